"""Public faults as small inputs (`cases/step3_stops.jsonl`): stop tokens, suffixes behind them, counts.

C14 here is its counting part: that a column does not count the ids, which end explains it, and that nothing is cut.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onepolicy.codes import CODES
from onepolicy.tokens.assemble import assemble
from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.counts import check_counts
from onepolicy.tokens.masks import check_masks
from onepolicy.tokens.spans import prove_spans
from onepolicy.tokens.spellings import record_of
from onepolicy.tokens.stops import check_stops
from onepolicy.tokens.suffixes import check_suffixes
from onepolicy.types import Finding, Severity

LINES = (Path(__file__).parent / "cases" / "step3_stops.jsonl").read_text(encoding="utf-8").splitlines()
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in map(json.loads, LINES)}

#: The names of the cases -> the codes that stand for them.
CODES_OF: dict[str, str] = {
    "missing-suffix-after-stop-token": "suffix-after-stop-missing",
    "stop-token-not-trained": "stop-token-not-trained",
    "logprob-length-mismatch": "counts-disagree",
}
#: "compare with an absolute tolerance of 2e-3"
NEAR = {"abs": 2e-3}


def given(case: str) -> Any:
    return CASES[case]["input"]


def expected(case: str) -> Any:
    return CASES[case]["expected"]


def record(case: str, name: str) -> TokenRecord:
    row = next(r for r in given(case)["records"] if r["id"] == name)
    return record_of(row, name, f"{case}:{name}")


def seen(findings: list[Finding]) -> list[Finding]:
    """Those at warn or above."""
    return [f for f in findings if f.severity is not Severity.INFO]


def verdict(findings: list[Finding]) -> str:
    weights = {f.severity for f in seen(findings)}
    return "fail" if Severity.FAIL in weights else "warn" if weights else "pass"


def of_code(findings: list[Finding], name: str) -> Finding:
    return next(f for f in findings if f.code == CODES_OF[name])


def test_every_case_has_a_row_in_the_table() -> None:
    assert {expected(case)["finding"] for case in CASES} == set(CODES_OF)
    assert set(CODES_OF.values()) <= set(CODES)


def c04(rollout: list[int] | None = None, rendered: list[int] | None = None) -> list[Finding]:
    case = given("C04")
    return check_suffixes(
        rollout or case["rollout_ids"],
        rendered or case["rendered_ids"],
        stop_ids=case["stop_token_ids"],
        spans=[(a, b) for a, b in case["assistant_spans_in_rollout"]],
        names={int(k): v for k, v in case["names"].items()},
        record_id="C04",
    )


def test_c04_the_newline_after_the_stop_token() -> None:
    findings, wanted = c04(), expected("C04")
    assert verdict(findings) == wanted["verdict"] and len(findings) == 1
    found = of_code(findings, wanted["finding"])
    assert found.evidence["first_diff"] == wanted["first_diff"]
    assert found.evidence["matters_from_turn"] == wanted["matters_from_turn"]
    shown = [
        {k: e[k] for k in ("op", "at_rollout_index", "ids", "harmless") if k in e} for e in found.evidence["edits"]
    ]
    assert shown == wanted["edits"]
    assert found.evidence["minimal"] is True
    assert "insert [3] (['\\\\n']) at 14" in found.message


def test_c04_the_missing_suffix_at_the_very_end_alone_is_no_finding() -> None:
    rendered = given("C04")["rendered_ids"]
    assert c04(rendered[:-1], rendered) == []
    assert c04(rendered, rendered) == []


def c04_turns() -> list[dict[str, list[int]]]:
    ids = given("C04")["rollout_ids"]
    spans = given("C04")["assistant_spans_in_rollout"]
    return [{"prompt_ids": ids[:start], "reply_ids": ids[start:stop]} for start, stop in spans]


def test_c04_the_spans_against_what_would_be_trained() -> None:
    case, (first, second) = given("C04"), given("C04")["assistant_spans_in_rollout"]
    (found,) = prove_spans(c04_turns(), case["rendered_ids"]).findings("C04")
    assert found.code == CODES_OF[expected("C04")["finding"]] and found.severity is Severity.FAIL
    assert found.evidence["at_sequence"] == expected("C04")["first_diff"]
    assert found.evidence["turn"] == expected("C04")["matters_from_turn"] - 1  # turns of a proof count from 0
    out = assemble(c04_turns())  # what was really sampled: no newline that the second turn did not see
    assert out.token_ids == case["rollout_ids"]
    assert [i for i, m in enumerate(out.loss_mask) if m] == [*range(*first), *range(*second)]


def test_c04_with_the_newline_in_the_prompt_it_stands_outside_of_the_mask() -> None:
    first, second = c04_turns()
    ids = given("C04")["rendered_ids"]
    second["prompt_ids"] = ids[:24]
    out = assemble([first, second])
    assert out.token_ids == ids[:-1] and out.loss_mask[expected("C04")["first_diff"]] == 0


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_c12_each_record(name: str) -> None:
    case, wanted = given("C12"), expected("C12")["records"][name]
    findings = check_stops(record("C12", name), eos=case["eos_token_id"], stop_ids=case["stop_token_ids"])
    assert verdict(findings) == wanted["verdict"]
    if wanted["verdict"] == "pass":
        assert not findings
        return
    found = of_code(findings, expected("C12")["finding"])
    assert {k: found.evidence[k] for k in ("stop_position", "mask", "why") if k in wanted} == {
        k: v for k, v in wanted.items() if k != "verdict"
    }


def test_c12_the_masks_and_counts_of_these_records_are_in_order() -> None:
    case = given("C12")
    for row in case["records"]:
        one = record("C12", row["id"])
        assert not check_counts(one, stop_ids=case["stop_token_ids"])
        assert not seen(check_masks(one, stop_ids=case["stop_token_ids"]))


def test_c12_the_test_against_one_eos_is_named() -> None:
    case = given("C12")
    findings = check_stops(record("C12", "b"), eos=case["eos_token_id"], stop_ids=case["stop_token_ids"])
    other = next(f for f in findings if f.code == "wrong-stop-id")
    assert other.severity is Severity.WARN and other.evidence["fully_masked"] is True
    assert (other.evidence["eos"], other.evidence["id"]) == (2, 7)


def test_c14_a_the_stop_token_was_trimmed_from_the_ids_alone() -> None:
    wanted = expected("C14")["records"]["a_stop_trimmed"]
    findings = check_counts(record("C14", "a_stop_trimmed"))
    assert verdict(findings) == wanted["verdict"] and len(findings) == 1
    found = of_code(findings, expected("C14")["finding"])
    assert found.evidence["extra"] == wanted["extra"]
    assert found.evidence["explanation"] == wanted["explanation"]
    assert found.evidence["max_abs_after_drop_tail"] == pytest.approx(wanted["max_abs_after_drop_tail"], **NEAR)
    assert found.evidence["usable"] is False


def test_c14_b_no_end_explains_ids_that_were_encoded_again() -> None:
    wanted = expected("C14")["records"]["b_retokenised"]
    found = of_code(check_counts(record("C14", "b_retokenised")), expected("C14")["finding"])
    assert found.severity is Severity.FAIL and found.evidence["extra"] == wanted["extra"]
    assert found.evidence["explanation"] == wanted["explanation"] and found.evidence["rivals"] == []
    assert found.evidence["max_abs_after_drop_tail"] == pytest.approx(wanted["max_abs_if_cut_to_16"], **NEAR)
    assert found.evidence["usable"] is wanted["usable"]
