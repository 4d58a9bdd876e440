"""Findings that the counts of a `Sums` show before any bound is looked at: integrity and meaning of the values."""

from __future__ import annotations

import math
from collections.abc import Mapping

from onepolicy.codes import finding
from onepolicy.estimate import heavy_tail
from onepolicy.metrics.tail import WITHHOLD_ABOVE
from onepolicy.sums import Sums
from onepolicy.types import Finding, Measurement

#: A single token is called an outlier from a factor of two on, among at least this many tokens.
_OUTLIER_NATS, _OUTLIER_TOKENS = math.log(2), 50


def state_findings(sums: Sums, measurements: Mapping[str, Measurement]) -> list[Finding]:
    """Nothing scored, missing, positive, non-finite and one-sided -inf values, heavy tails, withheld KL."""
    counts = sums.counts
    if counts.get("viewed", 0) == 0:
        message = f"none of the {counts.get('tokens', 0)} tokens belongs to the view {sums.view!r}"
        return [finding("nothing-scored", message, advice="Mark what the sampler drew in the column 'drawn'.")]
    checks = (_positive, _nonfinite, _support, _both_zero, _missing, _nothing_scored, _heavy_tail, _withheld)
    return [f for check in checks if (f := check(sums, measurements)) is not None]


def _places(sums: Sums, name: str) -> str:
    places = sums.worst.get(name, [])
    return "; ".join(f"record {p.record}, position {p.position}" for p in places[:3])


def _side_counts(sums: Sums, *states: str) -> dict[str, int]:
    names = dict(zip("ab", sums.names, strict=True))
    found = {f"{names[s]} {state}": sums.counts.get(f"{s}_{state}", 0) for s in "ab" for state in states}
    return {name: n for name, n in found.items() if n}


def _say(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')}: {n}" for name, n in found.items())


def _positive(sums: Sums, _: object) -> Finding | None:
    found = _side_counts(sums, "positive")
    if not found:
        return None
    first = sums.worst["positive"][0]
    message = f"log-probs above 0 ({_say(found)}); the first: {first.a} and {first.b}"
    return finding("positive-logprob", message, place=_places(sums, "positive"), evidence=found)


def _nonfinite(sums: Sums, _: object) -> Finding | None:
    found = _side_counts(sums, "nan", "pos_inf")
    if not found:
        return None
    return finding(
        "nonfinite-logprob",
        f"values that are not finite ({_say(found)})",
        place=_places(sums, "nonfinite"),
        evidence=found,
    )


def _support(sums: Sums, _: object) -> Finding | None:
    n = sums.counts.get("support_violations", 0)
    if not n:
        return None
    found = _side_counts(sums, "neg_inf")
    message = f"{n} drawn tokens have probability zero on one side only ({_say(found)})"
    return finding("support-violation", message, place=_places(sums, "support"), evidence={"tokens": n, **found})


def _both_zero(sums: Sums, _: object) -> Finding | None:
    n = sums.counts.get("both_neg_inf", 0)
    if not n:
        return None
    message = f"{n} tokens have probability zero on both sides, so no log-ratio; they are left out of every number"
    advice = "No sampler draws such a token: look for a fill value, or a truncation that is applied to both sides."
    return finding("nonfinite-terms", message, evidence={"tokens": n}, advice=advice)


def _missing(sums: Sums, _: object) -> Finding | None:
    found = _side_counts(sums, "null")
    if not found or sums.view == "fixed":  # prompts are fixed texts: the sampler rarely scores those
        return None
    place = _places(sums, "null_a") or _places(sums, "null_b")
    return finding("missing-logprobs", f"drawn tokens without a log-prob ({_say(found)})", place=place, evidence=found)


def _nothing_scored(sums: Sums, _: object) -> Finding | None:
    if sums.counts.get("scored", 0):
        return None
    return finding("nothing-scored", f"none of {sums.counts['viewed']} tokens has finite log-probs on both sides")


def _heavy_tail(sums: Sums, measurements: Mapping[str, Measurement]) -> Finding | None:
    k = measurements["ratio/pareto_k"].value if "ratio/pareto_k" in measurements else None
    if k is None or not heavy_tail(sums):
        return _single_outlier(sums, measurements)
    message = f"Pareto k of the ratios is {k:.2f}, above {WITHHOLD_ABOVE}: means of ratios have no interval"
    return finding("heavy-ratio-tail", message, place=_places(sums, "tokens"), evidence={"pareto_k": k})


def _single_outlier(sums: Sums, measurements: Mapping[str, Measurement]) -> Finding | None:
    """One token that is far off and carries most of mean(e^|d|) - 1: a shape that no tail fit of 5% can see."""
    mean, worst = (measurements.get(key) for key in ("mult_prob_error/mean", "abs_log_ratio/max"))
    if mean is None or worst is None or mean.value is None or worst.value is None:
        return None
    if mean.n < _OUTLIER_TOKENS or not _OUTLIER_NATS < worst.value < 700:
        return None
    share = math.expm1(worst.value) / (mean.n * (mean.value - 1))
    if not share > 0.5:
        return None
    without = 1 + (mean.value - 1) * max(1 - share, 0.0) * mean.n / (mean.n - 1)
    with_and_without = f"{mean.value:.4g} with it, {without:.4g} without it"
    message = f"one token carries {share:.0%} of the mean of e^|log ratio|: {with_and_without}"
    place = _places(sums, "tokens").split(";")[0]
    evidence = {"share": share, "abs_log_ratio": worst.value}
    return finding("heavy-ratio-tail", message, place=place, evidence=evidence, advice="Look at that token first.")


def _withheld(sums: Sums, _: object) -> Finding | None:
    n = sums.counts.get("not_estimable", 0)
    if sums.view == "fixed" or not n:
        return None
    message = f"KL estimators leave out {n} tokens: their log-probs describe another distribution than was sampled"
    return finding("kl-withheld", message, evidence={"tokens": n})
