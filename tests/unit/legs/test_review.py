"""What a hard look at the check found: passes that were none, alarms that were none, input that broke it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepolicy.check import Choices, check, check_engines
from onepolicy.checking import some_of
from onepolicy.engines.base import SamplingParams
from onepolicy.engines.fake import FakeEngine
from onepolicy.errors import ContentError, EngineDied, UsageError
from onepolicy.floor import Variant, measured
from onepolicy.legs import kept
from onepolicy.legs.plan import Task
from onepolicy.legs.step_zero import step_zero
from onepolicy.record import record_rollouts
from onepolicy.rollouts import Rollouts
from onepolicy.types import Floor, LegResult, Outcome, Ran, Report, Scoring, Values
from small_suite import SAMPLER, SCORER, small

PARAMS = SamplingParams(max_tokens=40, seed=2)


def draw(**settings: Any) -> Rollouts:
    params = replace(PARAMS, **settings)
    return record_rollouts(SAMPLER, prompts=[p.prompt for p in small().prompts], params=params)


@pytest.fixture(scope="module")
def drawn() -> Rollouts:
    return draw()


def leg(report: Report, key: str) -> LegResult:
    return next(x for x in report.legs if x.key == key)


class Padded(FakeEngine):
    """Gives other values with left padding: `spoil` of its log-probs and their validity."""

    def __init__(self, spoil: Any) -> None:
        super().__init__("", dtype="bfloat16", order="pairwise")
        self._spoil_left = spoil

    def score(
        self, rollouts: Rollouts, *, distributions: bool = False, using: Mapping[str, Any] | None = None
    ) -> Scoring:
        found = super().score(rollouts, distributions=distributions, using=using)
        if (using or {}).get("padding_side") != "left":
            return found
        values, valid = found.logprobs.values.copy(), found.logprobs.mask().copy()
        self._spoil_left(rollouts, values, valid)
        return replace(found, logprobs=Values(values, valid))


def test_one_sequence_that_is_wholly_wrong_in_a_leg_is_no_pass(drawn: Rollouts) -> None:
    def one(rollouts: Rollouts, values: Any, valid: Any) -> None:
        values[rollouts.sequence(3)] -= 5.0

    report, _ = check(drawn, Padded(one), choices=Choices(["scorer-padding"]))
    assert report.outcome is Outcome.INCONCLUSIVE
    assert any(f.code == "undecided" and "scorer-padding" in f.message for f in report.findings)


def test_a_leg_without_values_is_no_pass(drawn: Rollouts) -> None:
    def most(rollouts: Rollouts, values: Any, valid: Any) -> None:
        valid[len(valid) // 8 :] = False

    report, _ = check(drawn, Padded(most), choices=Choices(["scorer-padding"]))
    assert report.outcome is Outcome.INCONCLUSIVE
    assert any(f.code == "leg-failed" and "without a log-prob" in f.message for f in report.findings)


@pytest.mark.parametrize("old", [np.nan, -np.inf])
def test_step_zero_without_finite_numbers_is_no_pass(drawn: Rollouts, old: float) -> None:
    column = lambda x, name: Scoring(Values(np.full(drawn.n_tokens, x)), dtype="bfloat16", scoring_id=name)
    both = drawn.with_scoring("old", column(old, "x")).with_scoring("current", column(-1.0, "y"))
    result, findings = step_zero(both)
    assert result.outcome is Outcome.INCONCLUSIVE
    assert [f.code for f in findings] == ["nonfinite-terms"]


def test_step_zero_without_trained_tokens_is_no_pass(drawn: Rollouts) -> None:
    column = lambda x, name: Scoring(Values(np.full(drawn.n_tokens, x)), dtype="bfloat16", scoring_id=name)
    both = drawn.with_scoring("old", column(-1.0, "x")).with_scoring("current", column(-1.0, "y"))
    both = replace(both, tokens={**both.tokens, "loss_mask": Values(np.zeros(drawn.n_tokens, dtype=bool))})
    result, findings = step_zero(both)
    assert result.outcome is Outcome.INCONCLUSIVE
    assert [f.code for f in findings] == ["not-measured"]


def test_long_replies_leave_enough_clusters_for_the_slow_legs() -> None:
    rollouts = record_rollouts(
        SAMPLER, prompts=[p.prompt for p in small().prompts], params=replace(PARAMS, max_tokens=400)
    )
    drawn = np.array([int(rollouts.drawn[rollouts.sequence(i)].sum()) for i in some_of(rollouts)])
    assert drawn.sum() ** 2 / (drawn**2).sum() >= min(20, 0.9 * len(rollouts))


class Failing(FakeEngine):
    """Raises `error` from its n-th request on."""

    def __init__(self, at: int, error: Exception) -> None:
        super().__init__("", dtype="bfloat16", order="pairwise")
        self._at, self._error, self._calls = at, error, 0

    def score(
        self, rollouts: Rollouts, *, distributions: bool = False, using: Mapping[str, Any] | None = None
    ) -> Scoring:
        self._calls += 1
        if self._calls >= self._at:
            raise self._error
        return super().score(rollouts, distributions=distributions, using=using)


def test_an_engine_of_this_process_that_raises_in_a_leg_costs_that_leg(drawn: Rollouts) -> None:
    shards = -(-len(drawn) // 32)
    engine = Failing(shards + 1, RuntimeError("CUDA out of memory"))
    report, _ = check(drawn, engine, choices=Choices(["scorer-padding"]))
    assert report.outcome is Outcome.INCONCLUSIVE
    assert "CUDA out of memory" in leg(report, "scorer-padding").why


def test_what_was_scored_before_values_of_a_wrong_shape_is_judged(drawn: Rollouts) -> None:
    report, _ = check(drawn, Failing(2, ContentError("got 3 values for 4 tokens")), choices=Choices([]))
    assert report.outcome is Outcome.ERROR
    assert "32 of 40 sequences had been scored" in next(f.message for f in report.findings if f.code == "engine-failed")


def test_one_engine_on_both_sides_that_dies_is_said_in_one_line(drawn: Rollouts) -> None:
    engine = Failing(1, EngineDied("its process was killed by signal 9"))
    with pytest.raises(EngineDied, match="signal 9"):
        check(drawn, engine, sampler=engine, choices=Choices(["scorer-again"]))


# -- what was kept -----------------------------------------------------------------------------------------------------


def test_values_at_another_declared_temperature_are_not_taken(tmp_path: Path) -> None:
    rollouts = draw(temperature=0.7)
    bare = replace(rollouts, records={k: v for k, v in rollouts.records.items() if k != "temperature"})
    choices = Choices(["scorer-again"], keep=tmp_path)
    right, _ = check(bare, SCORER, declare={"temperature": "0.7"}, choices=choices)
    wrong, _ = check(bare, SCORER, declare={"temperature": "1.0"}, choices=choices)
    assert (right.outcome, wrong.outcome) == (Outcome.PASS, Outcome.DRIFT)


def test_values_of_other_weights_are_not_taken(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"old")
    before = kept.files_digest(f"hf:{model}?dtype=bfloat16")
    (model / "model.safetensors").write_bytes(b"new")
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert before not in ("", kept.files_digest(f"hf:{model}?dtype=bfloat16"))
    assert kept.files_digest("fake:?seed=1") == ""


def test_a_running_engine_is_never_taken_from_what_was_kept(drawn: Rollouts, tmp_path: Path) -> None:
    engine, choices = FakeEngine("", dtype="bfloat16", order="pairwise"), Choices(["scorer-again"], keep=tmp_path)
    first, _ = check(drawn, engine, choices=choices)
    engine.__init__("", dtype="bfloat16", order="pairwise", seed=4)  # as after an update of its weights
    second, _ = check(drawn, engine, choices=choices)
    assert (first.outcome, second.outcome) == (Outcome.PASS, Outcome.DRIFT)


def test_legs_that_are_asked_for_later_are_run(tmp_path: Path) -> None:
    given: dict[str, Any] = {"suite": small(24), "params": PARAMS, "keep": tmp_path}
    check_engines(SAMPLER, SCORER, choices=Choices(["scorer-again"], **given))
    report, _ = check_engines(SAMPLER, SCORER, choices=Choices(["contract", "fixed-texts"], **given))
    assert {leg(report, key).ran for key in ("contract", "fixed-texts")} == {Ran.DONE}


@pytest.mark.parametrize("text", ["not json", '{"a": 1}', "[]", "3"])
def test_a_note_that_no_check_wrote_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "check.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="written by no check"):
        check_engines(SAMPLER, SCORER, choices=Choices(["scorer-again"], suite=small(0), keep=tmp_path))


def test_files_that_are_not_ours_are_scored_again(drawn: Rollouts, tmp_path: Path) -> None:
    store, task = kept.Kept(tmp_path), Task("fake:", (), "drawn")
    scoring = FakeEngine().score(drawn)
    store.put(task, drawn, scoring)
    path = next(tmp_path.glob("*.npz"))
    assert store.get(task, drawn) is not None
    whole = path.read_bytes()
    for content in (b"", b"PK", b"x" * 200, whole[: len(whole) // 2]):
        path.write_bytes(content)
        assert store.get(task, drawn) is None
    short = replace(scoring, logprobs=Values(scoring.logprobs.values[:3], scoring.logprobs.mask()[:3]))
    store.put(task, drawn, short)
    assert store.get(task, drawn) is None


def test_a_full_disk_costs_what_would_be_kept_and_not_the_check(
    drawn: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept.np, "savez", full)
    report, _ = check(drawn, SCORER, choices=Choices(["scorer-again"], keep=tmp_path))
    assert report.outcome is Outcome.PASS
    assert list(tmp_path.iterdir()) == []
    store = kept.Kept(tmp_path)
    store.put(Task("fake:", (), "drawn"), drawn, FakeEngine().score(drawn))
    assert "No space left" in store.trouble


def test_numpy_values_in_a_fingerprint_can_be_kept(drawn: Rollouts, tmp_path: Path) -> None:
    scoring = FakeEngine().score(drawn)
    scoring = replace(scoring, fingerprint={**scoring.fingerprint, "n": np.int64(3), "x": np.float32(0.5)})
    store, task = kept.Kept(tmp_path), Task("fake:", (), "drawn")
    store.put(task, drawn, scoring)
    found = store.get(task, drawn)
    assert found is not None and found.fingerprint["n"] == 3 and found.fingerprint["x"] == 0.5


# -- the floor ---------------------------------------------------------------------------------------------------------

N = 4000


def kernels(*errors: float, same: float = 0.0) -> tuple[list[Variant], Any]:
    """Variants that stand `errors` nats RMS from float32; `same`: how far a last one is from the first."""
    rng = np.random.default_rng(0)
    exact = np.full(N, -3.0)
    found = [Variant(f"kernel {i}", exact + e * rng.normal(size=N)) for i, e in enumerate(errors)]
    if same:
        found.append(Variant("twin", found[0].logprobs + same * rng.normal(size=N)))
    return found, exact


def measured_rms(variants: list[Variant], exact: Any) -> Floor:
    return measured(variants, exact, np.ones(N, dtype=bool), "bfloat16")[0]


HEALTHY = 0.05 * 2**0.5


def test_two_kernels_that_are_nearly_one_do_not_make_the_third_look_broken() -> None:
    for same in (1e-12, 1e-4, 0.01):
        floor = measured_rms(*kernels(0.05, 0.05, same=same))
        assert floor.why == ""
        assert floor.rms == pytest.approx(HEALTHY, rel=0.05)


@pytest.mark.parametrize("errors", [(0.05, 0.5), (0.05, 0.5, 0.4), (0.5, 0.05, 0.4), (0.05, 0.05, 0.5)])
def test_broken_kernels_do_not_raise_the_floor_however_many_there_are(errors: tuple[float, ...]) -> None:
    floor = measured_rms(*kernels(*errors))
    assert "left out" in floor.why
    assert floor.source == ("measured" if errors.count(0.05) > 1 else "assumed")
    assert floor.rms == pytest.approx(HEALTHY, rel=0.05)


def test_healthy_kernels_are_all_used() -> None:
    floor = measured_rms(*kernels(0.05, 0.06, 0.045))
    assert floor.why == "" and len(floor.variants) == 3
