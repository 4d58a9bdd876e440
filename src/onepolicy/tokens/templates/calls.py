"""What a template makes of tool calls that are handed to it: arguments as an object, and as a JSON text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onepolicy.codes import finding
from onepolicy.tokens.templates.conversations import Conversation
from onepolicy.tokens.templates.edits import common_prefix, shorten
from onepolicy.tokens.templates.process import TemplateFailure
from onepolicy.tokens.templates.render import ChatTemplate
from onepolicy.tokens.templates.tool_calls import CALL_CLASSES, CallChange, argument_fate
from onepolicy.types import Finding, Outcome, Severity

_FAIL: Mapping[str, Any] = {"severity": Severity.FAIL, "outcome": Outcome.DRIFT}


@dataclass(frozen=True, slots=True)
class CallResult:
    """One call. `way`: `object` or `text`. `status`: `kept`, `changed`, `own format`, `not rendered`, `refused`."""

    conversation: Conversation
    way: str
    name: str
    status: str
    why: str = ""
    change: CallChange | None = None


def call_results(template: ChatTemplate, conversations: Iterable[Conversation]) -> list[CallResult]:
    """Every call of every conversation that has any, where no sampled text says what the call was."""
    out: list[CallResult] = []
    for conversation in conversations:
        messages = conversation.whole()
        for i, message in enumerate(messages):
            known = bool(conversation.turns) or i in conversation.sampled
            if message["role"] == "assistant" and message.get("tool_calls") and i and not known:
                out.extend(_reply(template, conversation, i))
    return out


def _reply(template: ChatTemplate, conversation: Conversation, i: int) -> Iterator[CallResult]:
    messages, options = conversation.whole(), conversation.options()
    calls = list(_calls(messages[i]))
    try:
        before = template.render(messages[:i], **options)
        whole = template.render(messages[: i + 1], **options)
    except TemplateFailure as failure:
        yield from (CallResult(conversation, way, name, "refused", str(failure)) for name, way, _ in calls)
        return
    rendered = whole[common_prefix(before, whole) :]
    for name, way, arguments in calls:
        yield _one(conversation, name, way, arguments, rendered)


def _one(conversation: Conversation, name: str, way: str, arguments: dict[str, Any], rendered: str) -> CallResult:
    if name not in rendered:
        return CallResult(conversation, way, name, "not rendered", "tool calls are not rendered")
    change = argument_fate(arguments, rendered)
    if change is None:
        return CallResult(conversation, way, name, "own format")
    return CallResult(conversation, way, name, "kept" if change.equal_text else "changed", "", change)


def _calls(message: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, way and arguments of each call whose arguments are a JSON object."""
    for entry in message["tool_calls"]:
        inner = entry.get("function", entry) if isinstance(entry, Mapping) else {}
        given = inner.get("arguments") if isinstance(inner, Mapping) else None
        try:
            arguments = json.loads(given) if isinstance(given, str) else given
        except ValueError:
            continue
        if isinstance(arguments, Mapping) and isinstance(inner.get("name"), str):
            yield inner["name"], "text" if isinstance(given, str) else "object", dict(arguments)


def call_findings(results: Iterable[CallResult]) -> list[Finding]:
    """`tool-call-rewritten`: a warning for the same JSON in another spelling, a failure for other JSON or none."""
    results = list(results)
    groups: dict[tuple[Any, ...], list[CallResult]] = {}
    for r in results:
        if r.change is not None and r.status == "changed":
            groups.setdefault((r.way, r.change.classes), []).append(r)
    lost = [r for r in results if r.status == "not rendered" and r.conversation.own]
    ways = _ways(results)
    return [*(_finding(group, ways) for group in groups.values()), *([_lost(lost)] if lost else [])]


def _ways(results: Iterable[CallResult]) -> dict[str, str]:
    """How arguments fare, by the way they are handed over: the worst of each."""
    out: dict[str, str] = {}
    for r in (r for r in results if r.status in ("kept", "changed", "own format")):
        said = r.status if r.change is None or r.status == "kept" else ", ".join(r.change.classes)
        if out.get(r.way, "kept") == "kept":
            out[r.way] = said
    return out


def _finding(group: list[CallResult], ways: dict[str, str]) -> Finding:
    first = group[0]
    change = first.change
    assert change is not None
    why = "; ".join(CALL_CLASSES[c] for c in change.classes)
    handed = "as a JSON text" if first.way == "text" else "as an object"
    text = f"a tool call whose arguments are handed over {handed} is written otherwise: {why}"
    evidence = {
        "class": change.classes[0],
        "arguments_given_as": first.way,
        "by_way": ways,
        "conversation": first.conversation.name,
        "places": [r.conversation.name for r in group][:20],
        **change.to_json(),
    }
    text += f"; {shorten(change.sampled, 80)} is {shorten(change.rendered, 80)}"
    avoided = _other_way(first, ways) and not any(r.conversation.own for r in group)  # nobody hands them over like this
    more = {} if change.equal_json or avoided else _FAIL
    return finding(
        "tool-call-rewritten",
        text,
        place=first.conversation.name,
        evidence=evidence,
        advice=_advice(first, ways),
        **more,
    )


def _advice(first: CallResult, ways: dict[str, str]) -> str:
    keep = "Keep the sampled ids of the call; do not parse it and render it again."
    if _other_way(first, ways):
        form = "an object" if first.way == "text" else "a JSON text"
        return f"{keep} Where it must be rendered, hand the arguments over as {form}."
    return keep


def _other_way(first: CallResult, ways: dict[str, str]) -> bool:
    """Whether the arguments are kept when they are handed over the other way."""
    return ways.get("object" if first.way == "text" else "text") == "kept"


def with_objects(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with tool-call arguments as objects where they are JSON texts; None where none is."""
    out: list[dict[str, Any]] = []
    for message in messages:
        calls = [_with_object(c) for c in message.get("tool_calls") or ()]
        out.append({**message, "tool_calls": calls} if calls else dict(message))
    return out if out != [dict(m) for m in messages] else None


def _with_object(entry: Any) -> Any:
    inner = entry.get("function", entry) if isinstance(entry, Mapping) else None
    given = inner.get("arguments") if isinstance(inner, Mapping) else None
    if not isinstance(given, str) or not isinstance(inner, Mapping):
        return entry
    try:
        new = {**inner, "arguments": json.loads(given)}
    except ValueError:
        return entry
    return {**entry, "function": new} if "function" in entry else new


def _lost(lost: list[CallResult]) -> Finding:
    first = lost[0]
    return finding(
        "tool-call-rewritten",
        f"the template leaves tool calls out: {first.name!r} of {first.conversation.name} is not in the text",
        place=first.conversation.name,
        evidence={"class": "missing", "places": [r.conversation.name for r in lost][:20], "equal_as_json": False},
        advice="Use a template that renders tool calls, or keep the sampled ids of the call.",
        **_FAIL,
    )
