"""A list that fits up to some token and is late or early behind it: a value was lost, doubled or put in there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onepolicy.counted import Counted
from onepolicy.integrity.base import Batch
from onepolicy.integrity.places import spot_tokens
from onepolicy.types import BoolArray, FloatArray, IntArray

LAGS = (-2, -1, 1, 2)
#: Tokens below this (nats) tell lags apart; near 0 every lag fits.
TELLING = -0.1
#: Values fit within this, and this share of their size.
_FITS, _OF_SIZE = 0.05, 0.15
#: Share of telling tokens that fit at lag 0 or at the lag; and that fit at the lag, and how many.
_EXPLAINED, _BEHIND, _LEAST = 0.85, 0.2, 6
#: Share of what fits at the lag that another lag may fit.
_RIVAL = 0.6
#: What the split leaves of the mean gap.
_LEFT = 0.25


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of some records: values and flat places `[N]`; `starts`, `lengths`, and their sequences `rows` `[R]`."""

    a: FloatArray
    b: FloatArray
    at: IntArray
    starts: IntArray
    lengths: IntArray
    rows: IntArray


def shifted(
    a: FloatArray, b: FloatArray, at: IntArray, k: int | IntArray, starts: IntArray, lengths: IntArray
) -> tuple[FloatArray, FloatArray, BoolArray]:
    """`a`, and the token of `b` that stands k places later (`[N]` or one for all) in the same record, where there is
    one."""
    n = len(a)
    partner = np.arange(n) + k
    inside = (partner >= 0) & (partner < n)
    partner = np.clip(partner, 0, n - 1)
    record = np.repeat(np.arange(len(starts)), lengths)
    there = inside & (record[partner] == record) & (at[partner] - at == k)
    return a, b[partner], there


def look_inside(out: Counted, batch: Batch, part: Part, which: BoolArray) -> BoolArray:
    """Counts the records of `which` `[R]` that split into a part without and a part with a lag, by lag; those `[R]`."""
    found = np.zeros(len(part.rows), dtype=bool)
    telling = part.a < TELLING
    n = np.add.reduceat(telling.astype(np.int64), part.starts)
    fitting = {k: _fitting(part, k) for k in (0, *LAGS)}
    fit = {k: np.add.reduceat((x & telling).astype(np.int64), part.starts) for k, x in fitting.items()}
    for k in LAGS:
        good = which & (fit[0] + fit[k] >= _EXPLAINED * n) & (fit[k] >= np.maximum(_LEAST, _BEHIND * n))
        rival = np.max([fit[j] for j in LAGS if j != k], axis=0)  # text that repeats itself fits several
        good &= rival <= _RIVAL * fit[k]
        splits = [(int(i), _split(part, int(i), k)) for i in np.flatnonzero(good)]
        known = [(i, at) for i, at in splits if at is not None]
        found[[i for i, _ in known]] = True
        _count(out, batch, part, k, known)
    return found


def near(x: FloatArray, y: FloatArray) -> BoolArray:
    """Where two values may be the same token's."""
    return np.abs(x - y) <= _FITS + _OF_SIZE * np.abs(x)


def _fitting(part: Part, k: int) -> BoolArray:
    x, y, there = shifted(part.a, part.b, part.at, k, part.starts, part.lengths)
    return there & near(x, y)


def _split(part: Part, i: int, k: int) -> int | None:
    """The token of record i from which lag k fits, None where the two parts do not explain the gap."""
    rows = slice(int(part.starts[i]), int(part.starts[i] + part.lengths[i]))
    a, b, at = part.a[rows], part.b[rows], part.at[rows]
    one = np.zeros(1, dtype=np.int64), np.array([len(a)], dtype=np.int64)
    x, y, there = shifted(a, b, at, k, *one)
    before = np.minimum(np.abs(b - a), 20.0)
    behind = np.where(there, np.minimum(np.abs(y - x), 20.0), 0.0)
    upto = np.concatenate([[0.0], np.cumsum(before)])
    rest = np.concatenate([[0.0], np.cumsum(behind)])
    cost = upto[:-1] + rest[-1] - rest[1:]  # the token at the split is left out
    m = int(cost.argmin())
    telling = int((a[m + 1 :] < TELLING).sum())
    if cost[m] > _LEFT * before.sum() or telling < _LEAST:
        return None
    return m


def _count(out: Counted, batch: Batch, part: Part, k: int, splits: list[tuple[int, int]]) -> None:
    if not splits:
        return
    out.count(f"shifts:inside:{k}", len(splits))
    at = np.array([part.at[part.starts[i] + m] for i, m in splits], dtype=np.int64)
    spot_tokens(out, "shifts:inside", batch, at, {"best_lag": np.full(len(at), k)})
