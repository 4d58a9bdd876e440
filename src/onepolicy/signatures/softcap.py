"""The final logits are capped on one side only, or by another formula: d depends on how far out a logit is.

Capped logits are cap * tanh(logits / cap). Log-probs have lost the level of the logits, so only recorded logits (or a
re-scoring that gives them) name it; two declared configurations that differ name it too. From chosen log-probs it
looks like a temperature, and both stay suspicions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.profiles.base import Seen
from onepolicy.signatures import entropy_fit, logit_fit
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.entropy_fit import Fit
from onepolicy.types import Finding, Outcome, Severity

#: Share of the mean square gap that two soft-caps must explain.
SHARE = 0.8
#: And that a fit must explain which no single temperature makes, to suspect one.
SHARE_BENT = 0.4
#: Keys under which engines and trainers declare it in a fingerprint.
KEYS = ("final_logit_softcapping", "final_logit_softcap", "logit_softcap", "final_logits_soft_cap")


def look(seen: Seen) -> Counted:
    out = logit_fit.look(seen)
    for side, name, values in (("a", seen.pairs.names[0], seen.a), ("b", seen.pairs.names[1], seen.b)):
        scoring = seen.rollouts.scorings.get(name)
        said = declared_cap({} if scoring is None else scoring.fingerprint)
        out.count(f"declared:{side}:{said}", len(seen.rollouts))
        if len(values):
            out.greatest(f"{side}:least", -float(values.min()))
    return out


def declared_cap(fingerprint: Mapping[str, Any]) -> str:
    """`30.0`, `none` for a null or 0, `unknown` where nothing is said."""
    inner = fingerprint.get("config")
    for source in (fingerprint, inner if isinstance(inner, Mapping) else {}):
        for key in KEYS:
            if key in source:
                value: Any = source[key]
                return str(float(value)) if isinstance(value, (int, float)) and value else "none"
    return "unknown"


def judge(evidence: Evidence) -> Answer:
    seen = evidence.extra.get("softcap")
    if seen is None:
        return Answer("lacks", "nothing was looked at")
    said = [_declared(seen, side) for side in ("a", "b")]
    if seen.counts.get("logits", 0):
        return _by_logits(seen, evidence, said)
    if "unknown" not in said and said[0] != said[1]:
        message = f"{evidence.names[0]} declares a soft-cap of {said[0]}, {evidence.names[1]} of {said[1]}"
        return Answer("fits", "", _finding(seen, evidence, message, said, {}), 0.5)
    bent = _bent(evidence)
    if bent is not None:
        low, high = bent.groups
        message = (
            f"the {bent.by} explains {bent.share:.0%} of the gap as a temperature, but contexts of low and high "
            f"entropy want other quotients ({low:.2f} and {high:.2f}), as where one side caps its logits: recorded "
            "logits, or final_logit_softcapping of both configurations, would decide"
        )
        return Answer("unclear", message, _suspected(seen, evidence, message, said), bent.share)
    if said == ["none", "none"]:
        return Answer("no", "both sides declare no soft-cap")
    return Answer("lacks", "a soft-cap is named from recorded logits or declared configurations only")


def _bent(evidence: Evidence) -> Fit | None:
    """An entropy's fit that no single temperature makes: the surer the context, the stronger."""
    heat = evidence.extra.get("temperature")
    fits = [] if heat is None else [f for side in ("a", "b") if (f := entropy_fit.fit(heat, side)) is not None]
    found = [f for f in fits if f.bent and f.share >= SHARE_BENT and f.n >= 100]
    found = [f for f in found if abs(math.log(f.groups[0])) > abs(math.log(f.groups[1]))]
    return max(found, key=lambda f: f.share) if found else None


def _declared(seen: Counted, side: str) -> str:
    found = {k.split(":")[2] for k in seen.counts if k.startswith(f"declared:{side}:")}
    return found.pop() if len(found) == 1 else "unknown"


def _by_logits(seen: Counted, evidence: Evidence, said: list[str]) -> Answer:
    (a, rms_a), (b, rms_b) = (logit_fit.cap(seen, side) for side in ("a", "b"))
    gap = logit_fit.gap(seen)
    share = 1 - (rms_a**2 + rms_b**2) / gap**2 if gap else 0.0
    heat = [logit_fit.temperature(seen, side).rms for side in ("a", "b")]
    if sum(x * x for x in heat) < rms_a**2 + rms_b**2:
        return Answer("no", "a temperature fits the recorded logits better")
    if a == b or share < SHARE:
        return Answer("no", f"the recorded logits show no difference in soft-cap ({max(0.0, share):.0%} explained)")
    message = f"{evidence.names[0]} {_words(a)}, {evidence.names[1]} {_words(b)}: this explains {share:.0%} of the gap"
    fitted = {"fitted": {evidence.names[0]: a, evidence.names[1]: b}, "explained": round(share, 4)}
    return Answer("fits", "", _finding(seen, evidence, message, said, fitted), share)


def _words(key: str) -> str:
    kind, value = key.split(":")
    if value == "none":
        return "does not cap its logits"
    if kind == "cap":
        return f"caps its logits at {value}"
    return f"multiplies its logits by tanh(logits / {value}), a slip of the formula that keeps no order"


def _finding(seen: Counted, evidence: Evidence, message: str, said: list[str], more: Mapping[str, Any]) -> Finding:
    a, b = evidence.names
    facts = {
        "declared": {a: said[0], b: said[1]},
        "min_logprob": {a: -seen.most.get("a:least", 0.0), b: -seen.most.get("b:least", 0.0)},
        "max_abs": evidence.measurements["abs_log_ratio/max"].value
        if "abs_log_ratio/max" in evidence.measurements
        else None,
        **more,
    }
    fitted = more.get("fitted", {})
    if fitted:
        keys = [str(v) for v in fitted.values()]
        facts["greedy_equal"] = all(logit_fit.same_greedy(seen, key) for key in keys)
        facts["order_preserved"] = not any(key.startswith("slip") for key in keys)
    return finding("softcap-differs", message, evidence=facts)


def _suspected(seen: Counted, evidence: Evidence, message: str, said: list[str]) -> Finding:
    rivals = ("another scale or bend of one side's logits", "a temperature that differs from record to record")
    found = _finding(seen, evidence, message, said, {})
    return replace(found, severity=Severity.INFO, outcome=Outcome.INCONCLUSIVE, rivals=rivals)


SIGNATURE = Signature(
    "softcap",
    "softcap-differs",
    "the two sides cap the final logits otherwise",
    judge,
    needs=("logits, or final_logit_softcapping in both fingerprints",),
    rivals=("temperature",),
    look=look,
)
