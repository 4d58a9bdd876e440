"""One small dump for each finding about what log-probs mean, which policy they are of, and what the run reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

import audit_batches as batches
import audit_meaning as meaning
from onepolicy.gates.judge import worst
from onepolicy.records import from_records
from onepolicy.rollouts import Rollouts
from onepolicy.signatures import reported
from onepolicy.signatures.weigh import weigh
from onepolicy.survey import evidence_of, survey_of
from onepolicy.types import Finding, Outcome, TokenReport


def told(findings: list[Finding], code: str, r: Rollouts) -> TokenReport:
    """The finding alone, as the audit's screen tells it, without what was ruled out."""
    found = tuple(replace(f, ruled_out=()) for f in findings if f.code == code)
    assert found, [f.code for f in findings]
    outcome = worst([f.outcome for f in found])
    said = "nothing here makes the numbers meaningless" if outcome is Outcome.PASS else ""
    return TokenReport(outcome, found, {}, {"records": len(r), "tokens": r.n_tokens}, headline=said)


def weighed(code: str, fault: str, dtype: str = "bfloat16") -> Callable[[], TokenReport]:
    def scenario() -> TokenReport:
        make = meaning.MEANING[fault][0] if fault in meaning.MEANING else batches.FAULTS[fault]
        r = make(batches.healthy(dtype, 3000, 30), np.random.default_rng(30))
        return told(weigh(evidence_of(survey_of(r, ("sampler", "old")))), code, r)

    return scenario


def _softcap() -> TokenReport:
    """Both configurations are in the dump."""
    r = meaning.capped(30.0)(batches.healthy("bfloat16", 3000, 30), np.random.default_rng(30))
    for name, cap in (("sampler", 30.0), ("old", None)):
        r = r.with_scoring(name, replace(r.scorings[name], fingerprint={"final_logit_softcapping": cap}))
    return told(weigh(evidence_of(survey_of(r, ("sampler", "old")))), "softcap-differs", r)


def _tool_use() -> Rollouts:
    """A reply with three tokens of tool output, which the policy finds likelier than the engine did."""
    a = [-0.2, -0.5, -2.5, -3.0, -1.9, -0.3, -0.11]
    b = [-0.22, -0.53, -0.4, -0.6, -0.3, -0.31, -0.13]
    row = {"token_ids": list(range(8)), "prompt_length": 1, "drawn": [0, 1, 1, 0, 0, 0, 1, 1]}
    return from_records([row | {"sampler_logprobs": [None, *a], "old_logprobs": [None, *b]}])


def reports(code: str, value: float) -> Callable[[], TokenReport]:
    return lambda: told(reported.of_rollouts(_tool_use(), {"kl": value}), code, _tool_use())


MEANING: dict[str, Callable[[], TokenReport]] = {
    "temperature-mismatch": weighed("temperature-mismatch", "temperature-0.6-drawn"),
    "temperature-suspected": weighed("temperature-suspected", "temperature-0.7"),
    "truncated-support-mismatch": weighed("truncated-support-mismatch", "top-p-0.9"),
    "penalty-mismatch": weighed("penalty-mismatch", "presence-0.5"),
    "softcap-differs": _softcap,
    "semantics-contradicted": weighed("semantics-contradicted", "never-processed"),
    "old-copied-from-sampler": weighed("old-copied-from-sampler", "old-copied"),
    "reference-follows-policy": weighed("reference-follows-policy", "reference-follows"),
    "kl-includes-unsampled-tokens": reports("kl-includes-unsampled-tokens", -0.86),
    "reported-metric-explained": reports("reported-metric-explained", -0.02),
    "reported-metric-unexplained": reports("reported-metric-unexplained", 0.5),
}
