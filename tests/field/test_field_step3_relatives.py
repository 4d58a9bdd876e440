"""Relatives of the public token faults (`cases/step3_relatives.jsonl`), written for this project in the same forms.

Each case has its healthy neighbours: a finding is right, at the right place, with the right numbers, and alone. Cases
carry their tokenizer in short (`merges`, `specials`, flags) for a byte-level BPE whose ids 0..255 are the bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onepolicy.codes import CODES
from onepolicy.same_tokens import check_chat_template, check_rollouts, check_tokenizers, check_two_templates
from onepolicy.tokens.fast import FastTokenizer
from onepolicy.types import Finding, Outcome, Severity, TokenReport

LINES = (Path(__file__).parent / "cases" / "step3_relatives.jsonl").read_text(encoding="utf-8").splitlines()
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in map(json.loads, LINES)}
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
VERDICTS = {Severity.FAIL: "fail", Severity.WARN: "warn", Severity.INFO: "pass"}


def of_form(*forms: str) -> list[str]:
    return [name for name, case in CASES.items() if case["input"]["form"] in forms]


def alphabet() -> dict[int, str]:
    """Byte -> the letter that byte-level BPE writes for it."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {**{b: chr(b) for b in plain}, **{b: chr(256 + k) for k, b in enumerate(others)}}


def spelled(text: str) -> str:
    return "".join(alphabet()[b] for b in text.encode())


def tokenizer(spec: dict[str, Any] | None, name: str = "tokenizer") -> FastTokenizer | None:
    """A byte-level BPE: bytes, then merges, then special tokens in order."""
    if spec is None:
        return None
    letters = alphabet()
    vocab = {letters[b]: b for b in range(256)}
    merges = [[spelled(a), spelled(b)] for a, b in spec["merges"]]
    vocab |= {a + b: 256 + k for k, (a, b) in enumerate(merges)}
    flags = spec.get("flags", {})
    specials = [
        {"id": len(vocab) + k, "content": s, **FLAGS, **flags.get(s, {})} for k, s in enumerate(spec["specials"])
    ]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": spec.get("prefix", False),
        "trim_offsets": True,
        "use_regex": True,
    }
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": specials,
        "normalizer": spec.get("normalizer"),
        "pre_tokenizer": level,
        "post_processor": None if "bos" not in spec else in_front(spec["bos"], specials),
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    return FastTokenizer.from_json(content, name)


def in_front(token: str, specials: list[dict[str, Any]]) -> dict[str, Any]:
    token_id = next(s["id"] for s in specials if s["content"] == token)
    one = {"SpecialToken": {"id": token, "type_id": 0}}
    texts = [{"Sequence": {"id": x, "type_id": 0}} for x in "AB"]
    known = {token: {"id": token, "ids": [token_id], "tokens": [token]}}
    return {"type": "TemplateProcessing", "single": [one, texts[0]], "pair": [one, *texts], "special_tokens": known}


def loud(report: TokenReport) -> list[Finding]:
    """Findings at warn or above."""
    return [f for f in report.findings if f.severity is not Severity.INFO]


def verdict(report: TokenReport) -> str:
    found = {VERDICTS[f.severity] for f in report.findings}
    return next((v for v in ("fail", "warn") if v in found), "pass")


def has(evidence: Any, wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        got = evidence[name]
        assert (list(got) if isinstance(got, tuple) else got) == value, (name, got, value)


def judged(case: str, name: str, **more: Any) -> TokenReport:
    given = CASES[case]["input"]
    return check_rollouts(
        [row for row in given["records"] if row["id"] == name], tokenizer(given.get("tokenizer")), **more
    )


def test_every_finding_of_the_cases_is_a_code() -> None:
    records = [r for case in CASES.values() for r in case["expected"].get("records", {}).values()]
    named = {x["finding"] for x in (*records, *(case["expected"] for case in CASES.values())) if "finding" in x}
    assert named <= set(CODES) and len(CASES) >= 40


RECORDS = [
    (case, name) for case in of_form("records", "tokenizer+records") for name in CASES[case]["expected"]["records"]
]


@pytest.mark.parametrize(("case", "name"), RECORDS, ids=lambda x: str(x))
def test_one_record(case: str, name: str) -> None:
    wanted = CASES[case]["expected"]["records"][name]
    report = judged(case, name)
    assert verdict(report) == wanted["verdict"], report.findings
    codes = [wanted["finding"]] if "finding" in wanted else []
    assert sorted({f.code for f in loud(report)}) == sorted({*codes, *wanted.get("also", [])})
    if codes:
        found = next(f for f in loud(report) if f.code == codes[0])
        has(found.evidence, wanted.get("evidence", {}))
        assert name in f"{found.place} {found.message}" or found.place.startswith("record 1")


AGAIN = [(case, name) for case in of_form("tokenizer+records") for name in CASES[case]["expected"].get("reencodes", {})]


@pytest.mark.parametrize(("case", "name"), AGAIN, ids=lambda x: str(x))
def test_one_record_where_the_pipeline_encodes_again(case: str, name: str) -> None:
    wanted = CASES[case]["expected"]["reencodes"][name]
    report = judged(case, name, reencodes=True)
    assert verdict(report) == wanted["verdict"], report.findings
    if "finding" in wanted:
        assert {(f.code, f.evidence["class"]) for f in loud(report)} == {(wanted["finding"], wanted["class"])}


@pytest.mark.parametrize("case", of_form("records", "tokenizer+records"))
def test_all_records_of_a_case_at_once(case: str) -> None:
    given, wanted = CASES[case]["input"], CASES[case]["expected"]["records"]
    report = check_rollouts(given["records"], tokenizer(given.get("tokenizer")))
    together = CASES[case]["expected"].get("together", {})
    codes = {r["finding"] for r in (*wanted.values(), together) if "finding" in r}
    codes |= {c for r in wanted.values() for c in r.get("also", [])}
    assert {f.code for f in loud(report)} == codes
    told = " ".join(f"{f.message} {f.place} {f.evidence.get('examples', '')}" for f in loud(report))
    for name in (name for name, r in wanted.items() if "finding" in r):
        assert name in told


@pytest.mark.parametrize("case", of_form("id-lists"))
def test_ids_of_a_rollout_against_those_that_are_rendered(case: str) -> None:
    wanted = CASES[case]["expected"]
    report = check_rollouts([{"id": case, **CASES[case]["input"]}])
    assert verdict(report) == wanted["verdict"], report.findings
    assert {f.code for f in loud(report)} == ({wanted["finding"]} if "finding" in wanted else set())
    if loud(report):
        has(loud(report)[0].evidence, {k: wanted[k] for k in ("class", "first_diff", "matters_from_turn")})
        assert case in loud(report)[0].message


@pytest.mark.parametrize("case", [name for name in CASES if "together" in CASES[name]["expected"]])
def test_what_only_several_records_show(case: str) -> None:
    """A tail that prompts of several lengths lack is no cut."""
    wanted = CASES[case]["expected"]["together"]
    report = check_rollouts(CASES[case]["input"]["records"])
    found = next(f for f in loud(report) if f.code == wanted["finding"])
    has(found.evidence, {k: v for k, v in wanted.items() if k != "finding"})


@pytest.mark.parametrize("case", of_form("two-tokenizers"))
def test_two_tokenizers(case: str) -> None:
    given, wanted = CASES[case]["input"], CASES[case]["expected"]
    a, b = (tokenizer(given[f"tokenizer_{x}"], x) for x in "ab")
    assert a is not None and b is not None
    report = check_tokenizers(a, b, texts=given["texts"])
    assert verdict(report) == wanted["verdict"], report.findings
    assert {t["text"]: t["first_diff"] for t in report.details["pair"]["texts"]} == wanted["first_diff"]
    assert {f.code for f in loud(report)} == ({wanted["finding"]} if "finding" in wanted else set())
    if "class" in wanted:
        assert loud(report)[0].evidence["class"] == wanted["class"]


@pytest.mark.parametrize("case", of_form("template+messages"))
def test_a_template(case: str) -> None:
    given, wanted = CASES[case]["input"], CASES[case]["expected"]
    own = [{"turns": given["turns"]}]
    made = tokenizer(given.get("tokenizer"))
    report = check_chat_template(given["template"], made, conversations=own, with_built_in=False)
    if wanted["verdict"] == "open":
        assert report.outcome is Outcome.INCONCLUSIVE and report.findings[0].code == wanted["finding"]
        return
    assert verdict(report) == wanted["verdict"], report.findings
    seen = [f for f in loud(report) if f.code == wanted.get("finding")]
    assert bool(seen) is ("finding" in wanted)
    if seen and "class" in wanted:
        assert wanted["class"] in {f.evidence["class"] for f in seen}
    has(report.details["template"] | {}, {"own_prefix_preserving": wanted.get("prefix_preserving", {})})
    has(seen[0].evidence if seen else {}, {k: wanted[k] for k in ("lost_text", "first_diff_char") if k in wanted})


@pytest.mark.parametrize("case", [c for c in of_form("template+messages") if CASES[c]["expected"]["verdict"] == "pass"])
def test_a_healthy_template_passes_with_the_built_in_conversations_too(case: str) -> None:
    given = CASES[case]["input"]
    report = check_chat_template(
        given["template"], tokenizer(given.get("tokenizer")), conversations=[{"turns": given["turns"]}]
    )
    assert report.outcome is Outcome.PASS, report.findings


@pytest.mark.parametrize("case", of_form("two-templates"))
def test_two_templates(case: str) -> None:
    given, wanted = CASES[case]["input"], CASES[case]["expected"]
    report = check_two_templates(given["template_a"], given["template_b"])
    assert verdict(report) == wanted["verdict"]
    assert {f.code for f in loud(report)} == ({wanted["finding"]} if "finding" in wanted else set())
    if "first_diff_char" in wanted:
        assert loud(report)[0].evidence["first_diff_char"] == wanted["first_diff_char"]
