"""A chat template with everything it gets besides the messages, and its text for given messages.

    template = ChatTemplate("{% for m in messages %}...", variables={"eos_token": "</s>"})
    template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)

The text is that of transformers' `apply_chat_template(tokenize=False)`, but the rendering runs in a limited child
process (`process`), so a hostile or broken template costs a `TemplateFailure` and nothing else.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any

from onepolicy.errors import ContentError, UsageError
from onepolicy.tokens.templates.process import Child, TemplateFailure

Message = Mapping[str, Any]
#: What `strftime_now` says in checks: two renders must not differ because a minute has passed between them.
FROZEN = datetime(2026, 1, 2, 3, 4, 5)
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REMEMBERED = 1024  # renders
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")


@cache
def shared_child() -> Child:
    """One child for all who bring none; it ends with this process."""
    return Child()


@dataclass(frozen=True, slots=True)
class Rendered:
    """`spans`: [start, stop) of the text inside `{% generation %}` blocks, as characters."""

    text: str
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """`text`: one template, or several by name (`default`, `tool_use`). `variables`: special tokens and whatever else
    is given to each render. `now`: the time that the template sees, None for the real one. `preface`: messages put
    before a conversation that has no system message, for templates that want one.

    Errors: `UsageError` for no template at all.
    """

    text: str | Mapping[str, str]
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    now: datetime | None = None
    child: Child = field(default_factory=shared_child, repr=False, compare=False)
    preface: tuple[Message, ...] = ()
    _seen: OrderedDict[str, Rendered | TemplateFailure] = field(
        default_factory=OrderedDict[str, "Rendered | TemplateFailure"], init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.text, str | Mapping) or not self.text:
            raise UsageError(f"chat template: got {self.text!r}, wanted its text (Jinja), or texts by name")
        wrong = [k for k in self.variables if k in _RESERVED]
        if wrong:
            raise UsageError(
                f"chat template: {wrong[0]!r} cannot be a default argument; it comes with each conversation"
            )

    @property
    def digest(self) -> str:
        """First 12 hex digits of the SHA-256 of the text and of what is given to it."""
        texts = self.text if isinstance(self.text, str) else dict(self.text)
        body = json.dumps([texts, dict(self.variables)], sort_keys=True, default=str)
        return hashlib.sha256(body.encode()).hexdigest()[:12]

    def chosen(self, tools: Any = None) -> str:
        """The template for a call with or without tools, as transformers chooses. Errors: `UsageError`."""
        if isinstance(self.text, str):
            return self.text
        name = "tool_use" if tools is not None and "tool_use" in self.text else "default"
        if name not in self.text:
            raise UsageError(f"chat template: no template named 'default' among {', '.join(sorted(self.text))}")
        return self.text[name]

    def names(self) -> tuple[str, ...]:
        """Variables that the template reads from outside, besides those of every call. Errors: `TemplateFailure`."""
        texts = [self.text] if isinstance(self.text, str) else list(self.text.values())
        found = {name for text in texts for name in self.child.ask("variables", template=text)["names"]}
        return tuple(sorted(found - set(_RESERVED)))

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """The text. `options` as for `render_spans`. Errors: `TemplateFailure`, `ContentError`, `UsageError`."""
        return self.render_spans(messages, **options).text

    def render_spans(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        **more: Any,
    ) -> Rendered:
        """The text and the spans of `{% generation %}`. `more`: arguments of the template (`enable_thinking=False`).

        Errors: `TemplateFailure`; `ContentError` for messages that are none; `UsageError` for options that clash.
        """
        check_messages(messages)
        if continue_final_message and add_generation_prompt:
            raise UsageError("continue_final_message and add_generation_prompt exclude each other")
        text = self.chosen(tools)
        given, goal = list(messages), None
        if self.preface and given[0]["role"] != "system":
            given = [*self.preface, *given]
        if continue_final_message:
            key = continue_final_message if isinstance(continue_final_message, str) else "content"
            given, goal = _marked(given, key, text)
        variables = {
            **self.variables,
            **more,
            "messages": given,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        rendered = self._ask(text, variables)
        return rendered if goal is None else Rendered(_cut_at_mark(rendered.text, goal))

    def _ask(self, text: str, variables: Mapping[str, Any]) -> Rendered:
        key = _as_json(text, variables)
        if key not in self._seen:
            self._remember(key, self._fresh(text, json.loads(key)[1]))
        found = self._seen[key]
        if isinstance(found, TemplateFailure):
            raise found
        return found

    def _fresh(self, text: str, variables: dict[str, Any]) -> Rendered | TemplateFailure:
        now = None if self.now is None else self.now.isoformat()
        request = {"template": text, "variables": variables, "now": now, "output": self.child.limits.output_chars}
        try:
            answer = self.child.ask("render", **request)
        except TemplateFailure as failure:
            return failure
        return Rendered(answer["text"], tuple((a, b) for a, b in answer["spans"]))

    def _remember(self, key: str, found: Rendered | TemplateFailure) -> None:
        if self.now is None:  # the clock goes on: nothing but the last answer is kept
            self._seen.clear()
        self._seen[key] = found
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)


def check_messages(messages: Any) -> None:
    """Errors: `ContentError` for what is no conversation."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ContentError(
            f"messages: got {type(messages).__name__}, wanted a list of objects with 'role' and 'content'"
        )
    if not messages:
        raise ContentError("messages: got an empty list, wanted one message at least")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ContentError(f"message {i}: got {type(message).__name__}, wanted an object with 'role' and 'content'")
        if not isinstance(message.get("role"), str):
            raise ContentError(f"message {i}: role is {message.get('role')!r}, wanted a text such as 'user'")


def _as_json(text: str, variables: Mapping[str, Any]) -> str:
    try:
        return json.dumps([text, variables], default=_plain)
    except (TypeError, ValueError, RecursionError) as err:
        raise ContentError(f"messages or template arguments: {err}; wanted JSON values only") from err


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value is {type(value).__name__}")


def _marked(messages: list[Message], key: str, template: str) -> tuple[list[Message], str]:
    """The messages with a mark behind the part that is to be continued, and that part."""
    final = copy.deepcopy(dict(messages[-1]))
    if final.get(key) is None:
        raise TemplateFailure("continue", f"it has no {key!r}")
    if key not in template:
        raise TemplateFailure("continue", f"the template never reads {key!r}")
    goal = final[key]
    if isinstance(goal, str):
        final[key] = goal + _TAG
        return [*messages[:-1], final], goal
    block = next((b for b in reversed(goal) if "text" in b), None)
    if block is None:
        raise TemplateFailure("continue", "it has no text")
    goal = block["text"]
    block["text"] = goal + _TAG
    return [*messages[:-1], final], goal


def _cut_at_mark(text: str, goal: str) -> str:
    mark = _TAG.strip()
    if goal.strip() not in text or mark not in text:
        raise TemplateFailure("continue", "the template changes its text")
    at = text.rindex(mark)
    # a template that trims its content has eaten the mark's own blank, and would have eaten those before it
    return text[:at] if text[at : at + len(_TAG)] == _TAG else text[:at].rstrip()
