"""The items of the suite, and how a line of JSON becomes one. A line with a reply is a text to score; one without is
a prompt to draw from.

    {"id": ..., "category": ..., "prompt": "..."}                                    a prompt
    {"id": ..., "category": ..., "messages": [{"role": ..., "content": ...}]}        a prompt, as a chat
    {..., "prompt" or "messages": ..., "reply": "..."}                               a text
    {..., "make": "chronicle", "seed": 7, "tokens": 4096}                            a prompt, made (`makers`)
    {..., "make": "chronicle", "seed": 7, "tokens": 4096, "reply_tokens": 256}       a text, made
    {..., "prompt": "...", "make": "chronicle", "seed": 7, "reply_tokens": 4096}     a text with a made reply

`tokens` counts the whole sequence; "limit" is as long as the model takes. `group` is the cluster, the id by default.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from onepolicy.errors import ContentError, UnknownName
from onepolicy.suite.makers import makers

Prompt = str | list[dict[str, str]]
SIZES = ("smoke", "default", "full")
_KEYS = ("id", "category", "size", "group", "prompt", "messages", "reply", "make", "seed", "tokens", "reply_tokens")
_WANTED = 'wanted {"prompt": text} or {"messages": [{"role": ..., "content": ...}]}, with "reply" for a text to score'


@dataclass(frozen=True, slots=True)
class Made:
    """Text that a maker writes to an exact number of tokens, the same for everyone who has the same seed.

    `tokens`: of the whole sequence, "limit" for as many as the model takes, None where a written prompt comes first.
    """

    maker: str
    seed: int
    tokens: int | Literal["limit"] | None
    reply_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SuitePrompt:
    """To draw from. `prompt` is empty where it is `made`. `size`: the smallest suite that has it."""

    id: str
    category: str
    size: str
    group: str
    prompt: Prompt
    made: Made | None = None


@dataclass(frozen=True, slots=True)
class SuiteText:
    """To score: nothing of it is drawn. `reply` is empty where it is `made`."""

    id: str
    category: str
    size: str
    group: str
    prompt: Prompt
    reply: str
    made: Made | None = None


Item = SuitePrompt | SuiteText


def rows(text: str, name: str) -> Iterator[tuple[str, Any]]:
    """(`name:line`, value) of each line that is not blank. Errors: `ContentError` for a line that is not JSON.

    Lines end at a newline only: JSON may hold U+2028 and U+0085 as they are.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield f"{name}:{number}", json.loads(line)
            except (ValueError, RecursionError) as err:
                raise ContentError(f"{name}:{number}: not JSON: {err}") from None


def item(row: Any, where: str, name: str, category: str) -> Item:
    """`name` and `category` stand in where the row has none. Errors: `ContentError`, one line with `where`."""
    row = {"prompt": row} if isinstance(row, str) else row
    if not isinstance(row, dict):
        raise ContentError(f"{where}: {_WANTED}")
    _refuse_unknown(row, where)
    size = row.get("size", "smoke")
    if size not in SIZES:
        raise ContentError(f"{where}: size: got {size!r}, wanted one of {', '.join(SIZES)}")
    name, category = (_name(row, key, where, other) for key, other in (("id", name), ("category", category)))
    group = _name(row, "group", where, name)
    made = _made(row, where)
    prompt = "" if made is not None and made.tokens is not None else prompt_of(row, where)
    if made is not None and made.reply_tokens:
        return SuiteText(name, category, size, group, prompt, "", made)
    if "reply" in row:
        return SuiteText(name, category, size, group, prompt, _text(row, "reply", where))
    return SuitePrompt(name, category, size, group, prompt, made)


def prompt_of(row: Any, where: str) -> Prompt:
    """The prompt of one row, text or messages. Errors: `ContentError`."""
    if isinstance(row, str):
        return row
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise ContentError(f"{where}: {_WANTED}")
    return _text(row, "prompt", where) if "prompt" in row else _messages(row["messages"], where)


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ContentError(f"{where}: {_WANTED}")
    for turn in value:
        if not isinstance(turn, dict) or not all(isinstance(turn.get(k), str) for k in ("role", "content")):
            raise ContentError(f"{where}: {_WANTED}")
        _text(turn, "content", where)
    return value


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    value = row[key]
    if not isinstance(value, str):
        raise ContentError(f"{where}: {key}: got {json.dumps(value)[:40]}, wanted text; {_WANTED}")
    bad = next((i for i, c in enumerate(value) if "\ud800" <= c <= "\udfff"), None)
    if bad is not None:
        raise ContentError(f"{where}: {key}: half a surrogate pair at character {bad}; it is not Unicode text")
    return value


def _name(row: Mapping[str, Any], key: str, where: str, other: str) -> str:
    value = row.get(key, other)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ContentError(f"{where}: {key}: got {json.dumps(value)[:40]}, wanted a name that can be printed")
    return value


def _refuse_unknown(row: Mapping[str, Any], where: str) -> None:
    """A reply under another key would make a prompt of a text, unnoticed."""
    for key in row:
        if key not in _KEYS and not key.startswith("x_"):
            near = UnknownName("key", key, _KEYS).suggestion
            hint = f"did you mean {near!r}?" if near else f"known: {', '.join(_KEYS)}"
            raise ContentError(f"{where}: unknown key {json.dumps(key)[:40]}; {hint} (keys of your own start with x_)")


def _made(row: Mapping[str, Any], where: str) -> Made | None:
    if "make" not in row:
        stray = [k for k in ("seed", "tokens", "reply_tokens") if k in row]
        if stray:
            raise ContentError(f"{where}: {stray[0]!r} belongs to a text that is made; there is no 'make'")
        return None
    if row["make"] not in list(makers()):
        raise ContentError(f"{where}: make: got {json.dumps(row['make'])[:40]}, wanted one of {', '.join(makers())}")
    written = [k for k in ("prompt", "messages") if k in row]
    if "reply" in row or (written and "tokens" in row):
        raise ContentError(f"{where}: a made text has 'tokens', or a prompt and 'reply_tokens'; never a 'reply'")
    reply = _count(row, "reply_tokens", where, 1 if written else 0)
    tokens = None if written else "limit" if row.get("tokens") == "limit" else _count(row, "tokens", where, reply + 1)
    return Made(row["make"], _count(row, "seed", where, 0), tokens, reply)


def _count(row: Mapping[str, Any], key: str, where: str, least: int) -> int:
    value = row.get(key, 0)
    if type(value) is not int or value < least:
        raise ContentError(f"{where}: {key}: got {json.dumps(value)[:40]}, wanted a number of at least {least}")
    return value
