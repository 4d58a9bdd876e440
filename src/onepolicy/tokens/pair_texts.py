"""The same texts through two tokenizers: which give other ids, from where on, and what kind of stretch it is.

Compared in bulk; only texts that differ are looked at closely.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

from onepolicy.tokens.base import Tokenizer
from onepolicy.tokens.probes import LOOK_ALIKE, class_of, class_of_change

Pair = tuple[Tokenizer, Tokenizer]
_CHUNK = 1024  # texts that are encoded at once
_AROUND = 3  # tokens shown on either side of a place
_SHOWN = 160  # characters of a text that are shown


@dataclass(frozen=True, slots=True)
class TextRow:
    """One text through both tokenizers. `counts`: tokens on each side. `first_diff`: the index of the first id that
    differs, None where all are the same. `kind`: what differs there, one of `KINDS`; `place`: the class of the stretch
    (`probes.class_of`); `around`: the tokens there as text, by side."""

    text: str
    group: str
    counts: tuple[int, int]
    first_diff: int | None = None
    kind: str = ""
    place: str = ""
    around: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))

    @property
    def same(self) -> bool:
        return self.first_diff is None

    def to_json(self, roles: tuple[str, str]) -> dict[str, Any]:
        """For evidence: counts in the order of the roles, tokens by role."""
        shown = self.text if len(self.text) <= _SHOWN else self.text[: _SHOWN - 1] + "…"
        out: dict[str, Any] = {"text": shown, "counts": list(self.counts), "first_diff": self.first_diff}
        if self.same:
            return out
        return out | {"class": self.place, "kind": self.kind, "around": dict(zip(roles, self.around, strict=True))}


#: What can differ at a place.
KINDS: dict[str, str] = {
    "ids": "the same pieces of text have other ids",
    "cuts": "the same text is cut otherwise",
    "bytes": "the text itself is changed otherwise before it is cut",
    "added": "an added token is matched on one side only, or eats white space on one side only",
}


class Pieces:
    """The bytes of tokens on both sides, each asked for once.

    A server is asked in one batch, and cannot show a part of a character: where the other side has a token of that id
    which looks the same, it is taken for the same.
    """

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self._known: tuple[dict[int, bytes], dict[int, bytes]] = ({}, {})

    def of(self, side: int, ids: Sequence[int]) -> list[bytes]:
        """The bytes of each id on that side (0 or 1)."""
        known = self._known[side]
        if missing := sorted({*ids} - known.keys()):
            known |= zip(missing, self._asked(side, missing), strict=True)
        return [known[i] for i in ids]

    def _asked(self, side: int, ids: list[int]) -> list[bytes]:
        tokenizer, other = self.pair[side], self.pair[1 - side]
        if tokenizer.BACKEND != "server":
            return [_bytes(tokenizer, i) for i in ids]
        alike = [None if other.BACKEND == "server" else other.token_bytes(i) for i in ids]
        shown = tokenizer.decode([[i] for i in ids])
        return [_borrowed(text, data) for text, data in zip(shown, alike, strict=True)]


def _borrowed(text: str, other: bytes | None) -> bytes:
    """A server's token by its text; by the other side's bytes where they read the same but for spaces at the ends."""
    same = other is not None and other.decode("utf-8", "replace").strip() == text.strip()
    return other if same and other is not None else text.encode()


def _bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    found = tokenizer.token_bytes(token_id)
    if found is None:
        found = tokenizer.decode([[token_id]])[0].encode() if tokenizer.exists(token_id) else b""
    return found


def compare_texts(pair: Pair, texts: Iterable[str], group: str, pieces: Pieces | None = None) -> Iterator[TextRow]:
    """A row for each text, in order. `group`: the class of the probes, or `given` for a user's texts. `pieces`: what is
    known of the two sides' tokens, from one call to the next."""
    rest, known = iter(texts), pieces or Pieces(pair)
    while chunk := list(islice(rest, _CHUNK)):
        encoded = list(zip(chunk, pair[0].encode(chunk), pair[1].encode(chunk), strict=True))
        unlike = [(a, b) for _, a, b in encoded if a != b]
        for side in (0, 1):
            known.of(side, [i for ids in unlike for i in ids[side]])
        for text, a, b in encoded:
            yield TextRow(text, group, (len(a), len(b))) if a == b else _differing(known, text, group, a, b)


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """Index of the first id that differs; the shorter length where one begins with the other; None if equal."""
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return None if at == len(a) == len(b) else at


def tokens_as_text(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Each token alone as text; bytes that are no UTF-8 as U+FFFD."""
    return [_bytes(tokenizer, i).decode("utf-8", "replace") for i in ids]


def _differing(known: Pieces, text: str, group: str, a: list[int], b: list[int]) -> TextRow:
    at = first_difference(a, b) or 0
    pieces = known.of(0, a), known.of(1, b)
    kind, place = _kind_and_place(known.pair, text, (a, b), pieces)
    start = max(0, at - _AROUND)
    near = [[p.decode("utf-8", "replace") for p in side[start : at + _AROUND + 1]] for side in pieces]
    return TextRow(text, group, (len(a), len(b)), at, kind, place, (near[0], near[1]))


def _kind_and_place(
    pair: Pair, text: str, ids: tuple[list[int], list[int]], pieces: tuple[list[bytes], list[bytes]]
) -> tuple[str, str]:
    if pieces[0] == pieces[1]:
        at = first_difference(*ids) or 0
        return "ids", _of_token(pair, ids, at, b"".join(pieces[0][at : at + 1]))
    joined = b"".join(pieces[0]), b"".join(pieces[1])
    found = [_added_in(pair, ids[side], pieces[side]) for side in (0, 1)]
    if found[0] != found[1] or _spaces_beside(joined, found[0]):
        return "added", "special look-alikes"
    if joined[0] != joined[1]:
        return "bytes", _of_change(text, *joined)
    return "cuts", _of_cut(pieces)


def _of_token(pair: Pair, ids: tuple[list[int], list[int]], at: int, data: bytes) -> str:
    if any(i in t.added for t, side in zip(pair, ids, strict=True) for i in side[at : at + 1]):
        return "special look-alikes"
    return class_of(data.decode("utf-8", "replace"))


def _added_in(pair: Pair, ids: list[int], pieces: list[bytes]) -> list[str]:
    """The added tokens of a text, by either side's list: a server has none to show."""
    out: list[str] = []
    for token_id, data in zip(ids, pieces, strict=True):
        named = [t.added[token_id].content for t in pair if token_id in t.added]
        out += [content for content in named if content.encode() == data][:1]
    return out


def _spaces_beside(joined: tuple[bytes, bytes], found: list[str]) -> bool:
    """Whether the two texts differ in nothing but white space beside added tokens."""
    if not found or joined[0] == joined[1] or _leads(*joined):
        return False
    return _but_spaces(joined[0], found) == _but_spaces(joined[1], found)


def _but_spaces(data: bytes, contents: list[str]) -> list[bytes]:
    """What stands between added tokens, without the white space at its ends."""
    out: list[bytes] = []
    for content in contents:
        head, _, data = data.partition(content.encode())
        out.append(head.strip())
    return [*out, data.strip()]


def _leads(a: bytes, b: bytes) -> bool:
    """Whether one side has only a space more, in front."""
    return a == b" " + b or b == b" " + a


def _of_change(text: str, a: bytes, b: bytes) -> str:
    """The class of the first place where the two sides' texts differ, by a character or two of each."""
    if _leads(a, b):
        return "leading space"
    left, right = a.decode("utf-8", "replace"), b.decode("utf-8", "replace")
    at = first_difference(left, right) or 0
    at = max(0, at - 1) if _mark_follows(left, right, at) else at
    if any(m.start() <= at < m.end() for m in LOOK_ALIKE.finditer(text)):
        return "special look-alikes"
    return class_of_change(_cluster(left, at), _cluster(right, at))


def _mark_follows(left: str, right: str, at: int) -> bool:
    """Whether the place is a mark that belongs to the letter before it."""
    return any(unicodedata.combining(side[at]) for side in (left, right) if at < len(side))


def _cluster(text: str, at: int) -> str:
    """A character with its marks."""
    end = at + 1
    while end < len(text) and unicodedata.combining(text[end]):
        end += 1
    return text[at:end]


def _of_cut(pieces: tuple[list[bytes], list[bytes]]) -> str:
    """The class of the stretch from the first place that is cut otherwise to where both sides cut again."""
    ends = [list(accumulate(map(len, side))) for side in pieces]
    both, one = set(ends[0]) & set(ends[1]), set(ends[0]) ^ set(ends[1])
    apart = min(one, default=0)  # no cut on one side only: a token without bytes stands there
    start = max((end for end in both if end < apart), default=0)
    stop = min((end for end in both if end > apart), default=None)
    data = b"".join(pieces[0])
    start, stop = _whole(data, start, -1), None if stop is None else _whole(data, stop, 1)
    return class_of(data[start:stop].decode("utf-8", "replace"))


def _whole(data: bytes, at: int, step: int) -> int:
    """The next place in that direction where a character begins."""
    while 0 < at < len(data) and data[at] & 0xC0 == 0x80:
        at += step
    return at
