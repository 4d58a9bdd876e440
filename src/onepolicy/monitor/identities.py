"""What must hold in the very first step: there is something to observe, and before an update one policy is one policy.

In the first batch the current policy is the old one (ratio 1, nothing clipped) and the reference is the policy (KL 0).
Where the caller's numbers say otherwise, every later number would be about that fault.
"""

from __future__ import annotations

from onepolicy.gates.bounds import Preset
from onepolicy.monitor.vector import Merged

#: Largest mean |d| of two recomputations of one policy, by the preset's precision; as in the leg `step-0`.
LIMITS = {"float64": 1e-6, "float32": 1e-4, "float16": 0.01, "bfloat16": 0.05}
#: Shares of tokens from which on a column is no column of log-probs.
_MISSING, _POSITIVE = 0.5, 0.5


def set_up_problems(merged: Merged, preset: Preset, step_zero: bool | float = True) -> list[str]:
    """One line each: what, got, wanted, what to do. Decided on merged numbers alone."""
    tokens, scored = merged["tokens"], merged["scored"]
    if not tokens:
        return ["nothing to observe: the mask of the first step selects no token on any rank; wanted 1 where drawn"]
    for side in ("sampler", "old"):
        missing = merged[f"null_{side}"] / tokens
        if missing > _MISSING:
            what = f"{missing:.0%} of the {side} log-probs under the mask are NaN in the first step"
            return [f"{what}; wanted a log-prob for every drawn token: ask the engine for them"]
        above = merged[f"positive_{side}"] / tokens
        if above > _POSITIVE:
            what = f"{above:.0%} of the {side} log-probs are above 0 in the first step"
            return [f"{what}; wanted log-probs in nats: are they probabilities, losses or logits?"]
    if not scored:
        return [f"none of {tokens:,.0f} tokens has finite log-probs on both sides in the first step"]
    return [] if step_zero is False else _identities(merged, preset, step_zero)


def _identities(merged: Merged, preset: Preset, step_zero: bool | float) -> list[str]:
    limit = LIMITS.get(preset.dtype, LIMITS["bfloat16"]) if step_zero is True else float(step_zero)
    out = list[str]()
    for pair, words in (("zero_update", "old and current"), ("zero_reference", "old and reference")):
        n = merged[f"{pair}:n"]
        mean = merged[f"{pair}:abs"] / n if n else 0.0
        if mean <= limit:
            continue
        clipped, k3 = merged[f"{pair}:outside_clip"] / n, merged[f"{pair}:k3"] / n
        ratio = 1 + merged[f"{pair}:ratio_minus_one"] / n
        out.append(
            f"not-at-step-zero: {words} differ before the first update: mean ratio {ratio:.4g}, {clipped:.1%} outside "
            f"1 +- 0.2, KL k3 {k3:.2g}, mean |d| {mean:.2g} nats, wanted at most {limit:g}; look at dropout, dtypes, "
            "adapters; or step_zero=False where this is not the first update"
        )
    return out
