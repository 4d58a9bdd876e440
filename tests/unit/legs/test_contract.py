"""The contract leg: engines that report what they declare, and engines that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from onepolicy.check import Choices, check_engines
from onepolicy.engines.base import SamplingParams
from onepolicy.engines.fake import FakeEngine
from onepolicy.legs import contract
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import LegResult, Outcome, Ran, Report
from small_suite import small

LEGS = ("contract",)


class Declares(FakeEngine):
    """Reports one meaning and declares another."""

    def __init__(self, says: str, **options: Any) -> None:
        super().__init__("", **options)
        self._says = says

    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Rollouts:
        drawn = super().sample(prompts, params)
        records = {**drawn.records, "logprob_semantics": column_values("logprob_semantics", [self._says] * len(drawn))}
        said = replace(drawn.scorings["sampler"], semantics=self._says)
        return replace(drawn, records=records, scorings={"sampler": said})


def check(sampler: Any, scorer: Any = "fake:?order=pairwise", **settings: Any) -> Report:
    params = SamplingParams(max_tokens=40, seed=1, **settings)
    return check_engines(sampler, scorer, choices=Choices(LEGS, suite=small(0), params=params))[0]


def leg(report: Report) -> LegResult:
    return next(x for x in report.legs if x.key == "contract")


def rows(report: Report) -> dict[str, Any]:
    return {row["name"]: row["applied"] for row in leg(report).facts["settings"] if "name" in row}


@pytest.mark.parametrize(
    ("meaning", "applied"),
    [
        ("raw", {"temperature": False, "top_p": False, "top_k": False, "min_p": False}),
        ("temperature", {"temperature": True, "top_p": False, "top_k": False, "min_p": False}),
        ("processed", {"temperature": True, "top_p": True, "top_k": True, "min_p": True}),
    ],
)
def test_each_meaning_is_found(meaning: str, applied: dict[str, bool]) -> None:
    report = check(f"fake:?logprobs={meaning}")
    assert rows(report) == applied
    assert leg(report).facts["meaning"] == meaning
    assert leg(report).outcome is Outcome.PASS
    assert "logprob-contract" not in {f.code for f in report.findings}


def test_settings_that_the_sampler_refuses_are_listed() -> None:
    told = {row["setting"]: row.get("why") for row in leg(check("fake:?logprobs=raw")).facts["settings"]}
    assert told["repetition_penalty"] == "not supported by the sampler"


@pytest.mark.parametrize(("is_", "says"), [("raw", "processed"), ("processed", "raw")])
def test_a_false_declaration_is_drift(is_: str, says: str) -> None:
    report = check(Declares(says, logprobs=is_))
    assert report.outcome is Outcome.DRIFT
    found = [f for f in report.findings if f.code == "logprob-contract"]
    assert {f.evidence["name"] for f in found} == {"temperature", "top_p", "top_k", "min_p"}
    assert repr(says) in found[0].message
    assert repr(is_) in found[0].advice


def test_without_a_reader_the_leg_is_not_run() -> None:
    class Plain(FakeEngine):
        RULES = False

    report = check("fake:?", Plain("", order="pairwise"))
    assert leg(report).ran is Ran.NOT
    assert "--floor" in leg(report).why


@pytest.mark.parametrize(
    ("told", "meaning"),
    [
        ({}, None),
        ({"temperature": None, "top_p": None}, None),
        ({"temperature": False, "top_p": False}, "raw"),
        ({"temperature": True}, "temperature"),
        ({"temperature": True, "top_p": False}, "temperature"),
        ({"temperature": True, "top_p": True}, "processed"),
        ({"temperature": False, "top_p": True}, "mixed"),
        ({"temperature": True, "top_p": True, "repetition_penalty": False}, "mixed"),
    ],
)
def test_meaning_from_rows(told: dict[str, bool | None], meaning: str | None) -> None:
    assert contract.meaning_of([{"name": k, "applied": v} for k, v in told.items()]) == meaning


@pytest.mark.parametrize(
    ("if_applied", "if_not", "n", "decided"),
    [
        (0.01, 0.3, 50, True),
        (0.3, 0.01, 50, False),
        (0.2, 0.3, 50, None),
        (0.01, 0.3, 5, None),
        (0.0, 0.0, 50, None),
    ],
)
def test_a_row_is_decided_only_when_one_reading_is_clearly_closer(
    if_applied: float, if_not: float, n: int, decided: bool | None
) -> None:
    assert contract._decided(if_applied, if_not, n) is decided


def placeholder(checked: Callable[..., Report], fault: str) -> list[Any]:
    report = checked(sampler=f"&fault={fault}")
    return [f for f in report.findings if f.code == "placeholder-logprob"]


def test_filled_zeros_are_found_by_value_and_place(checked: Callable[..., Report]) -> None:
    found = placeholder(checked, "zero_fill")
    assert len(found) == 1
    assert found[0].evidence["value"] == 0.0
    assert found[0].place.startswith("record ")
    assert checked(sampler="&fault=zero_fill").outcome is Outcome.DRIFT


def test_healthy_values_hold_no_placeholder(checked: Callable[..., Report]) -> None:
    assert "placeholder-logprob" not in {f.code for f in checked().findings}
