"""`check_template` both ways: each fault fires with its class, what is right is quiet, real templates get their due."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from template_faults import FAULTS
from template_texts import ALWAYS_THINKING, BRACKETS, CLEAN, DATED, HYBRID, KEEPING, chatml

import onepolicy.models
from onepolicy.errors import ContentError, UsageError
from onepolicy.tokens.open import open_tokenizer
from onepolicy.tokens.templates import Child, Limits, TemplateReport, check_template
from onepolicy.tokens.templates.conversations import assistant, user
from onepolicy.tokens.templates.prefix import CLASSES
from onepolicy.types import Finding, Outcome, Severity

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful keeper<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
#: no finding at warn or above
QUIET: dict[str, str] = {
    "append-only": CLEAN,
    "append-only, with calls and a thinking field": KEEPING,
    "default system prompt that is always the same": SMOLLM2,
    "no system message": "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CLEAN,
    "a system message is wanted": "{% if messages[0].role != 'system' %}{{ raise_exception('?') }}{% endif %}" + CLEAN,
    "roles take turns": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}"
        "{% endif %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content + "
        "'<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
    ),
    "stop is the EOS token": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    ),
    "no stop token at all": (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    ),
    "arguments in tags of their own": chatml(
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{% if c.function.arguments is mapping %}"
        "<f={{ c.function.name }}>{% for k, v in c.function.arguments.items() %}<p={{ k }}>{{ v }}</p>{% endfor %}</f>"
        "{% endif %}{% endfor %}"
    ),
}


def check(text: str, **more: Any) -> TemplateReport:
    return check_template(text, bos_token="<s>", eos_token="</s>", **more)


def loud(report: TemplateReport) -> list[Finding]:
    return [f for f in report.findings if f.severity is not Severity.INFO]


@cache
def of_fault(name: str) -> TemplateReport:
    return check_template(FAULTS[name][0], bos_token="<s>")


@pytest.mark.parametrize("name", QUIET)
def test_what_is_right_is_quiet(name: str) -> None:
    report = check(QUIET[name])
    assert loud(report) == [] and report.safe
    assert report.prefix_preserving["user"] is True


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_fires_with_its_class(name: str) -> None:
    _, code, change = FAULTS[name]
    report = of_fault(name)
    found = [f for f in report.findings if f.code == code and f.evidence["class"] == change]
    assert len(found) == 1, [(f.code, f.evidence.get("class")) for f in report.findings]
    assert found[0].severity is not Severity.INFO
    json.dumps([dict(f.evidence) for f in report.findings])
    json.dumps(report.to_json())


@pytest.mark.parametrize("name", FAULTS)
def test_no_advice_cuts_a_render_and_no_message_blames_the_tokenizer(name: str) -> None:
    for f in of_fault(name).findings:
        assert "[len(" not in f.advice + f.message and "slice" not in f.advice.lower()
        if f.code == "history-rewritten-by-template":
            assert "tokeniz" not in (f.message + f.advice).lower()
            assert f.evidence["class"] in CLASSES


def test_the_faults_of_one_template_are_few() -> None:
    """One fault is not reported as many: at most three codes and classes for any of them."""
    counts = {name: len(loud(of_fault(name))) for name in FAULTS}
    assert max(counts.values()) <= 3 and sorted(counts.values())[len(counts) // 2] == 1


def test_a_hybrid_thinking_template() -> None:
    """Old thinking goes when a question follows, stays when a tool result follows."""
    report = check(HYBRID)
    assert dict(report.prefix_preserving) == {"user": False, "tool": True, "system": True, "assistant": True}
    dropped, *others = loud(report)
    assert (dropped.code, dropped.severity) == ("history-rewritten-by-template", Severity.FAIL)
    assert dropped.evidence["class"] == "thinking-dropped" and dropped.evidence["kinds"] == ["user"]
    assert dropped.evidence["lost_text"] == "<think>\nSeven bells means half past three.\n</think>\n\n"
    assert all(f.severity is Severity.WARN for f in others)
    by_class = {f.evidence["class"]: f for f in others}
    assert by_class["thinking-dropped"].evidence["arguments"] == {"enable_thinking": False}
    assert "enable_thinking=False" in by_class["thinking-dropped"].message
    assert set(by_class) == {"thinking-dropped", "thinking-inserted", "tool-results-merged"}
    assert report.thinking_field == "reasoning_content" and report.names == ("enable_thinking",)


def test_a_dated_template_that_trims() -> None:
    report = check(DATED)
    found = {f.evidence["class"]: f for f in loud(report)}
    assert set(found) == {"content-stripped", "date-in-prompt", "double-encoded"}
    assert found["date-in-prompt"].severity is Severity.WARN and "date_string" in found["date-in-prompt"].advice
    assert found["double-encoded"].evidence["by_way"] == {"object": "kept", "text": "double-encoded"}
    assert "as an object" in found["double-encoded"].advice
    assert report.conversations["calls-parallel"].startswith("refused")
    quiet = check(DATED, defaults={"date_string": "02 Jan 2026"})
    assert "date-in-prompt" not in {f.evidence["class"] for f in loud(quiet)}


def test_a_strict_bracket_template() -> None:
    report = check(BRACKETS)
    assert {f.evidence["class"] for f in loud(report)} == {"space-before-reply", "double-encoded"}
    assert report.prefix_preserving["system"] is None and report.prefix_preserving["user"] is True
    assert report.stop.stop == "</s>" and report.stop.how == "eos_token" and report.stop.suffix == ""


def test_a_template_that_opens_thinking_and_drops_it() -> None:
    report = check(ALWAYS_THINKING)
    found = {(f.code, f.evidence["class"]): f for f in loud(report)}
    assert found["history-rewritten-by-template", "thinking-dropped"].severity is Severity.FAIL
    assert found["generation-prompt-differs", "opener-only-in-prompt"].evidence["lost_text"] == "<think>\n"
    assert report.conversations["call-arguments-object"].startswith("failed")
    assert report.conversations["call-arguments-text"] == "kept"


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_the_packaged_model_and_the_like(name: str) -> None:
    text = (Path(onepolicy.models.path("tiny")) / "chat_template.jinja").read_text() if name == "tiny" else SMOLLM2
    report = check(text)
    assert report.safe and loud(report) == [] and all(report.prefix_preserving.values())
    rows = {r.question: r for r in report.rows}
    assert rows["text after the stop token"].answer == repr("\n")
    assert rows["tool calls are kept"].answer == "not supported" and report.thinking_field == ""


def test_the_way_out_is_named() -> None:
    switch = chatml(
        "{% set c = m.content %}{% if not keep_thinking and not loop.last %}{% set c = c.split('</think>')[-1] %}"
        "{% endif %}{{ c }}"
    )
    found = loud(check(switch))[0]
    assert found.evidence["way_out"] == {"arguments": {"keep_thinking": True}}
    assert "keep_thinking=True" in found.advice
    assert loud(check(switch, defaults={"keep_thinking": True})) == []
    field = chatml(
        "{% if m.reasoning_content %}{{ '<think>' ~ m.reasoning_content ~ '</think>' }}{% endif %}"
        "{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
    )
    found = loud(check(field))[0]
    assert found.evidence["way_out"] == {"field": "reasoning_content"} and "reasoning_content is kept" in found.advice


def test_the_stop_token_can_be_given() -> None:
    text = "{% for m in messages %}{{ m.role ~ ':' ~ m.content ~ '@@' ~ '\\n' }}{% endfor %}"
    text += "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    report = check(text, stop_tokens=["@@"])
    assert (report.stop.stop, report.stop.suffix, report.stop.how) == ("@@", "\n", "given") and report.safe


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{% if %}", "no valid Jinja"),
        ("{{ raise_exception('never') }}", "refuses the conversation: never"),
        ("{{ messages[5].content.x }}", "not there"),
    ],
)
def test_a_template_that_never_renders_is_a_finding(text: str, says: str) -> None:
    report = check(text)
    assert [f.code for f in report.findings] == ["template-failed"] and says in report.findings[0].message
    assert report.findings[0].outcome is Outcome.ERROR and not report.safe


def test_a_template_that_hangs_on_one_kind_of_conversation_is_given_up_soon() -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with Child(Limits(cpu_seconds=1, wall_seconds=20)) as child:
        text = CLEAN + "{% if messages[0].role == 'system' and messages | length > 2 %}" + loop + "{% endif %}"
        report = check(text, child=child)
        failed = [f for f in report.findings if f.code == "template-failed"]
        assert len(failed) == 1 and "endless loop" in failed[0].message and failed[0].place.startswith("system,")
        assert child.starts <= 8


def test_an_error_on_the_users_own_conversation_is_a_finding_a_refusal_is_not() -> None:
    parts = [user([{"type": "text", "text": "x"}]), assistant("y"), user("z")]
    assert [f.code for f in loud(check(CLEAN, conversations=[parts]))] == ["template-failed"]
    strict = "{% if messages[0].content == 'no' %}{{ raise_exception('not that') }}{% endif %}" + CLEAN
    report = check(strict, conversations=[[user("no"), assistant("y"), user("z")]])
    assert loud(report) == [] and "not that" in report.conversations["conversation 0"]


def test_own_fields_that_the_template_leaves_out_are_a_failure() -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {"a": 1}}}
    talk = [user("Q"), assistant("", tool_calls=[call]), {"role": "tool", "content": "r"}]
    report = check(CLEAN, conversations=[talk])
    assert [(f.code, f.evidence["class"]) for f in loud(report)] == [("tool-call-rewritten", "missing")]
    thought = [user("Q"), assistant("A", reasoning_content="Hm, let me see."), user("R")]
    report = check(CLEAN, conversations=[thought])
    assert [(f.code, f.evidence["class"]) for f in loud(report)] == [
        ("history-rewritten-by-template", "thinking-dropped")
    ]
    assert loud(report)[0].evidence["lost_text"] == "Hm, let me see."


def test_null_content_that_is_printed_is_seen() -> None:
    report = check(KEEPING.replace("m.content if m.content is string else ''", "m.content"))
    rows = {r.question: r for r in report.rows}
    assert rows["a call with null content is taken"].answer == "not supported"
    assert rows["a call with null content is taken"].detail == "null content is written as 'None'"


def test_conversations_and_templates_that_are_none() -> None:
    with pytest.raises(ContentError, match="conversation 0"):
        check(CLEAN, conversations=[3])
    with pytest.raises(UsageError, match="none given"):
        check_template(None)


def test_the_tokenizer_gives_the_template_and_its_tokens() -> None:
    report = check_template(tokenizer=open_tokenizer("tiny"))
    assert report.safe and report.stop.how == "special token" and loud(report) == []
    assert {f.code for f in report.findings} == {"special-token-look-alike"}


ANY = [CLEAN, KEEPING, HYBRID, DATED, BRACKETS, ALWAYS_THINKING]
VALUES = st.sampled_from(
    [None, "", "x", "<think>\na\n</think>\n\nb", 3, 1.5, True, [], {}, [{"type": "text", "text": "q"}], ["s"], {"a": 1}]
)
CALLS = st.sampled_from(
    [
        None,
        "text",
        [],
        [None, "text", {}, {"function": None}],
        [{"function": {"name": "f", "arguments": 3}}, {"name": "f", "arguments": '{"a": 1}'}],
        [{"id": "abc123def", "function": {"name": "f", "arguments": {"a": "é"}}}],
        [{"function": {"name": 3, "arguments": "[1]"}}],
    ]
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "assistant", "tool", "system", "developer", ""])},
    optional={
        "content": VALUES,
        "tool_calls": CALLS,
        "reasoning_content": VALUES,
        "sampled_text": st.sampled_from(["", "x", "x<|im_end|>", "<think>\na\n</think>\n\nb<|im_end|>"]),
    },
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([CLEAN, KEEPING, HYBRID, DATED, BRACKETS, ALWAYS_THINKING]),
    st.lists(MESSAGES, min_size=1, max_size=6),
)
def test_any_conversation_ends_in_a_report(text: str, messages: list[dict[str, Any]]) -> None:
    report = check(text, conversations=[messages], with_built_in=False)
    assert json.loads(json.dumps(report.to_json()))["safe_for_multi_turn"] is report.safe
    assert all(f.message and f.advice and json.dumps(dict(f.evidence)) for f in report.findings)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=3, max_size=7), st.sampled_from([CLEAN, KEEPING]))
def test_no_text_makes_an_append_only_template_rewrite(texts: list[str], text: str) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]
    report = check(text, conversations=[messages], with_built_in=False)
    assert loud(report) == [] and report.own_prefix_preserving == {"user": True}
