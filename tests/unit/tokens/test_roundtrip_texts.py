"""Texts of records against their ids, records without ids, and token strings in place of ids."""

from __future__ import annotations

from typing import Any

import pytest

from onepolicy.tokens.roundtrip import round_trip
from onepolicy.tokens.roundtrip_texts import TEXT_CLASSES
from onepolicy.types import Severity
from small_tokenizers import byte_bpe, words

THINK, END, EOS = "<think>", "</think>", "<|eos|>"


@pytest.fixture(scope="module")
def bpe() -> Any:
    return byte_bpe(["o k"], [THINK, END, EOS])


@pytest.mark.parametrize(
    ("ids_of", "text", "cls"),
    [
        ("ok fine<|eos|>", "ok fine<|eos|>", "equal"),
        ("ok fine<|eos|>", "ok fine", "stop-token-not-in-text"),
        ("<think>ok</think> fine<|eos|>", "ok fine", "special-token-skipped"),
        (" ok fine \n", "ok fine", "stripped"),
        ("ok , fine .", "ok, fine.", "clean-up"),
        ("<think>hm</think>fine", "fine", "part-of-text"),
        ("ok fine STOP", "ok fine", "part-of-text"),
        ("cafe\u0301", "caf\u00e9", "normalizer"),
        ("ok fine", "something else", "other-text"),
    ],
)
def test_what_a_text_is_to_its_ids(bpe: Any, ids_of: str, text: str, cls: str) -> None:
    found = round_trip([{"response_ids": bpe.encode([ids_of])[0], "response_text": text}], bpe)
    assert found.texts == {cls: 1}
    assert cls in TEXT_CLASSES


def test_an_incomplete_character_that_the_engine_held_back(bpe: Any) -> None:
    found = round_trip([{"response_ids": [*b"ok ", 0xF0, 0x9F], "response_text": "ok "}], bpe)
    assert found.texts == {"end-not-decoded": 1}


def test_a_text_without_its_stop_token_is_no_finding_unless_it_is_encoded_again(bpe: Any) -> None:
    found = round_trip([{"response_ids": bpe.encode(["ok<|eos|>"])[0], "response_text": "ok"}], bpe)
    assert found.findings() == []
    assert [(f.code, f.severity) for f in found.findings(True)] == [("special-tokens-lost", Severity.WARN)]


def test_special_tokens_inside_that_the_text_lacks(bpe: Any) -> None:
    row = {"id": "a", "response_ids": bpe.encode(["<think>ok</think> fine"])[0], "response_text": "ok fine"}
    (finding,) = round_trip([row], bpe).findings()
    assert (finding.code, finding.severity) == ("special-tokens-lost", Severity.WARN)
    assert (finding.evidence["first_diff"], finding.evidence["class"]) == (0, "special-token-skipped")


def test_a_text_of_other_ids(bpe: Any) -> None:
    row = {"id": "a", "response_ids": bpe.encode(["ok fine"])[0], "response_text": "ok then"}
    (finding,) = round_trip([row], bpe).findings()
    assert (finding.code, finding.place) == ("text-of-other-ids", "record a, text, position 3")


def test_records_without_ids_go_from_text_to_text(bpe: Any) -> None:
    rows = [{"text": "ok \ufffd 日本 <|eos|>"}, {"prompt": "say ok", "text": "\n  ok"}]
    found = round_trip(rows, bpe)
    assert not found.groups
    assert found.checked == {"reply text": 2, "prompt text": 1}
    assert found.n_without_ids == 2


def test_a_text_that_the_tokenizer_does_not_keep() -> None:
    tokenizer = words(["one", "two"], normalizer={"type": "Lowercase"})
    found = round_trip([{"id": "a", "text": "one TWO"}, {"id": "b", "text": "one three"}], tokenizer)
    classes = {cls: g.examples[0]["record_id"] for (_, cls, _), g in found.groups.items()}
    assert classes == {"normalizer": "a", "other-text": "b"}
    example = found.groups["reply text", "normalizer", ""].examples[0]
    assert (example["first_diff"], example["detail"]) == (4, "lower case")
    assert {f.code for f in found.findings()} == {"text-not-kept"}


def test_nothing_but_null_texts(bpe: Any) -> None:
    found = round_trip([{"id": "a", "text": None, "response_ids": None}], bpe)
    assert (found.n_records, found.checked, found.groups) == (1, {}, {})


def strings(bpe: Any, text: str | None, tokens: list[str], data: Any = None) -> dict[str, Any] | None:
    row = {"text": text, "token_strings": tokens, "token_bytes": data}
    groups = [g for (part, _, _), g in round_trip([row], bpe).groups.items() if part == "token strings"]
    return groups[0].examples[0] if groups else None


def test_strings_that_hold_every_character(bpe: Any) -> None:
    assert strings(bpe, "ok 日", ["ok", " ", "日"]) is None
    assert strings(bpe, "ok", ["ok", ""]) is None  # a stop token without text


def test_replacement_characters_name_no_ids(bpe: Any) -> None:
    got = strings(bpe, "ok é", ["ok", " ", "\ufffd", "\ufffd"])
    assert got is not None
    assert (got["bad_positions"], got["ids_recoverable"]) == ([2, 3], False)
    assert got["true_ids"] == bpe.encode(["ok é"])[0]


def test_empty_strings_before_the_character_that_swallowed_them(bpe: Any) -> None:
    got = strings(bpe, "ok 😊!", ["ok", " ", "", "", "", "😊", "!"])
    assert got is not None and got["bad_positions"] == [2, 3, 4, 5]
    assert got["true_ids"] == bpe.encode(["ok 😊!"])[0]


def test_true_bytes_beside_broken_strings(bpe: Any) -> None:
    tokens = ["ok", "\ufffd", "\ufffd"]
    got = strings(bpe, "oké", tokens, [[111, 107], [0xC3], [0xA9]])
    assert got is not None and (got["ids_recoverable"], got["class"]) == (True, "characters-in-bytes")
    got = strings(bpe, "oké", tokens, [[111, 107], [239, 191, 189], [239, 191, 189]])
    assert got is not None and (got["ids_recoverable"], got["class"]) == (False, "characters-lost-in-strings")


def test_ids_of_a_text_that_was_sampled_otherwise_are_not_called_true(bpe: Any) -> None:
    got = strings(bpe, "ok é", ["o", "k", " ", "\ufffd", "\ufffd"])
    assert got is not None and "true_ids" not in got
    assert got["text_ids"] == bpe.encode(["ok é"])[0]
    got = strings(bpe, "ok \ufffd", ["ok", " ", "\ufffd"])
    assert got is not None and "true_ids" not in got and "text_ids" not in got
