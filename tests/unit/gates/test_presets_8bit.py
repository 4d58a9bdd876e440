"""The presets of 8-bit pairs: measured healthy gaps pass, gross faults do not, and what they leave out is meant."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from build import rollouts_of
from onepolicy.align import align
from onepolicy.gates import PRESETS
from onepolicy.gates.bounds import load
from onepolicy.gates.judge import judge
from onepolicy.metrics import METRICS
from onepolicy.reduce import reduce
from onepolicy.rollouts import Rollouts
from onepolicy.types import Outcome, Report, Values

#: RMS of the log-ratio of healthy pairs on SmolLM2-135M, nats: fp8 KV cache; W8A8 fp8; W8A8 int8; q8_0.
KV_FP8, W_FP8, W_INT8, Q8_0 = 0.29, 0.31, 0.32, 0.12
PEAKED = 0.6  # shape of the tokens' scales: mean |d| is then 0.63 RMS, as measured (a normal law has 0.80)


def pair(rms: float, shift: float = 0.0) -> Rollouts:
    """400 replies in 200 groups, about 13,000 tokens, each with its own scale; the mean ratio is e^shift."""
    rng = np.random.default_rng(8)
    lengths = rng.integers(5, 60, 400)
    n = int(lengths.sum())
    sd = rms * np.sqrt(rng.gamma(PEAKED, 1 / PEAKED, n))
    a = -4.0 - rng.exponential(1.0, n)  # far enough from 0 that no log-prob is cut there
    b = np.minimum(a + rng.normal(shift - sd * sd / 2, sd), 0.0)
    return rollouts_of(a, b, lengths, groups=[str(i // 2) for i in range(400)])


def judged(rollouts: Rollouts, preset: str) -> Report:
    return judge(reduce(align(rollouts, "sampler", "old"), METRICS.values(), "drawn"), load(preset))


@pytest.mark.parametrize(
    ("preset", "rms"), [("fp8", 0.05), ("fp8", KV_FP8), ("fp8", W_FP8), ("int8", Q8_0), ("int8", W_INT8)]
)
def test_a_healthy_8_bit_pair_passes_and_not_as_bf16(preset: str, rms: float) -> None:
    rollouts = pair(rms)
    assert judged(rollouts, preset).outcome is Outcome.PASS
    assert judged(rollouts, "bf16").outcome is (Outcome.PASS if rms < 0.15 else Outcome.DRIFT)


@pytest.mark.parametrize(("preset", "rms"), [("fp8", 0.45), ("int8", 0.6)])
def test_a_gap_of_twice_the_healthy_one_is_drift(preset: str, rms: float) -> None:
    report = judged(pair(rms), preset)
    assert report.outcome is Outcome.DRIFT
    assert {g.metric for g in report.gates if g.outcome is Outcome.DRIFT} == {
        "kl_sampler_scorer_k3/mean",
        "abs_log_ratio/mean",
    }


@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_tokens_cut_from_the_support_are_drift_at_any_precision(preset: str) -> None:
    """Kept mass 0.9: every reported log-prob is log(1 / 0.9) too high."""
    report = judged(pair(0.2, shift=math.log(0.9)), preset)
    assert [g.metric for g in report.gates if g.outcome is Outcome.DRIFT] == ["ratio_bias/mean"]


@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_few_tokens_cannot_pass(preset: str) -> None:
    few = rollouts_of(np.full(200, -1.0), np.full(200, -1.1), np.full(40, 5), groups=[str(i) for i in range(40)])
    assert judged(few, preset).outcome is not Outcome.PASS


def with_excess(rollouts: Rollouts, **excess: float) -> Rollouts:
    """Scorings whose entropy is that much below the surprisal of every drawn token, nats."""
    scorings = dict(rollouts.scorings)
    for name, more in excess.items():
        logprobs = scorings[name].logprobs
        entropy = Values((-logprobs.values - more).astype(logprobs.values.dtype), logprobs.valid)
        spread = Values(np.full_like(entropy.values, 0.01), logprobs.valid)
        scorings[name] = replace(scorings[name], entropy=entropy, varentropy=spread)
    return replace(rollouts, scorings=scorings)


@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_the_entropy_of_the_other_precision_is_not_held_against_the_scorer(preset: str) -> None:
    report = judged(with_excess(pair(0.2), sampler=0.0, old=0.1), preset)
    assert report.measurements["surprisal_scorer/excess"].value == pytest.approx(0.1, abs=1e-3)
    assert report.outcome is Outcome.PASS
    assert judged(with_excess(pair(0.05), sampler=0.0, old=0.1), "bf16").outcome is Outcome.DRIFT


@pytest.mark.parametrize("preset", ["fp8", "int8"])
def test_a_sampler_that_reports_another_distribution_is_drift(preset: str) -> None:
    report = judged(with_excess(pair(0.2), sampler=0.1, old=0.1), preset)
    assert [g.metric for g in report.gates if g.outcome is Outcome.DRIFT] == ["surprisal_sampler/excess"]


def test_each_8_bit_preset_is_looser_than_bf16_in_size_alone() -> None:
    def at_most(preset: str) -> dict[str, float]:
        return {b.metric: b.at_most for b in load(preset).bounds}

    for preset in ("fp8", "int8"):
        assert preset in PRESETS
        for metric in ("kl_sampler_scorer_k3/mean", "abs_log_ratio/mean"):
            assert at_most(preset)[metric] > at_most("bf16")[metric]
        for metric in ("ratio_bias/mean", "surprisal_sampler/excess"):
            assert at_most(preset)[metric] == at_most("bf16")[metric]
        assert "surprisal_scorer/excess" not in at_most(preset)
