"""What must not pass: questions that were asked and not answered, floors of strangers, precisions nobody declared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from onepolicy.check import Choices, check, check_engines
from onepolicy.engines.base import SamplingParams
from onepolicy.engines.fake import FakeEngine
from onepolicy.errors import EngineDied, UsageError
from onepolicy.legs.results import again
from onepolicy.record import record_rollouts
from onepolicy.rollouts import Rollouts
from onepolicy.types import Outcome, Ran, Report, Severity
from small_suite import SAMPLER, SCORER, small

PARAMS = SamplingParams(max_tokens=48, seed=3)


def run(sampler: object, scorer: object, legs: Sequence[str] | None, **more: object) -> Report:
    given = {"suite": small(0), "params": PARAMS, **more}
    return check_engines(sampler, scorer, choices=Choices(legs, **given))[0]  # type: ignore[arg-type]


def test_a_leg_that_was_named_and_cannot_run_leaves_its_question_open() -> None:
    report = run(SAMPLER, SCORER, ["sampler-cache", "scorer-path"])
    assert report.outcome is Outcome.INCONCLUSIVE
    found = next(f for f in report.findings if f.code == "leg-failed")
    assert "sampler-cache was asked for and cannot be run" in found.message
    assert run(SAMPLER, SCORER, ["scorer-path"]).outcome is Outcome.PASS


class DiesInProbes(FakeEngine):
    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Rollouts:
        if params.temperature != 1.0:
            raise EngineDied("its process was killed by signal 9")
        return super().sample(prompts, params)


def test_a_sampler_that_dies_in_the_probes_answers_no_contract() -> None:
    report = run(DiesInProbes("", dtype="bfloat16"), SCORER, ["contract"])
    leg = next(x for x in report.legs if x.key == "contract")
    assert leg.ran is Ran.FAILED and "signal 9" in leg.why
    assert report.outcome is Outcome.INCONCLUSIVE


def test_another_model_is_no_floor() -> None:
    report = run(SAMPLER, SCORER + "&drift=0.12", ["scorer-path"], floor="fake:?dtype=bfloat16&seed=9&hidden=512")
    assert report.floor is not None and report.floor.source == "incomplete"
    assert "near neither side" in report.floor.why
    assert "gap_over_floor/rms" not in {g.metric for g in report.gates}
    kin = run(SAMPLER, SCORER, ["scorer-path"], floor=SCORER)
    assert kin.floor is not None and kin.floor.source == "measured" and kin.outcome is Outcome.PASS


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 0.1), ("float16", 0.0125), (None, 0.1)])
def test_a_repeat_is_bounded_by_its_precision(dtype: str | None, bound: float) -> None:
    assert [b.at_most for b in again(dtype).bounds] == pytest.approx([bound])


def test_a_precision_that_nobody_declares_is_asked_for_before_anything_starts() -> None:
    rollouts = record_rollouts(SAMPLER, prompts=["a", "b"], params=SamplingParams(max_tokens=4))
    with pytest.raises(UsageError, match="its precision is not declared"):
        check(rollouts, "callable:no.such.module:fn")


def test_greedy_draws_have_no_surprisal() -> None:
    report = run(SAMPLER, SCORER, ["scorer-path"], params=replace(PARAMS, temperature=0.0))
    assert "not-drawn-from-reported" not in {f.code for f in report.findings if f.severity is Severity.FAIL}
    assert report.measurements["surprisal_scorer/excess"].value is None


def test_engines_that_agree_to_the_bit_pass() -> None:
    rollouts = record_rollouts(SAMPLER, prompts=[p.prompt for p in small(0).prompts], params=PARAMS)
    report, _ = check(rollouts, SAMPLER, choices=Choices(["scorer-again", "scorer-path"]))
    assert report.measurements["abs_log_ratio/max"].value == 0.0
    assert report.outcome is Outcome.PASS
