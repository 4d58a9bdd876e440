"""Integer sums of floats on a fixed grid, exact in any order.

A term with |x| < 2^10 is rounded half-even to a multiple of 2^-61 by a two-level split: `q = (x + M) - M` with
M = 1.5 * 2^(52 + k) rounds x to a multiple of 2^k. Sums of one level's parts stay exact in float64 for up to 2^18
terms, so they may be added by any vectorised loop, in any order, and only then become Python integers. Larger terms go
through `frexp` into integers exactly, and so do the sums of longer segments.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from onepolicy.types import BoolArray, FloatArray, IntArray

#: Totals are integers in units of 2^-GRID_BITS.
GRID_BITS = 61
#: Terms of this size or more are added as exact integers one by one.
LARGE = 2.0**10
#: Terms that may be added within one level before the float sum must become an integer: 2^18 terms below 2^10 in units
#: of 2^-25, and as many rests of up to 2^-26 in units of 2^-61, are 2^53 units.
MAX_TERMS = 2**18

#: Terms looked at before all of them are.
_FEW = 32

_LEVELS = (-25, -61)
_MAGIC = tuple(1.5 * 2.0 ** (52 + k) for k in _LEVELS)


@dataclass(frozen=True, slots=True)
class SegmentSums:
    """Exact sums of the terms in each segment (sequence): two float levels, integers for large terms, counts.

    `levels`: `[2, S]` float64, exact; `large`: segment -> integer in grid units; `n`, `nonfinite`: `[S]`.
    """

    levels: FloatArray
    n: IntArray
    nonfinite: IntArray
    large: dict[int, int] = field(default_factory=dict[int, int])

    def to_float(self) -> FloatArray:
        """`[S]`, each the float64 nearest to its sum: the same bits for any order of the terms."""
        out = self.levels[0] + self.levels[1]
        for i in self.large:
            out[i] = to_float(self.to_int(i))
        return out

    def to_int(self, i: int) -> int:
        """The sum of segment i in grid units."""
        return level_integers(self.levels[:, i : i + 1])[0] + self.large.get(i, 0)


def segment_sums(x: FloatArray, starts: IntArray, lengths: IntArray) -> SegmentSums:
    """Sums of `x` `[T]` over consecutive segments that begin at `starts` `[S]` and hold `lengths` `[S]` terms.

    Non-finite terms are left out and counted.
    """
    nonfinite = np.zeros(len(starts), dtype=np.int64)
    large: dict[int, int] = {}
    # one look settles the usual case: NaN and infinities make the comparison false
    if len(x) and not (x.max() < LARGE and x.min() > -LARGE):
        finite = np.isfinite(x)
        nonfinite = _add_segments((~finite).astype(np.float64), starts, lengths).astype(np.int64)
        x = np.where(finite, x, 0.0)
        large = _large_terms(x, starts)
        x = np.where(np.abs(x) >= LARGE, 0.0, x)
    levels = _split(x, starts, lengths)
    if len(x) > MAX_TERMS and lengths.max() > MAX_TERMS:
        for i in np.flatnonzero(lengths > MAX_TERMS).tolist():
            large[i] = large.get(i, 0) + _long(x[starts[i] : starts[i] + lengths[i]])
            levels[:, i] = 0.0
    return SegmentSums(levels, lengths - nonfinite, nonfinite, large)


def _split(x: FloatArray, starts: IntArray, lengths: IntArray) -> FloatArray:
    """`[2, S]` sums of the two levels of terms below `LARGE`."""
    levels = np.empty((2, len(starts)))
    q = x + _MAGIC[0]
    q -= _MAGIC[0]
    levels[0] = _add_segments(q, starts, lengths)
    rest = np.subtract(x, q, out=q)
    if not rest[:_FEW].any() and not rest.any():  # whole numbers: nothing is left for the finer level
        levels[1] = 0.0
        return levels
    rest += _MAGIC[1]
    rest -= _MAGIC[1]
    levels[1] = _add_segments(rest, starts, lengths)
    return levels


def _long(x: FloatArray) -> int:
    """The sum of a segment of more than `MAX_TERMS` terms below `LARGE`, in grid units."""
    starts = np.arange(0, len(x), MAX_TERMS)
    lengths = np.diff(starts, append=len(x))
    return sum(level_integers(_split(x, starts, lengths)))


def _add_segments(x: FloatArray, starts: IntArray, lengths: IntArray) -> FloatArray:
    """reduceat gives an element, not zero, for an empty segment: those are set here."""
    if not len(x):
        return np.zeros(len(starts))
    full = lengths > 0
    if full.all():
        return np.add.reduceat(x, starts)
    out = np.zeros(len(starts))
    if full.any():
        out[full] = np.add.reduceat(x, starts[full])
    return out


def _large_terms(x: FloatArray, starts: IntArray) -> dict[int, int]:
    at = np.flatnonzero(np.abs(x) >= LARGE)
    # the last segment that starts at or before the term: empty ones share a start with their follower
    segment = np.searchsorted(starts, at, side="right") - 1
    out: dict[int, int] = {}
    for i, value in zip(segment.tolist(), grid_integers(x[at]), strict=True):
        out[i] = out.get(i, 0) + value
    return out


def grid_integers(x: FloatArray) -> list[int]:
    """Finite floats with |x| >= 2^-8 as exact integers in grid units (smaller ones belong to the split)."""
    mantissa, exponent = np.frexp(x)
    whole = (mantissa * 2.0**53).astype(np.int64).tolist()
    shifts = (exponent.astype(np.int64) - 53 + GRID_BITS).tolist()
    return [m << s if s >= 0 else _shift_half_even(m, -s) for m, s in zip(whole, shifts, strict=True)]


def _shift_half_even(value: int, bits: int) -> int:
    low, half = value & ((1 << bits) - 1), 1 << (bits - 1)
    up = low > half or (low == half and (value >> bits) & 1)
    return (value >> bits) + int(up)


def level_integers(levels: FloatArray) -> list[int]:
    """`[2, C]` exact level sums as `[C]` integers in grid units."""
    high, low = (_units(levels[i], i).astype(np.int64).tolist() for i in range(2))
    return [_joined(x, y) for x, y in zip(high, low, strict=True)]


def _joined(high: int, low: int) -> int:
    """Sums of both levels, each in its own units, in grid units."""
    return (high << _LEVELS[0] - _LEVELS[1]) + low


def _units(sums: FloatArray, level: int) -> FloatArray:
    """Sums of one level in its own units: whole numbers."""
    return sums * 2.0 ** -_LEVELS[level]


def to_float(total: int) -> float:
    """A total in grid units as the nearest float64 (int / int division rounds once)."""
    try:
        return total / (1 << GRID_BITS)
    except OverflowError:
        return float("inf") if total > 0 else float("-inf")


def group_sums(sums: SegmentSums, group: IntArray, n_groups: int) -> tuple[list[int], list[int]]:
    """Segments added into groups `[S] -> group`: integer totals and counts of finite terms, `[n_groups]` each."""
    high, low = (_by_group(_units(sums.levels[i], i), group, n_groups) for i in range(2))
    totals = [_joined(x, y) for x, y in zip(high, low, strict=True)]
    for i, extra in sums.large.items():
        totals[int(group[i])] += extra
    counts = np.bincount(group, weights=sums.n.astype(np.float64), minlength=n_groups).astype(np.int64)
    return totals, counts.tolist()


def _by_group(x: FloatArray, group: IntArray, n_groups: int) -> list[int]:
    """`[n_groups]` sums of whole numbers `[S]`, through floats where these are exact."""
    if np.abs(x).sum() < 2.0**53:
        exact: list[int] = np.bincount(group, x, n_groups).astype(np.int64).tolist()
        return exact
    out = np.zeros(n_groups, dtype=object)
    np.add.at(out, group, x.astype(np.int64).astype(object))
    return out.tolist()


def selected_segments(offsets: IntArray, mask: BoolArray) -> tuple[IntArray, IntArray]:
    """(starts, lengths) `[S]` of each sequence's selected tokens after `x[mask]`."""
    counted = np.diff(offsets)
    lengths = np.zeros(len(counted), dtype=np.int64)
    if (counted > 0).any():
        starts = offsets[:-1][counted > 0] - offsets[0]
        lengths[counted > 0] = np.add.reduceat(mask[offsets[0] : offsets[-1]].view(np.int8), starts, dtype=np.int64)
    return np.cumsum(lengths) - lengths, lengths
