"""Sums by ranges of position in one pass are those of the elementwise terms, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from onepolicy.arrays import NUMPY
from onepolicy.grid import SegmentSums, segment_sums
from onepolicy.metrics.floor import BUCKETS
from onepolicy.types import FloatArray
from onepolicy.views import Tokens, Within, log_ratio_squared
from onepolicy.windows import window_sums

TERMS = [Within(log_ratio_squared, low, high) for low, high in zip(BUCKETS, [*BUCKETS[1:], None], strict=True)]


def integers(sums: SegmentSums) -> list[tuple[int, int, int]]:
    return [(sums.to_int(i), int(sums.n[i]), int(sums.nonfinite[i])) for i in range(len(sums.n))]


def both_ways(
    position: FloatArray, d: FloatArray, lengths: list[int], terms: list[Within]
) -> list[tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]]:
    """For each term: (in one pass, elementwise)."""
    counts = np.array(lengths)
    where = (np.cumsum(counts) - counts, counts)
    chunk = Tokens(np.zeros(len(d)), d, position=position)
    with np.errstate(over="ignore"):
        found = window_sums(chunk, {id(t): t for t in terms}, *where)
        return [(integers(found[id(t)]), integers(segment_sums(t(NUMPY, chunk), *where))) for t in terms]


@pytest.mark.parametrize("seed", range(30))
def test_any_sequences_give_the_integers_of_the_elementwise_terms(seed: int):
    """Empty sequences, positions that begin late and leave gaps, huge and infinite terms."""
    rng = np.random.default_rng(seed)
    lengths = rng.choice([0, 1, 3, 15, 16, 17, 400, 5000], 9).tolist()
    position = np.concatenate([rng.integers(0, 40) + np.cumsum(rng.integers(1, 30, n)) for n in lengths])
    d = rng.standard_t(1, len(position)) * 10.0 ** rng.integers(-9, 6, len(position))
    d[rng.random(len(d)) < 0.001] = 1e200  # its square overflows
    for found, wanted in both_ways(position.astype(np.float64), d, lengths, TERMS):
        assert found == wanted


def test_one_range_that_does_not_begin_at_0():
    position = np.concatenate([np.arange(50.0), np.arange(50.0)])
    term = Within(log_ratio_squared, 16, 32)
    [(found, wanted)] = both_ways(position, np.ones(100), [50, 50], [term])
    assert found == wanted == [(16 << 61, 50, 0), (16 << 61, 50, 0)]


@pytest.mark.parametrize("position", [np.array([3.0, 2.0, 40.0, 1.0]), np.full(4, 2.0**60), np.array([0.0, 0, 20, 20])])
def test_positions_that_do_not_rise_are_summed_too(position: FloatArray):
    for found, wanted in both_ways(position, np.array([0.5, 1.0, 2.0, 4.0]), [2, 2], TERMS):
        assert found == wanted


def test_no_tokens():
    for found, wanted in both_ways(np.zeros(0), np.zeros(0), [0, 0], TERMS):
        assert found == wanted == [(0, 0, 0), (0, 0, 0)]


def test_a_sequence_whose_runs_add_to_more_than_a_float_holds():
    """d squared just below 1024 at 2^18 + 9 places: the runs are exact in float64, the range of all of them is not."""
    n = (1 << 18) + 9
    d = np.full(n + 3, np.sqrt(1023.9999))
    term = Within(log_ratio_squared, 0, None)
    cut = Within(log_ratio_squared, 0, n // 2)
    position = np.concatenate([np.arange(n, dtype=np.float64), np.arange(3.0)])
    for found, wanted in both_ways(position, d, [n, 3], [term, cut]):
        assert found == wanted
