"""Content that spells a special token: did it become that token in the prompt, or did it stay text?

A template pastes a message's content between its own control tokens, and an encoder that parses special tokens cannot
tell the two apart: a user can end his own message, and begin one of the system's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onepolicy.codes import finding
from onepolicy.tokens.base import Tokenizer, TokenRecord
from onepolicy.types import Finding, Outcome, Severity

#: Characters beside a spelling by which its place in the prompt is found, and ids that are decoded for them.
_BESIDE, _IDS = 8, 16


@dataclass(frozen=True, slots=True)
class Spelling:
    """`token` is spelled out in message `message` of `role`, at character `at` of `text`."""

    message: int
    role: str
    text: str
    at: int
    token: str


def check_look_alikes(record: TokenRecord, tokenizer: Tokenizer) -> list[Finding]:
    """`special-token-look-alike` for the messages of one record, one finding a special token.

    With prompt ids: a warning where the content became the token (evidence: `position` in the prompt), nothing where
    it stayed text. Without: a note.
    """
    groups: dict[str, list[Spelling]] = {}
    for one in _spellings(record.messages or (), tokenizer):
        groups.setdefault(one.token, []).append(one)
    return [f for token, found in groups.items() if (f := _judged(record, token, found, tokenizer)) is not None]


def _spellings(messages: Sequence[Any], tokenizer: Tokenizer) -> Iterator[Spelling]:
    """Of all messages but the assistant's, whose special tokens may have been sampled."""
    special = [t.content for t in tokenizer.added.values() if t.special and t.content.strip()]
    for i, message in enumerate(messages):
        role = str(message.get("role")) if isinstance(message, Mapping) else "assistant"
        for text in () if role == "assistant" else _texts(message.get("content")):
            for token in special:
                at = text.find(token)
                while at >= 0:
                    yield Spelling(i, role, text, at, token)
                    at = text.find(token, at + len(token))


def _texts(content: Any) -> list[str]:
    """A content's texts: it is one, or a list of parts."""
    if isinstance(content, str):
        return [content]
    parts: list[Any] = content if isinstance(content, list) else []
    return [p["text"] for p in parts if isinstance(p, Mapping) and isinstance(p.get("text"), str)]


def _judged(record: TokenRecord, token: str, found: list[Spelling], tokenizer: Tokenizer) -> Finding | None:
    first, ids = found[0], record.prompt_ids
    token_id = next(i for i, t in tokenizer.added.items() if t.content == token)
    if ids is not None and (token_id not in ids or _kept_as_text(ids, token, tokenizer) >= len(found)):
        return None
    places = ((one, _position(ids or (), token_id, one, tokenizer)) for one in found)
    one, at = next(((one, p) for one, p in places if p is not None), (first, None))
    said = f"{record.record_id}: message {one.message} ({one.role}) spells {token!r} at character {one.at}"
    evidence: dict[str, Any] = {"class": "in-content", "token": token, "id": token_id, "times": len(found)}
    evidence |= {"message": one.message, "role": one.role, "character": one.at}
    if at is None:
        note = {"severity": Severity.INFO, "outcome": Outcome.PASS}
        text = f"{said}: an encoder that parses special tokens takes it for one"
        return finding("special-token-look-alike", text, place=record.place, evidence=evidence, **note)
    evidence |= {"class": "became-a-token", "position": at, "in_prompt": (ids or []).count(token_id)}
    text = f"{said}, and the prompt has it as the control token {token_id}, at position {at}"
    return finding("special-token-look-alike", text, place=record.place, evidence=evidence)


def _kept_as_text(ids: Sequence[int], token: str, tokenizer: Tokenizer) -> int:
    """How often the ids spell the token in other tokens."""
    count, run = 0, b""
    for i in [*ids, None]:
        if i is None or i in tokenizer.added:
            count, run = count + run.count(token.encode()), b""
        else:
            run += tokenizer.token_bytes(i) or b""
    return count


def _position(ids: Sequence[int], token_id: int, one: Spelling, tokenizer: Tokenizer) -> int | None:
    """Where the token stands between the texts that stand around it in its message."""
    end = one.at + len(one.token)
    before, after = one.text[max(0, one.at - _BESIDE) : one.at], one.text[end : end + _BESIDE]
    for p in (i for i, x in enumerate(ids) if x == token_id and (before or after)):
        head, tail = tokenizer.decode([list(ids[max(0, p - _IDS) : p]), list(ids[p + 1 : p + 1 + _IDS])])
        if head.endswith(before) and tail.startswith(after):
            return p
    return None
