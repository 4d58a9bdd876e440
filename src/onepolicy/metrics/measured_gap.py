"""The gap of a saved report: sd, mean, autocorrelation and law of one token's log-ratio, as far as it has them."""

from __future__ import annotations

import math

import numpy as np

from onepolicy.errors import ContentError
from onepolicy.histogram import Histogram as Counts
from onepolicy.histogram import bin_values
from onepolicy.metrics.laws import Histogram, Law, Normal
from onepolicy.metrics.whole_answer import Gap, inflation
from onepolicy.types import Measurement, Report

_MOST = 0.999


def gap_of(report: Report) -> tuple[Gap, dict[str, str]]:
    """(the gap, subject -> a note on what it is made of). Errors: `ContentError` for a report without the numbers."""
    rms, mean = (_value(report, key) for key in ("log_ratio/rms", "log_ratio/mean"))
    if rms is None or mean is None:
        raise ContentError(
            f"this report has no {'log_ratio/rms' if rms is None else 'log_ratio/mean'}: "
            "nothing was scored by both sides; wanted a report of `check -o` or `compare -o` with measured tokens"
        )
    sd = math.sqrt(max(rms * rms - mean * mean, 0.0))
    rho, said = _autocorrelation(report, sd)
    return Gap(sd, _law(report), rho, mean, "measured"), {"autocorrelation": said, **_left_out(report)}


def _measured(report: Report, key: str) -> Measurement | None:
    m = report.measurements.get(key)
    return None if m is None or m.value is None or not math.isfinite(m.value) else m


def _value(report: Report, key: str) -> float | None:
    m = _measured(report, key)
    return None if m is None else m.value


def _law(report: Report) -> Law:
    """The report's histogram of log-ratios; normal where it has none, or one value alone."""
    codes, counts = report.sums.histograms.get("log_ratio", Counts()).table()
    values, weights = bin_values(codes), counts.sum(axis=0).astype(np.float64)
    finite = np.isfinite(values)
    if finite.sum() < 2:
        return Normal()
    return Histogram(values[finite], weights[finite], f"as measured on {int(weights[finite].sum()):,} tokens")


def _autocorrelation(report: Report, sd: float) -> tuple[float, str]:
    """The rho that makes the AR(1) variance that of the report's answers, at their mean length.

    0 where the interval of Var(D) / T holds s^2: a few dozen answers tell the variance to a third at best.
    """
    m = _measured(report, "length_scaling/variance_per_token")
    if m is None or m.value is None or sd == 0:
        return 0.0, "tokens taken as independent: the report has no Var(D) / T"
    times = m.value / (sd * sd)
    seen = f"Var(D) / T is {times:.3g} times the token variance"
    if m.lower is None or m.upper is None:
        return 0.0, f"{seen}, on too few answers for an interval: tokens taken as independent"
    if m.lower <= sd * sd <= m.upper:
        return 0.0, f"{seen}, its interval holds 1: tokens taken as independent"
    rho = rho_for(times, max(2, round(_mean_length(report))))
    return rho, f"{seen}: an autocorrelation of {rho:.2g}, or answers that differ in their drift"


def _mean_length(report: Report) -> float:
    counts = report.sums.counts
    return counts.get("scored", 0) / max(counts.get("viewed_sequences", 0), 1)


def rho_for(times: float, length: int) -> float:
    """The rho with Var(D) = `times` n s^2 at n = `length`, within +-0.999, by bisection."""
    low, high = -_MOST, _MOST
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inflation(middle, length) < times * length else (low, middle)
    return (low + high) / 2


def _left_out(report: Report) -> dict[str, str]:
    out: dict[str, str] = {}
    m = report.measurements["log_ratio/rms"]
    if m.n_nonfinite:
        out["nonfinite"] = f"{m.n_nonfinite:,} tokens with a log-ratio that is not finite are left out"
    if report.sums.view == "fixed":
        out["view"] = "fixed texts were not drawn: their mean ratio need not be 1"
    return out
