"""Were the tokens drawn from the distribution that is reported? Two engines can agree and both be wrong."""

from __future__ import annotations

import numpy as np
import pytest

from onepolicy.check import check
from onepolicy.engines.base import SamplingParams
from onepolicy.record import record_rollouts
from onepolicy.rollouts import Rollouts
from onepolicy.types import Outcome, Report, Severity

HONEST = "fake:?seed=3"
COLD = "fake:?seed=3&fault=drawn_at_0.7"  # draws at T = 0.7, reports raw T = 1
NUMERIC = ("kl-above-bound", "gap-above-bound", "token-above-bound", "ratio-biased")


def recorded(sampler: str) -> Rollouts:
    return record_rollouts(sampler, params=SamplingParams(max_tokens=192, seed=5))


def codes(report: Report) -> set[str]:
    return {f.code for f in report.findings if f.severity is Severity.FAIL}


def test_honest_draws_are_not_surprising() -> None:
    report, _ = check(recorded(HONEST), "fake:?seed=3&order=reversed")
    assert report.outcome is Outcome.PASS
    assert abs(report.measurements["surprisal_sampler/z"].value or 9) < 4


def test_both_numbers_agree_and_the_draw_is_still_another() -> None:
    report, _ = check(recorded(COLD), "fake:?seed=3&order=reversed")
    assert codes(report) == {"not-drawn-from-reported"}
    assert not codes(report) & set(NUMERIC)
    assert report.outcome is Outcome.DRIFT
    assert (report.measurements["abs_log_ratio/mean"].value or 9) < 1e-4
    assert (report.measurements["surprisal_sampler/excess"].value or 0) < -0.1


def test_the_scorer_alone_sees_it_when_the_sampler_has_no_entropy() -> None:
    rollouts = recorded(COLD)
    bare = rollouts.scorings["sampler"].without_entropy()
    report, _ = check(rollouts.with_scoring("sampler", bare), "fake:?seed=3&order=reversed")
    assert report.measurements["surprisal_sampler/z"].value is None
    assert "not-drawn-from-reported" in codes(report)


@pytest.mark.parametrize("best", [True, False])
def test_selection_by_reward_is_named_as_a_rival(best: bool) -> None:
    """A reward that prefers usual (or unusual) choices keeps replies that no longer follow what drew them."""
    rollouts = record_rollouts(HONEST, params=SamplingParams(max_tokens=192, seed=5, samples=2))
    sampler, drawn = rollouts.scorings["sampler"], rollouts.drawn
    assert sampler.entropy is not None
    usual = sampler.logprobs.values + sampler.entropy.values
    reward = np.array([usual[at][drawn[at]].mean() for at in map(rollouts.sequence, range(len(rollouts)))])
    order = np.argsort(reward)
    chosen = order[len(order) // 2 :] if best else order[: len(order) // 2]
    report, _ = check(rollouts.take(chosen), "fake:?seed=3&order=reversed")
    found = next(f for f in report.findings if f.code == "not-drawn-from-reported")
    assert any("reward" in rival for rival in found.rivals)
