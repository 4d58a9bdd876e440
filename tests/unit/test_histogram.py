"""Float-bit histograms: error bound, order of bins, merging, and a standard error from hashed groups."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.histogram import Histogram, bin_value, codes, folded, quantile

values = st.floats(-1e30, 1e30, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-30)


@given(values)
def test_a_bin_stands_for_its_values_within_0_4_percent(x: float) -> None:
    got = bin_value(int(codes(np.array([x]))[0]))
    assert abs(got - x) <= 0.0039 * abs(x)


@given(st.lists(values, min_size=2, max_size=30))
def test_bins_keep_the_order(xs: list[float]) -> None:
    ordered = np.sort(np.array(xs))
    assert (np.diff(codes(ordered)) >= 0).all()


def test_minus_zero_is_zero() -> None:
    assert codes(np.array([-0.0, 0.0, 1e-300, -1e-300])).tolist() == [0, 0, 0, 0]
    assert bin_value(0) == 0.0


@pytest.mark.parametrize("n", [300, 400_000])
def test_quantiles_against_numpy(n: int) -> None:
    """Both ways of counting: a sort for few values, a table for many."""
    rng = np.random.default_rng(1)
    x = rng.normal(0, 0.05, n)
    all_codes, counts = Histogram.of(x, rng.integers(0, 32, n)).table()
    assert counts.sum() == n
    for q in (0.01, 0.5, 0.9, 0.99):
        wanted = np.quantile(x, q, method="inverted_cdf")
        assert quantile(all_codes, counts.sum(axis=0), q) == pytest.approx(wanted, rel=0.004)
    wide, n_wide = folded(all_codes, counts)
    wanted = np.quantile(np.abs(x), 0.95, method="inverted_cdf")
    assert quantile(wide, n_wide.sum(axis=0), 0.95) == pytest.approx(wanted, rel=0.004)


def test_parts_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(2)
    x, g = rng.normal(size=1000), rng.integers(0, 32, 1000)
    whole, parts = Histogram.of(x, g), Histogram.of(x[:300], g[:300])
    parts.add(Histogram.of(x[300:], g[300:]))
    assert whole.to_dict() == parts.to_dict()
    assert Histogram.from_dict(whole.to_dict()).to_dict() == whole.to_dict()


def test_nothing_has_no_quantile() -> None:
    assert np.isnan(quantile(np.array([], dtype=np.int64), np.array([], dtype=np.int64), 0.5))


@pytest.mark.parametrize(
    "bins",
    [{"code": [1.5], "n": [1]}, {"code": [1], "n": [0.5]}, {"code": [1], "n": [0]}, {"code": [2, 1], "n": [1, 1]},
     {"code": [1 << 15], "n": [1]}, {"code": [1], "n": [1 << 62]}, {"code": [True], "n": [1]}],
)  # fmt: skip
def test_what_is_no_histogram_is_refused(bins: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match=r"no bin of a histogram|not in order"):
        Histogram.from_dict({"0": bins})
    with pytest.raises(ValueError, match="no bin of a histogram"):
        Histogram.from_dict({"32": {"code": [1], "n": [1]}})


def test_a_pickled_one_is_the_same_and_no_larger_for_having_been_read() -> None:
    rng = np.random.default_rng(3)
    one = Histogram.of(rng.normal(size=1000), rng.integers(0, 32, 1000))
    before = pickle.dumps(one)
    one.table()
    assert len(pickle.dumps(one)) == len(before) and pickle.loads(before) == one
