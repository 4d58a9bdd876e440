"""One simulated dump for each cause that the audit reads from the shape of the gap."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import audit_batches as batches
from onepolicy.gates.judge import worst
from onepolicy.rollouts import Rollouts
from onepolicy.signatures import SIGNATURES
from onepolicy.signatures.weigh import unclear, weigh
from onepolicy.survey import evidence_of, survey_of
from onepolicy.types import Finding, Outcome, TokenReport

TOKENS = 6000


def told(findings: list[Finding], code: str, rollouts: Rollouts) -> TokenReport:
    """As the audit's screen tells it; of the findings, this one is looked at."""
    found = tuple(f for f in findings if f.code == code)
    assert found, f"{code}: got {[f.code for f in findings]}"
    outcome = worst([f.outcome for f in found])
    said = "no cause of a drift was found" if outcome is Outcome.PASS else ""
    return TokenReport(outcome, found, {}, {"records": len(rollouts), "tokens": rollouts.n_tokens}, headline=said)


def of(code: str, fault: str | None, dtype: str = "bfloat16", tokens: int = TOKENS) -> Callable[[], TokenReport]:
    """The code's finding in a batch with this fault."""

    def scenario() -> TokenReport:
        rollouts = batches.healthy(dtype, tokens, 20261130)
        if fault is not None:
            rollouts = batches.FAULTS[fault](rollouts, np.random.default_rng(20261130))
        return told(weigh(evidence_of(survey_of(rollouts, ("sampler", "old")))), code, rollouts)

    return scenario


def _one_sided() -> TokenReport:
    """Padded rows again, where nobody says whether the sampler cut its support."""
    rollouts = batches.FAULTS["padded-rows"](batches.healthy("bfloat16", TOKENS, 2), np.random.default_rng(2))
    rollouts = batches.declare(rollouts, top_p=None, top_k=None, min_p=None)
    return told(weigh(evidence_of(survey_of(rollouts, ("sampler", "old")))), "one-sided-gap", rollouts)


def _coarser() -> TokenReport:
    """Both sides declare float32, and differ by what bf16 gives."""
    rollouts = batches.declared_dtype(batches.healthy("bfloat16", TOKENS, 3), "float32")
    return told(weigh(evidence_of(survey_of(rollouts, ("sampler", "old")))), "coarser-than-declared", rollouts)


def _rope() -> TokenReport:
    rollouts = batches.FAULTS["grows-with-position"](batches.healthy("bfloat16", TOKENS, 4), np.random.default_rng(4))
    rollouts = batches.configured(rollouts, {"rope_theta": 10000.0}, {"rope_parameters": {"rope_theta": 500000.0}})
    return told(weigh(evidence_of(survey_of(rollouts, ("sampler", "old")))), "rope-differs", rollouts)


def _one_group() -> TokenReport:
    """Four replicas, of which one has other weights."""
    rng = np.random.default_rng(5)
    rollouts = batches.on_replicas(batches.healthy("bfloat16", 10_000, 5), 4)
    rollouts = batches.with_replica_off(rollouts, "dp2", rng)
    return told(weigh(evidence_of(survey_of(rollouts, ("sampler", "old")))), "one-group-differs", rollouts)


def _unclear() -> TokenReport:
    """Eight replies whose gap changes at one token: a step by place, and two causes that fit it."""
    rollouts = batches.FAULTS["chunk-boundary"](batches.healthy("bfloat16", TOKENS, 5), np.random.default_rng(5))
    e = evidence_of(survey_of(rollouts, ("sampler", "old")))
    fits = {k: a for k, s in SIGNATURES.items() if (a := s.judge(e)).verdict == "fits"}
    other = SIGNATURES["beyond_rounding"].judge(e)
    keys = ["one_place", "beyond_rounding"]
    return told([unclear(keys, {**fits, "beyond_rounding": other})], "cause-unclear", rollouts)


SCENARIOS: dict[str, Callable[[], TokenReport]] = {
    "padded-rows-in-softmax": of("padded-rows-in-softmax", "padded-rows"),
    "one-sided-gap": _one_sided,
    "staleness": of("staleness", "stale-lag-1"),
    "stale-prefix-cache": of("stale-prefix-cache", "stale-cache", tokens=12000),
    "changes-inside-reply": of("changes-inside-reply", "hidden-update", tokens=16000),
    "changes-at-one-place": of("changes-at-one-place", "chunk-boundary"),
    "grows-with-position": of("grows-with-position", "grows-with-position"),
    "rope-differs": _rope,
    "one-group-differs": _one_group,
    "expert-routing-mismatch": of("expert-routing-mismatch", "experts"),
    "noise-on-every-token": of("noise-on-every-token", "broad-0.1"),
    "single-outlier": of("single-outlier", "outlier"),
    "quantisation-suspected": of("quantisation-suspected", "quantised"),
    "larger-than-rounding": of("larger-than-rounding", "other-weights"),
    "coarser-than-declared": _coarser,
    "cause-unclear": _unclear,
    "bf16-noise": of("bf16-noise", None),
    "rounding-noise": of("rounding-noise", None, "float16"),
}
