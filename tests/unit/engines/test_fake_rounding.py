"""Rounding against numpy's own float16, against the table of all bfloat16 values, and against exact sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.engines.fake_rounding import DTYPES, ORDERS, TILE, Product, round_in_place, round_to

#: Every finite bfloat16 from 0 up, in order, and the first number that rounds to infinity in its place in the row.
BF16 = (np.arange(0x7F80, dtype=np.uint32) << 16).view(np.float32).astype(np.float64)

finite = st.floats(allow_nan=False, allow_infinity=False, width=64)


def nearest_bf16(x: float) -> float:
    """By search in the table: the nearer neighbour, of two equally near the one with an even last bit."""
    size = abs(x)
    high = int(np.searchsorted(BF16, size))
    if high == len(BF16):
        return float(np.copysign(np.inf if size >= 2.0**128 - 2.0**119 else BF16[-1], x))
    low = high if BF16[high] == size else high - 1
    # neighbours are close enough for these differences to be exact
    below, above = size - BF16[low], BF16[high] - size
    at = low if below < above or (below == above and low % 2 == 0) else high
    return float(np.copysign(BF16[at], x))


@given(finite)
def test_bfloat16_of_float64_is_the_nearest(x: float) -> None:
    assert float(round_to(np.array([x]), "bfloat16")[0]) == nearest_bf16(x)


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_bfloat16_of_float32_is_the_nearest(x: float) -> None:
    assert float(round_to(np.array([x], dtype=np.float32), "bfloat16")[0]) == nearest_bf16(x)


@given(st.integers(0, 0x7F7E), st.sampled_from([-1e-9, 0.0, 1e-9]))
def test_bfloat16_between_two_neighbours(low: int, lean: float) -> None:
    """Middles go to the even one, anything beside them to its own side: no second rounding on the way."""
    middle = (BF16[low] + BF16[low + 1]) / 2
    x = middle + lean * (BF16[low + 1] - BF16[low])
    wanted = BF16[low + (low % 2 if lean == 0 or x == middle else int(lean > 0))]
    assert float(round_to(np.array([x]), "bfloat16")[0]) == wanted


@given(finite)
def test_float16_is_numpys(x: float) -> None:
    with np.errstate(over="ignore"):
        assert float(round_to(np.array([x]), "float16")[0]) == float(np.float16(x))


def test_fast_float16_is_numpys_on_every_value_and_middle() -> None:
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[1:] + halves[:-1]) / 2
    beside = np.concatenate([np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(np.inf))])
    beyond = np.array([65519.996, 65520, 65536, 1e30, 2e-8, 3e-8, 1e-30], dtype=np.float32)
    x = np.concatenate([halves, middles, beside, beyond])
    x = np.concatenate([x, -x])
    with np.errstate(over="ignore"):
        wanted = x.astype(np.float16).astype(np.float32)
    assert np.array_equal(round_in_place(x.copy(), "float16"), wanted)


@pytest.mark.parametrize("dtype", list(DTYPES))
@given(x=finite)
def test_idempotent_and_odd(dtype: str, x: float) -> None:
    once = round_to(np.array([x]), dtype)
    assert np.array_equal(round_to(once, dtype), once)
    assert np.array_equal(round_to(np.array([-x]), dtype), -once)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_specials(dtype: str) -> None:
    nans = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000], dtype=np.uint32).view(np.float32)
    assert np.isnan(round_to(nans, dtype)).all()
    assert np.array_equal(round_to(np.array([np.inf, -np.inf]), dtype), [np.inf, -np.inf])
    assert np.signbit(round_to(np.array([-0.0]), dtype)).all()
    assert round_to(np.zeros((0, 3)), dtype).shape == (0, 3)
    assert round_to(np.float64(1.5), dtype).shape == ()


def test_known_values() -> None:
    got = round_to(np.array([1.0, np.pi, 1 + 2**-8, 1 + 3 * 2**-8, 0.1, 3.4e38, 1e39, 2.0**-134]), "bfloat16")
    assert list(got) == [1.0, 3.140625, 1.0, 1.015625, 0.10009765625, np.inf, np.inf, 0.0]
    assert round_to(np.array([2.0**-133]), "bfloat16")[0] == 2.0**-133


@pytest.mark.parametrize("order", list(ORDERS))
def test_a_product_rounds_each_partial_sum(order: str) -> None:
    """Against the same sums written out: whole numbers, so that each block's own sum is exact."""
    rng = np.random.default_rng(0)
    x = rng.integers(-9, 10, size=(2, TILE, 64)).astype(np.float32)
    w = rng.integers(-9, 10, size=(64, 5)).astype(np.float32)
    width = 8 if order == "blocked" else 16
    parts = [round_to(x[..., i : i + width] @ w[i : i + width], "bfloat16") for i in range(0, 64, width)]
    plus = lambda a, b: round_to(a + b, "bfloat16")
    if order == "pairwise":
        wanted = plus(plus(parts[0], parts[1]), plus(parts[2], parts[3]))
    else:
        parts = parts[::-1] if order == "reversed" else parts
        wanted = parts[0]
        for part in parts[1:]:
            wanted = plus(wanted, part)
    assert np.array_equal(Product(w, "bfloat16", order)(x), wanted)


def test_orders_differ_in_bfloat16_and_agree_in_float64() -> None:
    rng = np.random.default_rng(1)
    x, w = rng.normal(size=(4, TILE, 64)), rng.normal(size=(64, 32))
    narrow = [Product(w.astype(np.float32), "bfloat16", o)(x.astype(np.float32)) for o in ORDERS]
    wide = [Product(w, "float64", o)(x) for o in ORDERS]
    for a in range(len(ORDERS)):
        for b in range(a):
            assert not np.array_equal(narrow[a], narrow[b])
            assert np.allclose(wide[a], wide[b], rtol=0, atol=1e-12)
