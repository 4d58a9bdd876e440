"""The importance ratio r = e^d and what follows from its size: bias, chi-squared, effective sample size.

Everything here is raw: nothing is clamped or truncated before it is measured.
"""

from __future__ import annotations

from typing import Any

from onepolicy.sums import Metric
from onepolicy.views import log_ratio, mult_prob_error

_MOMENTS = {
    "ratio_minus_one": lambda xp, x: x.ratio_minus_one,
    "ratio_minus_one_squared": lambda xp, x: x.ratio_minus_one * x.ratio_minus_one,
}


def _std(t: Any) -> Any:
    mean = t.mean("ratio_minus_one")
    # a variance of equal values may round below zero
    return abs(t.mean("ratio_minus_one_squared") - mean * mean) ** 0.5


def _chi2(t: Any) -> Any:
    """E r^2 - 1 = E (r - 1)^2 + 2 E (r - 1)."""
    return t.mean("ratio_minus_one_squared") + 2 * t.mean("ratio_minus_one")


def _ess(t: Any) -> Any:
    """(sum r)^2 / (n sum r^2)."""
    mean = 1 + t.mean("ratio_minus_one")
    return t.divide(mean * mean, 1 + _chi2(t))


METRICS = [
    Metric(
        "ratio/mean",
        "token",
        "estimator",
        {"ratio_minus_one": _MOMENTS["ratio_minus_one"]},
        lambda t: 1 + t.mean("ratio_minus_one"),
        "mean(r): 1 when both distributions have the same support; the kept mass under a truncated one",
        ideal=1.0,
        unit="ratio",
        source="E r = 1 identity",
        ratio_tail=True,
    ),
    Metric(
        "ratio_bias/mean",
        "token",
        "estimator",
        {"ratio_minus_one": _MOMENTS["ratio_minus_one"]},
        lambda t: t.mean("ratio_minus_one"),
        "mean(r - 1) through expm1: 0 in health, where mean(d) is -KL",
        unit="ratio",
        source="E r = 1 identity",
        ratio_tail=True,
    ),
    Metric("ratio/std", "token", "estimator", _MOMENTS, _std, "standard deviation of r", unit="ratio", ratio_tail=True),
    Metric(
        "ratio/max",
        "token",
        "scored",
        {"log_ratio": log_ratio},
        lambda t: t.exp(t.greatest("log_ratio")),
        "max(r), raw",
        reducer="max",
        ideal=1.0,
        unit="ratio",
    ),
    Metric(
        "ratio/min",
        "token",
        "scored",
        {"log_ratio": log_ratio},
        lambda t: t.exp(t.least("log_ratio")),
        "min(r), raw",
        reducer="min",
        ideal=1.0,
        unit="ratio",
    ),
    Metric(
        "chi2_token/mean",
        "token",
        "estimator",
        _MOMENTS,
        _chi2,
        "mean(r^2) - 1 as mean((r - 1)^2) + 2 mean(r - 1)",
        unit="ratio",
        source="verl chi2_token, without its clamp",
        ratio_tail=True,
    ),
    Metric(
        "ess_token/share",
        "token",
        "estimator",
        _MOMENTS,
        _ess,
        "(sum r)^2 / (n sum r^2) of raw token ratios",
        ideal=1.0,
        unit="share",
        source="Kish 1965",
        ratio_tail=True,
    ),
    Metric(
        "mult_prob_error/mean",
        "token",
        "scored",
        {"mult_prob_error": mult_prob_error},
        lambda t: t.mean("mult_prob_error"),
        "mean(e^|d|), at least 1",
        ideal=1.0,
        unit="ratio",
        source="NeMo-RL token_mult_prob_error",
        ratio_tail=True,
    ),
    Metric(
        "mult_prob_error/sequence_max",
        "sequence",
        "scored",
        {"mult_prob_error_of_sequence": lambda xp, x: x.mult_prob_error / x.tokens},
        lambda t: t.greatest("mult_prob_error_of_sequence"),
        "the greatest sequence mean of e^|d|",
        reducer="max",
        ideal=1.0,
        unit="ratio",
        source="NeMo-RL max_seq_mult_prob_error",
    ),
]
