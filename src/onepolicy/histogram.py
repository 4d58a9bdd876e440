"""Histograms of float bits: mergeable, fixed bins, quantiles within 0.4% relative.

The bin of x is its float32 bits without the 16 lowest: sign, 8 exponent bits, 7 mantissa bits. -0 is folded onto 0. A
bin's value is the harmonic midpoint of its edges, which bounds the relative error by 1/257 = 0.39%. Counts are kept
for 32 hashed groups of clusters, so that a quantile's standard error comes from deleting one group at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.types import FloatArray, IntArray

GROUPS = 32
_SIGN = 0x8000
# a key is group << 16 | code + 2^15: codes lie in (-2^15, 2^15)
_SHIFT, _ZERO, _CODE = 16, 1 << 15, 0xFFFF
#: Values counted at a time.
_SLICE = 1 << 16


def _signed(high: IntArray) -> IntArray:
    """Codes of the upper 16 bits of float32: negative below 0, magnitude by float bits; -0 is 0."""
    magnitude = high & 0x7FFF
    return np.where(high & _SIGN, -magnitude, magnitude)


#: Upper 16 bits of a float32 -> bin code.
_CODE_OF = _signed(np.arange(1 << 16))


def _high_bits(x: FloatArray) -> NDArray[np.uint16]:
    """`[N]` upper 16 bits of the float32 nearest to each value."""
    with np.errstate(over="ignore"):
        return (np.ascontiguousarray(x, dtype=np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def codes(x: FloatArray) -> NDArray[np.int64]:
    """`[N]` signed bin codes in the order of the values."""
    return _CODE_OF[_high_bits(x)]


def bin_values(all_codes: IntArray) -> FloatArray:
    """`[K]` the values that stand for bins: harmonic midpoints of their edges, signed; 0 for the bin of zero."""
    magnitude = np.abs(all_codes).astype(np.uint32)
    with np.errstate(invalid="ignore", over="ignore"):
        low = (magnitude << np.uint32(16)).view(np.float32).astype(np.float64)
        high = ((magnitude + np.uint32(1)) << np.uint32(16)).view(np.float32).astype(np.float64)
        middle = np.where(np.isfinite(high), 2 * low * high / (low + high), low)
    return np.where(magnitude == 0, 0.0, np.copysign(middle, all_codes))


def bin_value(code: int) -> float:
    """The value that stands for one bin."""
    return float(bin_values(np.array([code], dtype=np.int64))[0])


class Histogram:
    """Counts by group and bin. `keys` `[K]` ascending: group << 16 | code + 2^15; `n` `[K]` values of each, above 0."""

    __slots__ = ("_table", "keys", "n")

    def __init__(self, keys: IntArray | None = None, n: IntArray | None = None) -> None:
        none = np.zeros(0, dtype=np.int64)
        self.keys, self.n = none if keys is None else keys, none if n is None else n
        self._table: tuple[IntArray, IntArray] | None = None

    @classmethod
    def of(cls, x: FloatArray, group: IntArray) -> Histogram:
        """`x` `[N]` finite values, `group` `[N]` in 0..31."""
        high = _high_bits(x)
        there = np.zeros(1 << 16, dtype=bool)
        there[high] = True
        used = np.unique(_CODE_OF[np.flatnonzero(there)])
        number = np.searchsorted(used, _CODE_OF)
        table = np.zeros(GROUPS * len(used), dtype=np.int64)
        for i in range(0, len(high), _SLICE):
            at = slice(i, i + _SLICE)
            table += np.bincount(group[at] * len(used) + number[high[at]], minlength=len(table))
        cells = np.flatnonzero(table)
        return cls((cells // max(1, len(used)) << _SHIFT) + used[cells % max(1, len(used))] + _ZERO, table[cells])

    def add(self, other: Histogram) -> None:
        keys = np.concatenate([self.keys, other.keys])
        order = np.argsort(keys, kind="stable")
        keys, n = keys[order], np.concatenate([self.n, other.n])[order]
        first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])) if len(keys) else order
        self.keys, self.n = keys[first], np.add.reduceat(n, first) if len(keys) else n
        self._table = None

    def __reduce__(self) -> tuple[type[Histogram], tuple[IntArray, IntArray]]:
        return Histogram, (self.keys, self.n)  # the table is made again where it is asked for

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Histogram) and np.array_equal(self.keys, other.keys) and np.array_equal(self.n, other.n)
        )

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __bool__(self) -> bool:
        """Whether it holds any value."""
        return len(self.keys) > 0

    def table(self) -> tuple[IntArray, IntArray]:
        """(codes `[K]` ascending, counts `[GROUPS, K]`); many metrics read it, and nobody may write to it."""
        if self._table is None:
            all_codes, at = np.unique((self.keys & _CODE) - _ZERO, return_inverse=True)
            counts = np.zeros((GROUPS, len(all_codes)), dtype=np.int64)
            counts[self.keys >> _SHIFT, at.ravel()] = self.n
            counts.flags.writeable = all_codes.flags.writeable = False
            self._table = all_codes, counts
        return self._table

    def to_dict(self) -> dict[str, Any]:
        """{group: {"code": ascending, "n": counts}}."""
        edges = np.searchsorted(self.keys, np.arange(GROUPS + 1) << _SHIFT).tolist()
        code, n = ((self.keys & _CODE) - _ZERO).tolist(), self.n.tolist()
        return {
            str(g): {"code": code[lo:hi], "n": n[lo:hi]}
            for g, (lo, hi) in enumerate(itertools.pairwise(edges))
            if hi > lo
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Histogram:
        """The inverse of `to_dict`. Errors: `ValueError`, `TypeError`, `KeyError` for anything else."""
        keys: list[int] = []
        n: list[int] = []
        for g, bins in sorted((int(g), bins) for g, bins in data.items()):
            for code, count in zip(bins["code"], bins["n"], strict=True):
                whole = type(code) is int and type(count) is int
                if not (whole and 0 <= g < GROUPS and -_ZERO < code < _ZERO and 0 < count < 1 << 62):
                    raise ValueError(f"no bin of a histogram: group {g}, code {code}, count {count}")
                keys.append((g << _SHIFT) + code + _ZERO)
                n.append(count)
        out = cls(np.array(keys, dtype=np.int64), np.array(n, dtype=np.int64))
        if (out.keys[1:] <= out.keys[:-1]).any():
            raise ValueError("a histogram's bins are not in order")
        return out


def folded(all_codes: IntArray, counts: IntArray) -> tuple[IntArray, IntArray]:
    """The histogram of |x| from that of x: (codes, counts `[GROUPS, K]`)."""
    unique, where = np.unique(np.abs(all_codes), return_inverse=True)
    out = np.zeros((len(unique), counts.shape[0]), dtype=np.int64)
    np.add.at(out, where.ravel(), counts.T)
    return unique, out.T


def quantile(all_codes: IntArray, counts: IntArray, q: float) -> float:
    """Nearest-rank quantile of binned values (`counts` `[K]`). NaN when there are none."""
    total = int(counts.sum())
    if total == 0:
        return math.nan
    rank = max(1, math.ceil(q * total - 1e-9))
    at = int(np.searchsorted(np.cumsum(counts), rank))
    return bin_value(int(all_codes[at]))
