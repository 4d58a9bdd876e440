"""Divergences: KL estimators from sampled tokens in both directions, JS, TV, and the exact ones.

d = log p_scorer - log p_sampler, r = e^d, expectations over tokens that the sampler drew. The estimators k1, k2, k3 are
J. Schulman's ("Approximating KL divergence", 2020). The swapped form on the same tokens, e^-d - 1 + d, is no estimate
of the other direction: that one carries r as weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onepolicy.sums import Metric, Term
from onepolicy.views import k3, log_ratio, log_ratio_squared


def _mean(term: str) -> Callable[[Any], Any]:
    return lambda t: t.mean(term)


def _reverse(xp: Any, x: Any) -> Any:
    """r d - (r - 1): near zero as r (expm1(-d) + d), which does not cancel."""
    near = x.ratio * (xp.expm1(-x.log_ratio) + x.log_ratio)
    return xp.where(x.abs_log_ratio < 1, near, x.ratio * x.log_ratio - x.ratio_minus_one)


_SAMPLED = "tokens the sampler drew, under the sampler's contexts"

METRICS = [
    Metric(
        "kl_sampler_scorer_k1/mean",
        "token",
        "estimator",
        {"log_ratio": log_ratio},
        lambda t: -t.mean("log_ratio"),
        "mean(-d), unbiased, may be negative; for the eye, never for a gate",
        source="Schulman 2020",
    ),
    Metric(
        "kl_sampler_scorer_k2/mean",
        "token",
        "estimator",
        {"log_ratio_squared": log_ratio_squared},
        lambda t: 0.5 * t.mean("log_ratio_squared"),
        "mean(d^2 / 2), biased, never negative",
        scale="log",
        source="Schulman 2020",
    ),
    Metric(
        "kl_sampler_scorer_k3/mean",
        "token",
        "estimator",
        {"k3": k3},
        _mean("k3"),
        "mean(e^d - 1 - d) as expm1(d) - d: unbiased, never negative",
        scale="log",
        source="Schulman 2020",
        ratio_tail=True,
    ),
    Metric(
        "kl_scorer_sampler_weighted/mean",
        "token",
        "estimator",
        {"k3_reverse": _reverse},
        _mean("k3_reverse"),
        "mean(1 - r + r d): KL(scorer || sampler) under the sampler's contexts, importance-weighted, never negative",
        scale="log",
        source="importance weighting of k3; the corrected form of NeMo-RL's policy_kl_error",
        ratio_tail=True,
    ),
    Metric(
        "js_sampled/mean",
        "token",
        "estimator",
        {
            # with m = (1 + r) / 2 the two terms are -log m + r (d - log m), each half
            "js": lambda xp, x: 0.5 * (x.ratio * x.log_ratio - (1 + x.ratio) * xp.log1p(0.5 * x.ratio_minus_one))
        },
        _mean("js"),
        "half of mean(log(2 / (1 + r)) + r log(2 r / (1 + r))): Jensen-Shannon divergence, unbiased",
        scale="log",
        source="sampler-side form of JS; " + _SAMPLED,
    ),
    Metric(
        "tv_sampled/mean",
        "token",
        "estimator",
        {"tv": lambda xp, x: xp.floor_at(-x.ratio_minus_one, 0.0)},
        _mean("tv"),
        "mean(max(0, 1 - r)): total variation; half of mean|r - 1| is only half of it under a truncated support",
        scale="log",
        unit="probability",
        source="sampler-side form of TV",
    ),
    *(
        Metric(
            f"{name}_exact/mean",
            "token",
            "exact",
            {column: lambda xp, x, column=column: x.exact[column]},
            _mean(column),
            formula,
            scale="log",
            unit=unit,
            source="full distributions, float64, renormalised",
        )
        for name, column, formula, unit in (
            ("kl_sampler_scorer", "kl_ab", "mean over tokens of sum_v p (log p - log q)", "nats"),
            ("kl_scorer_sampler", "kl_ba", "mean over tokens of sum_v q (log q - log p)", "nats"),
            ("js", "js", "mean over tokens of the Jensen-Shannon divergence", "nats"),
            ("tv", "tv", "mean over tokens of half of sum_v |p - q|", "probability"),
        )
    ),
]


def _sequence_mean(estimator: str, term: Term, sign: float) -> Metric:
    name = f"{estimator}_of_sequence"
    return Metric(
        f"kl_sampler_scorer_{estimator}/sequence_mean",
        "sequence",
        "estimator",
        {name: term},
        lambda t: sign * t.mean(name),
        f"mean over sequences of the sequence's token mean of {estimator}",
        scale="linear" if estimator == "k1" else "log",
        source="the averaging of slime, miles and ROLL",
        ratio_tail=estimator == "k3",
    )


METRICS += [
    _sequence_mean("k1", lambda xp, x: x.mean_log_ratio, -1.0),
    _sequence_mean("k2", lambda xp, x: x.log_ratio_squared / x.tokens, 0.5),
    _sequence_mean("k3", lambda xp, x: x.k3 / x.tokens, 1.0),
]
