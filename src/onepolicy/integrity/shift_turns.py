"""Replies of several turns whose lists lie apart by another lag in each: a value is lost or put in at each boundary."""

from __future__ import annotations

import numpy as np

from onepolicy.counted import Counted
from onepolicy.integrity.base import Batch
from onepolicy.integrity.places import spot_tokens
from onepolicy.integrity.shift_inside import TELLING, Part, near, shifted
from onepolicy.types import BoolArray, FloatArray, IntArray

#: Lags that are tried in each turn, besides the tokens between the turns so far.
LAGS = (0, *(k for i in range(1, 5) for k in (i, -i)))
#: Telling pairs of a turn that count, the share of them that fits, and the share of that which may fit another lag.
_LEAST, _FITS, _RIVAL = 4, 0.8, 0.6
#: Telling pairs of a record in turns with a lag.
_MOVED = 4


def look_turns(out: Counted, batch: Batch, part: Part, which: BoolArray) -> BoolArray:
    """Counts the records of `which` `[R]` of which each turn fits at one lag, and not all at the same; those `[R]`."""
    first = np.append(True, np.diff(part.at) != 1)
    first[part.starts[part.lengths > 0]] = True
    starts = np.flatnonzero(first)
    record = np.repeat(np.arange(len(part.rows)), part.lengths)[starts]
    turns = np.bincount(record, minlength=len(part.rows))
    found = np.zeros(len(part.rows), dtype=bool)
    if not (which & (turns > 1)).any():
        return found
    lengths = np.diff(np.append(starts, len(part.at)))
    gaps = _between(part, starts, lengths, record)
    lags = np.stack([*(np.full(len(starts), k) for k in LAGS), gaps, -gaps])
    n, share = (np.array(x) for x in zip(*(_share(part, k, starts, lengths) for k in lags), strict=True))
    best = np.where(n >= _LEAST, share, 0.0).argmax(axis=0)
    at_best = lambda x: np.take_along_axis(x, best[None], axis=0)[0]
    lag, tells = at_best(lags), at_best(n) >= _LEAST
    rival = np.where((lags == lag) | (n < _LEAST), 0.0, share).max(axis=0)
    good = (at_best(share) >= _FITS) & (rival <= _RIVAL * at_best(share))
    per = lambda x: np.bincount(record, x, minlength=len(part.rows))
    moved = per(np.where(tells & (lag != 0), at_best(n), 0.0))
    alike = _alike(lag, tells, record, len(part.rows))
    found = which & (turns > 1) & (per(tells & ~good) == 0) & (per(tells) > 1) & (moved >= _MOVED) & ~alike
    at = np.flatnonzero(found[record] & tells & (lag != 0))
    out.count("shifts:turns", int(found.sum()))
    spot_tokens(out, "shifts:turns", batch, part.at[starts[at]], {"best_lag": lag[at]})
    return found


def _between(part: Part, starts: IntArray, lengths: IntArray, record: IntArray) -> IntArray:
    """`[N]` tokens between the turns of a record up to each turn: what a list without them is early by."""
    last = part.at[starts + lengths - 1]
    gap = np.append(0, part.at[starts[1:]] - last[:-1] - 1)
    gap[np.append(True, np.diff(record) != 0)] = 0
    total = np.cumsum(gap)
    begins = np.flatnonzero(np.append(True, np.diff(record) != 0))
    return total - np.repeat(total[begins], np.diff(np.append(begins, len(record))))


def _share(part: Part, lag: IntArray, starts: IntArray, lengths: IntArray) -> tuple[FloatArray, FloatArray]:
    """`[N]` of each turn at its lag: telling pairs, and the share of them that fits."""
    record_starts, record_lengths = part.starts, part.lengths
    each = np.repeat(lag, lengths)
    x, y, there = shifted(part.a, part.b, part.at, each, record_starts, record_lengths)
    telling = there & (np.minimum(x, y) < TELLING)
    n = np.add.reduceat(telling.astype(np.float64), starts)
    fit = np.add.reduceat((telling & near(x, y)).astype(np.float64), starts)
    return n, fit / np.maximum(n, 1.0)


def _alike(lag: IntArray, tells: BoolArray, record: IntArray, size: int) -> BoolArray:
    """`[R]` records whose telling turns have one lag."""
    most, least = np.full(size, -(1 << 30)), np.full(size, 1 << 30)
    np.maximum.at(most, record[tells], lag[tells])
    np.minimum.at(least, record[tells], lag[tells])
    return most == least
