"""The gap step by step: weights that never arrive, a jump, a tail that grows while the mean stays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onepolicy.profiles.base import Bins, size_of
from onepolicy.rows import MISSING
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.contrast import SEQUENCES, SURE, contrast, told

#: Fewer steps show no trend.
STEPS = 5
#: The last steps against the first ones, and against those in the middle: it grew, and it still grows.
GROWTH, STILL = 2.5, 1.1
#: The same where no step falls behind the one before it.
STEADY = 1.05
#: One step against all before it.
JUMP = 3.0
#: Rank correlation of the gap with the step, after a jump if there is one.
TREND = 0.85
#: A lag of more versions than this is no bounded lag of an asynchronous run.
BOUNDED = 16
#: The tail: beyond one of these quantiles of the early steps, so many times as often; the median stays within 20%.
TAILS, TAIL_TIMES, MEDIAN_STAYS = (0.995, 0.999), 3.0, 1.2


@dataclass(frozen=True, slots=True)
class Course:
    """What a series of gaps does. `jump`: index of the step whose gap is several times that of all before it."""

    growth: float
    late_growth: float
    trend: float
    jump: int | None

    @property
    def keeps_growing(self) -> bool:
        still = STEADY if self.trend > 0.99 else STILL
        return self.growth >= GROWTH and self.late_growth >= still and self.trend >= TREND


def course(gaps: Sequence[float]) -> Course:
    """How the gap goes over the steps, each a positive number in nats. A jump is taken out before the trend."""
    x = np.asarray(gaps, dtype=np.float64)
    jump = next((i for i in range(1, len(x)) if x[i] > JUMP * x[:i].max() and x[i:].min() > JUMP * x[:i].max()), None)
    after = x[jump or 0 :]
    third = max(1, len(after) // 3)
    middle = after[-2 * third : -third] if len(after) >= 2 * third + 1 else after[:1]
    first = x[:jump].mean() if jump else x[:third].mean()
    trend = np.corrcoef(np.argsort(np.argsort(after)), np.arange(len(after)))[0, 1] if len(after) > 2 else 0.0
    floor = 1e-12
    return Course(
        float(after[-third:].mean() / max(first, floor)),
        float(after[-third:].mean() / max(middle.mean(), floor)),
        float(trend),
        jump,
    )


def _by_step(e: Evidence) -> Bins | None:
    """The gap by training step, or by the scorer's version where steps are not told."""
    return e.profiles.get("step") or e.profiles.get("scorer_version")


def never_updated(e: Evidence) -> Answer:
    """The gap grows without end while the declared lag stays bounded: the sampler's weights do not move."""
    bins = _by_step(e)
    steps = bins.labels() if bins is not None else []
    if bins is None or len(steps) < STEPS:
        return Answer("lacks", f"needs {STEPS} steps or more (column step)")
    went, raw = (course([bins.mean(s, what) for s in steps]) for what in ("scaled", "abs"))
    if not went.keeps_growing and raw.keeps_growing and went.growth >= GROWTH:
        went = raw  # few tokens a step: what the token scale adds of noise can hide the order of the steps
    norms = _norms(e)
    if not went.keeps_growing:
        return Answer("no", f"from the first steps to the last the gap is {went.growth:.2g} times as large")
    lags = lags_by_step(e)
    if lags and max(lags) > BOUNDED and lags[-1] - lags[0] > 0.5 * len(lags) and not _one_version(e):
        return Answer("no", "the declared lag grows with it: staleness as declared")
    held = contrast(bins, steps[: max(1, len(steps) // 4)], steps[-max(1, len(steps) // 4) :])
    fixed = norms.get("engine_norm_constant", False) and norms["trainer_norm_moves"]
    if held is None or not (held.clear or fixed or (went.trend > 0.99 and len(steps) > STEPS)):
        return Answer("unclear", "the gap grows over the steps, but not beyond chance")
    sure = fixed or (held.enough and held.clear)
    evidence: dict[str, Any] = {
        "mean_abs_by_step": {s: bins.mean(s) for s in steps}, "growth": went.growth, "late_growth": went.late_growth,
        "declared_lag_by_step": lags or None, "change_point_step": steps[went.jump] if went.jump else None,
        "change_point_index": went.jump, **norms,
    }  # fmt: skip
    out = told("engine-never-updated", _said(bins, steps, went, lags), sure, evidence=evidence, **_ruled(lags))
    return Answer("fits", "the gap grows without end", out, 1 - 1 / went.growth)


def _said(bins: Bins, steps: Sequence[str], went: Course, lags: Sequence[float]) -> str:
    since = f"since step {steps[went.jump]}" if went.jump else "step by step"
    lag = f" while the declared lag stays at most {max(lags):g}" if lags else ""
    return (
        f"{since} the gap grows, from {bins.mean(steps[0]):.2g} to {bins.mean(steps[-1]):.2g} nats{lag}: the sampler "
        "does not follow the scorer's weights"
    )


def _ruled(lags: Sequence[float]) -> dict[str, tuple[str, ...]]:
    gone = ("rounding: it does not grow with the weights' distance",)
    if lags:
        gone += ("ordinary staleness: a bounded lag gives a bounded gap",)
    return {"ruled_out": gone, "rivals": ("an engine that loses precision the longer it runs",)}


def _one_version(e: Evidence) -> bool:
    return len(e.profiles["version"].labels()) == 1 if "version" in e.profiles else False


def _norms(e: Evidence) -> dict[str, Any]:
    """Weight norms that the dump declares, by side."""
    out = {f"{n}_weight_norm": e.facts[f"{n}_weight_norm"] for n in e.names if f"{n}_weight_norm" in e.facts}
    sampler = out.get(f"{e.names[0]}_weight_norm")
    if not sampler:
        return out
    return out | {
        "engine_norm_constant": len(sampler) == 1,
        "trainer_norm_moves": len(out.get(f"{e.names[1]}_weight_norm", ())) > 1,
    }


def lags_by_step(e: Evidence) -> list[float]:
    """Mean declared lag of each step's replies; empty where versions are not told."""
    rows = e.rows[(e.rows["version_first"] != MISSING) & (e.rows["scorer_version"] != MISSING) & (e.rows["n"] > 0)]
    told_by = "step" if (rows["step"] != MISSING).any() else "scorer_version"
    rows = rows[rows[told_by] != MISSING]
    lag = rows["scorer_version"] - rows["version_first"]
    return [float(lag[rows[told_by] == s].mean()) for s in np.unique(rows[told_by]).tolist()]


def jumped(e: Evidence) -> Answer:
    """At one step the gap becomes several times what it was, and stays there."""
    bins = _by_step(e)
    steps = bins.labels() if bins is not None else []
    if bins is None or len(steps) < STEPS - 1:
        return Answer("lacks", f"needs {STEPS - 1} steps or more (column step)")
    went = course([bins.mean(s, "scaled") for s in steps])
    if went.jump is None:
        return Answer("no", "no step's gap is several times that of all before it and stays so")
    if went.keeps_growing:
        return Answer("no", "after the jump the gap goes on growing")
    held = contrast(bins, steps[: went.jump], steps[went.jump :])
    if held is None or not held.clear:
        return Answer("unclear", f"the gap jumps at step {steps[went.jump]}, but not beyond chance")
    message = (
        f"at step {steps[went.jump]} the gap goes from {held.abs_base:.2g} to {held.abs_other:.2g} and stays there"
    )
    evidence = held.evidence("before", "after") | {"change_point_step": steps[went.jump]}
    out = told("gap-jumped", message, held.enough, evidence=evidence)
    return Answer("fits", "a jump at one step", out, held.share)


def tail(e: Evidence) -> Answer:
    """The typical gap stays, the far ones grow more frequent."""
    bins = _by_step(e)
    steps = bins.labels() if bins is not None else []
    if bins is None or len(steps) < STEPS - 1:
        return Answer("lacks", f"needs {STEPS - 1} steps or more (column step)")
    third = max(1, len(steps) // 3)
    early, late = bins.merged(steps[:third], "x"), bins.merged(steps[-third:], "x")
    answers = [_tail(early, late, q) for q in TAILS]
    return next((a for v in ("fits", "unclear") for a in answers if a.verdict == v), answers[-1])


def _tail(early: Bins, late: Bins, quantile: float) -> Answer:
    edge = early.quantile("x", quantile)
    last = _code(early, edge)
    counts = [sum(n for code, n in b.sizes["x"].items() if code > last) for b in (early, late)]
    shares = [c / b.n("x") for c, b in zip(counts, (early, late), strict=True)]
    moved = late.quantile("x", 0.5) / max(early.quantile("x", 0.5), 1e-12)
    times = shares[1] / max(shares[0], (1 - quantile) / 2)
    if times < TAIL_TIMES or moved > MEDIAN_STAYS:
        why = f"the last steps' median |d| is {moved:.2g} times, the tail {times:.2g} times the first steps'"
        return Answer("no", why)
    expected = max(shares[0], 1 - quantile) * late.n("x")
    if counts[1] < 20 or (counts[1] - expected) / math.sqrt(expected) < 2 * SURE:
        return Answer("unclear", f"only {counts[1]} tokens of the last steps are in the tail")
    evidence = {
        "edge": edge, "share_early": shares[0], "share_late": shares[1], "median_early": early.quantile("x", 0.5),
        "median_late": late.quantile("x", 0.5), "mean_early": early.mean("x"), "mean_late": late.mean("x"),
        "p999_early": early.quantile("x", 0.999), "p999_late": late.quantile("x", 0.999),
    }  # fmt: skip
    message = (
        f"the median |d| stays ({evidence['median_early']:.2g}, {evidence['median_late']:.2g}), but {shares[1]:.2%} of "
        f"the last steps' tokens are beyond {edge:.2g} nats, {shares[0]:.2%} of the first steps'"
    )
    enough = min(early.get("x", "sequences"), late.get("x", "sequences")) >= SEQUENCES
    share = max(0.0, 1 - early.mean("x") / max(late.mean("x"), 1e-12))
    out = told("tail-rises", message, enough, evidence=evidence)
    return Answer("fits", "the tail grows, the median stays", out, share)


def _code(bins: Bins, edge: float) -> int:
    """The bin of |d| that holds this quantile."""
    return next(c for c in sorted(bins.sizes["x"]) if size_of(c) >= edge * (1 - 1e-9))


SIGNATURES = (
    Signature("never_updated", "engine-never-updated", "the gap grows with every step", never_updated, ("step",)),
    Signature("jumped", "gap-jumped", "the gap jumps at one step", jumped, ("step",), last=1),
    Signature("tail", "tail-rises", "the tail grows while the median stays", tail, ("step",)),
)
