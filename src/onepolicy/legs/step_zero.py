"""Step-0 identities: before the first update the trainer's old, current and reference values are one policy.

The ratio is 1, nothing is clipped, and KL(policy, reference) is at the floor. Needs `old`, `current` or `reference`
beside each other in the rollouts, from a trainer that has not updated yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onepolicy.codes import finding
from onepolicy.gates.judge import worst
from onepolicy.legs.base import values_of
from onepolicy.rollouts import Rollouts
from onepolicy.types import Finding, LegResult, Question, Ran, Scoring

#: Largest mean |log-ratio| of two recomputations of one policy, by declared precision (the floor of a rerun or of
#: another micro-batch: half of what two engines differ by).
LIMITS = {"float64": 1e-6, "float32": 1e-4, "float16": 0.01, "bfloat16": 0.05}
CLIP = 0.2
_PAIRS = (("old", "current"), ("old", "reference"))


def step_zero(rollouts: Rollouts) -> tuple[LegResult, list[Finding]]:
    """The leg and its findings; not run where the rollouts hold no two of a trainer's own scorings."""
    found = [p for p in _PAIRS if all(name in rollouts.scorings for name in p)]
    factor = "a trainer's own values before its first update"
    if not found:
        why = "the rollouts hold no old and current (or reference) log-probs of a trainer"
        return LegResult("step-0", Question.STALENESS, factor, "", "", Ran.NOT, why), []
    facts = {f"{a} and {b}": identities(rollouts, rollouts.scorings[a], rollouts.scorings[b]) for a, b in found}
    findings = [f for pair, row in facts.items() if (f := _finding(pair, row)) is not None]
    outcome = worst([f.outcome for f in findings])
    words = " and ".join(dict.fromkeys(b for _, b in found))
    return LegResult("step-0", Question.STALENESS, factor, "old", words, Ran.DONE, "", outcome, facts=facts), findings


def identities(rollouts: Rollouts, a: Scoring, b: Scoring) -> dict[str, Any]:
    """Mean ratio, share of ratios outside 1 +- `CLIP`, k3 and mean |d| over the tokens that are trained on (`b` against
    `a`), with the bound for their precision."""
    on = rollouts.drawn if rollouts.trained is None else rollouts.drawn & rollouts.trained
    with np.errstate(invalid="ignore"):
        d = (values_of(b) - values_of(a))[on & a.logprobs.mask() & b.logprobs.mask()]
    not_finite = int(np.count_nonzero(~np.isfinite(d)))
    d = d[np.isfinite(d)]
    known = [LIMITS[x.dtype] for x in (a, b) if x.dtype in LIMITS]
    ratio = np.exp(d)
    empty = not len(d)
    return {
        "tokens": len(d),
        "not_finite": not_finite,
        "ratio": None if empty else float(ratio.mean()),
        "clip_fraction": None if empty else float((np.abs(ratio - 1) > CLIP).mean()),
        "kl_k3": None if empty else float((np.expm1(d) - d).mean()),
        "mean_abs": None if empty else float(np.abs(d).mean()),
        "bit_equal": None if empty else float((d == 0).mean()),
        "bound": max(known, default=LIMITS["bfloat16"]),
    }


def _finding(pair: str, row: Mapping[str, Any]) -> Finding | None:
    if row["not_finite"]:
        message = f"{pair}: {row['not_finite']:,} log-ratios are not finite, {row['tokens']:,} are"
        return finding("nonfinite-terms", message, origin="run", evidence=dict(row))
    if row["mean_abs"] is None:
        return finding(
            "not-measured", f"{pair}: no token that is trained on has both", origin="run", evidence=dict(row)
        )
    if row["mean_abs"] <= row["bound"]:
        return None
    message = (
        f"{pair}: mean ratio {row['ratio']:.4g}, {row['clip_fraction']:.1%} outside 1 +- {CLIP}, "
        f"KL k3 {row['kl_k3']:.2g}, mean |d| {row['mean_abs']:.2g} nats over {row['tokens']:,} tokens, "
        f"bound {row['bound']:g}"
    )
    return finding("not-at-step-zero", message, origin="run", evidence=dict(row))
