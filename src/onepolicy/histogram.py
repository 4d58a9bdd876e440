"""Histograms of float bits: mergeable, fixed bins, quantiles within 0.4% relative.

The bin of x is its float32 bits without the 16 lowest: sign, 8 exponent bits, 7 mantissa bits. -0 is folded onto 0. A
bin's value is the harmonic midpoint of its edges, which bounds the relative error by 1/257 = 0.39%. Counts are kept
for 32 hashed groups of clusters, so that a quantile's standard error comes from deleting one group at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.types import FloatArray, IntArray

GROUPS = 32
_SIGN = 0x8000
# a key is group << 16 | code + 2^15: codes lie in (-2^15, 2^15)
_SHIFT, _ZERO, _CODE = 16, 1 << 15, 0xFFFF


def codes(x: FloatArray) -> NDArray[np.int64]:
    """`[N]` signed bin codes in the order of the values: negative below 0, magnitude by float bits."""
    with np.errstate(over="ignore"):
        bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32) >> np.uint32(16)
    magnitude = (bits & np.uint32(0x7FFF)).astype(np.int64)
    return np.where(bits & np.uint32(_SIGN), -magnitude, magnitude)


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


@dataclass(slots=True)
class Histogram:
    """Counts by group and bin: `counts[group][code]`."""

    counts: dict[int, dict[int, int]] = field(default_factory=dict[int, dict[int, int]])

    @classmethod
    def of(cls, x: FloatArray, group: IntArray) -> Histogram:
        """`x` `[N]` finite values, `group` `[N]` in 0..31."""
        keys = (group.astype(np.int64) << _SHIFT) + codes(x) + _ZERO
        # a table of all groups and bins costs less than a sort, once there are as many values as bins
        if len(keys) > GROUPS << _SHIFT - 3:
            table = np.bincount(keys, minlength=GROUPS << _SHIFT)
            unique = np.flatnonzero(table)
            n = table[unique]
        else:
            unique, n = np.unique(keys, return_counts=True)
        out = cls()
        for key, count in zip(unique.tolist(), n.tolist(), strict=True):
            out.counts.setdefault(key >> _SHIFT, {})[(key & _CODE) - _ZERO] = count
        return out

    def add(self, other: Histogram) -> None:
        for group, bins in other.counts.items():
            into = self.counts.setdefault(group, {})
            for code, n in bins.items():
                into[code] = into.get(code, 0) + n

    def table(self) -> tuple[IntArray, IntArray]:
        """(codes `[K]` ascending, counts `[GROUPS, K]`)."""
        all_codes = np.array(sorted({c for bins in self.counts.values() for c in bins}), dtype=np.int64)
        counts = np.zeros((GROUPS, len(all_codes)), dtype=np.int64)
        for group, bins in self.counts.items():
            counts[group, np.searchsorted(all_codes, list(bins))] = list(bins.values())
        return all_codes, counts

    def to_dict(self) -> dict[str, Any]:
        return {
            str(g): {"code": sorted(b), "n": [b[c] for c in sorted(b)]} for g, b in sorted(self.counts.items()) if b
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Histogram:
        return cls({int(g): dict(zip(b["code"], b["n"], strict=True)) for g, b in data.items()})


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
