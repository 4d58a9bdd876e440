"""What became of a reply's thinking: dropped, emptied, doubled, moved, rewritten, or put where there was none."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any

from onepolicy.tokens.templates import tags
from onepolicy.tokens.templates.conversations import Conversation, assistant, reasoning, user
from onepolicy.tokens.templates.edits import Edit, common_prefix
from onepolicy.tokens.templates.process import TemplateFailure
from onepolicy.tokens.templates.render import ChatTemplate
from onepolicy.tokens.templates.sides import Sides

_CONTROL = re.compile(r"<[|/｜]|\[/")
_PART = 7  # characters by which a part of a thought is known


def thinking_class(sides: Sides, edits: Sequence[Edit]) -> str:
    """The class of a change that has to do with thinking (a key of `prefix.CLASSES`); "" if it has not."""
    before, after = sides.text, sides.after[: sides.history]
    lost, inserted = "".join(e.lost for e in edits), "".join(e.inserted for e in edits)
    had, has = tags.blocks(before), tags.blocks(after)
    if _moved(sides):
        return "thinking-moved"
    if lost.strip() in tags.TAGS and not inserted.strip():
        return "thinking-opener-lost"
    if inserted.strip() in tags.TAGS and not lost.strip():
        return "thinking-opener-added"
    thoughts = {b.inner for b in had if b.inner} | {t for t in [tags.field_of(sides.step.reply).strip()] if t}
    inside = any(b.inner and b.start <= e.at < b.stop for e in edits for b in had)
    if not (inside or tags.has_tag(lost + inserted) or any(t in lost + inserted for t in thoughts)):
        return _spacing(before, lost, inserted)
    for thought in sorted(thoughts, key=before.find):
        fate = _fate(thought, before, after, [b.inner for b in has], lost + inserted)
        if fate:
            return "thinking-emptied" if fate == "thinking-dropped" and _emptied(had, has) else fate
    # what was put in for the next message is no matter of the history
    aligned = len(before) - len(lost) + len(inserted)
    empty = sum(not b.inner and b.stop <= aligned for b in has) - sum(not b.inner for b in had)
    if empty:
        return "thinking-inserted" if empty > 0 else "thinking-dropped"
    return _tags_only(before, after)


def _moved(sides: Sides) -> bool:
    """Thinking and answer have changed places."""
    found = [b for b in tags.blocks(sides.sampled) if b.inner]
    if not found:
        return False
    words = _CONTROL.split(sides.sampled[found[-1].stop :])[0].split()
    answer = words[0] if words else ""
    rendered = sides.after[len(sides.before) - 1 : sides.history]
    first, second = rendered.find(found[0].inner), rendered.find(answer)
    return bool(answer) and 0 <= second < first and sides.sampled.find(answer) > found[0].start


def _fate(thought: str, before: str, after: str, inside: list[str], changed: str) -> str:
    n, now = before.count(thought), after.count(thought)
    if now > n:
        return "thinking-doubled"
    if now < n:
        part = any(common_prefix(i, thought) > min(_PART, len(thought) // 2) for i in inside)
        return "thinking-rewritten" if part else "thinking-dropped"
    if thought not in inside:
        return "thinking-rewritten"  # its text is kept, its tags are not
    return "thinking-moved" if thought in changed else ""


def _emptied(had: list[tags.Block], has: list[tags.Block]) -> bool:
    return sum(not b.inner for b in has) > sum(not b.inner for b in had)


def _tags_only(before: str, after: str) -> str:
    """Only tags without a partner came or went: an opener that the generation prompt writes, say."""
    openers = {o: after.count(o) - before.count(o) for o in tags.TAGS}
    if any(n > 0 for n in openers.values()):
        return "thinking-inserted"
    return "thinking-dropped" if any(n < 0 for n in openers.values()) else "thinking-rewritten"


def _spacing(before: str, lost: str, inserted: str) -> str:
    """White space inside a reply that has thinking: between the tags and the answer, as a rule."""
    if (lost + inserted).strip() or not tags.blocks(before):
        return ""
    return "thinking-spacing"


def reasoning_field(template: ChatTemplate) -> str:
    """The field of a message that the template reads thinking from; "" if it reads none of those known."""
    for key in tags.FIELDS:
        messages = reasoning(key)
        try:
            text = template.render(messages[:2])
        except TemplateFailure:
            continue
        if messages[1][key] in text:
            return key
    return ""


def thinking_switches(names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Arguments of a template that may decide what happens to thinking: each on and off."""
    likely = [n for n in names if any(w in n.lower() for w in ("think", "reason", "history", "preserve"))]
    return [{name: value} for name in likely for value in (True, False)]


def thinking_tags(template: ChatTemplate, key: str) -> tuple[str, str]:
    """The tags that the template writes thinking with: what it makes of the field, else what its text names."""
    texts = [template.chosen()]
    if key:
        with contextlib.suppress(TemplateFailure):
            texts.insert(0, template.render([user("Q?"), assistant("A.", **{key: "Zqx."})]))
    found = next((t for t in texts if tags.has_tag(t)), "")
    return tags.tags_of(found)


def holds_thinking(conversation: Conversation) -> bool:
    """Whether any reply of a conversation thinks, in its content or in a field."""
    replies = [m for m in conversation.whole() if m["role"] == "assistant"]
    return any(tags.field_of(m) or tags.has_tag(str(m.get("content"))) for m in replies)
