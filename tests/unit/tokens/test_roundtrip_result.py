"""Results merge over chunks, survive JSON, keep few examples, and judge by what is known of the pipeline."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onepolicy.codes import CODES
from onepolicy.tokens.reading import RecordStream
from onepolicy.tokens.roundtrip import check_chunk, round_trip, way
from onepolicy.tokens.roundtrip_result import EXAMPLES, RECORD_SAYS, RULES, RoundTrip
from onepolicy.types import Outcome, Severity
from small_tokenizers import byte_bpe


@pytest.fixture(scope="module")
def bpe() -> Any:
    return byte_bpe(["h e", "l l", "he ll", "hell o"], ["<|eos|>"])


def rows(n: int) -> list[dict[str, Any]]:
    """Every second reply is not canonical, every fifth is cut inside a character."""
    out = []
    for k in range(n):
        reply = list(b"hello") if k % 2 else [259, *str(k).encode()]
        out.append({"id": f"r{k}", "prompt_ids": [104, 105], "response_ids": reply + [0xF0] * (k % 5 == 4)})
    return out


@pytest.mark.parametrize("max_tokens", [1, 7, 50, 10_000])
def test_chunks_of_any_size_give_one_result(bpe: Any, max_tokens: int) -> None:
    whole = round_trip(rows(40), bpe).as_json()
    assert round_trip(RecordStream(rows(40), max_tokens=max_tokens), bpe).as_json() == whole


def test_it_survives_json(bpe: Any) -> None:
    found = round_trip(rows(12), bpe)
    again = RoundTrip.from_json(json.loads(json.dumps(found.as_json())))
    assert json.dumps(again.as_json()) == json.dumps(found.as_json())
    assert [f.message for f in again.findings(True)] == [f.message for f in found.findings(True)]
    again += found
    assert again.n_records == 24


def test_examples_are_few_and_counts_are_all(bpe: Any) -> None:
    found = round_trip(rows(200), bpe)
    group = found.groups["reply", "other-segmentation", ""]
    assert (group.n, len(group.examples)) == (100, EXAMPLES)
    assert group.examples[0]["record_id"] == "r1"
    assert found.differing == {"prompt": 0, "reply": 120, "join": 0}
    assert found.directions == {"ids->text->ids": 120}


def test_directions_are_told_apart() -> None:
    tokenizer = byte_bpe(normalizer={"type": "NFC"})
    found = round_trip(
        [{"response_ids": list("cafe\u0301".encode())}, {"text": "cafe\u0301"}, {"text": "ok"}], tokenizer
    )
    assert found.directions == {"ids->text->ids": 1, "text->ids->text": 2}
    assert found.checked == {"reply": 1, "reply text": 2}
    assert found.n_without_ids == 2


def test_findings_are_one_a_part_and_class_in_the_order_of_suspicion(bpe: Any) -> None:
    given = [*rows(10), {"id": "far", "response_ids": [9999]}]
    found = round_trip(given, bpe).findings(True)
    assert [(f.code, f.evidence["class"]) for f in found] == [
        ("unknown-ids", "outside-vocabulary"),
        ("retokenization-drift", "other-segmentation"),
        ("incomplete-utf8", "incomplete-utf8-at-end"),
    ]
    assert found[1].evidence["records"] == 5
    assert found[1].message.startswith("5 of 11 replies: the same text in other pieces: 'h|e|l|l' becomes 'hello'")
    assert all(f.outcome is Outcome.DRIFT for f in found)
    assert json.dumps([dict(f.evidence) for f in found])


def test_severity_by_what_is_known() -> None:
    found = RoundTrip(checked={"reply": 1})
    example = {"record_id": "a", "first_diff": 0}
    for cls in RULES:
        found.add("reply", cls, example)
    unknown, again, keeps = (
        {f.evidence["class"]: f.severity for f in found.findings(how)} for how in (None, True, False)
    )
    always = {"outside-vocabulary", "characters-lost-in-strings"}
    assert {cls for cls, severity in unknown.items() if severity is Severity.FAIL} == always
    assert {cls for cls, severity in keeps.items() if severity is not Severity.INFO} == always
    lost_in_text = {"stop-token-not-in-text", "text-stripped", "part-of-text", "end-not-decoded", "characters-in-bytes"}
    assert {cls for cls, severity in again.items() if severity is not Severity.FAIL} == lost_in_text
    assert set(unknown) == set(RULES) - (lost_in_text - {"characters-in-bytes"})
    assert set(again) == set(RULES)
    assert {f.code for f in found.findings()} <= set(CODES)


def test_what_the_record_says_counts_only_where_nothing_else_is_known() -> None:
    found = RoundTrip(checked={"reply": 1})
    found.add("reply", "other-segmentation", {"record_id": "a", "first_diff": 0}, RECORD_SAYS)
    severities = [found.findings(how)[0].severity for how in (None, True, False)]
    assert severities == [Severity.FAIL, Severity.FAIL, Severity.INFO]


def test_a_chunk_can_be_checked_alone(bpe: Any) -> None:
    records = list(RecordStream(rows(4)).records())
    assert check_chunk(records, way(bpe)).checked == {"prompt": 4, "reply": 4, "join": 4}
    assert check_chunk([], way(bpe)).as_json() == RoundTrip().as_json()
    told: list[int] = []
    round_trip(RecordStream(rows(6), max_tokens=1), bpe, progress=lambda so_far: told.append(so_far.n_records))
    assert told == [1, 2, 3, 4, 5, 6]
