"""Side effects of a correction: raw and corrected ratios side by side, what was changed, who was dropped.

All of them are 0-dim float64 arrays on the device. Raw numbers are never clamped (the mean of ratios that overflow
float32 is still right: it is made of exp(d - max d)). Shares are of trained tokens, unless the name says otherwise.
"""

from __future__ import annotations

import math
from typing import Any

from onepolicy.arrays import Array, is_torch
from onepolicy.corrections.ops import EXP_LIMIT
from onepolicy.corrections.ratio import Ratio
from onepolicy.corrections.rule import Verdict
from onepolicy.errors import ContentError

#: name -> what it is; the docs table
EFFECTS: dict[str, str] = {
    "tokens/trained": "tokens where the mask is true",
    "tokens/missing": "of these: a log-prob is NaN or null; dropped, in no mean",
    "tokens/infinite": "of these: a log-prob is +inf or -inf; dropped, in no mean",
    "tokens/overflow": "of these: the ratio is above what float32 holds (log ratio > 88.72)",
    "log_ratio/mean": "mean d = log p_policy - log p_sampler; minus kl_sampler_scorer_k1/mean",
    "kl_sampler_scorer_k1/mean": "mean -d, raw",
    "kl_sampler_scorer_k3/mean": "mean e^d - 1 - d, raw",
    "ratio/mean": "mean e^d, raw",
    "ratio/min": "smallest e^d, raw",
    "ratio/max": "largest e^d, raw",
    "ess_token/raw": "(sum r)^2 / (n sum r^2) of raw token ratios",
    "ess_sequence/raw": "the same of raw sequence products e^D",
    "weight/mean": "mean weight of the tokens that have a ratio; one that is dropped counts as 0",
    "weight/min": "smallest weight of a kept token",
    "weight/max": "largest weight of a kept token",
    "ess_token/corrected": "ESS of the weights; a dropped token counts as 0",
    "ess_sequence/corrected": "ESS of each sequence's mean weight; a dropped token counts as 0",
    "changed_low/share": "tokens changed or dropped because the ratio was too small",
    "changed_high/share": "tokens changed or dropped because the ratio (or a divergence) was too large",
    "kept/share": "kept tokens",
    "kept_positive_advantage/share": "kept among tokens with a positive advantage",
    "kept_negative_advantage/share": "kept among tokens with a negative advantage",
    "kept_positive_reward/share": "kept among tokens of sequences with a positive reward",
    "kept_other_reward/share": "kept among tokens of sequences with a reward of 0 or less",
    "kept_short/share": "kept among tokens of sequences not longer than the mean length",
    "kept_long/share": "kept among tokens of longer sequences",
    "sequences/trained": "sequences with a trained token",
    "sequences/emptied": "of these: nothing is kept",
    "groups/trained": "groups with a trained token",
    "groups/emptied": "of these: nothing is kept",
}


class Applied:
    """What the stages did: who was outside, and the kept count after each."""

    def __init__(self) -> None:
        self.low: Array | None = None
        self.high: Array | None = None
        self.kept: list[tuple[str, Array]] = []

    def add(self, name: str, keep: Array, verdict: Verdict) -> None:
        self.low = verdict.low if self.low is None or verdict.low is None else self.low | verdict.low
        self.high = verdict.high if self.high is None or verdict.high is None else self.high | verdict.high
        self.kept.append((name, keep))


def effects_of(
    ratio: Ratio, weights: Array, keep: Array, applied: Applied, rewards: Any = None, groups: Any = None
) -> dict[str, Array]:
    """All side effects by name. `weights`: detached, 0 where nothing is kept."""
    out = _counts(ratio)
    n = ratio.ops.count(ratio.valid)
    _raw(out, ratio, n)
    _corrected(out, ratio, weights, keep, n)
    _shares(out, ratio, keep, applied)
    _rows(out, ratio, keep, rewards, groups)
    return out


def _counts(ratio: Ratio) -> dict[str, Array]:
    ops, mask = ratio.ops, ratio.mask
    trained = ops.count(mask)
    missing = ops.count(mask & (ops.isnan(ratio.sampler) | ops.isnan(ratio.policy)))
    return {
        "tokens/trained": trained,
        "tokens/missing": missing,
        "tokens/infinite": trained - ops.count(ratio.valid) - missing,
        "tokens/overflow": ops.count(ratio.log_ratio > EXP_LIMIT["float32"]),
    }


def _raw(out: dict[str, Array], ratio: Ratio, n: Array) -> None:
    ops, d, valid = ratio.ops, ratio.log_ratio, ratio.valid
    mean = ops.total(d) / n
    out["log_ratio/mean"], out["kl_sampler_scorer_k1/mean"] = mean, -mean
    out["kl_sampler_scorer_k3/mean"] = _added(ops, lambda x: ops.expm1(x) - x, d) / n
    least, most = _ends(ops, d, valid)
    total, squares = _shifted(ops, d, valid, most)
    out["ratio/mean"] = ops.exp(most) * total / n
    out["ratio/min"], out["ratio/max"] = ops.exp(_some(ops, least, n)), ops.exp(_some(ops, most, n))
    out["ess_token/raw"] = total * total / (n * squares)
    D, has = ratio.rows.total(d), ratio.rows.total(valid) > 0
    total, squares = _shifted(ops, D, has, _ends(ops, D, has)[1])
    out["ess_sequence/raw"] = total * total / (ops.count(has) * squares)


def _added(ops: Any, f: Any, *arrays: Array) -> Array:
    """The sum of f over slices of the arrays, each widened to float64: no temporary of full size."""
    parts = [
        ops.total(f(*(x if "bool" in str(x.dtype) else ops.wide(x) for x in part))) for part in ops.slices(*arrays)
    ]
    return ops.stack(parts).sum()


def _ends(ops: Any, x: Array, seen: Array) -> tuple[Array, Array]:
    """Smallest and largest value of the seen; inf and -inf if there is none."""
    parts = list(ops.slices(x, seen))
    least = [ops.least(ops.where(s, v, math.inf)) for v, s in parts]
    most = [ops.most(ops.where(s, v, -math.inf)) for v, s in parts]
    return ops.least(ops.stack(least)), ops.most(ops.stack(most))


def _some(ops: Any, x: Array, n: Array) -> Array:
    """`x`, NaN where n is 0."""
    return ops.where(n > 0, x, math.nan)


def _shifted(ops: Any, x: Array, seen: Array, most: Array) -> tuple[Array, Array]:
    """Sums of e^(x - most) and of its square over the seen: neither overflows."""
    total = _added(ops, lambda v, s: ops.where(s, ops.exp(v - most), 0.0), x, seen)
    return total, _added(ops, lambda v, s: ops.where(s, ops.exp((v - most) * 2), 0.0), x, seen)


def _corrected(out: dict[str, Array], ratio: Ratio, weights: Array, keep: Array, n: Array) -> None:
    ops, rows = ratio.ops, ratio.rows
    total, squares = ops.total(weights), _added(ops, lambda w: w * w, weights)
    kept = ops.count(keep)
    out["weight/mean"] = total / n
    least, most = _ends(ops, weights, keep)
    out["weight/min"], out["weight/max"] = _some(ops, least, kept), _some(ops, most, kept)
    out["ess_token/corrected"] = total * total / (n * squares)
    length = rows.total(ratio.valid)
    means = ops.where(length > 0, rows.total(weights) / ops.clip(length, 1.0, math.inf), 0.0)
    total, squares = ops.total(means), ops.total(means * means)
    out["ess_sequence/corrected"] = total * total / (ops.count(length > 0) * squares)


def _shares(out: dict[str, Array], ratio: Ratio, keep: Array, applied: Applied) -> None:
    ops, mask, trained = ratio.ops, ratio.mask, out["tokens/trained"]
    for name, outside in (("changed_low", applied.low), ("changed_high", applied.high)):
        count = trained * 0.0 if outside is None else ops.count(ratio.valid & outside)
        out[f"{name}/share"] = count / trained
    out["kept/share"] = ops.count(keep) / trained
    if len(applied.kept) > 1:
        for i, (name, left) in enumerate(applied.kept, 1):
            out[f"kept_after_{i}_{name}/share"] = ops.count(left) / trained
    if ratio.advantages is not None:
        for name, side in (("positive", ratio.advantages > 0), ("negative", ratio.advantages < 0)):
            out[f"kept_{name}_advantage/share"] = ops.count(keep & side) / ops.count(mask & side)


def _rows(out: dict[str, Array], ratio: Ratio, keep: Array, rewards: Any, groups: Any) -> None:
    ops = ratio.ops
    trained, kept = ratio.rows.total(ratio.mask), ratio.rows.total(keep)
    has = trained > 0
    out["sequences/trained"] = ops.count(has)
    out["sequences/emptied"] = ops.count(has & (kept == 0))
    long = trained > ops.total(trained) / ops.count(has)
    _classes(out, ops, trained, kept, {"short": ~long, "long": long})
    if rewards is not None:
        good = _per_sequence(rewards, ratio, "rewards") > 0
        _classes(out, ops, trained, kept, {"positive_reward": good, "other_reward": ~good})
    if groups is not None:
        _groups(out, ops, trained, kept, ops.integers(_per_sequence(groups, ratio, "groups"), trained))


def _classes(out: dict[str, Array], ops: Any, trained: Array, kept: Array, classes: dict[str, Array]) -> None:
    for name, rows in classes.items():
        out[f"kept_{name}/share"] = ops.total(ops.where(rows, kept, 0.0)) / ops.total(ops.where(rows, trained, 0.0))


def _groups(out: dict[str, Array], ops: Any, trained: Array, kept: Array, groups: Array) -> None:
    """Groups by sorting their ids: the number of a group is how many changes stand before it."""
    order = ops.argsort(groups)
    ids = ops.take(groups, order)
    number = ops.cumsum(ops.joined([ids[:1] != ids[:1], ids[1:] != ids[:-1]]))
    n = max(1, groups.shape[0])
    had, left = (ops.scatter_total(ops.take(x, order), number, n) for x in (trained, kept))
    out["groups/trained"], out["groups/emptied"] = ops.count(had > 0), ops.count((had > 0) & (left == 0))


def _per_sequence(x: Any, ratio: Ratio, name: str) -> Array:
    """`x` as `[B]` on the device. Errors: `ContentError`."""
    like = ratio.log_ratio
    if not is_torch(like):
        x = ratio.ops.as_like(x, like) if name == "rewards" else ratio.ops.integers(x, like)
    elif not is_torch(x):
        x = ratio.ops.torch.as_tensor(x, device=like.device)
    if tuple(x.shape) != (ratio.rows.n,):
        raise ContentError(f"{name}: got shape {tuple(x.shape)}, wanted ({ratio.rows.n},), one a sequence")
    return x
