"""A step between two turns, and its two texts: what was really in the engine's context, and what is rendered next.

Step k: a prompt is rendered, a reply is sampled after it, and one message more is rendered with the whole history. The
first text (prompt as rendered + reply as sampled, stop token and all) must be the beginning of the second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from onepolicy.tokens.templates import tags
from onepolicy.tokens.templates.conversations import FOLLOW_UPS, Conversation, Messages, assistant
from onepolicy.tokens.templates.edits import common_prefix, overlap
from onepolicy.tokens.templates.render import ChatTemplate
from onepolicy.tokens.templates.stop import StopText


@dataclass(frozen=True, slots=True)
class Step:
    """`prompt` + `reply` (+ `following`): messages. `kind`: the role that follows. `real`: the conversation goes on
    like that itself; otherwise the follow-up was appended for the check. `turn` counts replies from 0."""

    conversation: Conversation
    turn: int
    prompt: Messages
    reply: Mapping[str, Any]
    kind: str
    following: Messages
    sampled: str | None = None
    real: bool = False

    @property
    def place(self) -> str:
        return f"{self.conversation.name}, reply {self.turn}, then {self.kind}"


@dataclass(frozen=True, slots=True)
class Sides:
    """`before`: the prompt's text; `sampled`: the reply's; `after`: the next render. `alone`: the render of prompt and
    reply without a follow-up. `lead`: what that puts between prompt and reply. `agrees`: it begins with the prompt.
    `history`: the length of the next render without its own generation prompt. `start`: where the prompt's begins."""

    step: Step
    before: str
    sampled: str
    after: str
    alone: str
    lead: str = ""
    agrees: bool = True
    history: int = 0
    start: int = 0

    @property
    def text(self) -> str:
        return self.before + self.sampled


def steps_of(conversation: Conversation, stop: StopText) -> Iterator[Step]:
    """Every reply of a conversation with every kind of next message."""
    for base, real in _replies(conversation, stop):
        yield from real
        have = {s.kind for s in real}
        for kind, message in FOLLOW_UPS.items():
            if kind not in have:
                following = (*base.prompt, base.reply, message)
                yield Step(conversation, base.turn, base.prompt, base.reply, kind, following, base.sampled)


def _replies(conversation: Conversation, stop: StopText) -> Iterator[tuple[Step, list[Step]]]:
    if conversation.turns:
        yield from _from_turns(conversation, stop)
        return
    messages = conversation.messages
    at = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i]
    for turn, i in enumerate(at):
        sampled = conversation.sampled.get(i)
        base = Step(conversation, turn, messages[:i], messages[i], "", (), sampled)
        end = next((j for j in range(i + 1, len(messages)) if messages[j]["role"] == "assistant"), len(messages))
        end = max(end, i + 2)  # two replies in a row
        real = []
        if i + 1 < len(messages):
            kind = messages[i + 1]["role"]
            real = [Step(conversation, turn, messages[:i], messages[i], kind, messages[:end], sampled, True)]
        yield base, real


def _from_turns(conversation: Conversation, stop: StopText) -> Iterator[tuple[Step, list[Step]]]:
    """Each sampled text with every later prompt that goes on from its own."""
    prompts = [t.prompt for t in conversation.turns]
    for k, turn in enumerate(conversation.turns):
        if turn.sampled is None:
            continue
        n = len(turn.prompt)
        nexts = [*prompts[k + 1 : k + 2], *(o for o in conversation.others if o[:n] == turn.prompt)]
        nexts = [p for p in nexts if len(p) > n + 1 and p[n]["role"] == "assistant"]
        content = turn.sampled.removesuffix(stop.stop) if stop.stop else turn.sampled
        reply = nexts[0][n] if nexts else assistant(content)
        base = Step(conversation, k, turn.prompt, reply, "", (), turn.sampled)
        yield base, [Step(conversation, k, turn.prompt, p[n], p[n + 1]["role"], p, turn.sampled, True) for p in nexts]


def sides_of(template: ChatTemplate, step: Step, stop: StopText) -> Sides:
    """The two texts of a step. Errors: `TemplateFailure` where the template refuses either."""
    options = step.conversation.options()
    before = template.render(step.prompt, add_generation_prompt=True, **options)
    alone = template.render([*step.prompt, step.reply], **options)
    goes_on = step.following[-1]["role"] != "assistant" if step.following else False
    after = template.render(step.following, add_generation_prompt=goes_on, **options) if step.following else alone
    history = generation_start(template, step.following, after, options) if goes_on else len(after)
    shared = common_prefix(before, alone)
    # a difference before the generation prompt is the history's own, not the generation prompt's
    start = generation_start(template, step.prompt, before, options)
    agrees = shared == len(before) or shared < start
    lead = lead_of(step.reply, alone[shared:]) if shared == len(before) else ""
    sampled = step.sampled
    if sampled is None and not agrees and tags.ends_open(before) and not _opened(step, before):
        before, sampled = before[:shared], _until_stop(alone[shared:], stop)  # no such reply can come after this prompt
    elif sampled is None:
        sampled = _sampled(step, before, alone, lead, stop)
    return Sides(step, before, sampled, after, alone, lead, agrees, history, start)


def generation_start(template: ChatTemplate, prompt: Messages, before: str, options: Mapping[str, Any]) -> int:
    """Where the generation prompt begins in a rendered prompt. Errors: `TemplateFailure`."""
    return common_prefix(before, template.render(prompt, **options))


def structured(reply: Mapping[str, Any]) -> bool:
    """Whether the reply's text is not simply its content."""
    return bool(reply.get("tool_calls") or tags.field_of(reply)) or not isinstance(reply.get("content"), str)


def lead_of(reply: Mapping[str, Any], rendered: str) -> str:
    """What stands in a rendered reply before its content, apart from the content's own white space."""
    content = reply.get("content")
    if structured(reply) or not isinstance(content, str) or not content.strip() or rendered.startswith(content):
        return ""
    core = content.strip()
    at = rendered.find(core)
    own = content[: content.index(core)]
    return rendered[: max(at, 0)].removesuffix(own) if len(own) < at else ""


def _opened(step: Step, before: str) -> bool:
    """The generation prompt opens the thinking, and the reply goes on from there."""
    opener, content = tags.ends_open(before), step.reply.get("content")
    return bool(opener) and isinstance(content, str) and content.lstrip().startswith(opener)


def _sampled(step: Step, before: str, alone: str, lead: str, stop: StopText) -> str:
    """The reply as an engine would have drawn it: its content, or what the template itself makes of its fields."""
    content = step.reply.get("content")
    by_template = structured(step.reply) or not content
    by_template = by_template or (lead and not tags.has_tag(lead))  # a blank or a header that the model writes itself
    by_template = by_template or (
        tags.ends_open(before) and not tags.has_tag(str(content))
    )  # it thinks before it answers
    if by_template:
        return _until_stop(_without_empty_thinking(step.reply, alone[common_prefix(before, alone) :]), stop)
    content = content if isinstance(content, str) else ""
    shared = overlap(before, content)
    opener = tags.ends_open(before)
    start = shared if opener and content.startswith(opener) and shared >= len(opener) else 0
    return content[start:] + stop.before + stop.stop


def _without_empty_thinking(reply: Mapping[str, Any], rendered: str) -> str:
    """An empty pair of tags that the template puts before a reply which has no thinking was not sampled."""
    first = next(iter(tags.blocks(rendered)), None)
    if tags.field_of(reply) or first is None or first.inner or rendered[: first.start].strip():
        return rendered
    return rendered[first.stop :].lstrip()


def _until_stop(rendered: str, stop: StopText) -> str:
    """A rendered reply up to and with its stop token."""
    if stop.stop and stop.stop in rendered:
        return rendered[: rendered.rindex(stop.stop) + len(stop.stop)]
    return rendered.removesuffix(stop.suffix) if stop.suffix else rendered
