"""Raw records become `Rollouts` where their columns fit their tokens; what does not fit is set aside and named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from onepolicy import schema
from onepolicy.declared import Header, scorings_of
from onepolicy.errors import ContentError
from onepolicy.formats.base import BrokenRecord, Layout, RawColumn, RawRecord
from onepolicy.rollouts import Rollouts
from onepolicy.types import BoolArray, IntArray, Lists, Values
from onepolicy.values import BadValue, typed_values

#: The token that stands before a reply whose prompt is not in the dump, so that its first token has a context.
STAND_IN = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one record: `length` (a column does not fit the tokens), `claim` (the record's own count is
    not what is there), `broken` (cannot be read), `value` (a value that its column cannot hold)."""

    kind: Literal["length", "claim", "broken", "value"]
    place: str
    record_id: str | None
    column: str
    got: int | None
    wanted: int | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Settled:
    """`rollouts`: the records that fit, None if none does; `places`: where each of them stands. `aside`: those that do
    not, with their faults; `kept_faults`: of records that stay in."""

    rollouts: Rollouts | None
    places: tuple[str, ...]
    aside: tuple[tuple[RawRecord | BrokenRecord, tuple[Fault, ...]], ...]
    kept_faults: tuple[Fault, ...] = ()


def settle(records: Sequence[RawRecord | BrokenRecord]) -> Settled:
    """Nothing is cut, shifted or filled to make a record fit: one that does not is left out of every number."""
    fit: list[RawRecord] = []
    aside: list[tuple[RawRecord | BrokenRecord, tuple[Fault, ...]]] = []
    kept: list[Fault] = []
    for raw in records:
        if isinstance(raw, BrokenRecord):
            aside.append((raw, (Fault("broken", raw.place, raw.record_id, "", None, None, raw.why),)))
            continue
        faults = _faults(raw)
        if any(f.kind != "claim" for f in faults):
            aside.append((raw, tuple(faults)))
        else:
            kept += faults
            fit.append(raw)
    rollouts = rollouts_of(fit) if fit else None
    return Settled(rollouts, tuple(r.place for r in fit), tuple(aside), tuple(kept))


def length_of(layout: Layout, n_tokens: int, prompt: int) -> int:
    """How many values a column of that layout has."""
    return {"whole": n_tokens, "reply": n_tokens - prompt, "next": max(0, n_tokens - 1)}[layout]


def _faults(raw: RawRecord) -> list[Fault]:
    n, prompt = len(raw.token_ids), raw.prompt_length or 0
    name = raw.facts.get("record_id")
    told = None if name is None else str(name)
    out: list[Fault] = []
    fault = lambda kind, column, got, wanted, why="": out.append(Fault(kind, raw.place, told, column, got, wanted, why))
    ids: NDArray[Any] = raw.token_ids
    if n == 0:
        fault("broken", "token_ids", 0, None, "no tokens")
        return out
    if ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) >= 2**31:
        fault("value", "token_ids", None, None, f"got {ids.min()} to {ids.max()}, wanted 0 to {2**31 - 1}")
    if not 0 <= prompt <= n:
        fault("length", "prompt_length", prompt, n)
        return out
    for column, col in raw.columns.items():
        wanted = length_of(col.layout, n, prompt)
        if len(col.values) != wanted:
            fault("length", column, len(col.values), wanted)
    for column, (cells, layout) in raw.lists.items():
        wanted = length_of(layout, n, prompt)
        if len(cells) != wanted:
            fault("length", column, len(cells), wanted)
    there = {"token_ids": n, "prompt": prompt, "reply": n - prompt}
    for what, claimed in raw.claims.items():
        if claimed != there[what]:
            fault("claim", what, there[what], claimed)
    return out


# -- records that fit ------------------------------------------------------------------------------------------------


def rollouts_of(records: Sequence[RawRecord]) -> Rollouts:
    """Records whose columns fit, as one batch. Ids that are not known are null, and stand-ins stand under the null.

    `prompt_length` is null where the dump tells `drawn` instead. Errors: `ContentError` for a fact that its column
    cannot hold.
    """
    shifts = np.array([0 if r.prompt_known else 1 for r in records], dtype=np.int64)
    lengths = np.array([len(r.token_ids) for r in records], dtype=np.int64) + shifts
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.full(int(offsets[-1]), STAND_IN, dtype=np.int32)
    for r, end, n in zip(records, offsets[1:].tolist(), (lengths - shifts).tolist(), strict=True):
        ids[end - n : end] = r.token_ids
    prompts = np.array([_prompt(r) for r in records], dtype=np.int64) + shifts
    names = dict.fromkeys(name for r in records for name in r.columns)
    columns = {name: _column(name, records, offsets, prompts) for name in names}
    facts = _facts(records) | _prompt_lengths(records, prompts)
    columns["drawn"] = _drawn(records, columns.get("drawn"), offsets, prompts)
    tokens = {n: c for n, c in columns.items() if n in schema.COLUMNS and not schema.scoring_column(n)}
    lists = {
        name: _lists(name, records, offsets, prompts) for name in dict.fromkeys(k for r in records for k in r.lists)
    }
    lists |= _record_lists(records)
    header = Header()
    for r in records:
        header.add(r.scorings)
    return Rollouts(
        offsets,
        {"token_ids": Values(ids, _known_ids(records, lengths)), **tokens},
        facts,
        lists,
        scorings_of(columns, header, int(offsets[-1])),
    )


def ids_known(rollouts: Rollouts) -> BoolArray:
    """`[S]`: the ids of the sequence are known; the others hold log-probs alone."""
    known = rollouts.tokens["token_ids"].valid
    if known is None:
        return np.ones(len(rollouts), dtype=bool)
    of = np.repeat(np.arange(len(rollouts)), rollouts.lengths)
    return np.bincount(of[~known], minlength=len(rollouts)) == 0


def _known_ids(records: Sequence[RawRecord], lengths: IntArray) -> BoolArray | None:
    """`[T]` False at the stand-ins of records without ids; None where all are known."""
    if all(r.ids_known for r in records):
        return None
    return np.repeat([r.ids_known for r in records], lengths)


def _prompt_lengths(records: Sequence[RawRecord], prompts: IntArray) -> dict[str, Values]:
    """As told, or where a mask has the reply begin; not where `drawn` itself is told, which says more."""
    told = np.array([r.prompt_length is not None or "drawn" not in r.columns for r in records], dtype=bool)
    if not told.any():
        return {}
    return {"prompt_length": Values(np.where(told, prompts, 0).astype(np.int32), None if told.all() else told)}


def _drawn(records: Sequence[RawRecord], given: Values | None, offsets: IntArray, prompts: IntArray) -> Values:
    """`[T]` without nulls: what a record tells, else all that stands after its prompt."""
    lengths = np.diff(offsets)
    position = np.arange(int(offsets[-1])) - np.repeat(offsets[:-1], lengths)
    reply = position >= np.repeat(prompts, lengths)
    if given is None:
        return Values(reply)
    told = np.repeat(["drawn" in r.columns for r in records], lengths)
    return Values(np.where(told, given.values & given.mask(), reply))


def _prompt(r: RawRecord) -> int:
    """Where the reply begins: told, else at the first token that is trained on, else at the first one."""
    if r.prompt_length is not None:
        return r.prompt_length
    mask = r.columns.get("loss_mask") or r.columns.get("drawn")
    if mask is None:
        return 0
    at = np.flatnonzero(mask.values)
    first = int(at[0]) if len(at) else len(mask.values)
    return first + (1 if mask.layout == "next" else 0)


def _column(name: str, records: Sequence[RawRecord], offsets: IntArray, prompts: IntArray) -> Values:
    spec = schema.column(name)
    assert spec is not None, name
    kinds = {r.columns[name].values.dtype for r in records if name in r.columns}
    dtype = np.result_type(*kinds) if spec.dtype == "float" else np.dtype(spec.dtype)
    flat = np.zeros(int(offsets[-1]), dtype=dtype)
    valid = np.zeros(int(offsets[-1]), dtype=bool)
    scored = schema.scoring_column(name) is not None
    for i, r in enumerate(records):
        col = r.columns.get(name)
        if col is None:
            continue
        lo, hi = _span(col, int(offsets[i]), int(offsets[i + 1]), int(prompts[i]), r.prompt_known)
        flat[lo:hi] = col.values
        valid[lo:hi] = True if col.valid is None else col.valid
        if scored and col.layout == "whole" and r.prompt_known and col.at_zero:
            valid[offsets[i]] = False
    return Values(flat, None if valid.all() else valid)


def _span(col: RawColumn, lo: int, hi: int, prompt: int, prompt_known: bool) -> tuple[int, int]:
    if col.layout == "reply":
        return lo + prompt, hi
    if col.layout == "next":
        return hi - len(col.values), hi
    return (lo, hi) if prompt_known else (lo + 1, hi)


def _facts(records: Sequence[RawRecord]) -> dict[str, Values]:
    out: dict[str, Values] = {}
    for name in dict.fromkeys(k for r in records for k in r.facts):
        spec = schema.COLUMNS.get(name)
        if spec is None or spec.level != "record" or name == "prompt_length":
            continue
        cells = [_cell(r.facts.get(name), spec.dtype) for r in records]
        try:
            out[name] = typed_values(name, cells, spec.dtype)
        except BadValue as err:
            raise ContentError(f"{records[err.index].place}: {name}: {err.reason}") from None
    return out


def _cell(x: Any, dtype: str) -> Any:
    """Frameworks name groups and samples by numbers: a name is text."""
    if x is None:
        return None
    if dtype == "string":
        return x if isinstance(x, str) else str(x)
    return x.item() if isinstance(x, np.generic) else x


def _lists(name: str, records: Sequence[RawRecord], offsets: IntArray, prompts: IntArray) -> Lists:
    rows: list[Any] = [None] * int(offsets[-1])
    for i, r in enumerate(records):
        if name not in r.lists:
            continue
        cells, layout = r.lists[name]
        col = RawColumn(np.zeros(len(cells)), layout)
        lo, hi = _span(col, int(offsets[i]), int(offsets[i + 1]), int(prompts[i]), r.prompt_known)
        rows[lo:hi] = cells
    valid = np.array([x is not None for x in rows], dtype=bool)
    filled: list[NDArray[Any]] = [np.zeros(0, np.int32) if x is None else np.asarray(x).reshape(-1) for x in rows]
    inner = np.concatenate([[0], np.cumsum([len(x) for x in filled])]).astype(np.int64)
    values = np.concatenate(filled) if filled else np.zeros(0)
    return Lists(values.astype(np.int32), inner, None if valid.all() else valid)


def _record_lists(records: Sequence[RawRecord]) -> dict[str, Lists]:
    """Columns with a list a record (`stop_token_ids`), null where a record has none."""
    out: dict[str, Lists] = {}
    for name in schema.of_level("record_list"):
        cells = [r.facts.get(name) for r in records]
        there = np.array([x is not None for x in cells], dtype=bool)
        if not there.any():
            continue
        rows = [np.zeros(0, np.int32) if x is None else np.asarray(x, dtype=np.int32).reshape(-1) for x in cells]
        inner = np.concatenate([[0], np.cumsum([len(x) for x in rows])]).astype(np.int64)
        out[name] = Lists(np.concatenate(rows), inner, None if there.all() else there)
    return out


def declared(records: Sequence[RawRecord]) -> Mapping[str, Mapping[str, Any]]:
    """What the records declare of their scorings, joined."""
    header = Header()
    for r in records:
        header.add(r.scorings)
    return header.scorings
