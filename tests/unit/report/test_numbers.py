"""How numbers are written for people."""

from __future__ import annotations

import math

import pytest

from onepolicy.report.numbers import count, factor, interval, near_one, number, share


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (None, "–"),
        (0.0, "0"),
        (-0.0, "0"),
        (0.0123456, "0.0123"),
        (-9.5, "-9.5"),
        (4.7e-6, "4.7e-6"),
        (1e-11, "1e-11"),
        (10561.4, "10,561"),
        (1.5e12, "1.5e+12"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_number(x: float | None, text: str):
    assert number(x) == text


@pytest.mark.parametrize(
    ("x", "text"), [(None, "–"), (0.0, "0%"), (1.0, "100%"), (0.0116, "1.16%"), (6e-9, "6e-9"), (-0.004, "-0.4%")]
)
def test_share(x: float | None, text: str):
    assert share(x) == text


def test_the_others():
    assert factor(1 / 13_000) == "1 / 13,000"
    assert factor(0.5) == "0.5"
    assert factor(0.0) == "0"
    assert near_one(1.000021) == "1.00002"
    assert near_one(1e6) == "1,000,000"
    assert near_one(None) == "–"
    assert interval(None, 1.0) == ""
    assert interval(0.5, 1.0) == "[0.5, 1]"
    assert [count(n) for n in (12, 99_999, 276_383, 1_250_000)] == ["12", "99,999", "276k", "1.2M"]
