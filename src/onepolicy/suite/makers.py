"""Long texts from written parts: the same for everyone, with any Python, at any length.

A maker of `data/makers.json` has lines with slots, `‹slot›`, and the phrases that fill them. Lines follow one another
by a seeded draw, in paragraphs of `lines_a_paragraph` lines (0: no paragraphs), each after the maker's `head`. In one
line the same slot is filled alike, slots that differ in a last digit are not; `constant` slots stay for the whole
text. Counters and numbers: `‹count›` (of the line), `‹paragraph›`, `‹year›`, `‹int:2:90›`, `‹pad:0:59›` (as wide as
the highest), `‹hex:12›`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

_SLOT = re.compile(r"‹([^‹›:]+?)(\d?)(?::(\d+))?(?::(\d+))?›")
_FIRST_YEAR = 1600
#: A line comes again after this many others, at the earliest.
_APART = 4


@functools.cache
def source() -> bytes:
    """The file of all parts, for the digest of the suite."""
    return (resources.files("onepolicy.suite") / "data" / "makers.json").read_bytes()


@functools.cache
def makers() -> dict[str, Any]:
    """name -> parts."""
    return json.loads(source())


def text(maker: str, seed: int, characters: int) -> str:
    """At least `characters` of the maker's text; a shorter one is always the beginning of a longer one."""
    parts, length, out = makers()[maker], 0, list[str]()
    for piece in _pieces(parts, _Dice(f"{maker}:{seed}")):
        out.append(piece)
        length += len(piece)
        if length >= characters:
            return "".join(out)
    raise AssertionError("a maker never ends")


class _Dice:
    """Draws that no version of Python changes: each is a hash of the seed and its number."""

    def __init__(self, seed: str) -> None:
        self._seed, self._count = seed, 0

    def below(self, n: int) -> int:
        self._count += 1
        digest = hashlib.blake2b(f"{self._seed}:{self._count}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % n


def _pieces(parts: Mapping[str, Any], dice: _Dice) -> Iterator[str]:
    yield parts.get("opening", "")
    constant = {name: parts["slots"][name][dice.below(len(parts["slots"][name]))] for name in parts["constant"]}
    each, count, recent = parts["lines_a_paragraph"], 0, list[int]()
    while True:
        chosen = dice.below(len(parts["lines"]))
        while chosen in recent:
            chosen = (chosen + 1) % len(parts["lines"])
        recent = [*recent, chosen][-min(_APART, len(parts["lines"]) - 1) :] if len(parts["lines"]) > 1 else []
        first = each > 0 and count % each == 0
        before = "" if count == 0 else "\n\n" if first else parts["between"]
        number = count // each + 1 if each else 0
        counters = {"count": count + 1, "paragraph": number, "year": _FIRST_YEAR + number}
        line = (parts["head"] if first else "") + parts["lines"][chosen]
        yield before + _filled(line, parts["slots"], {**constant, **counters}, dice)
        count += 1


def _filled(line: str, slots: Mapping[str, list[str]], known: Mapping[str, Any], dice: _Dice) -> str:
    chosen: dict[str, str] = {}  # slot as written -> its phrase in this line

    def fill(match: re.Match[str]) -> str:
        name, _, low, high = match.groups()
        if name in ("int", "pad", "hex"):
            return _number(name, int(low), int(high or 0), dice)
        if name in known:
            return str(known[name])
        if match[0] not in chosen:
            free = [phrase for phrase in slots[name] if phrase not in chosen.values()]
            chosen[match[0]] = free[dice.below(len(free))]
        return chosen[match[0]]

    return _SLOT.sub(fill, line)


def _number(kind: str, low: int, high: int, dice: _Dice) -> str:
    if kind == "hex":
        return "".join("0123456789abcdef"[dice.below(16)] for _ in range(low))
    value = low + dice.below(high - low + 1)
    return str(value).zfill(len(str(high))) if kind == "pad" else str(value)
