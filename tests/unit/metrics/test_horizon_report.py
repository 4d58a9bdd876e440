"""The gap of a saved report: sd, mean, tail and correlation go in by the rollouts, and come out of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from build import rollouts_of
from onepolicy.check import compare_rollouts
from onepolicy.errors import ContentError
from onepolicy.metrics.horizon import horizon
from onepolicy.metrics.laws import Histogram, Normal
from onepolicy.metrics.measured_gap import gap_of, rho_for
from onepolicy.metrics.whole_answer import inflation
from onepolicy.report.json import from_json, to_json
from onepolicy.types import Report

TOKENS = 100


def report_of(rho: float = 0.0, sd: float = 0.05, mean: float = -0.002, far: float = 0.0, n: int = 300) -> Report:
    """`n` sequences whose log-ratios are an AR(1) of that sd and mean; a share `far` of them is 8 times as large."""
    rng = np.random.default_rng(20261130)
    x = rng.standard_normal((n, TOKENS)) * np.where(rng.random((n, TOKENS)) < far, 8.0, 1.0)
    for i in range(1, TOKENS):
        x[:, i] = rho * x[:, i - 1] + math.sqrt(1 - rho * rho) * x[:, i]
    a = -20 - rng.exponential(1.0, n * TOKENS)
    pair = rollouts_of(a, a + mean + sd * x.ravel(), [TOKENS] * n, groups=[str(i) for i in range(n)])
    return compare_rollouts(pair, None, ("sampler", "old"), bounds="bf16", reply_length=1000)


independent = cache(report_of)


def test_size_drift_and_law_are_read():
    gap, notes = gap_of(independent())
    assert gap.sd == pytest.approx(0.05, rel=0.02)
    assert gap.mean == pytest.approx(-0.002, abs=0.001)
    assert gap.mean_is == "measured"
    assert gap.autocorrelation == 0 and "interval holds 1" in notes["autocorrelation"]
    assert gap.law.about == "as measured on 29,700 tokens"
    assert gap.law.outside(-2, 2) == pytest.approx(0.0455, abs=0.005)
    assert list(notes) == ["autocorrelation"]


def test_the_same_from_a_saved_one():
    gap, _ = gap_of(from_json(to_json(independent())))
    assert (gap.sd, gap.mean) == (gap_of(independent())[0].sd, gap_of(independent())[0].mean)


@pytest.mark.parametrize("rho", [0.6, -0.5])
def test_correlation_is_found_where_it_is_and_is_of_the_right_size(rho: float):
    gap, notes = gap_of(report_of(rho))
    assert gap.autocorrelation == pytest.approx(rho, abs=0.12)
    assert "an autocorrelation of" in notes["autocorrelation"]


def test_few_answers_say_nothing_about_correlation():
    gap, notes = gap_of(report_of(0.9, n=8))
    assert gap.autocorrelation == 0
    assert "tokens taken as independent" in notes["autocorrelation"]


def test_heavy_tails_come_along():
    """The share outside the clip is that of the report's own tokens, not that of a normal of the same sd."""
    report = report_of(far=0.02)
    gap, _ = gap_of(report)
    row = horizon(gap, 500, answers=50)["readings"]["measured"]
    measured = report.measurements["outside_clip/share"].value
    assert measured is not None and measured > 0.002
    assert row["tokens_outside_clip"] == pytest.approx(measured, rel=0.02)
    alone = horizon(replace(gap, law=Normal()), 500, answers=0)["readings"]["measured"]
    assert abs(alone["tokens_outside_clip"] / measured - 1) > 0.2


def test_the_measured_drift_is_a_reading_of_its_own():
    result = horizon(gap_of(independent())[0], 1000, answers=20)
    assert list(result["readings"]) == ["walk", "normalised", "measured"]
    assert result["reading"] == "measured" == result["walks"]["reading"]
    assert result["readings"]["measured"]["label"] == "measured drift"


def test_equal_sides_have_no_law_and_no_horizon():
    gap, notes = gap_of(report_of(sd=0.0, mean=0.0))
    assert (gap.sd, gap.mean) == (0.0, 0.0)
    assert isinstance(gap.law, Normal)
    assert "no Var(D) / T" in notes["autocorrelation"] or "independent" in notes["autocorrelation"]
    assert horizon(gap, 1000, answers=10)["readings"]["measured"]["off_by"]["1.5"] == 0


def without(report: Report, *keys: str) -> Report:
    kept: Mapping[str, object] = {k: v for k, v in report.measurements.items() if k not in keys}
    return replace(report, measurements=kept)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["log_ratio/rms", "log_ratio/mean"])
def test_a_report_without_numbers_is_refused(key: str):
    with pytest.raises(ContentError, match=f"no {key}: nothing was scored by both sides"):
        gap_of(without(independent(), key))
    empty = replace(independent().measurements[key], value=None)
    with pytest.raises(ContentError, match="nothing was scored"):
        gap_of(replace(independent(), measurements={**independent().measurements, key: empty}))


def test_a_report_with_less_gives_less():
    gap, notes = gap_of(without(independent(), "length_scaling/variance_per_token"))
    assert gap.autocorrelation == 0 and "no Var(D) / T" in notes["autocorrelation"]
    bare = replace(independent(), sums=replace(independent().sums, histograms={}))
    assert isinstance(gap_of(bare)[0].law, Normal)
    assert isinstance(gap_of(independent())[0].law, Histogram)


def test_what_was_left_out_and_what_was_not_drawn_is_said():
    m = replace(independent().measurements["log_ratio/rms"], n_nonfinite=3)
    report = replace(independent(), measurements={**independent().measurements, "log_ratio/rms": m})
    assert "3 tokens" in gap_of(report)[1]["nonfinite"]
    fixed = replace(independent(), sums=replace(independent().sums, view="fixed"))
    assert "need not be 1" in gap_of(fixed)[1]["view"]


@pytest.mark.parametrize("rho", [-0.8, -0.1, 0.0, 0.3, 0.95])
def test_the_correlation_is_the_inverse_of_the_inflation(rho: float):
    assert rho_for(inflation(rho, 200) / 200, 200) == pytest.approx(rho, abs=1e-9)


def test_a_variance_that_no_correlation_makes_stops_at_the_end():
    assert rho_for(1e6, 200) == pytest.approx(0.999)
