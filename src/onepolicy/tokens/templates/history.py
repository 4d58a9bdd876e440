"""Findings about rewritten history: one for each kind of change, its first place in full and all places by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onepolicy.codes import finding
from onepolicy.tokens.templates import tags
from onepolicy.tokens.templates.edits import around, shorten
from onepolicy.tokens.templates.ids import IdResult
from onepolicy.tokens.templates.prefix import CLASSES, StepResult, judge_step
from onepolicy.tokens.templates.render import ChatTemplate
from onepolicy.tokens.templates.stop import StopText
from onepolicy.tokens.templates.thinking import thinking_switches
from onepolicy.tokens.templates.tool_calls import CALL_CLASSES
from onepolicy.types import Finding, Outcome, Severity

_KEEP = "Keep the sampled ids of earlier turns and append only what is new"
_SEGMENT = (
    "where the template changes them, end the segment there and start a new one from the prompt as it is rendered"
)
_PRESERVING = "or use a prefix-preserving template, which leaves earlier turns alone"
#: class -> what to do besides
_ADVICE: dict[str, str] = {
    "content-stripped": "The template trims content: replies that begin or end with white space are changed.",
    "system-prompt-changed": "Give the system message yourself in every turn, so that no default takes its place.",
    "stop-changed": "Write one stop text after every reply, the last one and the earlier ones alike.",
    "thinking-doubled": "Hand the thinking over once: in the content, or in its field, not in both.",
}
_WARN: Mapping[str, Any] = {"severity": Severity.WARN, "outcome": Outcome.PASS}
_OFTEN = ("user", "tool")  # what every multi-turn rollout appends


@dataclass(frozen=True, slots=True)
class Judged:
    """Everything that findings about history are made from."""

    template: ChatTemplate
    stop: StopText
    names: tuple[str, ...]
    results: Sequence[StepResult]
    ids: Sequence[IdResult | None]
    field: str


def history_findings(judged: Judged) -> list[Finding]:
    """`history-rewritten-by-template`, and `tool-call-rewritten` where a call is all that changed."""
    groups: dict[tuple[str, ...], list[tuple[StepResult, IdResult | None]]] = {}
    for result, ids in zip(judged.results, judged.ids, strict=True):
        if result.status == "rewritten":
            calls = result.call.classes if result.call else ()
            variant = json.dumps(dict(result.step.conversation.arguments)) if result.step.conversation.variant else ""
            groups.setdefault((result.kind_of_change, variant, *calls), []).append((result, ids))
    out = [_call(group) if group[0][0].call else _history(judged, group) for group in groups.values()]
    return [*out, *_ignored(judged.results), *_last_only(judged)]


def _history(judged: Judged, group: list[tuple[StepResult, IdResult | None]]) -> Finding:
    group = sorted(group, key=lambda g: not _counts(g[0]))
    result, ids = group[0]
    way_out = ways_out(judged, result)
    does = CLASSES[result.kind_of_change]
    text = f"when {article(result.step.kind)} message follows, the template {does}: {_what(result)}{_given(result)}"
    return finding(
        "history-rewritten-by-template",
        text,
        place=result.step.place,
        evidence={**_evidence(result, ids), "way_out": way_out, **_places([r for r, _ in group])},
        ruled_out=("encoding: the texts differ before anything is encoded",),
        advice=_advice(result.kind_of_change, way_out),
        **({} if _counts(result) else _WARN),
    )


def article(kind: str) -> str:
    return f"{'an' if kind[:1] in 'aeio' else 'a'} {kind}"


def _counts(result: StepResult) -> bool:
    """A change that a rollout meets: the conversation goes on like that, or every rollout of several turns does."""
    return not result.step.conversation.variant and (result.step.real or result.step.kind in _OFTEN)


def _given(result: StepResult) -> str:
    """The arguments that nobody gave and that it needs."""
    step = result.step
    given = ", ".join(f"{k}={v}" for k, v in step.conversation.arguments.items())
    return f" (rendered with {given})" if step.conversation.variant else ""


def _what(result: StepResult) -> str:
    edit = result.edits[0]
    at = f"at character {result.first}"
    if edit.lost and edit.inserted:
        return f"{at} {shorten(edit.lost, 80)!r} has become {shorten(edit.inserted, 80)!r}"
    if edit.lost:
        return f"{at} {shorten(edit.lost, 80)!r} is gone"
    return f"{at} {shorten(edit.inserted, 80)!r} has been put in"


def _evidence(result: StepResult, ids: IdResult | None) -> dict[str, Any]:
    edit, first, sides = result.edits[0], result.first or 0, result.sides
    assert sides is not None
    return {
        "class": result.kind_of_change,
        "region": result.region,
        "next_message": result.step.kind,
        "conversation": result.step.conversation.name,
        "turn": result.step.turn,
        "holds": result.step.conversation.holds,
        "arguments": dict(result.step.conversation.arguments),
        "first_diff_char": first,
        "lost_text": edit.lost,
        "inserted_text": edit.inserted,
        "edits": [e.to_json() for e in result.edits[:8]],
        "in_context": around(sides.text, first),
        "rendered": around(sides.after, first),
        **({"ids": ids.to_json()} if ids is not None else {}),
    }


def _places(results: Sequence[StepResult]) -> dict[str, Any]:
    return {
        "kinds": sorted({r.step.kind for r in results}),
        "places": [r.step.place for r in results][:20],
        "n_places": len(results),
    }


def _advice(change: str, way_out: Mapping[str, Any]) -> str:
    special = [_ADVICE[change]] if change in _ADVICE else []
    if "arguments" in way_out:
        given = ", ".join(f"{k}={v}" for k, v in way_out["arguments"].items())
        special.append(f"With the template's argument {given} this history is kept.")
    if "field" in way_out:
        special.append(f"Thinking handed over as {way_out['field']} is kept by this template.")
    elif change.startswith("thinking"):
        special.append("Hand thinking over as reasoning_content only to a template that keeps it in earlier turns.")
    return " ".join([f"{_KEEP}; {_SEGMENT}; {_PRESERVING}.", *special])


def ways_out(judged: Judged, result: StepResult) -> dict[str, Any]:
    """What would keep this history: an argument that the template has, or the thinking in a field of its own."""
    if not result.kind_of_change.startswith("thinking"):
        return {}
    out: dict[str, Any] = {}
    conversation = result.step.conversation
    for switch in thinking_switches(tuple(n for n in judged.names if n not in conversation.arguments)):
        other = replace(conversation, arguments={**conversation.arguments, **switch})
        if judge_step(judged.template, replace(result.step, conversation=other), judged.stop).status == "kept":
            out["arguments"] = switch
            break
    by_field = [
        r for r in judged.results if r.step.conversation.holds == "reasoning" and r.step.kind == result.step.kind
    ]
    if judged.field and by_field and all(r.status == "kept" for r in by_field):
        out["field"] = judged.field
    return out


def _call(group: list[tuple[StepResult, IdResult | None]]) -> Finding:
    result, ids = group[0]
    call = result.call
    assert call is not None
    why = "; ".join(CALL_CLASSES[c] for c in call.classes)
    text = (
        f"a sampled tool call is rendered as other text: {why}; {'equal' if call.equal_json else 'not equal'} as JSON"
    )
    more = {} if call.equal_json else {"severity": Severity.FAIL, "outcome": Outcome.DRIFT}
    evidence = {**_evidence(result, ids), "call": call.to_json(), **_places([r for r, _ in group])}
    evidence["class"] = call.classes[0] if call.classes else "around"
    return finding("tool-call-rewritten", text, place=result.step.place, evidence=evidence, **more)


def _ignored(results: Sequence[StepResult]) -> list[Finding]:
    """Thinking that the user's own conversation holds in a field which the template never reads."""
    hit = [r for r in results if r.status == "not rendered" and r.step.conversation.own and r.step.real]
    hit = [r for r in hit if r.sides and tags.field_of(r.step.reply).strip() not in r.sides.alone]  # "" is in any text
    if not hit:
        return []
    thought = tags.field_of(hit[0].step.reply)
    evidence = {"class": "thinking-dropped", "region": "reply", "lost_text": thought, **_places(hit)}
    text = f"the template {CLASSES['thinking-dropped']}: {hit[0].why}, so {shorten(thought, 80)!r} is gone"
    advice = f"{_KEEP}; {_PRESERVING}. Thinking that was sampled has to stand in the content for this template."
    return [finding("history-rewritten-by-template", text, place=hit[0].step.place, evidence=evidence, advice=advice)]


def _last_only(judged: Judged) -> list[Finding]:
    """Text after the last reply only, where the sampled part itself is kept."""
    only = judged.stop.last_only
    if not only or any(r.kind_of_change == "stop-changed" for r in judged.results):
        return []
    text = f"the template {CLASSES['last-message-only']}: {shorten(only, 80)!r}"
    return [
        finding(
            "history-rewritten-by-template",
            text,
            place="after a reply",
            evidence={"class": "last-message-only", "lost_text": only, **judged.stop.to_json()},
            advice="A finished conversation is no beginning of a longer one: cut training texts at the stop token.",
            **_WARN,
        )
    ]
