"""Ids of texts by their words, each encoded once: several times as fast as encoding, for tokenizers known to allow it.

A text is cut only where every known splitting expression ends a piece whatever stands before and behind: before a
space after a character that is none; and after an ASCII letter or digit before a line end or a punctuation mark (the
apostrophe is none: `'s` belongs to the word before it in some). Nothing merges across such a place, so the ids of the
text are those of its words. A share of the texts is encoded by the library as well, to see that this holds.
"""

from __future__ import annotations

import re
import string
import weakref
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Any

from onepolicy.tokens import patterns
from onepolicy.tokens.base import Tokenizer
from onepolicy.tokens.components import GPT2_PATTERN

#: Words that are remembered; then all are forgotten. About 250 bytes each.
MOST_WORDS = 1 << 18
#: A longer word is encoded each time.
LONGEST = 64
#: So many texts that survive, and that do not, are encoded by the library too at first, then every so-many-th.
TRIED_FIRST, TRIED_EVERY = 16, 128
#: Backends whose own encoding is slower than words, and the characters that they encode before words are worth it.
WORTH = frozenset({"tokenizers", "transformers", "gguf"})
READ_BEFORE = 1 << 21

#: Splitting expressions that end a piece at every cut, by name.
KNOWN: dict[str, str] = {
    "gpt-2": GPT2_PATTERN,
    "cl100k": patterns.CL100K,
    "llama 3": patterns.LLAMA3,
    "qwen 2": patterns.QWEN2,
    "o200k": patterns.O200K,
    "tekken": patterns.TEKKEN,
    "qwen 3.5": patterns.PRE["qwen35"].steps[0],
    "seed": patterns.PRE["seed-coder"].steps[0],
    "deepseek 3": patterns.PRE["deepseek-v3"].steps[2],
}
#: Expressions before one of those that split more, by characters of one kind alone.
BEFORE = frozenset(patterns.PRE["deepseek-v3"].steps[:2]) | {r"\p{N}", r"\p{N}{1,3}"}
_ALNUM = "A-Za-z0-9"


class Words:
    """The words of one tokenizer in one mode, and their ids. `usable` False: its rules are not known to allow it."""

    def __init__(self, pattern: re.Pattern[str] | None) -> None:
        self._pattern, self._ids = pattern, dict[str, list[int]]()
        self._seen = {True: 0, False: 0}

    @property
    def usable(self) -> bool:
        return self._pattern is not None

    def give_up(self) -> None:
        """From now on it is not used: the library does not agree."""
        self._pattern = None

    def to_try(self, same: Sequence[bool]) -> list[int]:
        """Which of the next texts the library should encode as well; `same`: whether their ids survive."""
        out: list[int] = []
        for k, one in enumerate(same):
            n = self._seen[one] = self._seen[one] + 1
            if n <= TRIED_FIRST or n % TRIED_EVERY == 0:
                out.append(k)
        return out

    def ids(self, texts: Sequence[str], encode: Callable[[list[str]], list[list[int]]]) -> list[list[int]]:
        """Ids of each text; `encode` is asked for words that are not known yet, all at once."""
        assert self._pattern is not None
        cut = list(map(self._pattern.findall, texts))
        words = set[str]().union(*cut)
        new = list(words.difference(self._ids))
        if len(self._ids) + len(new) > MOST_WORDS:
            self._ids = {word: self._ids[word] for word in words if word in self._ids}
        self._ids.update(zip(new, encode(new) if new else [], strict=True))
        ids = [list(chain.from_iterable(map(self._ids.__getitem__, one))) for one in cut]
        for word in new:
            if len(word) > LONGEST:
                del self._ids[word]
        return ids


#: tokenizer -> mode -> its words, or how many characters were read without them.
_WORDS: weakref.WeakKeyDictionary[Any, dict[bool, Words | int]] = weakref.WeakKeyDictionary()


def words_of(tokenizer: Tokenizer, characters: int = READ_BEFORE, *, parse_special: bool = True) -> Words | None:
    """The words of a tokenizer, remembered while it lives; None where it has none, or before they are worth it.

    `characters`: how many are about to be read. Describing a tokenizer may take a second, so it comes late.
    """
    if tokenizer.BACKEND not in WORTH:
        return None
    try:
        known = _WORDS.setdefault(tokenizer, {})
    except TypeError:  # cannot be referred to weakly
        return None
    words = known.get(parse_special, 0)
    if isinstance(words, int):
        words = words + characters
        if words >= READ_BEFORE:
            words = Words(word_pattern(tokenizer))
        known[parse_special] = words
    return words if isinstance(words, Words) and words.usable else None


def word_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """An expression whose matches are the words of a text; None where the tokenizer is not known to allow it."""
    part = tokenizer.parts()
    if not _splits(part["pre_tokenizer"]) or not _only_composes(part["normalizer"]):
        return None
    marks = set(string.punctuation) - {"'"}
    for token in tokenizer.added.values():
        text = token.content
        if token.lstrip or token.rstrip or token.single_word or re.search(r"\S\s", text):
            return None
        marks -= {b for a, b in pairwise(text) if a.isalnum()}
    return re.compile(_expression("".join(sorted(marks))))


def _splits(part: Any) -> bool:
    """Whether the splitting ends a piece at every cut."""
    steps = part.content if part.known and isinstance(part.content, list) else []
    found = False
    for step in steps:
        kind = step.get("type")
        if kind == "ByteLevel" and not step.get("add_prefix_space") and not step.get("use_regex"):
            continue
        if kind == "Digits":
            continue
        if kind != "Split" or step.get("behavior") != "Isolated" or step.get("invert"):
            return False
        pattern = (step.get("pattern") or {}).get("Regex")
        if pattern not in BEFORE and pattern not in KNOWN.values():
            return False
        found = found or pattern in KNOWN.values()
    return found


def _only_composes(part: Any) -> bool:
    """Whether there is no normalizer, or one that only composes characters: no cut takes part in it."""
    return part.known and part.content in (None, [], [{"type": "NFC"}])


def _expression(marks: str) -> str:
    """From one cut to the next: white space, other characters, and letters up to a mark, a line end or a space."""
    body = rf"(?:[^\s{_ALNUM}]++(?:[^\S ]\s*+)?+)*+[{_ALNUM}]*+"
    on = rf"(?:(?=[^{_ALNUM}{re.escape(marks)}\s])|[^\S \n]\s*+)"
    return rf"\s*+{body}(?:{on}{body})*+"
