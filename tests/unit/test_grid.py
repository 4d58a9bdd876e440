"""Integer sums on the grid: exact against fractions, in any order."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.grid import GRID_BITS, MAX_TERMS, grid_integers, group_sums, segment_sums, selected_segments, to_float

terms = st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=60)


def rounded(x: float) -> int:
    """Half-even onto the grid, by exact arithmetic."""
    return round(Fraction(x) * 2**GRID_BITS)


def whole(x: np.ndarray) -> int:
    return segment_sums(x, np.array([0]), np.array([len(x)])).to_int(0)


@given(terms)
def test_a_sum_is_the_sum_of_rounded_terms(values: list[float]) -> None:
    assert whole(np.array(values)) == sum(rounded(v) for v in values)


@given(terms, st.randoms())
def test_the_order_does_not_matter(values: list[float], random) -> None:
    shuffled = list(values)
    random.shuffle(shuffled)
    assert whole(np.array(values)) == whole(np.array(shuffled))


def test_a_plain_float_sum_would_depend_on_the_order() -> None:
    """What the grid is for: the property above can fail."""
    x = np.array([1.0, 1e-16, 1e-16, 1e-16, -1.0] * 50)
    assert float(np.cumsum(x)[-1]) != float(np.cumsum(x[::-1])[-1])


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (2.0**-62, 0),  # half of a grid step: to even
        (3 * 2.0**-62, 2),
        (2.0**-61, 1),
        (-(2.0**-61), -1),
        (1023.9999, round(Fraction(1023.9999) * 2**61)),
        (1024.0, 1024 * 2**61),
        (1e300, int(Fraction(1e300) * 2**61)),
        (0.0, 0),
    ],
)
def test_numbers_worked_by_hand(value: float, wanted: int) -> None:
    assert whole(np.array([value])) == wanted


def test_large_terms_are_exact_integers() -> None:
    x = np.array([1e300, -1e300, 2.0**10, 1234567.875])
    assert grid_integers(x) == [rounded(float(v)) for v in x]


def test_large_terms_that_cancel_leave_the_small_ones() -> None:
    x = np.array([2000.0, 0.5, -2000.0, 0.25, 7.0])
    assert segment_sums(x, np.array([0, 4]), np.array([4, 1])).to_float().tolist() == [0.75, 7.0]


def test_non_finite_terms_are_left_out_and_counted() -> None:
    x = np.array([1.0, np.nan, np.inf, -np.inf, 2.0, 3.0])
    sums = segment_sums(x, np.array([0, 4]), np.array([4, 2]))
    assert sums.n.tolist() == [1, 2]
    assert sums.nonfinite.tolist() == [3, 0]
    assert sums.to_float().tolist() == [1.0, 5.0]


def test_empty_segments_are_zero() -> None:
    sums = segment_sums(np.array([1.0, 2000.0, 4.0]), np.array([0, 0, 1, 3, 3]), np.array([0, 1, 2, 0, 0]))
    assert sums.to_float().tolist() == [0.0, 1.0, 2004.0, 0.0, 0.0]
    assert sums.n.tolist() == [0, 1, 2, 0, 0]


def test_groups_add_segments() -> None:
    sums = segment_sums(np.array([1.0, 2.0, 3000.0, 4.0]), np.array([0, 1, 3]), np.array([1, 2, 1]))
    totals, counts = group_sums(sums, np.array([1, 0, 1]), 2)
    assert [to_float(t) for t in totals] == [3002.0, 5.0]
    assert counts == [2, 2]


@pytest.mark.parametrize("n", [MAX_TERMS, MAX_TERMS + 1, 2 * MAX_TERMS + 7])
@pytest.mark.parametrize("value", [np.nextafter(1024.0, 0.0), 1000 + 2.0**-26 - 2.0**-40, -(2.0**-26) + 2.0**-61])
def test_a_long_segment_of_the_worst_terms_is_exact(n: int, value: float) -> None:
    """As many terms of one sign, as large or with as large a rest, as a level's float holds, and more."""
    x = np.concatenate([[3000.0, 2.0**-60], np.full(n, value), [5.0, 2.0**-61]])
    sums = segment_sums(x, np.array([0, n + 2]), np.array([n + 2, 2]))
    wanted = n * rounded(value) + rounded(3000.0) + 2
    assert [sums.to_int(i) for i in range(2)] == [wanted, rounded(5.0) + 1]
    assert sums.to_float().tolist() == [wanted / 2**GRID_BITS, 5.0]


def test_groups_whose_sums_pass_a_float_are_exact() -> None:
    """Every segment is exact in a float64, their sum is not."""
    n, value = MAX_TERMS, float(np.nextafter(1024.0, 0.0))
    x = np.concatenate([np.full(n, value), np.full(n, value), np.full(n, value), [2.0**-61]])
    starts, lengths = np.array([0, n, 2 * n, 3 * n]), np.array([n, n, n, 1])
    totals, counts = group_sums(segment_sums(x, starts, lengths), np.array([1, 1, 1, 1]), 3)
    assert totals == [0, 3 * n * rounded(value) + 1, 0]
    assert counts == [0, 3 * n + 1, 0]


@given(terms)
def test_the_float_of_a_sum_is_the_nearest_one(values: list[float]) -> None:
    """Whichever way it was added: the same bits as from the integer."""
    sums = segment_sums(np.array(values), np.array([0]), np.array([len(values)]))
    assert sums.to_float().tolist() == [to_float(sums.to_int(0))]


def test_a_total_too_large_for_a_float_is_infinite() -> None:
    assert to_float(10**400) == float("inf")
    assert to_float(-(10**400)) == float("-inf")


def test_selected_segments() -> None:
    mask = np.array([True, False, False, False, True, True])
    starts, lengths = selected_segments(np.array([0, 2, 4, 6]), mask)
    assert starts.tolist() == [0, 1, 1]
    assert lengths.tolist() == [1, 0, 2]
