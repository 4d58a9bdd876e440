"""Sums that signatures keep: terms rounded once to a fixed grid, so that any split and order gives the same integers.

Clusters are sequences: a `gram` holds the sums over sequences of all products of a few per-sequence sums, from which
the cluster-robust standard error of anything linear in them follows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from onepolicy.counted import Counted
from onepolicy.grid import segment_sums, to_float
from onepolicy.profiles.base import MOST_GAP, Seen
from onepolicy.profiles.blocks import TOKENS
from onepolicy.types import FloatArray, IntArray

#: Products of a sequence's sums are large: they are added in units of this.
_UNIT = 2.0**16


def total(x: Any) -> int:
    """The sum of finite terms in grid units."""
    terms = np.ascontiguousarray(x, dtype=np.float64)
    return sum(_total(terms[lo : lo + TOKENS]) for lo in range(0, len(terms), TOKENS))


def _total(terms: FloatArray) -> int:
    zero, length = np.zeros(1, dtype=np.int64), np.array([len(terms)], dtype=np.int64)
    return segment_sums(terms, zero, length).to_int(0)


def keep(counted: Counted, **columns: Any) -> None:
    """Adds the sum of each column, by its name."""
    for name, x in columns.items():
        counted.sums[name] = counted.sums.get(name, 0) + total(x)


def read(counted: Counted, name: str) -> float:
    """A sum that `keep` made; 0 where there is none."""
    return to_float(counted.sums.get(name, 0))


def of_sequences(seen: Seen, x: FloatArray, inside: Any) -> FloatArray:
    """`[S]` sums of `x` over each sequence's tokens `inside`, each made of that sequence alone."""
    return np.bincount(seen.sequence[inside], x, len(seen.rollouts)).astype(np.float64)


def cell_sums(
    seen: Seen, cells: int, columns: Callable[[slice], tuple[IntArray, Mapping[str, FloatArray]]]
) -> tuple[IntArray, dict[str, list[int]]]:
    """(`[cells]` tokens, grid totals by cell of each column). `columns`: the cells of a slice of tokens, and the
    columns. Each sequence's sums come first, made of that sequence alone."""
    size, counts, tables = len(seen.rollouts), np.zeros(cells, dtype=np.int64), dict[str, FloatArray]()
    for block in seen.blocks:
        first, n = block.sequences.start, block.sequences.stop - block.sequences.start
        cell, each = columns(block.tokens)
        key = (seen.sequence[block.tokens] - first) * cells + cell
        counts += np.bincount(cell, minlength=cells)
        for name, x in each.items():
            table = tables.setdefault(name, np.zeros((cells, size)))
            table[:, block.sequences] = np.bincount(key, x, n * cells).reshape(n, cells).T
    starts = np.arange(cells, dtype=np.int64) * size
    sums = {k: segment_sums(x.reshape(-1), starts, np.full(cells, size)) for k, x in tables.items()}
    return counts, {k: [x.to_int(i) for i in range(cells)] for k, x in sums.items()}


def keep_gram(counted: Counted, name: str, columns: Mapping[str, FloatArray]) -> None:
    """Adds the products of per-sequence sums `[S]`."""
    for (i, x), (j, y) in itertools.combinations_with_replacement(columns.items(), 2):
        key = f"{name}:{i}*{j}"
        with np.errstate(over="ignore", invalid="ignore"):
            counted.sums[key] = counted.sums.get(key, 0) + total(x * y / _UNIT)


def spread(counted: Counted, name: str, weights: Mapping[str, float]) -> float:
    """The root of the sum over sequences of (sum of weight times column) squared."""
    out = 0.0
    for (i, w), (j, v) in itertools.combinations_with_replacement(weights.items(), 2):
        stored = counted.sums.get(f"{name}:{i}*{j}", counted.sums.get(f"{name}:{j}*{i}", 0))
        out += (1 if i == j else 2) * w * v * to_float(stored) * _UNIT
    return math.sqrt(max(0.0, out))


def clipped(d: FloatArray) -> FloatArray:
    return np.clip(d, -MOST_GAP, MOST_GAP)
