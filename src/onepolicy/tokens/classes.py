"""Why ids change on the way ids -> text -> ids: one class for each differing stretch.

A stretch is a run of sampled ids and the run of re-encoded ids that stands in its place (`explain_difference`). The
rules are tried in order; the first that holds names the class.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from onepolicy.tokens.base import AddedToken, Tokenizer

#: class -> what it is, in words for a report.
CLASSES: dict[str, str] = {
    "outside-vocabulary": "ids that the tokenizer does not have",
    "special-token-look-alike": "plain text that spells a special token becomes that token",
    "special-token-spelled-out": "a special token becomes plain text",
    "special-token-skipped": "a special token is missing",
    "special-token-doubled": "a special token stands there once more",
    "special-token-added": "a special token is put around the text",
    "added-token-white-space": "an added token eats or adds the white space beside it",
    "byte-fallback": "the same bytes, as byte tokens on one side",
    "same-tokens-other-ids": "the same pieces of text under other ids",
    "other-segmentation": "the same text in other pieces",
    "unknown-token": "text that the vocabulary cannot spell becomes the unknown token",
    "incomplete-utf8-at-end": "the text ends inside a character",
    "incomplete-utf8-inside": "bytes that are no UTF-8 inside the text",
    "prefix-space": "a space at the beginning is added or lost",
    "normalizer": "the text is normalised before it is split",
    "merged-across-join": "a token merges across the join of prompt and reply",
    "other-text": "a truly different text",
    "text-of-other-ids": "the record's text is not the text of its ids",
    "stop-token-not-in-text": "the text lacks the special tokens at the end of the ids",
    "text-normalised": "the record's text is that of its ids after a normalisation",
    "text-cleaned-up": "the record's text lacks spaces before punctuation (clean_up_tokenization_spaces)",
    "text-stripped": "the record's text lacks white space at its ends",
    "part-of-text": "the record's text is a part of the text of its ids",
    "end-not-decoded": "the record's text lacks the incomplete character at the end of its ids",
    "characters-lost-in-strings": "token strings with U+FFFD or nothing in place of parts of characters, and no ids",
    "characters-in-bytes": "token strings with U+FFFD or nothing in place of parts of characters, with their bytes",
}
#: The text is the same, only cut otherwise: what normal sampling does.
SAME_TEXT = frozenset({"other-segmentation", "byte-fallback", "same-tokens-other-ids"})

#: Changes of a text that tokenizers make before they split it, by name.
FORMS: dict[str, Callable[[str], str]] = {
    "NFC": lambda text: unicodedata.normalize("NFC", text),
    "NFD": lambda text: unicodedata.normalize("NFD", text),
    "NFKC": lambda text: unicodedata.normalize("NFKC", text),
    "NFKD": lambda text: unicodedata.normalize("NFKD", text),
    "lower case": str.lower,
    "accents": lambda text: "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c)),
    "lower case and accents": lambda text: FORMS["accents"](text).lower(),
    "white space": lambda text: " ".join(text.split()),
    "NFKC and white space": lambda text: " ".join(unicodedata.normalize("NFKC", text).split()),
    "control characters": lambda text: "".join(c for c in text if unicodedata.category(c) not in ("Cc", "Cf")),
}


def form(before: str, after: str) -> str | None:
    """The name of the change that makes `before` into `after`, None if it is none of `FORMS`."""
    exact = (name for name, change in FORMS.items() if change(before) == after)
    alike = (name for name, change in FORMS.items() if change(before) == change(after))
    return next(exact, None) or next(alike, None)


@dataclass(slots=True, weakref_slot=True)
class Facts:
    """What the rules ask of a tokenizer, looked up once. `bytes_of` never fails: an id without bytes has none."""

    tokenizer: Tokenizer
    _bytes: dict[int, bytes] = field(default_factory=dict[int, bytes])
    _switches: dict[str, bool] = field(default_factory=dict[str, bool])

    @property
    def added(self) -> Mapping[int, AddedToken]:
        return self.tokenizer.added

    def bytes_of(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._looked_up(token_id)
        return known

    def _looked_up(self, token_id: int) -> bytes:
        if token_id in self.added:
            return self.added[token_id].content.encode("utf-8", "surrogatepass")
        return (self.tokenizer.token_bytes(token_id) if self.has(token_id) else None) or b""

    def has(self, token_id: int) -> bool:
        return 0 <= token_id < self.tokenizer.size and self.tokenizer.exists(token_id)

    def is_unknown(self, token_id: int) -> bool:
        return token_id == self.tokenizer.special_ids().get("unk")

    @property
    def byte_fallback(self) -> bool:
        return self._switch("byte_fallback", lambda: _model_switch(self.tokenizer, "byte_fallback"))

    @property
    def normalizes(self) -> bool:
        """Whether it is known to change texts before it splits them."""
        return self._switch("normalizer", lambda: self.tokenizer.parts()["normalizer"].content is not None)

    def _switch(self, name: str, read: Callable[[], bool]) -> bool:
        if name not in self._switches:
            self._switches[name] = read()
        return self._switches[name]


def _model_switch(tokenizer: Tokenizer, name: str) -> bool:
    content = tokenizer.parts()["model"].content
    return isinstance(content, Mapping) and any(name in str(key) and value for key, value in content.items())


@dataclass(frozen=True)
class Stretch:
    """Sampled ids `a` and what the re-encoding has in their place, `b`; the ids beside them, None at an end.

    `broken`: the sampled bytes here are no UTF-8: "end" or "inside", else "".
    """

    a: list[int]
    b: list[int]
    a_side: Facts
    b_side: Facts
    before: int | None = None
    after: int | None = None
    at_start: bool = False
    broken: str = ""

    @cached_property
    def a_bytes(self) -> bytes:
        return b"".join(map(self.a_side.bytes_of, self.a))

    @cached_property
    def b_bytes(self) -> bytes:
        return b"".join(map(self.b_side.bytes_of, self.b))

    @cached_property
    def texts(self) -> tuple[str, str]:
        return self.a_bytes.decode("utf-8", "replace"), self.b_bytes.decode("utf-8", "replace")

    @property
    def same_bytes(self) -> bool:
        return self.a_bytes == self.b_bytes

    @cached_property
    def specials(self) -> tuple[list[str], list[str]]:
        """Added tokens on each side, by their text."""
        a = [self.a_side.added[i].content for i in self.a if i in self.a_side.added]
        b = [self.b_side.added[i].content for i in self.b if i in self.b_side.added]
        return a, b

    @cached_property
    def only_space_differs(self) -> bool:
        a, b = ("".join(text.split()) for text in self.texts)
        return a == b and self.texts[0] != self.texts[1]  # bytes that are no UTF-8 are one text: U+FFFD


def classify(stretch: Stretch) -> tuple[str, str]:
    """(class, detail) of one stretch. The detail is a few words, or empty."""
    for rule in _RULES:
        if (found := rule(stretch)) is not None:
            return found
    return "other-text", ""


Found = tuple[str, str] | None


def _outside(s: Stretch) -> Found:
    bad = [i for i in s.a if not s.a_side.has(i)]
    return ("outside-vocabulary", f"ids {bad[:8]}") if bad else None


def _special(s: Stretch) -> Found:
    """More or fewer added tokens on one side than on the other."""
    a, b = s.specials
    more = next((content for content in b if b.count(content) > a.count(content)), None)
    fewer = next((content for content in a if a.count(content) > b.count(content)), None)
    if more is not None and more in s.texts[0]:
        return "special-token-look-alike", repr(more)
    if fewer is not None and s.same_bytes:
        return "special-token-spelled-out", repr(fewer)
    if fewer is not None and fewer not in s.texts[1]:
        return "special-token-skipped", repr(fewer)
    if more is not None and not _is_unknown(s, more):
        return ("special-token-doubled" if more in _beside(s) else "special-token-added"), repr(more)
    return None


def _is_unknown(s: Stretch, content: str) -> bool:
    return any(s.b_side.is_unknown(i) for i in s.b if i in s.b_side.added and s.b_side.added[i].content == content)


def _beside(s: Stretch) -> list[str]:
    ids = (i for i in (s.before, s.after) if i is not None)
    return [s.b_side.added[i].content for i in ids if i in s.b_side.added] + s.specials[0]


def _eaten(s: Stretch) -> Found:
    """White space beside an added token, which is inside the stretch or next to it."""
    if s.texts[0].strip() and not any(s.specials) and (found := _prefix(s)) is not None:
        return found  # an added token behind a text does not eat what stands before it
    beside = _beside(s)
    if s.only_space_differs and beside:
        return "added-token-white-space", repr(beside[0])
    return None


def _same_text(s: Stretch) -> Found:
    if not s.same_bytes or not s.a or not s.b:
        return None
    a, b = [s.a_side.bytes_of(i) for i in s.a], [s.b_side.bytes_of(i) for i in s.b]
    as_bytes = a == b or any(len(x) == 1 and x[0] > 0x7F for x in (*a, *b))
    if as_bytes and (s.a_side.byte_fallback or s.b_side.byte_fallback):
        return "byte-fallback", ""
    return ("same-tokens-other-ids", "") if a == b else ("other-segmentation", "")


def _unknown(s: Stretch) -> Found:
    unknown = any(map(s.b_side.is_unknown, s.b)) and not any(map(s.a_side.is_unknown, s.a))
    return ("unknown-token", repr(s.texts[0][:20])) if unknown else None


def _broken(s: Stretch) -> Found:
    return ("incomplete-utf8-at-end" if s.broken == "end" else "incomplete-utf8-inside", "") if s.broken else None


def _prefix(s: Stretch) -> Found:
    a, b = s.texts
    if s.at_start and a.lstrip() == b.lstrip() and a != b:
        return "prefix-space", "added" if len(b) > len(a) else "lost"
    return None


def _normalized(s: Stretch) -> Found:
    name = form(*s.texts)
    if name is not None:
        return "normalizer", name
    return ("normalizer", "") if s.b_side.normalizes and s.b else None


_RULES: tuple[Callable[[Stretch], Found], ...] = (
    _outside,
    _special,
    _eaten,
    _same_text,
    _unknown,
    _broken,
    _prefix,
    _normalized,
)


def plain(value: Any) -> Any:
    """A dataclass's dict without what is empty, for JSON."""
    return {k: v for k, v in value.items() if v not in (None, "", [], (), {})}
