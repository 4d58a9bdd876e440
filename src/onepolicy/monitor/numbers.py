"""From the merged vector to numbers by name, a plain dict. Missing is None, never 0.0.

Names are those of `onepolicy.metrics` for sampler against old; what the loop adds stands in `ADDED`, with its meaning.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onepolicy.metrics import METRICS
from onepolicy.monitor.vector import CLIPS, LOOP, SIGNS, STATES, Merged, bin_middles, term_key
from onepolicy.sums import Metric

#: key -> what it is. A trailing `*` stands for the moments in `_MOMENTS`.
ADDED: dict[str, str] = {
    "tokens": "tokens under the mask, all ranks",
    "scored": "of these, finite on both sides",
    "sequences": "rows with a scored token",
    "abs_log_ratio/p50": "and p95, p99, p99.9: nearest rank of |d| from bins a quarter octave wide: within 12%",
    "over_two/share": "ratios above 2",
    "missing/share": "tokens without a finite log-prob on both sides",
    "null_sampler/count": "NaN; also _old, neg_inf_, pos_inf_, positive_, and placeholder_ (0.0 or below -1000)",
    "lag/mean": "versions between the tokens' and the scorer's; lag/max, lag/known (share of tokens)",
    "ahead/share": "tokens with a version that the scorer has not reached, of those with one; in no lag",
    "mixed_version/share": "sequences whose tokens come from more than one version",
    "mixed_version/first_change": "tokens of a sequence before its first change of version: the least; /last_change",
    "lag_0.*": "sampler against old, tokens of the scorer's own version: mismatch alone",
    "stale.*": "the same for tokens of an older version: staleness on top",
    "update.*": "old against current: what this update has moved; update.bit_equal/share",
    "current.*": "sampler against current: both together",
    "reference.*": "old against reference",
    "clipped/positive": "and /negative: share of the tokens with that advantage which the loss's clip decides against",
    "wrongly_clipped/positive": "and /negative: clipped, though the ratio to the sampler is inside",
    "wrongly_passed/positive": "and /negative: not clipped, though the ratio to the sampler is outside",
    "wrong_decisions/share": "both, of all tokens with an advantage",
    "corrected.weight/mean": "what the loss is multiplied by, over all scored tokens; /max",
    "corrected.ess/share": "(sum w)^2 / (n sum w^2) of these weights; the raw one is ess_token/share",
    "corrected.kept/share": "tokens whose weight is not 0",
    "corrected.lowered/share": "tokens whose weight is below their raw ratio; /raised",
    "corrected.nonfinite/count": "weights that are NaN or infinite",
    "corrected.emptied/share": "sequences of which nothing is kept",
    "monitor/ranks": "ranks that joined; monitor/faults: calls that failed on any rank in this step",
    "monitor/skipped": "with skip_batch: 1 where this step's batch had the weight 0",
    "monitor/warnings": "what the first rank's monitor counted since it was built",
}
#: suffix -> (moment, what it is divided by)
_MOMENTS = {
    "tokens": ("n", None),
    "abs_log_ratio/mean": ("abs", "n"),
    "kl_k1/mean": ("log_ratio", "n"),
    "kl_k3/mean": ("k3", "n"),
    "ratio_bias/mean": ("ratio_minus_one", "n"),
    "outside_clip/share": ("outside_clip", "n"),
}
_PAIRS = {"lag_0": "lag0", "stale": "stale", "update": "update", "current": "current", "reference": "reference"}
_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}


class LoopTotals:
    """What a metric's `compute` sees of the merged vector."""

    def __init__(self, merged: Merged, metric: Metric) -> None:
        self._merged, self._metric = merged, metric

    def _key(self, term: str) -> str:
        return term_key(self._metric, term)

    def sum(self, term: str) -> float:
        key = self._key(term)
        return self._merged[f"sum:{key}" if self._metric.level == "sequence" else key]

    def n(self, term: str) -> float:
        key = self._key(term)
        if self._metric.level == "sequence":
            return self._merged[f"n:{key}"]
        return self._merged["finite" if ":finite:" in key else "scored"]

    def mean(self, term: str) -> float:
        return self.divide(self.sum(term), self.n(term))

    def greatest(self, term: str) -> float:
        return self._merged.greatest(term)

    def least(self, term: str) -> float:
        return -self._merged.greatest(f"minus_{term}")

    @staticmethod
    def exp(x: float) -> float:
        return math.exp(x) if x < 709 else math.inf

    @staticmethod
    def divide(x: float, y: float) -> float:
        return x / y if y else math.nan


def numbers(merged: Merged) -> dict[str, float | None]:
    """Every number that this step can give, None for what it cannot."""
    out: dict[str, float | None] = {}
    for name in ("tokens", "scored"):
        out[name] = merged[name]
    out["sequences"] = merged["rows_scored"]
    some = merged["scored"] > 0
    for key, m in LOOP.items():
        out[key] = _finite(m.compute(LoopTotals(merged, m))) if some else None
    for name, q in _QUANTILES.items():
        out[f"abs_log_ratio/{name}"] = _quantile(merged, q)
    out["over_two/share"] = _finite(merged.ratio("over_two", "scored"))
    out |= _states(merged)
    out |= _versions(merged)
    for name, pair in _PAIRS.items():
        out |= _moments(merged, name, pair)
    out |= _clips(merged)
    out |= _corrected(merged)
    if merged["updates:observes"]:
        out["update.bit_equal/share"] = _finite(_over(merged["updates:equal"], merged["update:n"]))
    out["monitor/ranks"], out["monitor/faults"] = float(len(merged.rows)), sum(merged.own("faults"))
    return out


def measurable(key: str) -> bool:
    """Whether a bound on this metric can be judged in the loop."""
    return key in LOOP or (key in METRICS and key.removeprefix("abs_log_ratio/") in _QUANTILES)


def _finite(x: Any) -> float | None:
    return float(x) if math.isfinite(x) else None


def _over(x: float, y: float) -> float:
    return x / y if y else math.nan


def _quantile(merged: Merged, q: float) -> float | None:
    counts = merged.bins.sum(axis=0)
    total = counts.sum()
    if not total > 0:
        return None
    at = int(np.searchsorted(np.cumsum(counts), max(1.0, math.ceil(q * total - 1e-9))))
    return 0.0 if at == 0 else float(bin_middles()[min(at, len(counts) - 1)])


def _states(merged: Merged) -> dict[str, float | None]:
    counts = {f"{s}_{side}/count": merged[f"{s}_{side}"] for s in STATES for side in ("sampler", "old")}
    return {"missing/share": _finite(1 - merged.ratio("scored", "tokens")), **counts}


def _versions(merged: Merged) -> dict[str, float | None]:
    known = merged["versions:known"]
    if not known:
        return {}
    told = known - merged["versions:ahead"]
    return {
        "lag/mean": _finite(_over(merged["versions:lag"], told)),
        "lag/max": merged.greatest("lag") if told else None,
        "ahead/share": merged["versions:ahead"] / known,
        "lag/known": _finite(merged.ratio("versions:known", "scored")),
        "mixed_version/share": _finite(merged.ratio("versions:rows_mixed", "rows_scored")),
        "mixed_version/first_change": _finite(-merged.greatest("minus_change")),
        "mixed_version/last_change": _finite(merged.greatest("change")),
        "newest_version": merged.greatest("newest_version"),
    }


def _moments(merged: Merged, name: str, pair: str) -> dict[str, float | None]:
    if not merged[f"{pair}:n"]:
        return {}
    out: dict[str, float | None] = {}
    for suffix, (moment, below) in _MOMENTS.items():
        value = merged[f"{pair}:{moment}"] if below is None else merged.ratio(f"{pair}:{moment}", f"{pair}:{below}")
        out[f"{name}.{suffix}"] = _finite(-value if "k1" in suffix else value)
    mean, square = (merged.ratio(f"{pair}:{m}", f"{pair}:n") for m in ("log_ratio", "squared"))
    out[f"{name}.log_ratio/sd"] = _finite(math.sqrt(max(square - mean * mean, 0.0)))
    mean, square = (merged.ratio(f"{pair}:{m}", f"{pair}:n") for m in ("ratio_minus_one", "ratio_minus_one_squared"))
    out[f"{name}.ess_token/share"] = _finite(_over((1 + mean) ** 2, 1 + 2 * mean + square))
    return out


def _clips(merged: Merged) -> dict[str, float | None]:
    out: dict[str, float | None] = {}
    n = {sign: merged[f"clip:n:{sign}"] for sign in SIGNS}
    if not sum(n.values()):
        return out
    for name in CLIPS[1:]:
        for sign in SIGNS:
            out[f"{name}/{sign}"] = _finite(_over(merged[f"clip:{name}:{sign}"], n[sign]))
    wrong = sum(merged[f"clip:{name}:{sign}"] for name in CLIPS[2:] for sign in SIGNS)
    out["wrong_decisions/share"] = wrong / sum(n.values())
    return out


def _corrected(merged: Merged) -> dict[str, float | None]:
    n = merged["corrected:n"]
    if not n:
        return {}
    weight, square = merged["corrected:weight"], merged["corrected:weight_squared"]
    shares = {f"corrected.{x}/share": merged[f"corrected:{x}"] / n for x in ("kept", "lowered", "raised")}
    return {
        "corrected.weight/mean": weight / n,
        "corrected.weight/max": _finite(merged.greatest("weight")),
        "corrected.ess/share": _finite(_over(weight * weight, n * square)),
        **shares,
        "corrected.nonfinite/count": merged["corrected:nonfinite"],
        "corrected.emptied/share": _finite(merged.ratio("corrected:rows_emptied", "rows_scored")),
    }
