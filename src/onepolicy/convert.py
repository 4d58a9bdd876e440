"""`convert`: a dump of any format as one canonical file. What does not fit its tokens is left out, and named."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy import storage
from onepolicy.auditing import batches, whole_columns
from onepolicy.errors import ContentError, UsageError
from onepolicy.formats.base import Shard
from onepolicy.formats.detect import detect
from onepolicy.formats.files import Files
from onepolicy.formats.settle import ids_known
from onepolicy.rollouts import Rollouts

Told = Callable[[int, int], None]
#: Why records were left out, of which so many are named.
NAMED = 8


@dataclass(slots=True)
class Converted:
    """What became of a dump: records and tokens written, and what was left out, with the first reasons."""

    records: int = 0
    tokens: int = 0
    left_out: int = 0
    texts: int = 0
    reasons: list[str] = field(default_factory=list[str])
    unreadable: list[str] = field(default_factory=list[str])
    scorings: tuple[str, ...] = ()
    #: declarations of a scoring that the files do not share, and that the one file therefore cannot make
    undeclared: tuple[str, ...] = ()

    def leave(self, why: str) -> None:
        self.left_out += 1
        if len(self.reasons) < NAMED:
            self.reasons.append(why)


def convert(
    uris: Iterable[str | Path], output: Path, progress: Told | None = None, overwrite: bool = False
) -> Converted:
    """Reads a dump and writes one Parquet or JSON lines file, in the dump's order, in memory of one batch.

    Errors: `UsageError` for an output that exists (unless `overwrite`) or of another kind; `ContentError` where nothing
    of the dump fits its tokens.
    """
    _require_output(output, overwrite)
    names = tuple(map(str, uris))
    found = detect(names, Files())
    shards = _without_output(found.shards, names, output)
    if not shards:
        path, why = found.unclaimed[0] if found.unclaimed else ("", "no files")
        raise ContentError(f"no file of a known format: {path}: {why}")
    out = Converted()
    with tempfile.TemporaryDirectory(prefix=".onepolicy-", dir=output.resolve().parent) as folder:
        parts: list[Path] = []
        for n, shard in enumerate(shards, start=1):
            _convert_shard(out, shard, parts, Path(folder))
            if progress is not None:
                progress(n, len(shards))
        if not parts:
            why = [*out.reasons, *out.unreadable, "text only: no token ids" if out.texts else "no records"][0]
            raise ContentError(f"nothing to write: {why}")
        declared, out.undeclared = _declared(parts)
        _join(parts, output, declared)
    return out


def _without_output(shards: Sequence[Shard], uris: Sequence[str], output: Path) -> list[Shard]:
    """What an earlier run wrote into the dump's own folder is no part of the dump, unless it is named."""
    mine = str(output.resolve())
    if any(os.path.realpath(uri) == mine for uri in uris):
        return list(shards)
    return [s for s in shards if all(os.path.realpath(path) != mine for path in s.paths)]


def _declared(parts: Sequence[Path]) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """What the parts declare of each scoring, joined: null where they do not say the same, and a line about that."""
    import pyarrow.parquet as pq

    out: dict[str, dict[str, Any]] = {}
    differ: dict[str, None] = {}
    for part in parts:
        metadata: Any = pq.read_schema(part).metadata or {}  # pyright: ignore[reportUnknownMemberType]
        for name, said in json.loads(metadata.get(b"onepolicy.scorings", b"{}")).items():
            known = out.setdefault(name, dict(said))
            for key, value in said.items():
                if known[key] != value:
                    differ[f"{name}.{key}"] = None
    for name, said in out.items():
        for key in said:
            if f"{name}.{key}" in differ:
                said[key] = {} if key == "fingerprint" else None
    return out, tuple(differ)


def _convert_shard(out: Converted, shard: Shard, parts: list[Path], folder: Path) -> None:
    """By whole columns where that goes, else record by record."""
    before, n = replace(out, reasons=list(out.reasons)), len(parts)
    try:
        for read in whole_columns(shard) or ():
            _take(out, read, parts, folder)
        if len(parts) > n:
            return
    except ContentError:
        del parts[n:]
        for name in ("records", "tokens", "left_out", "texts", "reasons"):
            setattr(out, name, getattr(before, name))
    try:
        for read in batches(shard):
            _take(out, read, parts, folder)
    except ContentError as err:
        out.unreadable.append(str(err))


def _require_output(output: Path, overwrite: bool) -> None:
    if output.suffix.lower() not in storage.FORMATS:
        raise UsageError(
            f"output {output}: got the suffix {output.suffix!r}, wanted one of {', '.join(storage.FORMATS)}"
        )
    if output.exists() and not overwrite:
        raise UsageError(f"output {output} exists; --overwrite replaces it")
    if not output.resolve().parent.is_dir():
        raise UsageError(f"output {output}: {output.parent} is not a folder")


def _take(out: Converted, read: Any, parts: list[Path], folder: Path) -> None:
    out.texts += len(read.texts)
    for _, faults in read.settled.aside if read.settled else ():
        f = faults[0]
        what = f.why or f"{f.column}: got {f.got} values, wanted {f.wanted}"
        out.leave(f"{f.place}: {what}")
    rollouts: Rollouts | None = read.rollouts
    if rollouts is None:
        return
    known = ids_known(rollouts)
    for i in np.flatnonzero(~known).tolist():
        out.leave(f"{read.places[i]}: log-probs without token ids, which one of our files needs; audit reads them")
    rollouts = rollouts if known.all() else rollouts.take(known)
    if not len(rollouts):
        return
    out.records, out.tokens = out.records + len(rollouts), out.tokens + rollouts.n_tokens
    out.scorings = tuple(dict.fromkeys((*out.scorings, *rollouts.scorings)))
    parts.append(folder / f"{len(parts):06d}.parquet")
    storage.write(rollouts, parts[-1])


def _join(parts: Sequence[Path], output: Path, declared: Mapping[str, Any]) -> None:
    """One file of all parts. A column that a part lacks is null there."""
    temporary = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp{output.suffix}")
    try:
        if output.suffix.lower() == ".parquet":
            _join_parquet(parts, temporary, declared)
        else:
            _join_lines(parts, temporary, declared)
        os.replace(temporary, output)
    except OSError as err:
        raise UsageError(f"cannot write {output}: {err.strerror or err}") from err
    finally:
        temporary.unlink(missing_ok=True)


def _schema(parts: Sequence[Path]) -> Any:
    """All columns of all parts; one that is float32 in some and float64 in others is float64."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schemas = [pq.read_schema(p) for p in parts]  # pyright: ignore[reportUnknownMemberType]
    return pa.unify_schemas(schemas, promote_options="permissive").with_metadata(schemas[0].metadata)


def _join_parquet(parts: Sequence[Path], path: Path, declared: Mapping[str, Any]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from onepolicy.values import json_text

    fields = _schema(parts)
    fields = fields.with_metadata({**fields.metadata, b"onepolicy.scorings": json_text("scorings", declared)})
    with pq.ParquetWriter(path, fields, compression="zstd", write_page_checksum=True) as writer:
        for part in parts:
            table: Any = pq.read_table(part)  # pyright: ignore[reportUnknownMemberType]
            for name in fields.names:
                if name not in table.column_names:
                    table = table.append_column(name, pa.nulls(table.num_rows, fields.field(name).type))
            writer.write_table(table.select(fields.names).cast(fields))


def _join_lines(parts: Sequence[Path], path: Path, declared: Mapping[str, Any]) -> None:
    """The first record carries what is declared, of all of them."""
    import pyarrow as pa

    from onepolicy.records import HEADER_KEYS, to_records
    from onepolicy.values import json_text

    single = sorted(f.name for f in _schema(parts) if getattr(f.type, "value_type", None) == pa.float32())
    head = ({"scorings": declared} if declared else {}) | ({"float32": single} if single else {})
    with path.open("w", encoding="utf-8") as file:
        for part in parts:
            for record in to_records(storage.read(part)):
                plain = {k: v for k, v in record.items() if k not in HEADER_KEYS}
                file.write(json_text("record", plain | head) + "\n")
                head = {}
