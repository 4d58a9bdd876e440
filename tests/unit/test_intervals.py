"""Student's t and Holm against scipy and numbers worked by hand."""

from __future__ import annotations

import pytest
from scipy import stats

from onepolicy.intervals import holm, t_cdf, t_quantile


@pytest.mark.parametrize("df", [1.0, 2.5, 7.0, 19.0, 63.7, 1000.0, 1e6])
@pytest.mark.parametrize("t", [-40.0, -3.2, -0.4, 0.0, 0.001, 1.0, 2.6, 12.0])
def test_t_cdf(df: float, t: float) -> None:
    assert t_cdf(t, df) == pytest.approx(stats.t.cdf(t, df), rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("df", [1.0, 2.5, 19.0, 63.7, 1e5])
@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.9, 0.99, 0.999])
def test_t_quantile(df: float, p: float) -> None:
    assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-8, abs=1e-12)


def test_t_at_infinity() -> None:
    assert (t_cdf(float("inf"), 5), t_cdf(float("-inf"), 5)) == (1.0, 0.0)


def test_holm_by_hand() -> None:
    # at 5%: 0.01 <= 0.05 / 3, 0.02 <= 0.05 / 2, 0.06 > 0.05
    assert holm({"a": 0.01, "b": 0.06, "c": 0.02}, 0.05) == {"a", "c"}
    # the first step fails: nothing after it is looked at
    assert holm({"a": 0.02, "b": 0.021, "c": 0.022}, 0.05) == set()
    assert holm({}, 0.05) == set()
    assert holm({"a": float("nan")}, 0.05) == set()
