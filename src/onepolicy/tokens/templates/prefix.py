"""Is what was in the engine's context still the beginning of the next render? Step by step, with what was changed.

Prompt as rendered + reply as sampled must be a prefix of the next prompt: only then do sampled ids, log-probs and
masks of earlier turns stay where they are. `judge_step` answers for one step; `summary` by kind of next message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from onepolicy.tokens.templates import tags
from onepolicy.tokens.templates.conversations import FOLLOW_UPS
from onepolicy.tokens.templates.edits import Edit, common_prefix, edits_to_prefix
from onepolicy.tokens.templates.process import TemplateFailure
from onepolicy.tokens.templates.render import ChatTemplate
from onepolicy.tokens.templates.sides import Sides, Step, sides_of
from onepolicy.tokens.templates.stop import StopText
from onepolicy.tokens.templates.thinking import thinking_class
from onepolicy.tokens.templates.tool_calls import CallChange, compare_calls, json_values, without_json

#: What can happen to history -> in words. The class in a finding's evidence is the key.
CLASSES: dict[str, str] = {
    "thinking-dropped": "drops the thinking of an earlier reply",
    "thinking-emptied": "empties the thinking of an earlier reply and keeps its tags",
    "thinking-doubled": "writes the thinking of an earlier reply twice",
    "thinking-moved": "moves the thinking of an earlier reply to another place",
    "thinking-opener-lost": "drops the opening tag of an earlier reply's thinking",
    "thinking-opener-added": "puts an opening tag of thinking into an earlier reply",
    "thinking-rewritten": "writes the thinking of an earlier reply otherwise",
    "thinking-inserted": "puts thinking tags into an earlier reply that were not sampled",
    "thinking-spacing": "changes the white space around an earlier reply's thinking",
    "content-stripped": "strips white space from an earlier message",
    "whitespace-changed": "changes white space in an earlier message",
    "system-prompt-changed": "changes what stands before the first message",
    "generation-prompt-changed": "writes the beginning of the reply otherwise than the prompt it was sampled after",
    "stop-changed": "changes the end of an earlier reply",
    "reply-dropped": "drops an earlier reply",
    "earlier-turns-changed": "changes turns before the last reply",
    "tool-call-changed": "writes a tool call otherwise",
    "content-rewritten": "rewrites an earlier reply",
    "tool-results-merged": "joins tool results that follow each other into one message",
    "last-message-only": "writes something after a message only as long as it is the last one",
    "date-in-prompt": "writes the date of the render into the prompt",
    "time-in-prompt": "writes the time of the render into the prompt",
    "random-text": "renders the same messages otherwise each time",
}


_NULL = re.compile(r"(?<![\w' ,:\[])None(?![\w',\]])")  # not the one of a Python list


@dataclass(frozen=True, slots=True)
class StepResult:
    """`status`: `kept`, `rewritten`, `refused` (by `raise_exception`), `failed` (an error), `stopped` (a limit), `not
    rendered` (the template leaves the reply's fields, or the next message, out; `why`)."""

    step: Step
    status: str
    why: str = ""
    sides: Sides | None = None
    edits: tuple[Edit, ...] = ()
    kind_of_change: str = ""
    region: str = ""
    call: CallChange | None = None

    @property
    def first(self) -> int | None:
        """First character that differs."""
        if self.sides is None or self.status != "rewritten":
            return None
        return common_prefix(self.sides.text, self.sides.after)


def judge_step(template: ChatTemplate, step: Step, stop: StopText) -> StepResult:
    """What the next render makes of one step. Never raises `TemplateFailure`: it is the status."""
    try:
        sides = sides_of(template, step, stop)
    except TemplateFailure as failure:
        status = "refused" if failure.kind == "refused" else "stopped" if failure.stopped else "failed"
        return StepResult(step, status, str(failure))
    why = left_out(sides)
    if why:
        return StepResult(step, "not rendered", why, sides)
    edits = tuple(edits_to_prefix(sides.text, sides.after))
    if not edits:
        return StepResult(step, "kept", "", sides)
    region = region_of(sides, edits[0], stop)
    call = _call_change(sides, edits)
    if call:
        change = "tool-call-changed"
    else:
        change = "reply-dropped" if _dropped(template, sides) else class_of(sides, edits, region)
    return StepResult(step, "rewritten", "", sides, edits, change, region, call)


def left_out(sides: Sides) -> str:
    """What the template silently ignores of a step; "" if nothing."""
    reply, step = sides.step.reply, sides.step
    if step.sampled is None:
        why = _ignored_fields(reply, sides.alone)
        if why:
            return why
    last = step.following[-1] if step.following else {}
    content = last.get("content")
    if isinstance(content, str) and content.strip() and content.strip() not in sides.after:
        return f"the message of role {last['role']!r} is not rendered"
    return ""


def _ignored_fields(reply: Mapping[str, Any], rendered: str) -> str:
    names = [_function(c).get("name") for c in reply.get("tool_calls") or []]
    if any(isinstance(n, str) and n not in rendered for n in names):
        return "tool calls are not rendered"
    if reply.get("content", "") is None and _NULL.search(rendered):
        return "null content is written as 'None'"
    thought = tags.field_of(reply)
    if thought.strip() and thought.strip() not in rendered:
        return f"{next(f for f in tags.FIELDS if reply.get(f) == thought)} is not rendered"
    parts = reply.get("content")
    if isinstance(parts, list) and ("'type'" in rendered or any(_text(p) not in rendered for p in parts)):
        return "content in parts is not rendered"
    return ""


def _function(entry: Any) -> Mapping[str, Any]:
    inner = entry.get("function", entry) if isinstance(entry, Mapping) else {}
    return inner if isinstance(inner, Mapping) else {}


def _text(part: Any) -> str:
    return str(part.get("text", "")) if isinstance(part, Mapping) else str(part)


def region_of(sides: Sides, edit: Edit, stop: StopText) -> str:
    """Where the first change lies: `head`, `earlier turns`, `last message`, `generation prompt`, `reply`, `stop`."""
    at = edit.at
    if at >= len(sides.before):
        end = len(sides.text) - (len(stop.stop) if stop.stop and sides.sampled.endswith(stop.stop) else 0)
        return "stop" if at >= end else "reply"
    first = next((m for m in sides.step.prompt if m["role"] != "system"), None)
    content = first.get("content") if first else None
    known = sides.before.find(content.strip()) if isinstance(content, str) and content.strip() else -1
    if at < known:
        return "head"
    if at >= sides.start:
        return "generation prompt"
    return "last message" if at >= _last_content(sides) else "earlier turns"


def _last_content(sides: Sides) -> int:
    """Where the text of the prompt's last message begins, as far as it can be found."""
    content = sides.step.prompt[-1].get("content")
    text = content.strip() if isinstance(content, str) else ""
    at = sides.before.rfind(text) if text else -1
    return at if at >= 0 else sides.start


def _dropped(template: ChatTemplate, sides: Sides) -> bool:
    """Whether the next render is the one that there would be without the reply."""
    step = sides.step
    n = len(step.prompt)
    without = [*step.following[:n], *step.following[n + 1 :]]
    try:
        goes_on = step.following[-1]["role"] != "assistant"
        return template.render(without, add_generation_prompt=goes_on, **step.conversation.options()) == sides.after
    except TemplateFailure:
        return False


def class_of(sides: Sides, edits: Iterable[Edit], region: str) -> str:
    """A key of `CLASSES`."""
    edits = list(edits)
    lost, inserted = "".join(e.lost for e in edits), "".join(e.inserted for e in edits)
    thought = thinking_class(sides, edits)
    if thought:
        return thought
    if region == "head":
        return "system-prompt-changed"
    if not (lost + inserted).strip():
        return "whitespace-changed" if inserted else "content-stripped"
    names = {
        "stop": "stop-changed",
        "generation prompt": "generation-prompt-changed",
        "last message": "last-message-only",
        "earlier turns": "earlier-turns-changed",
    }
    return names.get(region, "content-rewritten")


def _call_change(sides: Sides, edits: Iterable[Edit]) -> CallChange | None:
    """How the reply's tool calls differ, where nothing else does."""
    start = len(sides.before)
    sampled, rendered = sides.sampled, sides.after[start:]
    spans = [(s + start, e + start) for s, e, _ in json_values(sampled)]
    if not spans or not sides.after.startswith(sides.before):
        return None
    inside = all(any(s <= edit.at and edit.at + len(edit.lost) <= e for s, e in spans) for edit in edits)
    if not (inside or without_json(rendered, len(spans)).startswith(without_json(sampled, len(spans)))):
        return None
    change = compare_calls(sampled, rendered)
    return None if change is None or change.sampled == change.rendered else change


def summary(results: Iterable[StepResult]) -> dict[str, bool | None]:
    """Kind of next message -> whether everything before it is kept; None where no step could be judged."""
    out: dict[str, bool | None] = dict.fromkeys(FOLLOW_UPS)
    for result in results:
        if result.status in ("kept", "rewritten"):
            kept = result.status == "kept"
            out[result.step.kind] = kept and out.get(result.step.kind) is not False
    return out
