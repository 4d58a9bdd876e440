"""Is this chat template safe for multi-turn RL? `check_template` tries it on conversations and says.

report = check_template(text, tokenizer=tokenizer)
report.prefix_preserving    # {"user": False, "tool": True, ...}
report.findings, report.rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onepolicy.codes import by_rank, finding
from onepolicy.errors import UsageError
from onepolicy.tokens.base import Tokenizer
from onepolicy.tokens.templates.calls import CallResult, call_findings, call_results, with_objects
from onepolicy.tokens.templates.conversations import SYSTEM, Conversation, built_in, conversation_from, user
from onepolicy.tokens.templates.generation import GenerationResult, generation_findings, generation_results
from onepolicy.tokens.templates.history import Judged, history_findings
from onepolicy.tokens.templates.ids import (
    IdResult,
    bos_findings,
    control_token_findings,
    id_results,
    look_alike_findings,
    seam_findings,
)
from onepolicy.tokens.templates.prefix import StepResult, judge_step, summary
from onepolicy.tokens.templates.process import Child, TemplateFailure
from onepolicy.tokens.templates.render import FROZEN, ChatTemplate, shared_child
from onepolicy.tokens.templates.sides import steps_of
from onepolicy.tokens.templates.stop import StopText, find_stop
from onepolicy.tokens.templates.table import Row, rows_of
from onepolicy.tokens.templates.thinking import reasoning_field, thinking_tags
from onepolicy.tokens.templates.varying import joined_findings, varying_findings
from onepolicy.types import Finding, Severity

_PATIENCE = 3  # renders stopped by a limit before the rest is given up


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """`prefix_preserving`: kind of next message -> kept, None where the template takes no such message; at the given
    arguments. `own_prefix_preserving`: the same of the user's conversations alone, as they really go on.
    `conversations`: name -> what became of it. `thinking_field`: where thinking is read from, "" if nowhere."""

    digest: str
    findings: tuple[Finding, ...]
    rows: tuple[Row, ...] = ()
    prefix_preserving: Mapping[str, bool | None] = field(default_factory=dict[str, "bool | None"])
    own_prefix_preserving: Mapping[str, bool | None] = field(default_factory=dict[str, "bool | None"])
    stop: StopText = field(default_factory=StopText)
    thinking_field: str = ""
    names: tuple[str, ...] = ()
    conversations: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def safe(self) -> bool:
        """No finding that fails, and something was rendered: a rollout of several turns may be rendered each turn."""
        kept = [*self.prefix_preserving.values(), *self.own_prefix_preserving.values()]
        return not any(f.severity is Severity.FAIL for f in self.findings) and any(x is not None for x in kept)

    def to_json(self) -> dict[str, Any]:
        return {
            "template": self.digest,
            "safe_for_multi_turn": self.safe,
            "prefix_preserving": dict(self.prefix_preserving),
            "own_prefix_preserving": dict(self.own_prefix_preserving),
            "rows": [r.to_json() for r in self.rows],
            "stop": self.stop.to_json(),
            "thinking_field": self.thinking_field or None,
            "arguments": list(self.names),
            "conversations": dict(self.conversations),
        }


def check_template(
    template: str | Mapping[str, str] | ChatTemplate | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    bos_token: str | None = None,
    eos_token: str | None = None,
    conversations: Sequence[Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    stop_tokens: Sequence[str] = (),
    with_built_in: bool = True,
    child: Child | None = None,
) -> TemplateReport:
    """Tries a template on the built-in conversations and on the user's own.

    `template`: Jinja text, texts by name, or None for the tokenizer's. `tokenizer`: for questions in ids; it also gives
    BOS, EOS and default arguments where they are not given. `conversations`: as `conversation_from` takes them.
    `defaults`: arguments of every render. `stop_tokens`: texts of the engine's stop tokens.

    A template that fails is a finding (`template-failed`), not an exception. Errors: `UsageError` for no template;
    `ContentError` for conversations that are none.
    """
    bound = bind(template, tokenizer, bos_token=bos_token, eos_token=eos_token, defaults=defaults, child=child)
    own = [conversation_from(c, f"conversation {i}") for i, c in enumerate(conversations or [])]
    try:
        names = bound.names()
        usable = with_preface(bound)
        if _ignores_messages(usable):
            return TemplateReport(bound.digest, (_no_template(),))
    except TemplateFailure as failure:
        return TemplateReport(bound.digest, (failed(failure),))
    return _Check(usable, tokenizer, names, own, stop_tokens, with_built_in).report()


def _ignores_messages(template: ChatTemplate) -> bool:
    """Whether two questions give one text: a text that leaves every message out is no chat template."""
    one, other = (template.render([user(text)], add_generation_prompt=True) for text in ("Qzw1?", "Is it lit?"))
    return one == other


def _no_template() -> Finding:
    advice = "Give the template's own file (chat_template.jinja): Jinja text that writes messages."
    return finding("nothing-checked", "the template writes nothing of a message: it is no chat template", advice=advice)


def with_preface(template: ChatTemplate) -> ChatTemplate:
    """The template, with a system message before every conversation if it wants one. Errors: `TemplateFailure`."""
    talk = [user("Hello.")]
    try:
        template.render(talk, add_generation_prompt=True)
    except TemplateFailure as failure:
        other = replace(template, preface=(SYSTEM,))
        try:
            other.render(talk, add_generation_prompt=True)
        except TemplateFailure:
            raise failure from None
        return other
    return template


def bind(
    template: str | Mapping[str, str] | ChatTemplate | None,
    tokenizer: Tokenizer | None = None,
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    child: Child | None = None,
) -> ChatTemplate:
    """A template with its special tokens and default arguments; what is not given comes from the tokenizer."""
    if isinstance(template, ChatTemplate):
        return template
    if template is None and tokenizer is not None:
        template = _of(tokenizer)
    if template is None:
        raise UsageError("chat template: none given, and the tokenizer has none; --template FILE names one")
    given = {"bos_token": bos_token, "eos_token": eos_token}
    variables = {**_known(tokenizer), **{k: v for k, v in given.items() if v is not None}, **(defaults or {})}
    return ChatTemplate(template, variables, FROZEN, child or shared_child())


def _of(tokenizer: Tokenizer) -> str | Mapping[str, str] | None:
    """All templates by name where there are several, else the one."""
    part = tokenizer.parts().get("chat_template")
    several = part is not None and isinstance(part.content, Mapping) and "default" in part.content
    return part.content if part is not None and several else tokenizer.chat_template


def _known(tokenizer: Tokenizer | None) -> dict[str, Any]:
    if tokenizer is None:
        return {}
    part = tokenizer.parts().get("template_defaults")
    known = dict(part.content) if part is not None and isinstance(part.content, Mapping) else {}
    for name, token_id in tokenizer.special_ids().items():
        if token_id is not None:
            added = tokenizer.added.get(token_id)
            known.setdefault(f"{name}_token", added.content if added else tokenizer.decode([[token_id]])[0])
    return known


def failed(failure: TemplateFailure, place: str = "chat template") -> Finding:
    """`template-failed` for one failure."""
    evidence = {"class": failure.kind, "line": failure.line, "why": failure.why}
    return finding("template-failed", str(failure), place=place, evidence=evidence)


class _Check:
    """One run: everything is computed once and read by the findings and by the table."""

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer | None,
        names: tuple[str, ...],
        own: list[Conversation],
        stop_tokens: Sequence[str],
        with_built_in: bool,
    ) -> None:
        self.template, self.tokenizer, self.names = template, tokenizer, names
        self.failures: list[Finding] = []
        self.stop = self._stop(stop_tokens)
        self.field = reasoning_field(template)
        tags = thinking_tags(template, self.field)
        others = built_in(*tags, self.field or "reasoning_content") if with_built_in else []
        self.conversations = [*own, *(c for c in others if self._applies(c))]
        self.results = self._results()
        self.ids: list[IdResult | None] = [None] * len(self.results)
        if tokenizer is not None:
            self.ids = id_results(tokenizer, self.results)
        self.calls: list[CallResult] = call_results(template, self.conversations)
        self.generation: list[GenerationResult] = []

    def _applies(self, conversation: Conversation) -> bool:
        if conversation.documents:
            return False  # another text, the same steps
        return all(name in self.names for name in conversation.arguments)

    def _stop(self, given: Sequence[str]) -> StopText:
        specials = [t.content for t in self.tokenizer.added.values() if t.special] if self.tokenizer else []
        try:
            return find_stop(self.template, given=given, specials=specials)
        except TemplateFailure as failure:
            self.failures.append(failed(failure, "one question and one reply"))
            return StopText()

    def _results(self) -> list[StepResult]:
        out: list[StepResult] = []
        stopped = 0
        for conversation in self.conversations:
            for step in steps_of(conversation, self.stop):
                if stopped >= _PATIENCE:
                    return out
                out.append(judge_step(self.template, step, self.stop))
                stopped += out[-1].status == "stopped"
        return out

    def report(self) -> TemplateReport:
        judged = Judged(self.template, self.stop, self.names, self.results, self.ids, self.field)
        varying = self._varying()
        found = [*self.failures, *self._broken(), *varying]
        if not any(f.evidence.get("class") == "random-text" for f in varying):  # chance would be taken for rewriting
            found += [*history_findings(judged), *self._generation(), *self._rest()]
        ordered = by_rank(found)
        kept = summary(r for r in self.results if not r.step.conversation.variant)
        own = summary(r for r in self.results if r.step.conversation.own and r.step.real)
        around = (self.names, self.template.variables, bool(self.template.preface))
        rows = rows_of(self.results, kept, self.generation, self.calls, self.stop, self.field, ordered, *around)
        return TemplateReport(
            self.template.digest,
            tuple(ordered),
            tuple(rows),
            kept,
            {kind: value for kind, value in own.items() if value is not None},
            self.stop,
            self.field,
            self.names,
            _outcomes(self.results),
        )

    def _broken(self) -> list[Finding]:
        """Stopped by a limit, or an error on the user's own conversation; a refusal is the template's right."""
        bad = [
            r
            for r in self.results
            if r.status == "stopped" or (r.status == "failed" and r.step.conversation.own and r.step.real)
        ]
        firsts = {(r.status, r.why): r for r in reversed(bad)}
        return [self._failed(firsts[key]) for key in dict.fromkeys((r.status, r.why) for r in bad)]

    def _failed(self, bad: StepResult) -> Finding:
        """One failure; with its cause, where the template takes arguments of tool calls as objects only."""
        evidence = {"class": bad.status, "why": bad.why}
        objects = with_objects(bad.step.following) if bad.status == "failed" else None
        try:
            if objects is not None:
                self.template.render(objects, **bad.step.conversation.options())
        except TemplateFailure:
            objects = None
        if objects is None:
            return finding("template-failed", bad.why, place=bad.step.place, evidence=evidence)
        said = f"{bad.why}; the same messages render when the tool calls' arguments are objects instead of JSON texts"
        advice = (
            "Parse the arguments before rendering (json.loads): engines send a text, this template takes an object."
        )
        evidence["class"] = "arguments-as-text"
        return finding("template-failed", said, place=bad.step.place, evidence=evidence, advice=advice)

    def _generation(self) -> list[Finding]:
        cases: list[dict[str, Any]] = [{}, *([{"enable_thinking": False}] if "enable_thinking" in self.names else [])]
        out: list[Finding] = []
        for arguments in cases:
            try:
                results = generation_results(self.template, self.field, arguments)
            except TemplateFailure:
                continue
            self.generation.extend(results)
            out.extend(generation_findings(results, arguments))
        return out

    def _varying(self) -> list[Finding]:
        try:
            return varying_findings(self.template, self.names)
        except TemplateFailure as failure:
            return [failed(failure)]

    def _rest(self) -> list[Finding]:
        out = [*call_findings(self.calls), *seam_findings(self.results, self.ids)]
        try:
            out += joined_findings(self.template, self.conversations)
            out += bos_findings(self.template, self.tokenizer)
            out += control_token_findings(self.template, self.tokenizer, self.stop.stop)
            out += look_alike_findings(self.template, self.stop.stop)
        except TemplateFailure as failure:
            out.append(failed(failure))
        return out


def _outcomes(results: Sequence[StepResult]) -> dict[str, str]:
    """Name of a conversation -> the worst that happened in it, in words."""
    order = ("stopped", "rewritten", "failed", "refused", "not rendered", "kept")
    out: dict[str, StepResult] = {}
    for r in results:
        name, real = r.step.conversation.name, r.step.real
        old = out.get(name)
        rank = (not real, order.index(r.status))
        if old is None or rank < (not old.step.real, order.index(old.status)):
            out[name] = r
    return {name: f"{r.status}: {r.why}" if r.why else r.status for name, r in out.items()}
