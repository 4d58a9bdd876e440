"""The difference of two texts: as small as the fault, at its place, and right for any two texts."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.tokens.templates.edits import Edit, around, common_prefix, edits_to_prefix, overlap, shorten

LETTERS = st.text(alphabet="ab<>\n |", max_size=14)

CASES: dict[str, tuple[str, str, list[tuple[int, str, str]]]] = {
    "kept": ("abc", "abcdef", []),
    "dropped": ("q<think>\nx\n</think>\n\n7<|e|>", "q7<|e|>\nnext", [(1, "<think>\nx\n</think>\n\n", "")]),
    "dropped before a tag": ("q<think>x</think><b>7<|e|>", "q<b>7<|e|>\nnext", [(1, "<think>x</think>", "")]),
    "inserted": ("abc def<|e|>", "abc \n\ndef<|e|>", [(4, "", "\n\n")]),
    "stripped on both sides": ("q:  Aye. \n<|e|>", "q:Aye.<|e|>\nnext \n", [(2, "  ", ""), (8, " \n", "")]),
    "replaced": ("one two three<|e|>", "one 2 three<|e|>\n", [(4, "two", "2")]),
    "all gone": ("q reply", "q next question", [(2, "reply", "")]),
    "cut short": ("abcdef", "abc", [(3, "def", "")]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_was_lost_and_put_in(name: str) -> None:
    text, longer, expected = CASES[name]
    assert [(e.at, e.lost, e.inserted) for e in edits_to_prefix(text, longer)] == expected


@given(LETTERS, LETTERS)
def test_the_edits_make_a_beginning_of_the_other_text(text: str, longer: str) -> None:
    edits = edits_to_prefix(text, longer)
    assert (edits == []) == longer.startswith(text)
    out, at = "", 0
    for edit in edits:
        assert edit.at >= at and text[edit.at : edit.at + len(edit.lost)] == edit.lost
        out, at = out + text[at : edit.at] + edit.inserted, edit.at + len(edit.lost)
    assert longer.startswith(out + text[at:])


@given(LETTERS, LETTERS)
def test_common_beginning_and_overlap(a: str, b: str) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n] and (n == min(len(a), len(b)) or a[n] != b[n])
    best = max(k for k in range(min(len(a), len(b)) + 1) if a[len(a) - k :] == b[:k])
    assert overlap(a, b) == best


def test_long_texts_take_little_time() -> None:
    text = " ".join(f"word{i}" for i in range(40_000))
    began = time.monotonic()
    edits = edits_to_prefix("<think>" + text + "</think>7<|e|>", "7<|e|> next")
    assert [e.lost for e in edits] == ["<think>" + text + "</think>"]
    assert (
        edits_to_prefix(text, text.replace("word17 ", "w ").replace("word39999", "w"))[0].at
        == text.index("word17 ") + 1
    )
    assert time.monotonic() - began < 20


def test_words_for_people() -> None:
    assert shorten("x" * 1000, 10) == "xxxxx[... 990 characters ...]xxxxx" and shorten("abc") == "abc"
    assert around("0123456789", 5, 2, 3) == "34567"
    assert Edit(3, "a", "b", 3).to_json() == {"at": 3, "lost": "a", "inserted": "b"}
