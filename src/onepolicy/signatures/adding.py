"""Sums that signatures keep: terms rounded once to a fixed grid, so that any split and order gives the same integers.

Clusters are sequences: a `gram` holds the sums over sequences of all products of a few per-sequence sums, from which
the cluster-robust standard error of anything linear in them follows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from onepolicy.counted import Counted
from onepolicy.grid import segment_sums, to_float
from onepolicy.profiles.base import Seen
from onepolicy.types import FloatArray, IntArray

#: Products of a sequence's sums are large: they are added in units of this.
_UNIT = 2.0**16
#: A gap beyond this says that a record is broken; it is cut here, so that one token does not decide a fit.
MOST = 30.0


def total(x: Any) -> int:
    """The sum of finite terms in grid units."""
    terms = np.ascontiguousarray(x, dtype=np.float64)
    zero, length = np.zeros(1, dtype=np.int64), np.array([len(terms)], dtype=np.int64)
    return segment_sums(terms, zero, length).to_int(0)


def keep(counted: Counted, **columns: Any) -> None:
    """Adds the sum of each column, by its name."""
    for name, x in columns.items():
        counted.sums[name] = counted.sums.get(name, 0) + total(x)


def read(counted: Counted, name: str) -> float:
    """A sum that `keep` made; 0 where there is none."""
    return to_float(counted.sums.get(name, 0))


def of_sequences(seen: Seen, x: FloatArray, inside: Any = None) -> FloatArray:
    """`[S]` sums of `x` over each sequence's tokens, each made of that sequence alone. `inside`: the tokens of `x`."""
    where = seen.sequence if inside is None else seen.sequence[inside]
    return np.bincount(where, x, len(seen.rollouts)).astype(np.float64)


def cell_sums(seen: Seen, cell: IntArray, cells: int, x: FloatArray) -> list[int]:
    """Grid totals of `x` `[N]` by cell `[N]`: each sequence's sums first, made of that sequence alone."""
    size = len(seen.rollouts)
    table = np.bincount(seen.sequence * cells + cell, x, size * cells).reshape(size, cells)
    flat = np.ascontiguousarray(table.T, dtype=np.float64).reshape(-1)
    starts = np.arange(cells, dtype=np.int64) * size
    sums = segment_sums(flat, starts, np.full(cells, size, dtype=np.int64))
    return [sums.to_int(i) for i in range(cells)]


def keep_gram(counted: Counted, name: str, columns: Mapping[str, FloatArray]) -> None:
    """Adds the products of per-sequence sums `[S]`."""
    for (i, x), (j, y) in itertools.combinations_with_replacement(columns.items(), 2):
        key = f"{name}:{i}*{j}"
        counted.sums[key] = counted.sums.get(key, 0) + total(x * y / _UNIT)


def spread(counted: Counted, name: str, weights: Mapping[str, float]) -> float:
    """The root of the sum over sequences of (sum of weight times column) squared."""
    out = 0.0
    for (i, w), (j, v) in itertools.combinations_with_replacement(weights.items(), 2):
        stored = counted.sums.get(f"{name}:{i}*{j}", counted.sums.get(f"{name}:{j}*{i}", 0))
        out += (1 if i == j else 2) * w * v * to_float(stored) * _UNIT
    return math.sqrt(max(0.0, out))


def clipped(d: FloatArray) -> FloatArray:
    return np.clip(d, -MOST, MOST)
