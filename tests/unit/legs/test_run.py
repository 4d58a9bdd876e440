"""Running a plan: what fails fails alone, what is finished is kept, and each configuration is started once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepolicy.check import Choices, check, check_engines
from onepolicy.engines.base import SamplingParams
from onepolicy.engines.fake import FakeEngine
from onepolicy.errors import EngineDied, EngineError, UnknownName, UsageError
from onepolicy.legs import LEGS
from onepolicy.record import record_rollouts
from onepolicy.rollouts import Rollouts
from onepolicy.types import LegResult, Outcome, Ran, Report, Scoring
from small_suite import SAMPLER, SCORER, small

PARAMS = SamplingParams(max_tokens=40, seed=2)


@pytest.fixture(scope="module")
def drawn() -> Rollouts:
    return record_rollouts(SAMPLER, prompts=[p.prompt for p in small().prompts], params=PARAMS)


def leg(report: Report, key: str) -> LegResult:
    return next(x for x in report.legs if x.key == key)


def test_out_of_memory_in_float32_is_said_and_is_no_pass(drawn: Rollouts) -> None:
    choices = Choices(["same-function", "scorer-again"])
    report, _ = check(drawn, SCORER + "&fault=oom", sampler=SAMPLER, choices=choices)
    assert leg(report, "same-function").ran is Ran.FAILED
    assert "out of memory" in leg(report, "same-function").why
    assert report.outcome is Outcome.INCONCLUSIVE
    found = next(f for f in report.findings if f.code == "same-function-open")
    assert "--skip same-function" in found.advice
    without, _ = check(drawn, SCORER + "&fault=oom", choices=Choices(skip=["same-function"]))
    assert without.outcome is Outcome.PASS


def test_a_sampler_that_hangs_costs_its_own_legs_only(drawn: Rollouts) -> None:
    hanging = "worker:fake:?dtype=bfloat16&fault=hangs&timeout=15"
    report, _ = check(drawn, SCORER, sampler=hanging, choices=Choices(["sampler-again", "scorer-again"]))
    assert leg(report, "sampler-again").ran is Ran.FAILED
    assert "no answer to score within 15 s" in leg(report, "sampler-again").why
    assert leg(report, "scorer-again").outcome is Outcome.PASS
    assert report.outcome is Outcome.INCONCLUSIVE
    assert {f.code for f in report.findings if f.outcome is Outcome.INCONCLUSIVE} == {"leg-failed"}


def test_a_scorer_that_hangs_ends_the_check_in_one_line(drawn: Rollouts) -> None:
    with pytest.raises(EngineError, match="no answer to score within 8 s"):
        check(drawn, "worker:fake:?dtype=bfloat16&fault=hangs&timeout=8", choices=Choices(["scorer-again"]))


class Dying(FakeEngine):
    """Dies in its n-th request."""

    def __init__(self, dies_at: int = 10**9) -> None:
        super().__init__("", dtype="bfloat16", order="pairwise")
        self.calls: list[Mapping[str, Any]] = []
        self._dies_at = dies_at

    def score(
        self, rollouts: Rollouts, *, distributions: bool = False, using: Mapping[str, Any] | None = None
    ) -> Scoring:
        self.calls.append(dict(using or {}))
        if len(self.calls) >= self._dies_at:
            raise EngineDied("its process was killed by signal 9")
        return super().score(rollouts, distributions=distributions, using=using)


def test_a_death_in_a_leg_leaves_the_pair_judged(drawn: Rollouts) -> None:
    shards = -(-len(drawn) // 32)
    report, _ = check(drawn, Dying(shards + 1), choices=Choices(["scorer-again", "scorer-batch"]))
    assert report.measurements["abs_log_ratio/mean"].value is not None
    assert report.outcome is Outcome.INCONCLUSIVE
    assert "leg-failed" in {f.code for f in report.findings}


def test_what_was_finished_is_taken_from_where_it_was_kept(drawn: Rollouts, tmp_path: Path) -> None:
    spec = SCORER
    whole = Choices(["scorer-path", "scorer-batch"], keep=tmp_path / "kept")
    first, _ = check(drawn, spec, choices=whole)
    stored = sorted(p.name for p in (tmp_path / "kept").iterdir())
    again, _ = check(drawn, spec, choices=whole)
    assert sorted(p.name for p in (tmp_path / "kept").iterdir()) == stored
    assert again.sums.to_json() == first.sums.to_json()
    assert [x.sums for x in again.legs] == [x.sums for x in first.legs]


def test_a_torn_file_is_scored_again(drawn: Rollouts, tmp_path: Path) -> None:
    choices = Choices(["scorer-path"], keep=tmp_path)
    first, _ = check(drawn, SCORER, choices=choices)
    for path in tmp_path.glob("*.npz"):
        path.write_bytes(path.read_bytes()[:100])
    again, _ = check(drawn, SCORER, choices=choices)
    assert again.sums.to_json() == first.sums.to_json()


def test_resume_does_not_draw_again_and_refuses_another_check(tmp_path: Path) -> None:
    choices = Choices(["scorer-again"], suite=small(0), params=PARAMS, keep=tmp_path)
    first, one = check_engines(SAMPLER, SCORER, choices=choices)
    _, two = check_engines(SAMPLER, SCORER, choices=choices)
    assert one.record_ids() == two.record_ids()
    assert np.array_equal(one.token_ids, two.token_ids)
    other = Choices(["scorer-again"], suite=small(0), params=SamplingParams(max_tokens=8), keep=tmp_path)
    with pytest.raises(UsageError, match="holds another check"):
        check_engines(SAMPLER, SCORER, choices=other)
    assert first.outcome is Outcome.PASS


def test_each_configuration_is_started_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    begin = FakeEngine.__init__

    def counted(self: FakeEngine, target: str = "", **options: Any) -> None:
        started.append(options)
        begin(self, target, **options)

    monkeypatch.setattr(FakeEngine, "__init__", counted)
    check_engines(SAMPLER, SCORER, choices=Choices(suite=small(8), params=SamplingParams(max_tokens=16)))
    configurations = [tuple(sorted((k, str(v)) for k, v in x.items())) for x in started]
    text_for_people = 1  # the worst tokens are decoded by one more, light as it is
    assert len(configurations) - len(set(configurations)) <= text_for_people


@pytest.mark.parametrize("names", [(["scorer-pth"], ()), (None, ["scorer-pth"])])
def test_a_leg_that_is_none_is_refused_before_any_engine(drawn: Rollouts, names: Any) -> None:
    with pytest.raises(UnknownName, match="did you mean 'scorer-path'"):
        check(drawn, "fake:?dtype=bfloat16&fault=oom", choices=Choices(*names))


def test_a_leg_cannot_be_asked_for_and_skipped(drawn: Rollouts) -> None:
    with pytest.raises(UsageError, match="both"):
        check(drawn, SCORER, choices=Choices(["scorer-path"], ["scorer-path"]))


def test_a_running_engine_cannot_be_loaded_otherwise(drawn: Rollouts) -> None:
    report, _ = check(drawn, Dying(), choices=Choices(["scorer-precision", "scorer-path"]))
    assert "given running" in leg(report, "scorer-precision").why
    assert leg(report, "scorer-path").outcome is Outcome.PASS


def test_every_leg_has_its_key_and_a_page_for_its_finding() -> None:
    from onepolicy.codes import CODES

    for key, one in LEGS.items():
        assert one.key == key
        assert one.code == "" or one.code in CODES
