"""The answers to "is this template safe for multi-turn RL?", a row a question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onepolicy.tokens.templates.calls import CallResult
from onepolicy.tokens.templates.generation import GENERATION_CLASSES, GenerationResult
from onepolicy.tokens.templates.history import article
from onepolicy.tokens.templates.prefix import CLASSES, StepResult
from onepolicy.tokens.templates.stop import StopText
from onepolicy.types import Finding

_JUDGED = ("kept", "rewritten")
#: what a conversation holds -> the question
_HOLDS: dict[str, str] = {
    "thinking": "thinking in the content is kept",
    "reasoning": "thinking in a field is kept",
    "calls": "tool calls are kept",
    "parallel calls": "several calls in one reply are kept",
    "calls, null content": "a call with null content is taken",
    "text parts": "content in parts is taken",
    "white space at the edges": "white space at a reply's edges is kept",
    "look-alikes": "text that looks like a control token is kept",
    "no thinking": "with enable_thinking=False, history is kept",
    "own": "your own conversations are kept",
}


@dataclass(frozen=True, slots=True)
class Row:
    """`answer`: `yes`, `no`, `not supported`, or a value."""

    question: str
    answer: str
    detail: str = ""

    def to_json(self) -> dict[str, str]:
        return {"question": self.question, "answer": self.answer, "detail": self.detail}


def rows_of(
    results: Sequence[StepResult],
    kept: Mapping[str, bool | None],
    generation: Sequence[GenerationResult],
    calls: Sequence[CallResult],
    stop: StopText,
    field: str,
    findings: Iterable[Finding],
    names: Sequence[str],
    given: Iterable[str],
    preface: bool,
) -> list[Row]:
    """The table, the important questions first."""
    by_kind = [_kind(kind, value, results) for kind, value in kept.items()]
    by_content = [row for holds, question in _HOLDS.items() if (row := _content(holds, question, results)) is not None]
    last = [_field(field), *_calls(calls), _same(findings), _arguments(names, given)]
    if preface:
        last.append(Row("it wants a system message", "yes", "one was put before every conversation without one"))
    return [*by_kind, _generation(generation), *_stop(stop), *by_content, *last]


def _kind(kind: str, value: bool | None, results: Sequence[StepResult]) -> Row:
    question = f"history is kept when {article(kind)} message follows"
    mine = [r for r in results if r.step.kind == kind and not r.step.conversation.variant]
    if value is None:
        return Row(question, "not supported", next((r.why for r in mine if r.why), "no such message was tried"))
    bad = [r for r in mine if r.status == "rewritten"]
    return Row(question, "no" if bad else "yes", _changes(bad))


def _changes(bad: Iterable[StepResult]) -> str:
    names = dict.fromkeys(r.kind_of_change for r in bad)
    return ", ".join(CLASSES[n] for n in names)


def _content(holds: str, question: str, results: Sequence[StepResult]) -> Row | None:
    mine = [r for r in results if r.step.conversation.holds == holds]
    if "call" in holds:
        mine = [r for r in mine if r.step.reply.get("tool_calls")]
    often = [r for r in mine if r.step.real or r.step.kind in ("user", "tool")]
    if not mine:
        return None
    bad = [r for r in often if r.status == "rewritten"]
    if bad:
        return Row(question, "no", _changes(bad))
    if any(r.status == "kept" for r in often):
        return Row(question, "yes")
    return Row(question, "not supported", next((r.why for r in mine if r.why), ""))


def _generation(results: Sequence[GenerationResult]) -> Row:
    question = "the prompt of a reply stands in the rendered reply"
    wrong = [r for r in results if r.change]
    if not results:
        return Row(question, "not supported", "no prompt renders")
    if not wrong:
        return Row(question, "yes")
    said = dict.fromkeys(f"{r.way}: {GENERATION_CLASSES[r.change]}" for r in wrong)
    return Row(question, "no" if len(wrong) == len(results) else "in part", "; ".join(said))


def _stop(stop: StopText) -> list[Row]:
    how = {"none": "no stop token found after a reply"}.get(stop.how, f"known by: {stop.how}")
    after = f"not sampled: a rollout of sampled ids lacks {stop.suffix!r}" if stop.suffix else ""
    return [Row("stop token", repr(stop.stop), how), Row("text after the stop token", repr(stop.suffix), after)]


def _field(field: str) -> Row:
    return Row("thinking is read from a field", field or "no", "" if field else "reasoning_content is ignored")


def _calls(calls: Sequence[CallResult]) -> list[Row]:
    out: list[Row] = []
    for way, words in {"object": "an object", "text": "a JSON text"}.items():
        mine: list[Any] = [c for c in calls if c.way == way]
        if mine:
            bad = next((c for c in mine if c.status == "changed"), None)
            one = bad or mine[0]
            answer = {"kept": "yes", "changed": "no", "own format": "yes"}.get(one.status, "not supported")
            own = "in a format of its own" if one.status == "own format" else one.why
            detail = ", ".join(bad.change.classes) if bad else own
            out.append(Row(f"arguments handed over as {words} are written as they are", answer, detail))
    return out


def _arguments(names: Sequence[str], given: Iterable[str]) -> Row:
    lacking = [n for n in names if n not in set(given)]
    return Row(
        "it reads from outside", ", ".join(names) or "nothing", f"not given: {', '.join(lacking)}" if lacking else ""
    )


def _same(findings: Iterable[Finding]) -> Row:
    varying = ("random-text", "time-in-prompt", "date-in-prompt")
    found = [f.evidence.get("class") for f in findings]
    hit = next((v for v in varying if v in found), "")
    return Row("the same messages always give the same text", "no" if hit else "yes", CLASSES[hit] if hit else "")
