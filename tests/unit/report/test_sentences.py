"""The verdict's sentences: careful words, the report's own numbers, nothing that was not measured."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from full import CONTRACT, REPORTS, checked, other_function, other_leg, without
from scenarios import batch, judged

from onepolicy.report.sentences import answer, floor_outcome, ownership, rounding, same_function, sentences
from onepolicy.types import Outcome, Question, Ran, Report


def at(report: Report, **context: object) -> Report:
    return replace(report, context={**report.context, **context})


def test_a_report_without_legs_and_floor_says_nothing_more():
    assert sentences(judged(batch())) == []


def test_a_pass_is_consistent_with_rounding_and_says_what_it_could_not_see():
    said = rounding(checked())
    assert re.match(
        r"Consistent with bf16 rounding: predicted 0\.03\d+, measured 0\.03\d+ nats RMS "
        r"\([01]\.\d\d floors, [01]\.\d\d to [01]\.\d\d\); "
        r"a fault under 0\.023 nats RMS would not have been seen; at your 4,096-token replies a whole answer's "
        r"log-ratio is -\d\.\d ± \d\.\d: sequence-level weights are unusable$",
        said,
    ), said


@pytest.mark.parametrize("what", REPORTS)
def test_no_sentence_denies_a_fault(what: str):
    said = " ".join(sentences(REPORTS[what]()))
    assert said
    assert not re.search(r"no (bug|fault|drift)|correct|healthy|safe", said)


def test_beyond_rounding_names_quantiles_and_positions():
    late = rounding(REPORTS["a late fault"]())
    assert late.startswith("Beyond bf16 rounding: predicted 0.03")
    assert "above the bound: p50 at 2." in late and "positions 64 to 127, 128 to 255" in late
    assert "would not have been seen" not in late
    assert "every stretch of positions" in rounding(REPORTS["a fault"]())


def test_undecided_is_said():
    gates = tuple(
        replace(g, outcome=Outcome.INCONCLUSIVE, why="the interval holds the bound") if g.metric.endswith("p50") else g
        for g in checked().gates
    )
    report = replace(checked(), gates=gates)
    assert floor_outcome(report) is Outcome.INCONCLUSIVE
    assert rounding(report).startswith("Not decided whether this is bf16 rounding: predicted")
    assert "would not have been seen" not in rounding(report)


def test_incomplete_assumed_and_baseline_floors_are_said():
    said = rounding(REPORTS["no floor"]())
    assert said.startswith(
        "Floor incomplete: the sampler keeps its KV cache in fp8, which cannot be emulated; "
        "absolute bounds instead (bf16); at your 4,096-token"
    )
    assert "rounding" not in said and "predicted" not in said
    said = rounding(REPORTS["one kernel"]())
    assert said.startswith("Consistent with assumed bf16 rounding: ")
    assert "floor assumed: one kernel only: sqrt(2) times its own error against float32" in said
    saved = checked().floor
    assert saved is not None
    said = rounding(replace(checked(), floor=replace(saved, source="baseline", why="nightly.json")))
    assert "floor from a saved report: nightly.json" in said


def test_a_floor_that_no_bound_uses_is_shown_and_not_judged():
    assert rounding(REPORTS["plain bounds"]()).startswith("Not judged against the floor of bf16 rounding: predicted")
    withheld = rounding(REPORTS["withheld"]())
    assert withheld.startswith("Not judged against the floor") and "sequence-level" not in withheld


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.0001, "are unusable"),
        (0.00999, "are unusable"),
        (0.01, "are costly (1% of the answers count)"),
        (0.49, "are costly (49% of the answers count)"),
        (0.5, "are usable"),
    ],
)
def test_what_the_gap_does_to_weights(share: float, said: str):
    found = {**checked().context["answer"], "ess_share": share, "drift": -9.5, "spread": 4.4}
    assert answer(at(checked(), answer=found)) == (
        f"at your 4,096-token replies a whole answer's log-ratio is -9.5 ± 4.4: sequence-level weights {said}"
    )


@pytest.mark.parametrize("found", [None, {}, [], "x", {"length": "4", "drift": 1}])
def test_an_answer_that_is_not_there_is_not_said(found: object):
    assert answer(at(checked(), answer=found)) == ""


# -- same function -----------------------------------------------------------------------------------------------------


def test_yes_names_the_kernels_and_what_it_does_not_cover():
    said = same_function(checked().legs)
    assert re.match(
        r"Same function: yes in float32 \(mean \S+e-6, max \S+e-5 over 10,176 tokens; "
        r"on texts mean \S+e-6, max \S+e-5 over 10,176 tokens\); "
        r"kernels of that leg: sampler CPU_ATTN, oneDNN float32, scorer sdpa, mkl float32; TF32 off; "
        r"what production uses instead is not covered by it$",
        said,
    ), said
    facts = {"kernels": "sdpa", "production_kernels": ["flash", "bf16 mkl"]}
    told = other_leg(checked(), "same-function", facts=facts)
    assert "production uses instead (flash, bf16 mkl) is not covered" in same_function(told.legs)


def test_no_names_the_place_and_claims_nothing_else():
    said = same_function(other_function().legs)
    assert said.startswith("Same function: no, in float32 the gap stays (mean ")
    assert said.endswith("first bad token: record prompt-7, position 12")


def test_without_an_answer_there_is_none():
    failed = same_function(REPORTS["float32 failed"]().legs)
    assert failed == "Same function: no answer (out of memory: float32 needs 3.1 GiB, 2.0 GiB are free)"
    legs = [without("same-function", Question.FUNCTION, "engine 'x' has no switch 'dtype'")]
    assert same_function(legs) == "Same function: not asked (engine 'x' has no switch 'dtype')"
    assert same_function([CONTRACT]) == ""
    part = other_leg(checked(), "same-function-texts", ran=Ran.NOT, why="no texts", outcome=None)
    assert "no texts" not in same_function(part.legs) and "yes in float32" in same_function(part.legs)
    part = other_leg(checked(), "same-function-texts", ran=Ran.FAILED, why="too long", outcome=None)
    assert "; same-function-texts failed (too long);" in same_function(part.legs)
    part = other_leg(checked(), "same-function", ran=Ran.NOT, why="one engine", outcome=None)
    assert "; same-function not run (one engine);" in same_function(part.legs)


@pytest.mark.parametrize(("outcome", "said"), [(Outcome.INCONCLUSIVE, "not decided"), (Outcome.ERROR, "no answer")])
def test_the_worse_leg_wins(outcome: Outcome, said: str):
    legs = other_leg(checked(), "same-function-texts", outcome=outcome).legs
    assert same_function(legs).startswith(f"Same function: {said}")


# -- whose gap ---------------------------------------------------------------------------------------------------------


def test_ownership_without_shares():
    found = {"sampler": 0.04, "scorer": 0.03, "against": "hf float32"}
    assert ownership(at(checked(), ownership=found)) == "their errors 0.04 and 0.03 nats RMS against hf float32"


@pytest.mark.parametrize("found", [None, [], "x", {"sampler": 0.1}, {"sampler": "a", "scorer": "b"}])
def test_ownership_that_is_not_there_is_not_said(found: object):
    assert ownership(at(checked(), ownership=found)) == ""
