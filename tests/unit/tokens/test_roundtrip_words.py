"""Ids by words are the library's ids: every splitting expression that is allowed, on texts made to break it."""

from __future__ import annotations

import gc
import json
import random
import weakref
from typing import Any

import pytest

from onepolicy.tokens import words as room
from onepolicy.tokens.fast import FastTokenizer
from onepolicy.tokens.patterns import PRE, Pre, pre_tokenizer
from onepolicy.tokens.roundtrip import round_trip
from onepolicy.tokens.words import KNOWN, Words, word_pattern, words_of
from small_tokenizers import byte_bpe
from tokenizer_families import BYTES, PIECES, opened, texts, tiny_json

#: What splitting expressions tell apart, and what Python and they may see otherwise.
LETTERS = (
    *" \n\t\r'`.,;:!?/\\|_<>[](){}-+=*&^%$#@~\"abcXYZ019sStTdDmM",
    *("\u0301", "é", "ß", "日", "本", "。", "\u00a0", "\u2028", "\u180e", "\u200b", "\x1c", "\x85", "😊"),
    *("\u0e01\u0e31", "¹", "½", "Ⅳ", "ǅ", "\ufffd", "\u3000", "·", "'s", "'ll"),
)
PARTS = (
    "hello",
    "World",
    "12",
    "3456",
    "  ",
    "\n\n",
    " a",
    "/",
    "\n/",
    "<|im_end|>",
    "<s>",
    "</s>",
    "<think>",
    "[INST]",
)


def odd_texts(n: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    return [
        "".join(rng.choice(LETTERS if rng.random() < 0.7 else PARTS) for _ in range(rng.randint(1, 24)))
        for _ in range(n)
    ]


def by_words(tokenizer: Any, given: list[str]) -> list[list[int]]:
    return Words(word_pattern(tokenizer)).ids(given, tokenizer.encode)


@pytest.mark.parametrize("family", BYTES)
def test_real_families(family: str) -> None:
    tokenizer = opened(family)
    given = [*odd_texts(1000, 3), *texts()]
    assert by_words(tokenizer, given) == tokenizer.encode(given)


@pytest.mark.parametrize("before", [(), PRE["deepseek-v3"].steps[:2]], ids=["alone", "after digits"])
@pytest.mark.parametrize("name", KNOWN)
def test_every_expression(name: str, before: tuple[str, ...]) -> None:
    content = json.loads(tiny_json().read_text())
    content["pre_tokenizer"] = pre_tokenizer(Pre((*before, KNOWN[name])))
    content["normalizer"] = {"type": "NFC"}
    tokenizer = FastTokenizer.from_json(content)
    given = odd_texts(3000, 7)
    assert by_words(tokenizer, given) == tokenizer.encode(given)


@pytest.mark.parametrize("family", PIECES)
def test_tokenizers_without_splitting_are_left_alone(family: str) -> None:
    assert word_pattern(opened(family)) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "NFKC"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}},
        {"pre_tokenizer": pre_tokenizer(Pre((r"[a-z]+ ?",)))},
        {"specials": ["a b"]},
        {"specials": [("<m>", {"lstrip": True})]},
        {"specials": [("<m>", {"rstrip": True})]},
        {"specials": [("m", {"single_word": True})]},
    ],
    ids=lambda changed: str(changed)[:60],
)
def test_rules_that_reach_across_a_cut_are_refused(changed: dict[str, Any]) -> None:
    assert word_pattern(byte_bpe(["a b"])) is not None
    assert word_pattern(byte_bpe(["a b"], **changed)) is None


def test_words_are_the_text() -> None:
    pattern = word_pattern(opened("smollm2"))
    assert pattern is not None
    for text in [*odd_texts(500, 1), *texts()]:
        assert "".join(pattern.findall(text)) == text
    assert pattern.findall("def f(x):\n    return x.y")[:4] == ["def", " f", "(x", "):\n    return"]


def test_a_special_token_is_not_cut() -> None:
    pattern = word_pattern(byte_bpe((), ["<|im_end|>", "</s>"]))
    assert pattern is not None
    assert pattern.findall("hi<|im_end|>so</s>") == ["hi", "<|im_end|>so", "</s>", ""]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_WORDS", 50)
    tokenizer = opened("tiny")
    words = Words(word_pattern(tokenizer))
    for k in range(20):
        given = [f"word{k} other{i} same" + "x" * 100 for i in range(10)]
        assert words.ids(given, tokenizer.encode) == tokenizer.encode(given)
    assert len(words._ids) <= 50
    assert max(map(len, words._ids)) <= room.LONGEST


class Liar:
    """A tokenizer whose description is not what it does: `abc` at the end of a text is one token more."""

    def __init__(self) -> None:
        self.true = byte_bpe(["a b", "ab c"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.true, name)

    def encode(self, given: list[str], **how: Any) -> list[list[int]]:
        return [[*ids, 0] if text.endswith("abc def") else ids for ids, text in self._encoded(given, how)]

    def _encoded(self, given: list[str], how: Any) -> Any:
        return zip(self.true.encode(given, **how), given, strict=True)


def test_a_library_that_disagrees_is_believed() -> None:
    tokenizer: Any = Liar()
    assert words_of(tokenizer) is not None
    found = round_trip([{"response_ids": tokenizer.true.encode(["abc def"])[0]}], tokenizer)
    assert found.differing["reply"] == 1
    assert words_of(tokenizer) is None


def test_words_go_with_their_tokenizer() -> None:
    tokenizer = byte_bpe(["a b"])
    assert words_of(tokenizer) is words_of(tokenizer)
    assert words_of(tokenizer) is not words_of(tokenizer, parse_special=False)
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None


def test_little_text_is_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "READ_BEFORE", 100)
    tokenizer = byte_bpe(["a b"])
    assert [words_of(tokenizer, 40) is None for _ in range(4)] == [True, True, False, False]
