"""Public faults as small inputs (`cases/step3_pairs.jsonl`): two tokenizers, and one prompt as two sides read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onepolicy.codes import CODES
from onepolicy.tokens.fast import FastTokenizer
from onepolicy.tokens.pair import PairReport, compare_prompts, compare_tokenizers
from onepolicy.types import Finding, Outcome, Severity

LINES = (Path(__file__).parent / "cases" / "step3_pairs.jsonl").read_text(encoding="utf-8").splitlines()
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in map(json.loads, LINES)}
#: The names of the cases -> our codes.
CODE_OF = {"double-bos": "double-bos", "pre-tokenizer-differs": "pre-tokenizer-differs"}


def given(case: str) -> Any:
    return CASES[case]["input"]


def expected(case: str) -> Any:
    return CASES[case]["expected"]


def seen(findings: list[Finding]) -> list[Finding]:
    """Findings at warn or above."""
    return [f for f in findings if f.severity is not Severity.INFO]


def test_every_case_has_a_row_in_the_table() -> None:
    assert {expected(case)["finding"] for case in CASES} == set(CODE_OF)
    assert set(CODE_OF.values()) <= set(CODES)


# C05


def of_pair(name: str) -> list[Finding]:
    case = given("C05")
    return compare_prompts([p for p in case["pairs"] if p["id"] == name], case["bos_token_id"])


def test_c05_two_bos_tokens_on_one_side() -> None:
    wanted = expected("C05")["pairs"]["double"]
    (found,) = of_pair("double")
    assert (found.code, found.severity.value) == ("double-bos", wanted["verdict"])
    assert found.evidence["bos_count"] == wanted["bos_count"]
    assert found.evidence["equal_after_dropping"] is wanted["equal_after_dropping"]
    assert found.evidence["offset"] == wanted["offset"]
    assert found.evidence["side"] == "engine"
    assert found.place == "prompt double, engine, token 1"


def test_c05_two_bos_tokens_on_both_sides_warn() -> None:
    (found,) = of_pair("both_double")
    assert (found.code, found.severity.value) == ("double-bos", expected("C05")["pairs"]["both_double"]["verdict"])
    assert found.outcome is Outcome.PASS


def test_c05_a_model_without_bos_passes() -> None:
    assert expected("C05")["pairs"]["no_bos_model"]["verdict"] == "pass"
    assert seen(of_pair("no_bos_model")) == []


def test_c05_all_pairs_at_once() -> None:
    found = compare_prompts(given("C05")["pairs"], given("C05")["bos_token_id"])
    assert [(f.evidence["prompt"], f.severity.value) for f in found] == [("double", "fail"), ("both_double", "warn")]


# C07


@pytest.fixture(scope="module")
def pair() -> PairReport:
    case = given("C07")
    sides = [FastTokenizer.from_json(case[name]["tokenizer_json"], name) for name in ("tokenizer_a", "tokenizer_b")]
    return compare_tokenizers(sides[0], sides[1], texts=case["texts"])


def test_c07_the_pre_tokenizer_alone_is_named(pair: PairReport) -> None:
    wanted = expected("C07")
    (found,) = seen(pair.findings)
    assert (found.code, found.severity.value) == (CODE_OF[wanted["finding"]], wanted["verdict"])
    assert found.evidence["class"] == wanted["class"]
    assert found.evidence["vocab_equal"] is wanted["vocab_equal"]
    assert found.evidence["merges_equal"] is wanted["merges_equal"]
    assert "digits: sampler in groups of up to 3 from the left, scorer one by one" in found.evidence["differences"]
    assert found.place == "text 'x=12345', token 2"


def test_c07_counts_and_first_places(pair: PairReport) -> None:
    wanted = expected("C07")
    assert {row.text: list(row.counts) for row in pair.texts} == wanted["counts"]
    assert {row.text: row.first_diff for row in pair.texts} == wanted["first_diff"]
    (found,) = seen(pair.findings)
    assert found.evidence["counts"] == wanted["counts"]
    assert found.evidence["first_diff"] == wanted["first_diff"]


def test_c07_parts_that_are_not_known_are_neither_same_nor_different(pair: PairReport) -> None:
    states = {row.part: row.state for row in pair.parts}
    assert [part for part, state in states.items() if state == "differs"] == ["pre_tokenizer"]
    assert states["vocabulary"] == states["merges"] == states["decoder"] == "same"
    assert states["chat_template"] == states["stop_ids"] == "not known"


@pytest.mark.parametrize("name", ["tokenizer_a", "tokenizer_b"])
def test_c07_each_with_itself_passes(name: str) -> None:
    both = [FastTokenizer.from_json(given("C07")[name]["tokenizer_json"]) for _ in range(2)]
    report = compare_tokenizers(both[0], both[1], texts=given("C07")["texts"])
    assert report.findings == []
    assert report.same_ids
