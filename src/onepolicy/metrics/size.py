"""The size of the gap: |d|, its tails, bias, differences of probability, agreement of the two sides as columns."""

from __future__ import annotations

import math
from typing import Any

from onepolicy.sums import Metric, Quantile
from onepolicy.views import abs_log_ratio, log_ratio, log_ratio_squared, logprob_a, logprob_b

_ABS = {"abs_log_ratio": abs_log_ratio}


def _quantile(q: float, name: str) -> Metric:
    read = Quantile("log_ratio", q, absolute=True)
    return Metric(
        f"abs_log_ratio/{name}",
        "token",
        "scored",
        {},
        lambda t: t.quantile(read),
        f"nearest-rank {name} of |d| from float-bit bins, within 0.4% relative",
        reducer="histogram",
        quantile=read,
    )


def _share_above(name: str, tau: float) -> Metric:
    bound = math.log(tau)
    term = f"above_{name}"
    return Metric(
        f"extreme_share/{name}",
        "token",
        "scored",
        {term: lambda xp, x: xp.indicator(x.abs_log_ratio > bound)},
        lambda t: t.mean(term),
        f"share of tokens with |d| > ln {tau:g}: ratio outside [1/{tau:g}, {tau:g}]",
        unit="share",
        source="R3 (arXiv:2510.11370) F(tau); AReaL extreme_frac",
    )


def _variance(t: Any, x: str, squared: str) -> Any:
    """Of a column; 0 where nothing but rounding is left of it, so that a constant column has no slope."""
    variance = t.mean(squared) - t.mean(x) * t.mean(x)
    return variance * (variance > 1e-12 * t.mean(squared))


def _pearson(t: Any) -> Any:
    cov = t.mean("pq") - t.mean("p") * t.mean("q")
    var = _variance(t, "p", "pp") * _variance(t, "q", "qq")
    return t.divide(cov, var**0.5)


def _slope(t: Any) -> Any:
    return t.divide(t.mean("ab") - t.mean("a") * t.mean("b"), _variance(t, "a", "aa"))


_LINE = {
    "a": logprob_a,
    "b": logprob_b,
    "aa": lambda xp, x: x.a * x.a,
    "ab": lambda xp, x: x.a * x.b,
}

_DIFFERENCE = {"prob_abs_diff": lambda xp, x: xp.abs(x.probability_diff)}

METRICS = [
    Metric("abs_log_ratio/mean", "token", "scored", _ABS, lambda t: t.mean("abs_log_ratio"), "mean(|d|)", scale="log"),
    Metric(
        "abs_log_ratio/max",
        "token",
        "scored",
        _ABS,
        lambda t: t.greatest("abs_log_ratio"),
        "max(|d|), exact; it has no interval",
        reducer="max",
    ),
    *(_quantile(q, n) for q, n in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"), (0.999, "p99.9"))),
    Metric(
        "log_ratio/rms",
        "token",
        "scored",
        {"log_ratio_squared": log_ratio_squared},
        lambda t: abs(t.mean("log_ratio_squared")) ** 0.5,
        "sqrt(mean(d^2))",
        scale="log",
    ),
    Metric(
        "log_ratio/mean",
        "token",
        "scored",
        {"log_ratio": log_ratio},
        lambda t: t.mean("log_ratio"),
        "mean(d) = -k1: in health -KL, not 0",
        ideal=0.0,
    ),
    Metric(
        "bit_equal/share",
        "token",
        "scored",
        {"bit_equal": lambda xp, x: xp.indicator(x.a == x.b)},
        lambda t: t.mean("bit_equal"),
        "share of tokens whose two values are equal to the last bit",
        ideal=1.0,
        unit="share",
    ),
    Metric(
        "prob_abs_diff/mean",
        "token",
        "scored",
        _DIFFERENCE,
        lambda t: t.mean("prob_abs_diff"),
        "mean |e^b - e^a|: a difference of probabilities, not of log-probs",
        scale="log",
        unit="probability",
        source="verl rollout_probs_diff_mean",
    ),
    Metric(
        "prob_abs_diff/max",
        "token",
        "scored",
        _DIFFERENCE,
        lambda t: t.greatest("prob_abs_diff"),
        "max |e^b - e^a|",
        reducer="max",
        unit="probability",
        source="verl rollout_probs_diff_max",
    ),
    Metric(
        "prob_diff/mean",
        "token",
        "scored",
        {"prob_diff": lambda xp, x: x.probability_diff},
        lambda t: t.mean("prob_diff"),
        "mean(e^b - e^a), signed",
        unit="probability",
        source="ROLL train_infer_diff, prime-rl prob_delta",
    ),
    Metric(
        "prob_pearson/r",
        "token",
        "scored",
        {
            "p": lambda xp, x: x.probability_a,
            "q": lambda xp, x: x.probability_b,
            "pp": lambda xp, x: x.probability_a * x.probability_a,
            "qq": lambda xp, x: x.probability_b * x.probability_b,
            "pq": lambda xp, x: x.probability_a * x.probability_b,
        },
        _pearson,
        "Pearson correlation of the two sides' probabilities",
        ideal=1.0,
        unit="correlation",
        source="MiniMax-M1; verl rollout_actor_probs_pearson_corr",
    ),
    Metric(
        "logprob_line/slope",
        "token",
        "scored",
        _LINE,
        _slope,
        "least-squares slope of the scorer's log-prob on the sampler's: a wrong temperature bends it",
        ideal=1.0,
        unit="slope",
    ),
    Metric(
        "logprob_line/intercept",
        "token",
        "scored",
        _LINE,
        lambda t: t.mean("b") - _slope(t) * t.mean("a"),
        "least-squares intercept of the same line",
        ideal=0.0,
    ),
    *(_share_above(n, t) for n, t in (("1.1", 1.1), ("1.2", 1.2), ("2", 2.0), ("10", 10.0))),
    Metric(
        "outside_clip/share",
        "token",
        "scored",
        {"outside_clip": lambda xp, x: xp.indicator(xp.abs(x.ratio_minus_one) > 0.2)},
        lambda t: t.mean("outside_clip"),
        "share of ratios outside 1 +- 0.2: clip decisions at risk where no advantages are known",
        unit="share",
        source="PPO's usual clip range",
    ),
    Metric(
        "catastrophic_token/share",
        "token",
        "scored",
        {"catastrophic": lambda xp, x: xp.indicator(x.abs_log_ratio > math.log(1e4))},
        lambda t: t.mean("catastrophic"),
        "share of tokens with r < 1e-4 or r > 1e4",
        unit="share",
        source="slime rs_veto_threshold",
    ),
]
