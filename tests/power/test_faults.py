"""Whole verdicts on the fake engine: each fault is found by the finding that fits it, and what is no fault passes."""

from __future__ import annotations

import pytest

from onepolicy.check import check
from onepolicy.engines.base import SamplingParams
from onepolicy.record import record_rollouts
from onepolicy.rollouts import Rollouts
from onepolicy.types import Outcome, Severity

SAMPLER = "fake:?seed=3"


@pytest.fixture(scope="module")
def recorded() -> Rollouts:
    return record_rollouts(SAMPLER, params=SamplingParams(max_tokens=128, seed=2))


@pytest.mark.parametrize("preset", ["fp32", "strict"])
@pytest.mark.parametrize("order", ["reversed", "pairwise", "blocked"])
def test_healthy_in_fp32(recorded: Rollouts, order: str, preset: str) -> None:
    report, _ = check(recorded, f"{SAMPLER}&order={order}", bounds=preset)
    assert report.outcome is Outcome.PASS
    assert [f.code for f in report.findings if f.severity is not Severity.INFO] == []


@pytest.mark.parametrize("preset", ["fp32", "strict"])
def test_logits_plus_a_hundred_pass(recorded: Rollouts, preset: str) -> None:
    report, _ = check(recorded, f"{SAMPLER}&fault=logits_plus_hundred", bounds=preset)
    assert report.outcome is Outcome.PASS


@pytest.mark.parametrize("preset", ["fp32", "strict", "fp16", "bf16"])
def test_logits_times_two_drift_at_every_preset(recorded: Rollouts, preset: str) -> None:
    report, _ = check(recorded, f"{SAMPLER}&fault=logits_times_two", bounds=preset)
    assert report.outcome is Outcome.DRIFT


@pytest.mark.parametrize(
    ("fault", "code", "outcome"),
    [
        ("temperature", "gap-above-bound", Outcome.DRIFT),
        ("shift", "gap-above-bound", Outcome.DRIFT),
        ("eps_norm", "gap-above-bound", Outcome.DRIFT),
        ("stale", "weights-differ", Outcome.DRIFT),
        ("zero_fill", "gap-above-bound", Outcome.DRIFT),
        ("support", "support-violation", Outcome.DRIFT),
        ("nan", "nonfinite-logprob", Outcome.ERROR),
    ],
)
def test_each_fault_is_found(recorded: Rollouts, fault: str, code: str, outcome: Outcome) -> None:
    report, _ = check(recorded, f"{SAMPLER}&fault={fault}", bounds="fp32")
    assert report.outcome is outcome
    assert code in [f.code for f in report.findings]


def test_full_distributions_give_the_exact_divergences() -> None:
    recorded = record_rollouts(f"{SAMPLER}&dtype=bfloat16", params=SamplingParams(max_tokens=64, seed=2))
    report, scored = check(recorded, f"{SAMPLER}&dtype=bfloat16&order=reversed", exact=True)
    assert scored.scorings["scorer"].distributions is not None
    # the recording has none, so the exact KL is not measured, and says so
    assert report.measurements["kl_sampler_scorer_exact/mean"].value is None
    both, _ = check(
        scored.with_scoring("sampler", scored.scorings["scorer"]), f"{SAMPLER}&dtype=bfloat16&order=blocked", exact=True
    )
    exact = both.measurements["kl_sampler_scorer_exact/mean"].value
    k3 = both.measurements["kl_sampler_scorer_k3/mean"]
    assert exact is not None
    assert k3.lower is not None
    assert k3.upper is not None
    assert k3.lower * 0.8 < exact < k3.upper * 1.25
