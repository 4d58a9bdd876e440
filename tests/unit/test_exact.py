"""Exact divergences: the same bits in any memory order and any cut, infinities, vocabularies that differ."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onepolicy.errors import AlignmentError
from onepolicy.exact import exact_divergences

RNG = np.random.default_rng(0)
A = RNG.normal(0, 3, (5000, 37))
B = A + RNG.normal(0, 0.1, A.shape)


def bits(a: np.ndarray, b: np.ndarray) -> dict[str, bytes]:
    return {name: column.tobytes() for name, column in exact_divergences(a, b).items()}


@pytest.mark.parametrize(
    "laid",
    [np.asfortranarray, lambda x: x[:, ::-1].copy()[:, ::-1], lambda x: np.repeat(x, 2, axis=1)[:, ::2]],
    ids=["column order", "reversed", "strided"],
)
def test_the_memory_order_changes_no_bit(laid) -> None:
    assert bits(laid(A), laid(B)) == bits(A, B)


def test_a_sum_down_a_strided_row_does_change_a_bit() -> None:
    """What the copy is for."""
    x = np.exp(A)
    assert (np.asfortranarray(x).sum(axis=1) != x.sum(axis=1)).any()


def test_a_cut_changes_no_bit() -> None:
    whole = exact_divergences(A, B)
    parts = [exact_divergences(A[at], B[at]) for at in (slice(0, 17), slice(17, 4999), slice(4999, None))]
    for name, column in whole.items():
        assert np.array_equal(np.concatenate([p[name] for p in parts]), column), name


def test_two_outcomes_by_hand() -> None:
    got = exact_divergences(np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]]))
    assert got["kl_ab"][0] == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert got["kl_ba"][0] == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert got["tv"][0] == pytest.approx(0.25)


def test_a_truncated_support() -> None:
    """b lacks what a has: KL(a || b) is infinite, KL(b || a) = -log of the kept mass, TV is the mass that is lost."""
    p = np.array([[0.5, 0.3, 0.2]])
    got = exact_divergences(np.log(p), np.where([[True, True, False]], np.log(p), -np.inf))
    assert got["kl_ab"][0] == math.inf
    assert got["kl_ba"][0] == pytest.approx(-math.log(0.8))
    assert got["tv"][0] == pytest.approx(0.2)
    assert 0 < got["js"][0] < math.log(2)


def test_equal_is_zero_and_a_missing_row_is_nan() -> None:
    x = A[:3].copy()
    x[1] = np.nan
    for column in exact_divergences(x, x.copy()).values():
        assert column[[0, 2]].tolist() == [0.0, 0.0]
        assert np.isnan(column[1])


def test_vocabularies_that_differ_are_refused() -> None:
    with pytest.raises(AlignmentError, match="vocabularies"):
        exact_divergences(A, B[:, :36])
    assert exact_divergences(None, B) == {}
