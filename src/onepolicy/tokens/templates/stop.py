"""What a template puts after a reply: the stop token, and what comes between it and the next turn.

The text after the stop token (a newline, in ChatML) is not sampled. A rollout that holds sampled ids only lacks it,
and every later turn is shifted: `suffix_after_stop` says what to add.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from onepolicy.tokens.templates.conversations import assistant, user
from onepolicy.tokens.templates.edits import common_prefix
from onepolicy.tokens.templates.render import ChatTemplate

#: Spellings of control tokens, for where no tokenizer says which there are.
SPELLED = re.compile(r"<\|[^<>|\s]{1,40}\|>|<｜[^<>｜]{1,40}｜>|</s>|<(?:end|eos|eot)[a-z_]*>|\[/?[A-Z_]{2,20}\]")
_ENDS = re.compile(r"end|eos|eot|stop|return|</", re.IGNORECASE)
_ASK, _REPLY, _NEXT = "Qzw1?", "Zqx7.", "Wvk3!"


@dataclass(frozen=True, slots=True)
class StopText:
    """`stop`: the stop token's text, "" where none was found. `before`: what the template writes between the reply and
    it. `suffix`: what it writes after it, before the next turn begins. `how`: `given`, `eos_token`, `special token`,
    `spelling`, or `none`. `last_only`: text that stands after a reply only as long as it is the last message."""

    stop: str = ""
    before: str = ""
    suffix: str = ""
    how: str = "none"
    last_only: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "stop": self.stop,
            "before_stop": self.before,
            "suffix_after_stop": self.suffix,
            "known_by": self.how,
            "last_message_only": self.last_only,
        }


def find_stop(template: ChatTemplate, *, given: Iterable[str] = (), specials: Iterable[str] = ()) -> StopText:
    """The stop text of a template. `given`: texts of the engine's stop tokens; `specials`: special tokens' texts.

    Errors: `TemplateFailure` where it cannot render one question and one reply.
    """
    talk = [user(_ASK), assistant(_REPLY)]
    last = _after(template.render(talk), _REPLY)
    more = _middle(template, talk)
    tail = last if more is None or more.startswith(last) else more
    both = last if more is None else last[: _shared(last, more)]
    ranks = [("given", set(given)), ("eos_token", _eos(template)), ("special token", set(specials))]
    stop, at, how = _first_of(both, ranks, spelled=True)  # else text of the last message only might be taken for it
    if not stop:
        stop, at, how = _first_of(last, ranks, spelled=True)
    if not stop and more is not None:
        stop, at, how = _first_of(more, ranks[:2], spelled=False)
        last, tail = (more, more) if stop else (last, tail)
    only = "" if more is None or more.startswith(last) else last[_shared(last, more) :]
    if not stop:
        return StopText(suffix=last if only == "" else "", last_only=only)
    after = last[at + len(stop) :]
    if last is more or (only and tail.startswith(last[: at + len(stop)])):  # the next turn's header stands behind it
        after = _white(tail[at + len(stop) :])
    return StopText(stop, last[:at], after, how, only)


def suffix_after_stop(template: ChatTemplate, *, given: Iterable[str] = (), specials: Iterable[str] = ()) -> str:
    """What the template writes after the stop token of a reply, before the next turn; "" if nothing.

    Errors: as `find_stop`.
    """
    return find_stop(template, given=given, specials=specials).suffix


def _shared(last: str, more: str) -> int:
    """Length of the common beginning, without half a control token at its end."""
    n = common_prefix(last, more)
    open_at = [m.start() for text in (last, more) for m in SPELLED.finditer(text) if m.start() < n < m.end()]
    return min(open_at, default=n)


def _eos(template: ChatTemplate) -> set[str]:
    eos = template.variables.get("eos_token")
    return {eos} if isinstance(eos, str) and eos else set()


def _middle(template: ChatTemplate, talk: list[dict[str, Any]]) -> str | None:
    """What stands between the reply and the next question's text; None where the template renders no next question."""
    text = _after(template.render([*talk, user(_NEXT)]), _REPLY)
    return text.split(_NEXT)[0] if _NEXT in text else None


def _after(text: str, word: str) -> str:
    return text[text.rindex(word) + len(word) :] if word in text else ""


def _first_of(text: str, ranks: list[tuple[str, set[str]]], *, spelled: bool) -> tuple[str, int, str]:
    """The known stop token that stands first; what the caller gave wins over what is only likely."""
    for how, names in ranks:
        found = [(text.find(n), -len(n), n) for n in names if n and n in text and (how != "special token" or spelled)]
        if found:
            at, _, name = min(found)
            return name, at, how
    hits = list(SPELLED.finditer(text)) if spelled else []
    hit = next((h for h in hits if _ENDS.search(h.group())), hits[0] if hits else None)
    return (hit.group(), hit.start(), "spelling") if hit else ("", 0, "none")


def _white(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]
