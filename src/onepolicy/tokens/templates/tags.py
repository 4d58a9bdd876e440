"""How templates write thinking: the tags around it, the fields that hold it, and the blocks in a text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

#: opening tag -> closing tag
TAGS: dict[str, str] = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<reason>": "</reason>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "◁think▷": "◁/think▷",
    "<|channel|>analysis<|message|>": "<|end|>",
}
#: fields of a message that hold its thinking, the usual one first
FIELDS: tuple[str, ...] = ("reasoning_content", "reasoning", "thinking", "thought")


@dataclass(frozen=True, slots=True)
class Block:
    """One piece of thinking in a text: [start, stop) with its tags; `inner` without the white space at its edges."""

    start: int
    stop: int
    inner: str


def tags_of(text: str) -> tuple[str, str]:
    """The tags that a template's text names; `<think>` where it names none."""
    opener = next((o for o, c in TAGS.items() if o in text or c in text), "<think>")
    return opener, TAGS[opener]


def blocks(text: str) -> list[Block]:
    """Every closed piece of thinking."""
    return [Block(m.start(), m.end(), next(g for g in m.groups() if g is not None).strip()) for m in _all(text)]


@cache
def _pattern() -> re.Pattern[str]:
    return re.compile("|".join(f"{re.escape(o)}(.*?){re.escape(c)}" for o, c in TAGS.items()), re.DOTALL)


def _all(text: str) -> Any:
    return _pattern().finditer(text)


def ends_open(text: str) -> str:
    """The opening tag that a text ends with, white space aside; "" if it does not."""
    bare = text.rstrip()
    return next((o for o in TAGS if bare.endswith(o)), "")


def ends_closed(text: str) -> str:
    """The closing tag that a text ends with, white space aside."""
    bare = text.rstrip()
    return next(
        (c for c in TAGS.values() if c.startswith(("</", "[/", "◁/", "<|END", "<|end_of")) and bare.endswith(c)), ""
    )


def field_of(message: Mapping[str, Any]) -> str:
    """The thinking that a message holds in a field of its own."""
    return next((message[f] for f in FIELDS if isinstance(message.get(f), str)), "")


def has_tag(text: str) -> bool:
    return any(o in text or c in text for o, c in TAGS.items() if o != "<|channel|>analysis<|message|>")
