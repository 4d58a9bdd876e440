"""Does the prompt that a reply is sampled after stand in the rendered reply? And does the reply stand right behind it?

A generation prompt that writes more (an open thinking tag), less (no header at all) or otherwise than the template
writes for a finished reply makes the trainer see another prompt than the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from onepolicy.codes import finding
from onepolicy.tokens.templates import tags
from onepolicy.tokens.templates.conversations import ANSWER, THOUGHT, assistant, user
from onepolicy.tokens.templates.edits import common_prefix, shorten
from onepolicy.tokens.templates.process import TemplateFailure
from onepolicy.tokens.templates.render import ChatTemplate
from onepolicy.tokens.templates.sides import lead_of
from onepolicy.tokens.templates.thinking import thinking_tags
from onepolicy.types import Finding, Outcome, Severity

#: class -> in words
GENERATION_CLASSES: dict[str, str] = {
    "missing": "the generation prompt is missing: the template writes the reply's header only with the reply",
    "opener-only-in-prompt": "thinking is opened by the generation prompt only, the rendered reply has no opening tag",
    "thinking-only-in-prompt": "the generation prompt holds thinking tags that the rendered reply lacks",
    "thinking-inserted": "the rendered reply has thinking tags that were neither in the prompt nor in the reply",
    "space-before-reply": "the rendered reply has white space before it that the prompt lacks",
    "text-before-reply": "the rendered reply has text before it that the prompt lacks",
    "other": "the rendered reply does not begin with the prompt",
}
_ASK = "Which light is that?"
_WAY_OUT = (
    "Train on the sampled prompt ids and reply ids as they are. If text has to be rendered: put what the generation "
    "prompt adds into the reply's content, or into reasoning_content where the template reads it."
)


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """One way to hand a reply to the template. `change`: a key of `GENERATION_CLASSES`, "" where all is well."""

    way: str
    change: str
    prompt: str
    rendered: str
    lost: str = ""
    inserted: str = ""

    @property
    def first(self) -> int:
        return common_prefix(self.prompt, self.rendered)


def generation_results(
    template: ChatTemplate, key: str, arguments: dict[str, Any] | None = None
) -> list[GenerationResult]:
    """Every way to hand over a reply that can come after this generation prompt. `key`: the template's thinking field.

    Errors: `TemplateFailure` when not even one question renders.
    """
    options = arguments or {}
    talk = [user(_ASK)]
    prompt = template.render(talk, add_generation_prompt=True, **options)
    bare = template.render(talk, **options)
    start = common_prefix(prompt, bare)
    out: list[GenerationResult] = []
    for way, reply in _ways(template, key, prompt):
        try:
            rendered = template.render([*talk, reply], **options)
        except TemplateFailure:
            continue
        if common_prefix(prompt, rendered) >= min(
            start, len(rendered)
        ):  # else history differs, which is another finding
            out.append(_compare(way, reply, prompt, bare, rendered))
    return out


def _ways(template: ChatTemplate, key: str, prompt: str) -> list[tuple[str, dict[str, Any]]]:
    """An open thinking tag is followed by thinking; anything else by a plain answer."""
    opened = tags.ends_open(prompt)
    if not opened:
        return [("plain", assistant(ANSWER))]
    _, closer = thinking_tags(template, key)
    rest = f"{THOUGHT}\n{closer}\n\n{ANSWER}"
    ways = [("content with the opening tag", assistant(f"{opened}\n{rest}")), ("content as sampled", assistant(rest))]
    return [*ways, (key, assistant(ANSWER, **{key: THOUGHT}))] if key else ways


def _compare(way: str, reply: dict[str, Any], prompt: str, bare: str, rendered: str) -> GenerationResult:
    shared = common_prefix(prompt, rendered)
    if shared < len(prompt):
        lost = prompt[shared:]
        change = "opener-only-in-prompt" if tags.ends_open(lost) else "thinking-only-in-prompt"
        change = change if tags.has_tag(lost) or tags.has_tag(prompt[len(bare) :]) else "other"
        return GenerationResult(way, change, prompt, rendered, lost, rendered[shared : shared + 60])
    lead = "" if tags.ends_open(prompt) else lead_of(reply, rendered[shared:])
    if not lead:
        return GenerationResult(way, "", prompt, rendered)
    if prompt == bare and lead.strip():
        return GenerationResult(way, "missing", prompt, rendered, "", lead)
    change = (
        "thinking-inserted" if tags.has_tag(lead) else "text-before-reply" if lead.strip() else "space-before-reply"
    )
    return GenerationResult(way, change, prompt, rendered, "", lead)


def generation_findings(results: Sequence[GenerationResult], arguments: dict[str, Any] | None = None) -> list[Finding]:
    """`generation-prompt-differs`: at warn, at info where another way to hand the reply over is right, and as a failure
    where there is no generation prompt at all."""
    wrong = [r for r in results if r.change]
    if not wrong:
        return []
    good = [r.way for r in results if not r.change]
    worst = wrong[0]
    evidence = _evidence(worst, good, wrong, arguments)
    text = f"{GENERATION_CLASSES[worst.change]}: {_shown(worst)}"
    advice = f"Hand the reply over this way: {good[0]}. {_WAY_OUT}" if good else _WAY_OUT
    more: dict[str, Any] = {}
    if good:
        more = {"severity": Severity.INFO, "outcome": Outcome.PASS}
    elif worst.change == "missing":
        more = {"severity": Severity.FAIL, "outcome": Outcome.DRIFT}
        advice = "Let the template write the assistant's header when add_generation_prompt is true, and nothing else."
    return [
        finding("generation-prompt-differs", text, place="generation prompt", evidence=evidence, advice=advice, **more)
    ]


def _shown(result: GenerationResult) -> str:
    where = f"at character {result.first}"
    if result.lost:
        return f"{where} the prompt has {shorten(result.lost, 80)!r}, the rendered reply goes on otherwise"
    return f"{where} the template writes {shorten(result.inserted, 80)!r} before the reply"


def _evidence(
    worst: GenerationResult, good: list[str], wrong: Iterable[GenerationResult], arguments: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "class": worst.change,
        "way": worst.way,
        "first_diff_char": worst.first,
        "lost_text": shorten(worst.lost),
        "inserted_text": shorten(worst.inserted),
        "prompt": shorten(worst.prompt),
        "rendered": shorten(worst.rendered),
        "ways_that_differ": {r.way: r.change for r in wrong},
        "ways_that_agree": good,
        "arguments": arguments or {},
    }
