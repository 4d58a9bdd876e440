"""One shard of a dump, surveyed: what every worker runs, in this process, in a pool or on Ray."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onepolicy.errors import ContentError, MergeError
from onepolicy.formats import FORMATS
from onepolicy.formats.base import BrokenRecord, RawRecord, Shard, TextRecord
from onepolicy.formats.files import Files
from onepolicy.formats.settle import Settled, settle
from onepolicy.grid import selected_segments
from onepolicy.profiles import PROFILES, Profile
from onepolicy.profiles.bins import kinds
from onepolicy.rollouts import Rollouts
from onepolicy.rows import Rows
from onepolicy.survey import Survey, survey_of
from onepolicy.tokens.kinds import KINDS
from onepolicy.types import IntArray

#: Tokens that are surveyed at a time: bounds memory.
BATCH_TOKENS = 1 << 19
#: Broken records kept before a batch is closed although it has few tokens.
BATCH_RECORDS = 1 << 13


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked of every shard. `unit`: cluster by it, None: the coarsest that the records have. `dialect`: a
    framework and its options; `kinds` `[V]`: kind of each token id (`tokens.kinds`); `spill`: a folder for the rows."""

    names: tuple[str | None, str | None]
    view: str = "drawn"
    unit: str | None = None
    replays: bool = True
    dialect: tuple[str, Mapping[str, Any]] | None = None
    kinds: IntArray | None = None
    spill: str | None = None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Files of which nothing could be read, and why, in one line."""

    paths: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Read:
    """Some records of a shard. `rollouts` None: none of them fits its tokens. `texts`: records without token ids."""

    rollouts: Rollouts | None
    places: tuple[str, ...]
    settled: Settled | None = None
    texts: tuple[TextRecord, ...] = ()


def whole_columns(shard: Shard, max_tokens: int = BATCH_TOKENS) -> Iterator[Read] | None:
    """The shard by whole columns, for a format and file that can be read so; None for others. It is strict: at the
    first record that breaks the contract it raises `ContentError`, and `batches` tells what can be told."""
    module: Any = importlib.import_module(FORMATS[shard.format])
    if not hasattr(module, "rollouts") or not module.is_parquet(shard, Files()):
        return None
    return (Read(x, _places(shard, len(x))) for x in module.rollouts(shard, Files(), max_tokens))


def batches(shard: Shard, max_tokens: int = BATCH_TOKENS) -> Iterator[Read]:
    """The shard's sequences, record by record, about `max_tokens` tokens at a time.

    Errors: `ContentError` for a file that cannot be read (what came before it has been given).
    """
    held: list[RawRecord | BrokenRecord] = []
    texts: list[TextRecord] = []
    n_tokens = 0
    for item in importlib.import_module(FORMATS[shard.format]).read(shard, Files()):
        if isinstance(item, TextRecord):
            texts.append(item)
        else:
            held.append(item)
            n_tokens += len(item.token_ids) if isinstance(item, RawRecord) else 0
        if n_tokens >= max_tokens or len(held) + len(texts) >= BATCH_RECORDS:
            yield _settled(held, texts)
            held, texts, n_tokens = [], [], 0
    if held or texts:
        yield _settled(held, texts)


def _places(shard: Shard, n: int) -> tuple[str, ...]:
    return (os.path.basename(shard.paths[0]),) * n


def _settled(held: Sequence[RawRecord | BrokenRecord], texts: Sequence[TextRecord]) -> Read:
    settled = settle(held)
    return Read(settled.rollouts, settled.places, settled, tuple(texts))


def audit_shard(shard: Shard, work: Work, number: int = 0) -> Survey | Unreadable:
    """The survey of one shard; the rows go to a file of `work.spill`, where that is given.

    A file that ends in the middle keeps what came before and is counted.
    """
    out = _by_columns(shard, work, number) or _by_records(shard, work, number)
    if isinstance(out, Unreadable):
        return out
    out.dump.count("files", len(shard.paths) if not shard.start else 0)
    if work.spill is not None and out.rows:
        out.spilled = [spill(out.rows, os.path.join(work.spill, f"rows-{number:06d}.parquet"))]
        out.rows = []
    return out


def _by_columns(shard: Shard, work: Work, number: int) -> Survey | None:
    """None where that way is not open, or a record breaks the contract: then every record is looked at by itself."""
    out = Survey(work.names)
    try:
        reads = whole_columns(shard)
        if reads is None:
            return None
        for read in reads:
            out.add(survey_read(read, work, order_of(read, number, out.dump.counts.get("records", 0))))
    except MergeError:  # parts that are clustered by other units: no fault of the file, and told apart by `surveyed`
        raise
    except ContentError:
        return None
    return out


def _by_records(shard: Shard, work: Work, number: int) -> Survey | Unreadable:
    out = Survey(work.names)
    try:
        for read in batches(shard):
            out.add(survey_read(read, work, order_of(read, number, out.dump.counts.get("records", 0))))
    except MergeError:
        raise
    except ContentError as err:
        if not out.dump.counts.get("records"):
            return Unreadable(shard.paths, str(err))
        out.dump.count("files cut short", 1)
        out.dump.spot("cut short", _spots(shard, str(err)))
    return out


def order_of(read: Read, number: int, before: int = 0) -> IntArray:
    """`[S]` where each record stands in the dump: by the shard's `number`, and in it after `before` others."""
    return (number << 32) + before + np.arange(len(read.places))


def _spots(shard: Shard, why: str) -> Any:
    from onepolicy.counted import Spot

    return [Spot(os.path.basename(shard.paths[0]), -1, why, shard.paths[0])]


def survey_read(read: Read, work: Work, order: IntArray) -> Survey:
    """`order`: `[S]` where each record stands in the dump (`order_of`)."""
    out, files = Survey(work.names), list[IntArray]()
    settled = read.settled  # what it counts is of the whole batch: told once
    for rollouts, places, rows in by_speakers(read):
        part = survey_of(
            None if rollouts is None else as_asked(rollouts, work), work.names, settled=settled, places=places,
            view=work.view, replays=work.replays, dialect=work.dialect, profiles=_profiles(work), order=order[rows],
        )  # fmt: skip
        files += [order[rows] >> 32 for _ in part.rows]
        out.add(part)
        settled = None
    if len(files) > 1:  # of several files: each one's rows together, as they would be alone
        out.rows = [np.concatenate(out.rows)[np.argsort(np.concatenate(files), kind="stable")]]
    if read.texts:
        out.dump.count("records", len(read.texts))
        out.dump.count("records of text only", len(read.texts))
    return out


def as_asked(rollouts: Rollouts, work: Work) -> Rollouts:
    """Without what records are clustered by, where every sequence is to be a cluster."""
    if work.unit != "sequence":
        return rollouts
    kept = {k: v for k, v in rollouts.records.items() if k not in ("group_id", "trajectory_id")}
    return replace(rollouts, records=kept)


def by_speakers(read: Read) -> list[tuple[Rollouts | None, tuple[str, ...], IntArray]]:
    """The batch, apart by which scorings say anything of a record, without the silent ones: whether a column of nulls
    is there or not may hang on which other records stand in the batch, and no number may. With each part's rows."""
    rollouts = read.rollouts
    if rollouts is None:
        return [(None, read.places, np.zeros(0, np.int64))]
    speaks = {
        name: selected_segments(rollouts.offsets, scoring.logprobs.mask())[1] > 0
        for name, scoring in rollouts.scorings.items()
        if scoring.logprobs.valid is not None
    }
    if all(mask.all() for mask in speaks.values()):
        return [(rollouts, read.places, np.arange(len(rollouts)))]
    code = sum(
        (mask.astype(np.int64) << i for i, mask in enumerate(speaks.values())), np.zeros(len(rollouts), np.int64)
    )
    out: list[tuple[Rollouts | None, tuple[str, ...], IntArray]] = []
    for one in np.unique(code).tolist():
        rows = np.flatnonzero(code == one)
        part = rollouts.take(rows)
        silent = {name for i, name in enumerate(speaks) if not one >> i & 1}
        said = {name: scoring for name, scoring in part.scorings.items() if name not in silent}
        out.append((replace(part, scorings=said), tuple(read.places[i] for i in rows.tolist()), rows))
    return out


def _profiles(work: Work) -> list[Profile]:
    """All of them, and one by kind of token where a tokenizer told the kinds."""
    out = list(PROFILES.values())
    if work.kinds is not None:
        out.append(Profile("kind", "kind of token", kinds(work.kinds, KINDS), order=KINDS))
    return out


def spill(parts: Sequence[Rows], path: str) -> str:
    """Rows to a Parquet file; its path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = np.concatenate(list(parts))
    table = pa.table({name: rows[name] for name in rows.dtype.names or ()})
    pq.write_table(table, path)  # pyright: ignore[reportUnknownMemberType]
    return path


def load(path: str) -> Rows:
    """The rows that `spill` wrote."""
    import pyarrow.parquet as pq

    from onepolicy.rows import dtype

    table: Any = pq.read_table(path)  # pyright: ignore[reportUnknownMemberType]
    out = np.zeros(table.num_rows, dtype())
    for name in table.column_names:
        out[name] = table.column(name).to_numpy()
    return out
