"""Templates whose text depends on more than the messages: the clock, or chance. And messages that are joined."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

from onepolicy.codes import finding
from onepolicy.tokens.templates.conversations import Conversation, assistant, user
from onepolicy.tokens.templates.edits import around, common_prefix
from onepolicy.tokens.templates.prefix import CLASSES
from onepolicy.tokens.templates.process import TemplateFailure
from onepolicy.tokens.templates.render import FROZEN, ChatTemplate
from onepolicy.types import Finding, Outcome, Severity

_WARN = {"severity": Severity.WARN, "outcome": Outcome.PASS}
_TRIES = 6  # renders that must be equal: two choices agree by chance once in 32


def varying_findings(template: ChatTemplate, names: tuple[str, ...]) -> list[Finding]:
    """A prompt that holds the date (warn), the time or something random (fail). `names`: the template's arguments."""
    talk = [user("What day is it?")]
    texts = [_at(template, timedelta(), talk) for _ in range(_TRIES)]
    if len(set(texts)) > 1:
        return [_varies("random-text", texts[0], next(t for t in texts if t != texts[0]), "Remove the random part.")]
    later = _at(template, timedelta(hours=5, minutes=7, seconds=9), talk)
    if later != texts[0]:
        return [_varies("time-in-prompt", texts[0], later, _clock_advice(names))]
    other_day = _at(template, timedelta(days=400), talk)
    if other_day != texts[0]:
        return [_varies("date-in-prompt", texts[0], other_day, _clock_advice(names), **_WARN)]
    return []


def _at(template: ChatTemplate, later: timedelta, talk: list[dict[str, Any]]) -> str:
    return replace(template, now=FROZEN + later).render(talk, add_generation_prompt=True)


def _clock_advice(names: tuple[str, ...]) -> str:
    name = next((n for n in names if "date" in n.lower() or "time" in n.lower()), "")
    fixed = f"Pass {name!r} as a fixed argument" if name else "Write the date into the system message yourself"
    return f"{fixed}, the same for the whole rollout and for scoring it later; or keep the sampled prompt ids."


def _varies(change: str, a: str, b: str, advice: str, **more: Any) -> Finding:
    first = common_prefix(a, b)
    evidence = {
        "class": change,
        "first_diff_char": first,
        "one_render": around(a, first),
        "another_render": around(b, first),
    }
    text = f"the template {CLASSES[change]}: {around(a, first)!r} and {around(b, first)!r} for the same messages"
    return finding("history-rewritten-by-template", text, place="prompt", evidence=evidence, advice=advice, **more)


def joined_findings(template: ChatTemplate, conversations: list[Conversation]) -> list[Finding]:
    """Tool results that the template joins into one message: what follows a result depends on the next message. Nothing
    is sampled between them, so it matters only to a pipeline that appends one result at a time (warn)."""
    return next(
        ([_joined(c, i, a, b)] for c in conversations for i, a, b in _result_pairs(template, c) if not b.startswith(a)),
        [],
    )


def _result_pairs(template: ChatTemplate, conversation: Conversation) -> Iterator[tuple[int, str, str]]:
    messages = conversation.whole()
    for i in range(1, len(messages)):
        if messages[i - 1]["role"] == messages[i]["role"] == "tool":
            try:
                one = template.render(messages[:i], **conversation.options())
                other = template.render([*messages[:i], assistant("Well.")], **conversation.options())
                if other.startswith(one):  # else what follows the last message is no matter of tool results
                    yield i, one, template.render(messages[: i + 1], **conversation.options())
            except TemplateFailure:
                continue


def _joined(conversation: Conversation, i: int, a: str, b: str) -> Finding:
    first = common_prefix(a, b)
    evidence = {
        "class": "tool-results-merged",
        "conversation": conversation.name,
        "message": i,
        "first_diff_char": first,
        "lost_text": a[first:][:200],
        "inserted_text": b[first:][:200],
    }
    return finding(
        "history-rewritten-by-template",
        f"the template {CLASSES['tool-results-merged']}: {a[first:][:60]!r} after one is gone when another follows",
        place=f"{conversation.name}, message {i}",
        evidence=evidence,
        advice="Append all results of one reply in one step, then render; never one result at a time.",
        **_WARN,
    )
