"""Public faults as small inputs (`cases/step3_roundtrip.jsonl`): sampled ids against their text and their log-probs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onepolicy.codes import CODES
from onepolicy.tokens.fast import FastTokenizer
from onepolicy.tokens.fidelity import TokenFidelityError, assert_token_fidelity
from onepolicy.tokens.lag import lag_findings
from onepolicy.tokens.roundtrip import round_trip
from onepolicy.tokens.spellings import record_of
from onepolicy.types import Finding, Outcome, Severity

LINES = (Path(__file__).parent / "cases" / "step3_roundtrip.jsonl").read_text(encoding="utf-8").splitlines()
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in map(json.loads, LINES)}

#: The names of the cases -> the codes that stand for them.
CODES_OF = {
    "retokenization-drift": "retokenization-drift",
    "incomplete-utf8": "incomplete-utf8",
    "logprob-length-mismatch": "counts-disagree",
}
VERDICTS = {"fail": Severity.FAIL, "warn": Severity.WARN}
NEAR = {"abs": 2e-3}


def given(case: str) -> Any:
    return CASES[case]["input"]


def expected(case: str) -> Any:
    return CASES[case]["expected"]


def found(case: str, reencodes: bool | None = None) -> list[Finding]:
    tokenizer = FastTokenizer.from_json(given(case)["tokenizer"]["tokenizer_json"])
    return round_trip(given(case)["records"], tokenizer).findings(reencodes)


def of_record(findings: list[Finding], name: str) -> list[Finding]:
    return [f for f in findings if f.evidence.get("record_id") == name]


def test_every_case_has_a_row_in_the_table() -> None:
    assert {expected(case)["finding"] for case in CASES} == set(CODES_OF)
    assert set(CODES_OF.values()) <= set(CODES)


def test_c01_sampled_ids_that_their_text_does_not_encode_to() -> None:
    wanted = expected("C01")["records"]["drift"]
    findings = found("C01", reencodes=True)
    (f,) = of_record(findings, "drift")
    assert (f.code, f.severity, f.outcome) == (CODES_OF["retokenization-drift"], Severity.FAIL, Outcome.DRIFT)
    assert list(f.evidence["reencoded_ids"]) == wanted["reencoded_ids"]
    for name in ("text_equal", "first_diff", "sampled_len", "reencoded_len"):
        assert f.evidence[name] == wanted[name]
    assert f.evidence["class"] == "other-segmentation"
    assert not of_record(findings, "control") and len(findings) == 1


def test_c01_is_a_note_where_nothing_is_known_of_the_pipeline() -> None:
    (f,) = found("C01")
    assert (f.code, f.severity, f.outcome) == ("noncanonical-ids", Severity.INFO, Outcome.PASS)


def test_c01_nobody_is_told_of_two_tokenizers_or_shorter_log_probs() -> None:
    for f in (*found("C01"), *found("C01", True)):
        assert f.code != "texts-encode-differently"
        assert "tokenizer" not in f.message and "log-prob" not in f.message
        assert "filter" not in f.advice or "do not filter" in f.advice


def test_c01_the_assertion_names_record_class_and_place() -> None:
    tokenizer = FastTokenizer.from_json(given("C01")["tokenizer"]["tokenizer_json"])
    with pytest.raises(TokenFidelityError, match=r"1 of 2 replies .*record drift, reply, position 0: .*other-segm"):
        assert_token_fidelity(given("C01")["records"], decode_with=tokenizer)


def test_c09_strings_in_place_of_ids_hold_no_characters() -> None:
    wanted = expected("C09")["records"]["strings_only"]
    (f,) = of_record(found("C09"), "strings_only")
    assert (f.code, f.severity) == (CODES_OF["incomplete-utf8"], VERDICTS[wanted["verdict"]])
    for name in ("ids_recoverable", "bad_positions", "true_ids"):
        assert f.evidence[name] == wanted[name]


def test_c09_a_reply_that_is_cut_inside_a_character() -> None:
    wanted = expected("C09")["records"]["cut"]
    (f,) = of_record(found("C09"), "cut")
    assert (f.code, f.severity) == (CODES_OF["incomplete-utf8"], VERDICTS[wanted["verdict"]])
    assert f.evidence["class"] == "incomplete-utf8-at-end"
    assert list(f.evidence["reencoded_ids"]) == wanted["reencoded_ids"]
    for name in ("first_diff", "sampled_len", "reencoded_len", "dangling_tokens"):
        assert f.evidence[name] == wanted[name]


def lag_of(name: str) -> Finding:
    (row,) = [r for r in given("C14")["records"] if r["id"] == name]
    (f,) = lag_findings(record_of(row, name))
    assert (f.code, f.severity) == (CODES_OF["logprob-length-mismatch"], Severity.FAIL)
    return f


def test_c14_a_stop_token_that_was_trimmed_from_the_ids() -> None:
    wanted = expected("C14")["records"]["a_stop_trimmed"]
    evidence = lag_of("a_stop_trimmed").evidence
    assert (evidence["extra"], evidence["explanation"]) == (wanted["extra"], wanted["explanation"])
    assert evidence["pieces"] == [{"from_id": 0, "to_id": 16, "lag": 0, **sizes(evidence["pieces"][0])}]
    assert evidence["pieces"][0]["max_abs"] == pytest.approx(wanted["max_abs_after_drop_tail"], **NEAR)


def test_c14_ids_that_were_encoded_again() -> None:
    wanted = expected("C14")["records"]["b_retokenised"]
    finding = lag_of("b_retokenised")
    evidence = finding.evidence
    assert (evidence["extra"], evidence["explanation"]) == (wanted["extra"], wanted["explanation"])
    assert evidence["usable"] is wanted["usable"]
    assert evidence["max_abs_if_cut"] == pytest.approx(wanted["max_abs_if_cut_to_16"], **NEAR)
    first, rest = evidence["pieces"]
    assert (first["from_id"], first["to_id"], first["lag"]) == (0, 7, 0)
    assert first["max_abs"] == pytest.approx(wanted["max_abs_first_7"], **NEAR)
    assert (rest["from_id"], rest["to_id"], rest["lag"]) == (wanted["lag1_fits_from_id"], 16, 1)
    assert rest["max_abs"] == pytest.approx(wanted["max_abs_with_lag1_from_id_8"], **NEAR)
    assert "never cut" in finding.advice


def sizes(piece: dict[str, Any]) -> dict[str, Any]:
    return {name: piece[name] for name in ("max_abs", "mean_abs")}
