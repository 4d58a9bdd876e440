"""What happens to whole sequences: D = sum of d, its geometric mean ratio, perplexities, how it grows with length."""

from __future__ import annotations

import math
from typing import Any

from onepolicy.sums import Metric, Quantile


def _quantile(key: str, read: Quantile, formula: str) -> Metric:
    return Metric(
        key,
        "sequence",
        "scored",
        {},
        lambda t: t.quantile(read),
        formula,
        reducer="histogram",
        ideal=1.0 if read.exponent else 0.0,
        unit="ratio" if read.exponent else "nats",
        quantile=read,
    )


def _chi2(name: str, column: str, formula: str) -> Metric:
    term = f"exp2_{column}"
    return Metric(
        f"chi2_sequence_{name}/mean",
        "sequence",
        "estimator",
        {term: lambda xp, x: xp.expm1(2 * getattr(x, column))},
        lambda t: t.mean(term),
        formula,
        unit="ratio",
        source="verl and slime chi2_seq (product), ms-swift chi2_seq (geometric), unclamped",
        ratio_tail=True,
    )


def _spread(t: Any) -> Any:
    """sum (D - mu T)^2 / sum T with mu = sum D / sum T."""
    mu = t.divide(t.mean("D"), t.mean("T"))
    return t.divide(abs(t.mean("DD") - 2 * mu * t.mean("DT") + mu * mu * t.mean("TT")), t.mean("T"))


_SPREAD = {
    "D": lambda xp, x: x.log_ratio,
    "T": lambda xp, x: x.tokens,
    "DD": lambda xp, x: x.log_ratio * x.log_ratio,
    "DT": lambda xp, x: x.log_ratio * x.tokens,
    "TT": lambda xp, x: x.tokens * x.tokens,
}
_WEIGHT = {"weight": lambda xp, x: xp.exp(x.log_ratio), "weight2": lambda xp, x: xp.exp(2 * x.log_ratio)}


def _ppl(side: str, column: str) -> Metric:
    term = f"ppl_{column}"
    return Metric(
        f"ppl_{side}/mean",
        "sequence",
        "scored",
        {term: lambda xp, x: xp.exp(-getattr(x, column) / x.tokens)},
        lambda t: t.mean(term),
        "mean over sequences of exp(-mean log-prob)",
        scale="log",
        ideal=None,
        unit="perplexity",
        source="verl training_ppl / rollout_ppl",
    )


METRICS = [
    *(
        _quantile(
            f"sequence_log_ratio/{n}", Quantile("sequence_log_ratio", q), f"{n} of D, the sequence's summed log-ratio"
        )
        for q, n in ((0.05, "p5"), (0.5, "p50"), (0.95, "p95"))
    ),
    *(
        _quantile(f"geometric_ratio/{n}", Quantile("mean_log_ratio", q, exponent=True), f"{n} of exp(D / T)")
        for q, n in ((0.05, "p5"), (0.5, "p50"), (0.95, "p95"))
    ),
    Metric(
        "sequence_log_ratio/mean",
        "sequence",
        "scored",
        {"D": _SPREAD["D"]},
        lambda t: t.mean("D"),
        "mean over sequences of D",
    ),
    Metric(
        "geometric_ratio/mean",
        "sequence",
        "scored",
        {"geometric": lambda xp, x: xp.exp(x.mean_log_ratio)},
        lambda t: t.mean("geometric"),
        "mean over sequences of exp(D / T)",
        ideal=1.0,
        unit="ratio",
        source="GSPO's ratio",
    ),
    _chi2("product", "log_ratio", "mean(e^(2 D)) - 1"),
    _chi2("geometric", "mean_log_ratio", "mean(e^(2 D / T)) - 1"),
    Metric(
        "ess_sequence/share",
        "sequence",
        "estimator",
        _WEIGHT,
        lambda t: t.divide(t.mean("weight") * t.mean("weight"), t.mean("weight2")),
        "(sum w)^2 / (S sum w^2) with w = e^D, raw",
        ideal=1.0,
        unit="share",
        source="Kish 1965",
        ratio_tail=True,
    ),
    _ppl("sampler", "a"),
    _ppl("scorer", "b"),
    Metric(
        "log_ppl_diff/mean",
        "sequence",
        "scored",
        {"mean_log_ratio": lambda xp, x: x.mean_log_ratio},
        lambda t: -t.mean("mean_log_ratio"),
        "mean over sequences of (mean sampler log-prob - mean scorer log-prob) = log ppl scorer - log ppl sampler",
        source="verl log_ppl_diff, the sign of its code",
    ),
    Metric(
        "ppl_ratio/mean",
        "sequence",
        "scored",
        {"inverse_geometric": lambda xp, x: xp.exp(-x.mean_log_ratio)},
        lambda t: t.mean("inverse_geometric"),
        "mean over sequences of ppl scorer / ppl sampler = exp(-D / T)",
        ideal=1.0,
        unit="ratio",
        source="verl ppl_ratio, the formula of its code",
    ),
    Metric(
        "catastrophic_sequence/share",
        "sequence",
        "scored",
        {"catastrophic": lambda xp, x: xp.indicator(xp.abs(x.log_ratio) > math.log(1e4))},
        lambda t: t.mean("catastrophic"),
        "share of sequences with e^D < 1e-4 or > 1e4",
        unit="share",
        source="slime rs_veto_threshold, at the level of sequences",
    ),
    Metric(
        "length_scaling/variance_per_token",
        "sequence",
        "scored",
        _SPREAD,
        _spread,
        "Var(D) / T with D centred on its drift: the token variance for independent noise, more for a shared bias",
        scale="log",
        unit="nats^2",
        source="tunix PR 2129, corrected: not the sd of the mean",
    ),
]
