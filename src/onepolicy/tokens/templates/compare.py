"""Do two sides render the same conversations to the same text, and to the same ids?

compare_templates(bind(None, a), bind(None, b), tokenizers=(a, b)).findings
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onepolicy.codes import finding
from onepolicy.tokens.base import Tokenizer
from onepolicy.tokens.templates.conversations import Conversation, built_in, conversation_from
from onepolicy.tokens.templates.edits import around, common_prefix, edits_to_prefix, shorten
from onepolicy.tokens.templates.process import TemplateFailure
from onepolicy.tokens.templates.render import FROZEN, ChatTemplate
from onepolicy.types import Finding

_NAMED = 20


@dataclass(frozen=True, slots=True)
class View:
    """One render on both sides; None where a template refuses it (`why`). Ids where there are tokenizers."""

    conversation: str
    what: str
    texts: tuple[str | None, str | None]
    why: tuple[str, str] = ("", "")
    ids: tuple[Sequence[int], Sequence[int]] | None = None

    @property
    def same_text(self) -> bool:
        return self.texts[0] == self.texts[1]

    @property
    def same(self) -> bool:
        return self.same_text and (self.ids is None or list(self.ids[0]) == list(self.ids[1]))


@dataclass(frozen=True, slots=True)
class Comparison:
    """`views`: every prompt and every whole conversation, both sides."""

    views: tuple[View, ...]
    findings: tuple[Finding, ...]

    @property
    def same(self) -> bool:
        return all(v.same for v in self.views)


def compare_templates(
    a: ChatTemplate | str,
    b: ChatTemplate | str,
    conversations: Sequence[Any] | None = None,
    *,
    tokenizers: tuple[Tokenizer | None, Tokenizer | None] = (None, None),
    names: tuple[str, str] = ("sampler", "scorer"),
) -> Comparison:
    """Both sides' texts (and ids) of each conversation: the prompt of each reply, and the whole.

    `conversations`: as `conversation_from` takes them; None for the built-in set. `names`: of the two sides, for
    messages. A conversation that both refuse says nothing. Errors: `ContentError` for conversations that are none.
    """
    sides = _fixed(a), _fixed(b)
    given = (
        built_in()
        if conversations is None
        else [conversation_from(c, f"conversation {i}") for i, c in enumerate(conversations)]
    )
    views = [v for c in given for v in _views(sides, c) if v.texts != (None, None)]
    views = _with_ids(views, tokenizers)
    other_text = [v for v in views if not v.same_text]
    other_ids = [v for v in views if v.same_text and not v.same]
    found = [_text_finding(sides, other_text, len(views), names)] if other_text else []
    found += [_ids_finding(other_ids, len(views), names)] if other_ids else []
    return Comparison(tuple(views), tuple(found))


def _fixed(template: ChatTemplate | str) -> ChatTemplate:
    """With the clock stopped: two renders must not differ because time went on."""
    template = ChatTemplate(template) if isinstance(template, str) else template
    return template if template.now else replace(template, now=FROZEN)


def _views(sides: tuple[ChatTemplate, ChatTemplate], conversation: Conversation) -> Iterator[View]:
    messages = conversation.whole()
    replies = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i]
    for turn, i in enumerate(replies):
        yield _view(sides, conversation, f"prompt of reply {turn}", messages[:i], True)
    if messages and messages[-1]["role"] != "assistant":
        yield _view(sides, conversation, "last prompt", messages, True)
    yield _view(sides, conversation, "whole", messages, False)


def _view(
    sides: tuple[ChatTemplate, ChatTemplate], conversation: Conversation, what: str, messages: Any, prompt: bool
) -> View:
    texts, why = [], []
    for side in sides:
        try:
            texts.append(side.render(messages, add_generation_prompt=prompt, **conversation.options()))
            why.append("")
        except TemplateFailure as failure:
            texts.append(None)
            why.append(str(failure))
    return View(conversation.name, what, (texts[0], texts[1]), (why[0], why[1]))


def _with_ids(views: list[View], tokenizers: tuple[Tokenizer | None, Tokenizer | None]) -> list[View]:
    first, second = tokenizers
    if first is None or second is None:
        return views
    both = [i for i, v in enumerate(views) if None not in v.texts]
    ids = [t.encode([views[i].texts[k] or "" for i in both]) if both else [] for k, t in enumerate((first, second))]
    found = {i: (ids[0][n], ids[1][n]) for n, i in enumerate(both)}
    return [replace(v, ids=found.get(i)) for i, v in enumerate(views)]


def _text_finding(
    sides: tuple[ChatTemplate, ChatTemplate], differing: list[View], n: int, names: tuple[str, str]
) -> Finding:
    first = next((v for v in differing if None not in v.texts), differing[0])
    cause = _cause(sides, first)
    evidence = {**_shown(first, names), **cause, **_counted(differing, n)}
    place = f"{first.conversation}, {first.what}"
    if None in first.texts:
        refuses = names[first.texts.index(None)]
        text = f"{place}: the template of the {refuses} gives no text, the other side's does"
    else:
        at = evidence["first_diff_char"]
        ours, theirs = (around(t or "", at, 0, 30) for t in first.texts)
        text = f"{place}: from character {at} on the {names[0]} has {ours!r}, the {names[1]} {theirs!r}"
    return finding(
        "chat-template-differs", f"{text} ({len(differing)} of {n} renders differ)", place=place, evidence=evidence
    )


def _shown(view: View, names: tuple[str, str]) -> dict[str, Any]:
    a, b = view.texts
    out: dict[str, Any] = {"conversation": view.conversation, "view": view.what}
    if a is None or b is None:
        return {**out, "class": "refused on one side", "why": dict(zip(names, view.why, strict=True))}
    at = common_prefix(a, b)
    edit = next(iter(edits_to_prefix(a, b)), None)
    out.update(
        {
            "class": "other text",
            "first_diff_char": at,
            "texts": {n: shorten(t) for n, t in zip(names, (a, b), strict=True)},
        }
    )
    out.update({"near": {n: around(t, at) for n, t in zip(names, (a, b), strict=True)}})
    out.update(
        {"lost_text": shorten(edit.lost), "inserted_text": shorten(edit.inserted)}
        if edit
        else {"lost_text": "", "inserted_text": shorten(b[at:])}
    )
    return {**out, **_id_evidence(view, names)}


def _id_evidence(view: View, names: tuple[str, str]) -> dict[str, Any]:
    if view.ids is None:
        return {}
    a, b = list(view.ids[0]), list(view.ids[1])
    at = common_prefix(a, b)
    near = {n: ids[max(0, at - 3) : at + 5] for n, ids in zip(names, (a, b), strict=True)}
    return {
        "first_diff_id": at if a != b else None,
        "n_ids": dict(zip(names, (len(a), len(b)), strict=True)),
        "ids": near,
    }


def _counted(differing: list[View], n: int) -> dict[str, Any]:
    named = dict.fromkeys(v.conversation for v in differing)
    return {"differing": len(differing), "renders": n, "conversations": list(named)[:_NAMED]}


def _cause(sides: tuple[ChatTemplate, ChatTemplate], view: View) -> dict[str, Any]:
    """The template's text, or what is given to it: the special tokens and default arguments."""
    a, b = sides
    keys = sorted(k for k in {*a.variables, *b.variables} if a.variables.get(k) != b.variables.get(k))
    pairs: Mapping[str, Any] = {k: [a.variables.get(k), b.variables.get(k)] for k in keys}
    return {"template_text_equal": a.text == b.text, "arguments_that_differ": pairs, "view_refused": None in view.texts}


def _ids_finding(differing: list[View], n: int, names: tuple[str, str]) -> Finding:
    first = differing[0]
    place = f"{first.conversation}, {first.what}"
    shown = _id_evidence(first, names)
    text = f"{place}: one text, other ids on the two sides from position {shown['first_diff_id']} on"
    evidence = {"class": "same text, other ids", "conversation": first.conversation, **shown, **_counted(differing, n)}
    return finding("prompt-ids-differ", text, place=place, evidence=evidence)
