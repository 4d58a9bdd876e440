"""`TokenRecord`s from JSON lines, the canonical Parquet, `Rollouts` or rows in memory: a stream in bounded chunks.

A line that cannot be read is left out, counted and named; with `strict` it is an error. Nothing else is held but the
chunk in hand, so the file may be of any size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from onepolicy import codes, storage
from onepolicy.errors import ContentError, UsageError
from onepolicy.rollouts import Rollouts
from onepolicy.storage import jsonl
from onepolicy.tokens.answers import messages_of
from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.spellings import record_of, runs
from onepolicy.types import Finding

#: What a chunk holds at most: ids (a longer record is a chunk of its own) and bytes of lines.
CHUNK_TOKENS, CHUNK_BYTES = 1 << 18, 1 << 25
#: Places of broken lines that are kept.
NAMED = 8

Source = str | Path | BinaryIO | Rollouts | Iterable[Any]


@dataclass(slots=True)
class RecordStream:
    """Iterating gives lists of records. The counts are of what has been read so far.

    `source`: a path (`.jsonl`, `.json`, `.parquet`), an open binary file of JSON lines, `Rollouts`, or rows: mappings
    and `TokenRecord`s.
    Errors while iterating: `UsageError` for a file that is not there; `ContentError` for one in which no record can be
    read, and with `strict` at the first broken record, naming file, line and what was wrong.
    """

    source: Source
    strict: bool = False
    max_tokens: int = CHUNK_TOKENS
    max_bytes: int = CHUNK_BYTES
    n_records: int = 0
    n_tokens: int = 0
    n_without_ids: int = 0
    n_skipped: int = 0
    skipped: list[str] = field(default_factory=list[str])

    def __iter__(self) -> Iterator[list[TokenRecord]]:
        chunk: list[TokenRecord] = []
        n_tokens = n_bytes = 0
        for record, size in self._records():
            length = n_ids(record)
            if chunk and (n_tokens + length > self.max_tokens or n_bytes + size > self.max_bytes):
                yield chunk
                chunk, n_tokens, n_bytes = [], 0, 0
            chunk.append(record)
            n_tokens, n_bytes = n_tokens + length, n_bytes + size
            self._count(record, length)
        if chunk:
            yield chunk
        if not self.n_records:
            raise ContentError(self._nothing())

    def records(self) -> Iterator[TokenRecord]:
        """One after another."""
        for chunk in self:
            yield from chunk

    def findings(self) -> list[Finding]:
        """`lines-skipped`, if any were."""
        if not self.n_skipped:
            return []
        message = (
            f"{self.n_skipped} of {self.n_records + self.n_skipped} records could not be read and were left out; the "
            f"first: {self.skipped[0]}"
        )
        evidence = {"skipped": self.n_skipped, "read": self.n_records, "places": list(self.skipped)}
        return [codes.finding("lines-skipped", message, place=self.skipped[0].split(": ")[0], evidence=evidence)]

    def _count(self, record: TokenRecord, length: int) -> None:
        self.n_records += 1
        self.n_tokens += length
        self.n_without_ids += record.reply_ids is None and record.prompt_ids is None and len(record.sides) < 2

    def _nothing(self) -> str:
        name = self.source if isinstance(self.source, str | Path) else getattr(self.source, "name", "the input")
        if self.n_skipped:
            return f"{name}: none of {self.n_skipped} records can be read; the first: {self.skipped[0]}"
        return f"{name}: the file is empty: no records, nothing to check"

    def _skip(self, problem: str) -> None:
        if self.strict:
            raise ContentError(problem)
        self.n_skipped += 1
        if len(self.skipped) < NAMED:
            self.skipped.append(problem)

    def _records(self) -> Iterator[tuple[TokenRecord, int]]:
        """(record, bytes of its line)."""
        source = self.source
        if isinstance(source, Rollouts):
            yield from ((record, 0) for record in records_of(source))
        elif isinstance(source, str | Path) and Path(source).suffix.lower() == ".parquet":
            yield from self._parquet(Path(source))
        elif isinstance(source, str | Path):
            with _opened(Path(source)) as file:
                yield from self._lines(file, str(source))
        elif hasattr(source, "readline"):
            yield from self._lines(cast(BinaryIO, source), str(getattr(source, "name", "input")))
        else:
            yield from self._rows(cast(Iterable[Any], source))

    def _parquet(self, path: Path) -> Iterator[tuple[TokenRecord, int]]:
        first = 0
        for shard in storage.iter_shards(path, self.max_tokens):
            yield from ((record, 0) for record in records_of(shard, first=first, place=str(path)))
            first += len(shard)

    def _rows(self, rows: Iterable[Any]) -> Iterator[tuple[TokenRecord, int]]:
        for number, row in enumerate(rows, 1):
            record = row if isinstance(row, TokenRecord) else self._record(row, f"record {number}", number)
            if record is not None:
                yield from ((one, 0) for one in apart(record))

    def _lines(self, file: BinaryIO, name: str) -> Iterator[tuple[TokenRecord, int]]:
        orjson = jsonl._orjson()  # pyright: ignore[reportPrivateUsage]
        for number, line in _numbered(file):
            place = f"{name}:{number}"
            if line is None:
                self._skip(f"{place}: the line has more than {jsonl.MAX_LINE >> 20} MiB; wanted one rollout a line")
                continue
            try:
                row = jsonl._parsed(orjson, line, place)  # pyright: ignore[reportPrivateUsage]
            except ContentError as err:
                self._skip(str(err))
                continue
            if (record := self._record(row, place, number)) is not None:
                yield from ((one, len(line)) for one in apart(record))

    def _record(self, row: Any, place: str, number: int) -> TokenRecord | None:
        try:
            return record_of(row, f"#{number}", place)
        except (ContentError, RecursionError) as err:
            self._skip(f"{place}: {_named(row)}{err}")
            return None


def apart(record: TokenRecord) -> Iterator[TokenRecord]:
    """The record; its turns, each as a record, where they alone have ids."""
    turns = [turn for turn in record.turns or () if turn.get("reply_ids")]
    if record.prompt_ids is not None or record.reply_ids is not None or not turns:
        yield record
        return
    for k, turn in enumerate(turns):
        names = ("prompt_ids", "reply_ids", "reply_text", "logprobs", "loss_mask")
        known: dict[str, Any] = {name: turn.get(name) for name in names}
        finish = turn.get("finish_reason")
        yield TokenRecord(
            f"{record.record_id}, turn {k}",
            record.place,
            **known,
            finish_reason=finish if isinstance(finish, str) else None,
            stop_ids=record.stop_ids,
            extra=record.extra,
        )


def n_ids(record: TokenRecord) -> int:
    """Ids of prompt, reply and both sides; of a record without any, about as many as its text has."""
    n = len(record.prompt_ids or ()) + len(record.reply_ids or ()) + sum(map(len, record.sides.values()))
    return n or (len(record.prompt_text or "") + len(record.reply_text or "")) // 4


def records_of(rollouts: Rollouts, first: int = 0, place: str = "") -> Iterator[TokenRecord]:
    """The records of a batch. `first`: how many came before it in the file at `place`."""
    names = rollouts.record_ids()
    flat = rollouts.token_ids
    for i, name in enumerate(names):
        at = rollouts.sequence(i)
        where = f"{place}:record {first + i + 1}" if place else f"record {first + i + 1}"
        yield _from_columns(rollouts, i, TokenRecord(name, where), flat[at].tolist())


def _from_columns(rollouts: Rollouts, i: int, record: TokenRecord, ids: list[int]) -> TokenRecord:
    at = rollouts.sequence(i)
    drawn = rollouts.drawn[at].tolist()
    length = rollouts.record("prompt_length", i)
    start = next((k for k, x in enumerate(drawn) if x), len(ids)) if length is None else int(length)
    record.prompt_ids = ids[:start]
    record.reply_ids = ids[start:] if start < len(ids) or length is not None else None
    record.loss_mask = _cells(rollouts.tokens.get("loss_mask"), at, start)
    for name, side in (("logprobs", ("sampler",)), ("scorer_logprobs", ("old", "current"))):
        scoring = next((rollouts.scorings[s] for s in side if s in rollouts.scorings), None)
        setattr(record, name, None if scoring is None else _cells(scoring.logprobs, at, start))
    record.spans = runs(drawn) if any(drawn) else None
    record.prompt_text = rollouts.record("prompt_text", i)
    record.messages = messages_of(rollouts.record("prompt_messages", i))
    record.finish_reason = rollouts.record("finish_reason", i)
    stops = rollouts.lists.get("stop_token_ids")
    record.stop_ids = tuple(stops.row(i).tolist()) if stops is not None else ()
    return record


def _cells(column: Any, at: slice, start: int) -> list[Any] | None:
    """A column's values at the reply's tokens, None for null; None where the whole column is."""
    if column is None:
        return None
    part = slice(at.start + start, at.stop)
    values: list[Any] = column.values[part].tolist()
    if column.valid is None:
        return values
    valid = column.valid[part]
    return [x if ok else None for x, ok in zip(values, valid, strict=True)] if valid.any() else None


def _opened(path: Path) -> BinaryIO:
    if path.is_dir():
        raise UsageError(f"{path} is a folder; wanted a file of rollouts (.jsonl, .json, .parquet)")
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise UsageError(f"no such file: {path}") from None
    except OSError as err:
        raise UsageError(f"{path}: cannot be read: {err.strerror}") from None


def _numbered(file: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """(number, line) of each line that is not blank; None for one that is too long, which is read past in pieces."""
    number = 0
    while line := file.readline(jsonl.MAX_LINE + 1):
        number += 1
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if len(line) > jsonl.MAX_LINE:
            while line and not line.endswith(b"\n"):
                line = file.readline(jsonl.MAX_LINE)
            yield number, None
        elif line.strip():
            yield number, line


def _named(row: Any) -> str:
    """The name that a broken record has of its own, for messages."""
    if not isinstance(row, Mapping):
        return ""
    keys = ("record_id", "id", "uid", "uuid")
    name = next((row[k] for k in keys if isinstance(row.get(k), str | int)), None)
    return "" if name is None else f"record {str(name)[:60]!r}: "
