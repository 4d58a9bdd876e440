"""What stands in for a log-prob, besides the numbers that no engine computes: logs of small bounds, runs of 0.0."""

from __future__ import annotations

import math

import numpy as np

from onepolicy.counted import Counted
from onepolicy.integrity.base import Batch, Side
from onepolicy.types import BoolArray, FloatArray, IntArray

#: What keeps a probability from 0: 1e-8, the least float. Their logs are stored to four decimals or more.
_SMALL = (*(10.0**-k for k in range(4, 21)), 2.0**-14, 2.0**-23, 2.0**-24, 2.0**-52, 2.0**-126, 2.0**-149)
_FLOORS, _CLOSE = np.sort(np.log(_SMALL)), 1e-4
#: Zeros side by side that are a run.
_RUN = 3


def count_runs(out: Counted, batch: Batch, at: IntArray, side: Side) -> None:
    """Which of the filled 0.0 `at` stand side by side with others or with nulls: at the start, inside, or at the end.
    Tokens that the mask takes out are looked at too."""
    values, offsets = batch.side_values[side], batch.rollouts.offsets
    first = np.zeros(len(values), dtype=bool)
    starts = offsets[:-1] + batch.prompts
    for begun in (offsets[:-1], starts):  # a run begins anew with each record, and with its reply
        first[begun[begun < offsets[1:]]] = True
    empty = (values == 0.0) | np.isnan(values)
    run = np.cumsum(first | (np.diff(empty, prepend=False)))
    long = np.bincount(run)[run[at]] >= _RUN
    record = np.searchsorted(offsets, at, side="right") - 1
    last = run[offsets[record + 1] - 1] == run[at]
    start = run[np.minimum(starts, offsets[1:] - 1)[record]] == run[at]
    out.count(f"fills:{side}:zero runs at the start", int((start & ~last).sum()))
    long &= ~start  # a reply of nothing else has no place for them
    out.count(f"fills:{side}:zero runs inside", int((long & ~last).sum()))
    out.count(f"fills:{side}:zero runs at the end", int((long & last).sum()))


def is_round(x: FloatArray) -> BoolArray:
    """Whole numbers, and logs of small numbers that keep a probability from 0."""
    whole = x == np.rint(x)
    low = np.flatnonzero(x < _FLOORS[-1] + _CLOSE)  # few are that unlikely
    at = np.clip(np.searchsorted(_FLOORS, x[low]), 1, len(_FLOORS) - 1)
    whole[low] |= np.minimum(np.abs(x[low] - _FLOORS[at]), np.abs(x[low] - _FLOORS[at - 1])) <= _CLOSE
    return whole


def say_kind(kind: str, n: int) -> str:
    """A kind of fill and how often."""
    if kind == "repeated":
        return f"one number repeated: {n:,}"
    small = next((x for x in _SMALL if f"{math.log(x):g}" == kind), None)
    return f"{kind}: {n:,}" if small is None else f"{kind}, the log of {small:.3g}: {n:,}"


def say_runs(runs: dict[str, int], n: int) -> str:
    """Where most of them stand, what stands so."""
    if runs["at the start"] > 0.5 * n:
        return "; they stand at the start of replies, as the prompt's tokens do: see where the loss mask begins"
    if runs["inside"] > 0.5 * n:
        return "; they stand side by side inside of replies, as tool output does that nobody drew: see the loss mask"
    if runs["at the end"] > 0.5 * n:
        return "; they stand side by side at the end of replies, as padding does, or what a cut list left"
    return ""
