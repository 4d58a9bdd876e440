"""Two tokenizers part by part: the same, different (how, in words), or not known; a digest of each on both sides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from onepolicy.tokens import part_words
from onepolicy.tokens.base import PARTS, Part, Tokenizer
from onepolicy.tokens.part_forms import canonical, comparable
from onepolicy.tokens.part_words import Roles

State = Literal["same", "differs", "not known"]
#: Tokens that only fill up a vocabulary: `[PAD151665]`, `<unused12>`, `<|reserved_special_token_3|>`.
FILLER = re.compile(
    r"\[PAD\d+\]|<(unused|dummy|pad|extra_id)_?\d+>|<\|?(reserved|unused|dummy|extra|placeholder)\w*\|?>"
)


@dataclass(frozen=True, slots=True)
class PartRow:
    """One part on both sides, in its one form. `contents`: None where there is none or it is not known."""

    part: str
    state: State
    digests: tuple[str, str]
    words: tuple[str, ...] = ()
    why: str = ""
    contents: tuple[Any, Any] = field(default=(None, None), repr=False)

    @property
    def differs(self) -> bool:
        return self.state == "differs"

    def to_json(self) -> dict[str, Any]:
        """Without the contents, which may be a whole vocabulary."""
        out: dict[str, Any] = {"part": self.part, "state": self.state, "digests": list(self.digests)}
        return out | ({"differences": list(self.words)} if self.words else {}) | ({"why": self.why} if self.why else {})


def compare_parts(a: Tokenizer, b: Tokenizer, roles: Roles = ("sampler", "scorer")) -> dict[str, PartRow]:
    """A row for each of `PARTS`, in their order."""
    found = a.parts(), b.parts()
    missing = Part(known=False, why="this backend says nothing of it")
    left, right = (
        {name: canonical(name, parts.get(name, missing), t) for name in PARTS}
        for parts, t in zip(found, (a, b), strict=True)
    )
    rows = {name: _row(name, left[name], right[name], roles) for name in PARTS}
    rows["vocabulary"] = _vocabulary(rows["vocabulary"], a, b, roles)
    rows["added_tokens"] = _added(rows, a, b, roles)
    rows["template_defaults"] = _defaults(rows, roles)
    return rows


def _row(name: str, a: Part, b: Part, roles: Roles) -> PartRow:
    digests = a.digest, b.digest
    if not a.known or not b.known:
        told = [
            f"{role}: {part.why or 'not known'}" for role, part in zip(roles, (a, b), strict=True) if not part.known
        ]
        return PartRow(name, "not known", digests, why="; ".join(told), contents=(a.content, b.content))
    if a.content == b.content:
        return PartRow(name, "same", digests, contents=(a.content, b.content))
    if not comparable(name, a.content, b.content):
        return PartRow(name, "not known", digests, why="the two sides describe it in other terms")
    said = part_words.words(name, a.content, b.content, roles)
    return PartRow(name, "differs", digests, tuple(said), contents=(a.content, b.content))


def overlap(row: PartRow) -> tuple[float, float]:
    """How much of the larger vocabulary, and of the smaller one, stands in both."""
    a, b = row.contents
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return 1.0, 1.0
    common, sizes = len(a.keys() & b.keys()), sorted((len(a), len(b)))
    return common / max(1, sizes[1]), common / max(1, sizes[0])


def _vocabulary(row: PartRow, a: Tokenizer, b: Tokenizer, roles: Roles) -> PartRow:
    """Tokens that only fill up one side are no difference; tokens in another spelling are compared by their bytes."""
    if not row.differs or not all(isinstance(c, Mapping) for c in row.contents):
        return row
    left, right = row.contents
    if a.BACKEND != b.BACKEND and overlap(row)[1] < 0.5 and _same_bytes(a, b):
        return PartRow(row.part, "same", row.digests, why="spelled otherwise, the same bytes for every id")
    kept = _but_fillers(left, right), _but_fillers(right, left)
    if kept[0] != kept[1]:
        return row
    counts = [len(side) - len(rest) for side, rest in zip(row.contents, kept, strict=True)]
    why = part_words.sides("but for tokens that only fill up the vocabulary", counts, roles)
    return PartRow(row.part, "same", row.digests, why=why, contents=row.contents)


def _but_fillers(side: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {t: i for t, i in side.items() if t in other or not FILLER.fullmatch(t)}


def _same_bytes(a: Tokenizer, b: Tokenizer) -> bool:
    """Whether every id stands for the same bytes on both sides."""
    return a.size == b.size and all(a.token_bytes(i) == b.token_bytes(i) for i in range(a.size))


def _added(rows: Mapping[str, PartRow], a: Tokenizer, b: Tokenizer, roles: Roles) -> PartRow:
    """Flags token by token. `normalized` says nothing where neither side normalizes."""
    row = rows["added_tokens"]
    if not row.differs:
        return row
    idle = rows["normalizer"].state == "same" and rows["normalizer"].contents[0] is None
    flags = [f for f in part_words.FLAGS if f != "normalized" or not idle]
    change = part_words.added_change(a.added, b.added, flags)
    change = {
        t: what for t, what in change.items() if not (FILLER.fullmatch(t) and len(what) == 1 and "only" in what[0])
    }
    if not change:
        return PartRow(row.part, "same", row.digests, why="but for what changes nothing here")
    said = part_words.added_words(a.added, b.added, change, roles)
    return PartRow(row.part, "differs", row.digests, tuple(said), contents=(change, None))


def _defaults(rows: Mapping[str, PartRow], roles: Roles) -> PartRow:
    """Defaults that neither template reads are no difference."""
    row, templates = rows["template_defaults"], [str(c) for c in rows["chat_template"].contents if c]
    if not row.differs or not all(isinstance(c, Mapping | None) for c in row.contents):
        return row
    used = [{k: v for k, v in (c or {}).items() if any(_reads(t, k) for t in templates)} for c in row.contents]
    said = part_words.words(row.part, used[0], used[1], roles)
    if said:
        return PartRow(row.part, "differs", row.digests, tuple(said), contents=(used[0], used[1]))
    return PartRow(row.part, "same", row.digests, why="but for values that no template reads", contents=row.contents)


def _reads(template: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}\b", template) is not None
