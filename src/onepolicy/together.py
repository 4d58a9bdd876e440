"""Several small files surveyed as one batch: a survey costs some milliseconds before it has seen a token.

Only files that say the same of themselves are joined, one after another, and only where each is read to its end in one
piece: anything else is surveyed by itself. No number, place or count depends on what was joined.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from onepolicy.auditing import (
    BATCH_RECORDS,
    BATCH_TOKENS,
    Read,
    Unreadable,
    Work,
    as_asked,
    audit_shard,
    batches,
    by_speakers,
    order_of,
    spill,
    survey_read,
    whole_columns,
)
from onepolicy.errors import ContentError
from onepolicy.formats.base import RawRecord, Shard
from onepolicy.formats.files import is_url
from onepolicy.formats.settle import Settled
from onepolicy.rollouts import Rollouts, concat
from onepolicy.survey import Survey, count_records, numbers_of
from onepolicy.types import Lists, Scoring, Values

#: Bytes of a file that is small.
SMALL = 1 << 20
#: Small files that one worker is given at a time: so many, and so many bytes of them.
FILES, BYTES = 256, 1 << 24
#: Workers get at least so many pieces each, so that none waits long for the last one.
EACH = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """Shards that follow each other, for one worker; `number`: that of the first in the dump."""

    shards: tuple[Shard, ...]
    number: int

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(path for shard in self.shards for path in shard.paths)


@dataclass(slots=True)
class Answer:
    """Of a piece: surveys (more than one where records are clustered by other units, which are not added up) and what
    could not be read."""

    surveys: list[Survey] = field(default_factory=list[Survey])
    unreadable: list[Unreadable] = field(default_factory=list[Unreadable])

    def keep(self, found: Survey | Unreadable) -> None:
        if isinstance(found, Unreadable):
            self.unreadable.append(found)
        elif self.surveys and _one_unit(self.surveys[-1], found):
            self.surveys[-1].add(found)
        else:
            self.surveys.append(found)


def _one_unit(x: Survey, y: Survey) -> bool:
    return x.sums is None or y.sums is None or x.sums.cluster_unit == y.sums.cluster_unit


def pieces(shards: Sequence[Shard], workers: int) -> list[Piece]:
    """All shards in their order: small files of one format several at a time, every other shard by itself."""
    sizes = [_size(shard) for shard in shards]
    small = sum(size <= SMALL for size in sizes)
    most = min(FILES, -(-small // (EACH * workers)))
    out: list[Piece] = []
    held = room = 0
    for number, (shard, size) in enumerate(zip(shards, sizes, strict=True)):
        if size <= min(room, SMALL) and held < most and out[-1].shards[0].format == shard.format:
            out[-1] = Piece((*out[-1].shards, shard), out[-1].number)
            held, room = held + 1, room - size
        else:
            out.append(Piece((shard,), number))
            held, room = 1, BYTES - size if size <= SMALL else 0
    return out


def _size(shard: Shard) -> float:
    """Bytes as stored; infinite for what is not known to be small: a part of a file, a remote one."""
    if shard.start is not None or shard.stop is not None or any(is_url(path) for path in shard.paths):
        return np.inf
    try:
        return sum(os.stat(path).st_size for path in shard.paths)
    except OSError:  # told when it is read
        return np.inf


def audit_piece(piece: Piece, work: Work) -> Answer:
    """The shards of a piece; what `audit_shard` gives for each of them, added up. What is read of small files is held
    until a batch is full or the next file is of another kind."""
    out, run = Answer(), _Run(replace(work, spill=None))
    for number, shard in enumerate(piece.shards, start=piece.number):
        read = _only_read(shard) if len(piece.shards) > 1 else None
        kind = None if read is None else _kind(read, work)
        if read is None or kind is None:
            run.close(out)
            out.keep(audit_shard(shard, run.work, number))
            continue
        if not run.takes(read, kind):
            run.close(out)
        run.add(shard, number, read, kind)
    run.close(out)
    if work.spill is not None:
        for k, survey in enumerate(out.surveys):
            if survey.rows:
                survey.spilled = [spill(survey.rows, os.path.join(work.spill, f"rows-{piece.number:06d}-{k}.parquet"))]
                survey.rows = []
    return out


def _only_read(shard: Shard) -> Read | None:
    """The shard as one batch; None where there are more, none, or an error, which `audit_shard` then tells."""
    for way in (whole_columns, batches):
        try:
            found = list(islice(way(shard) or (), 2))
        except ContentError:
            continue
        if found:
            return found[0] if len(found) == 1 else None
    return None


@dataclass(slots=True)
class _Run:
    """Files in a row that are surveyed as one."""

    work: Work
    kind: Any = None
    shards: list[tuple[Shard, int]] = field(default_factory=list[tuple[Shard, int]])
    reads: list[Read] = field(default_factory=list[Read])
    records: int = 0
    tokens: int = 0

    def takes(self, read: Read, kind: Any) -> bool:
        """Whether the read is of the same kind and there is room for it."""
        records, tokens = self.records + _records(read), self.tokens + _tokens(read)
        return bool(self.reads) and kind == self.kind and records <= BATCH_RECORDS and tokens <= BATCH_TOKENS

    def add(self, shard: Shard, number: int, read: Read, kind: Any) -> None:
        self.kind = kind
        self.shards.append((shard, number))
        self.reads.append(read)
        self.records, self.tokens = self.records + _records(read), self.tokens + _tokens(read)

    def close(self, out: Answer) -> None:
        """Surveys what is held and empties the run. An error is of one file, so each is then looked at by itself."""
        if not self.reads:
            return
        try:
            survey = self._surveyed()
        except ContentError:
            for shard, number in self.shards:
                out.keep(audit_shard(shard, self.work, number))
        else:
            survey.dump.count("files", sum(len(shard.paths) for shard, _ in self.shards))
            out.keep(survey)
        self.shards, self.reads, self.records, self.tokens = [], [], 0, 0

    def _surveyed(self) -> Survey:
        order = np.concatenate([order_of(r, n) for r, (_, n) in zip(self.reads, self.shards, strict=True)])
        if len(self.reads) == 1:
            return survey_read(self.reads[0], self.work, order)
        joined = _joined(self.reads)
        out = survey_read(joined, replace(self.work, dialect=None), order)
        if self.work.dialect is not None:
            alone = (rollouts for read in self.reads for rollouts in _parts(read, self.work) if rollouts is not None)
            out.numbers = numbers_of(alone, self.work.dialect)  # they may hang on what stands in one batch
        if len(by_speakers(joined)) > 1:
            out.dump.counts = {**_names(self.reads, self.work), **out.dump.counts}
        return out


def _records(read: Read) -> int:
    return len(read.places) + len(read.texts) + (0 if read.settled is None else len(read.settled.aside))


def _tokens(read: Read) -> int:
    aside = () if read.settled is None else read.settled.aside
    left_out = sum(len(raw.token_ids) for raw, _ in aside if isinstance(raw, RawRecord))
    return left_out + (0 if read.rollouts is None else read.rollouts.n_tokens)


def _parts(read: Read, work: Work) -> Iterator[Rollouts | None]:
    """What of a read is surveyed at a time, where it is not joined."""
    for rollouts, _, _ in by_speakers(read):
        yield None if rollouts is None else as_asked(rollouts, work)


def _names(reads: Sequence[Read], work: Work) -> dict[str, int]:
    """What is counted of records and files, at 0, in the order in which it comes up file by file."""
    out = Survey(work.names)
    for read in reads:
        for part in _parts(read, work):
            count_records(out, part, None, work.names)
        if read.texts:
            out.dump.count("records of text only", 0)
        out.dump.count("files", 0)
    return dict.fromkeys(out.dump.counts, 0)


def _joined(reads: Sequence[Read]) -> Read:
    """Reads of one kind, one after another."""
    parts = [read.rollouts for read in reads if read.rollouts is not None]
    rollouts = concat([_without_ids(part) for part in parts]) if parts else None
    places = tuple(place for read in reads for place in read.places)
    told = [read.settled for read in reads if read.settled is not None]
    aside, faults = (tuple(x for one in told for x in getattr(one, name)) for name in ("aside", "kept_faults"))
    settled = Settled(rollouts, places, aside, faults) if told else None
    return Read(rollouts, places, settled, tuple(text for read in reads for text in read.texts))


def _without_ids(rollouts: Rollouts) -> Rollouts:
    """Without the ids of its scorings, which are each file's own; `_kind` has seen that no two are one."""
    scorings = {name: replace(scoring, scoring_id=None) for name, scoring in rollouts.scorings.items()}
    return replace(rollouts, scorings=scorings)


# -- which files are alike -------------------------------------------------------------------------------------------


def _kind(read: Read, work: Work) -> Any:
    """What must be equal for reads to be joined: columns, their types, what is declared. None: it is surveyed alone."""
    of_read = (read.settled is None, bool(read.texts))
    if read.rollouts is None:
        return of_read
    rollouts = as_asked(read.rollouts, work)
    clusters = _clustered(rollouts)
    experts = _experts(rollouts)
    if not rollouts.n_tokens or clusters is None or experts is None or _one_scoring(rollouts, work):
        return None
    scorings = [(name, _declared(scoring)) for name, scoring in rollouts.scorings.items()]
    if any(s.distributions is not None or s.routes is not None for s in rollouts.scorings.values()):
        return None
    columns = (_columns(rollouts.tokens), _columns(rollouts.records, nulls=False), _columns(rollouts.lists))
    return (*of_read, *columns, scorings, clusters, experts)


def _columns(columns: Mapping[str, Values | Lists], nulls: bool = True) -> list[tuple[Any, ...]]:
    """Name, type and, with `nulls`, whether there are nulls, of each column."""
    return sorted((name, col.values.dtype.str, nulls and col.valid is None) for name, col in columns.items())


def _declared(scoring: Scoring) -> tuple[Any, ...]:
    told = {k: v for k in ("logprobs", "entropy", "varentropy") if (v := getattr(scoring, k)) is not None}
    return _columns(told), scoring.semantics, scoring.dtype, repr(scoring.fingerprint)


def _clustered(rollouts: Rollouts) -> tuple[bool, bool] | None:
    """Whether the sequences have a group, a trajectory. None where only some have: what they are clustered by then
    hangs on which others stand in the batch."""
    out: list[bool] = []
    for name in ("group_id", "trajectory_id"):
        col = rollouts.records.get(name)
        has = np.zeros(1, dtype=bool) if col is None else col.mask()
        if has.any() and not has.all():
            return None
        out.append(bool(has.all()))
    return out[0], out[1]


def _experts(rollouts: Rollouts) -> list[int] | None:
    """Experts of a token, where they are recorded; None for tokens of several numbers: the widest of a batch tells
    how they are read."""
    lists = (rollouts.lists.get(name) for name in ("routed_experts", "scorer_routed_experts"))
    found = {int(n) for x in lists if x is not None for n in np.unique(np.diff(x.offsets)).tolist() if n}
    return None if len(found) > 1 else sorted(found)


def _one_scoring(rollouts: Rollouts, work: Work) -> bool:
    """The two sides are one scoring: the file is refused."""
    ids = [s.scoring_id for name in work.names if name and (s := rollouts.scorings.get(name)) is not None]
    return len(ids) == 2 and ids[0] is not None and ids[0] == ids[1]
