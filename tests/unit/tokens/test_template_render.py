"""`ChatTemplate.render` against transformers' own rendering, for every template and conversation at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from template_faults import FAULTS
from template_texts import CLEAN, REALISTIC

import onepolicy.models
from onepolicy.errors import ContentError, UsageError
from onepolicy.tokens.open import open_tokenizer
from onepolicy.tokens.templates import ChatTemplate, TemplateFailure, bind, built_in, check_template
from onepolicy.tokens.templates.conversations import TOOLS, Conversation, assistant, user
from onepolicy.tokens.templates.render import FROZEN
from onepolicy.types import Severity

TINY = (Path(onepolicy.models.path("tiny")) / "chat_template.jinja").read_text(encoding="utf-8")
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
ALL = {"tiny": TINY, "clean": CLEAN, **REALISTIC, **{n: t for n, (t, _, _) in FAULTS.items() if n != "random"}}
#: what transformers gives besides: HTML, tests, loops that break, macros, options of tojson, white space control
DETAILS = {
    "html": "{{ {'a': '<b>&\\'\"'} | tojson }} {{ messages[0].content }}",
    "tojson": "{{ {'b': 1, 'a': ['é']} | tojson(ensure_ascii=True, indent=2, separators=(',', ':'), sort_keys=True) }}",
    "blocks": "  {% if true %}\n  a\n  {% endif %}\n\n{%- for m in messages %}\n {{ m.role }}\n{% endfor %}\nend\n",
    "loops": "{% for m in messages %}{% if loop.index0 == 2 %}{% break %}{% endif %}{% continue %}{% endfor %}x",
    "generation": "a{% for m in messages %}{% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}",
    "undefined": "[{{ nothing }}][{{ bos_token }}][{{ unk_token }}][{{ tools is none }}][{{ documents is defined }}]",
    "macro": "{% macro f(x, n=2) %}{{ x * n }}{% endmacro %}{{ f('ab') }}{{ f(messages[0].role, 1) | upper }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "documents": "{% for d in documents or [] %}{{ d.title }}: {{ d.text | trim }}\n{% endfor %}",
    "methods": "{{ messages[0].items() | list | length }}{{ messages[::-1] | map(attribute='role') | join('/') }}",
    "dates": "{{ strftime_now('%d %B %Y') }}",
    "argument": "{{ enable_thinking is defined and enable_thinking is false }} {{ flavour | default('none') }}",
}


def reference(text: str, conversation: Conversation, **more: Any) -> str | None:
    """What transformers renders; None where it raises."""
    from transformers.utils.chat_template_utils import render_jinja_template

    options = {**conversation.options(), **SPECIALS, **more}
    messages = [dict(m) for m in conversation.messages]
    try:
        rendered, _ = render_jinja_template(conversations=[messages], chat_template=text, **options)
    except Exception:
        return None
    return rendered[0]


def ours(text: str, conversation: Conversation, **more: Any) -> str | None:
    try:
        return ChatTemplate(text, SPECIALS).render(conversation.messages, **conversation.options(), **more)
    except TemplateFailure:
        return None


@pytest.mark.parametrize("name", [*ALL, *DETAILS])
def test_the_text_is_that_of_transformers(name: str) -> None:
    text = {**ALL, **DETAILS}[name]
    if name == "time":
        text = text.replace("%H:%M:%S", "%Y")  # two clocks
    given = 0
    for conversation in built_in():
        for more in ({}, {"add_generation_prompt": True}, {"flavour": "salt"}):
            expected = reference(text, conversation, **more)
            assert ours(text, conversation, **more) == expected, conversation.name
            given += expected is not None
    assert given >= 6


@pytest.mark.parametrize("name", ["clean", "keeping", "hybrid", "dated", "always-thinking", "content trimmed"])
def test_continuing_the_final_message(name: str) -> None:
    replies = ["Half", "Half ", " Half", "<think>\nHm", "", "<think>\nHm\n</think>\n\nYes "]
    compared = 0
    for reply in replies:
        for key in (True, "content", "reasoning_content"):
            more = {"reasoning_content": reply} if key == "reasoning_content" else {}
            talk = Conversation("c", (user("Q?"), assistant(reply, **more)))
            expected = reference(ALL[name], talk, continue_final_message=key)
            assert ours(ALL[name], talk, continue_final_message=key) == expected, (reply, key)
            compared += expected is not None
    assert compared >= 4


def test_continuing_a_message_in_parts() -> None:
    text = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"
    talk = Conversation("c", (user([{"type": "text", "text": "Q"}]), assistant([{"type": "text", "text": "Ha"}])))
    assert ours(text, talk, continue_final_message=True) == "user:Q;assistant:Ha"
    assert reference(text, talk, continue_final_message=True) == "user:Q;assistant:Ha"


def test_a_message_that_cannot_be_continued() -> None:
    with pytest.raises(TemplateFailure, match="no 'content'"):
        ChatTemplate(CLEAN).render([{"role": "user"}], continue_final_message=True)
    with pytest.raises(TemplateFailure, match="changes its text"):
        ChatTemplate("content").render([user("x")], continue_final_message=True)
    with pytest.raises(UsageError, match="exclude each other"):
        ChatTemplate(CLEAN).render([user("x")], continue_final_message=True, add_generation_prompt=True)


def test_spans_of_generation_are_those_of_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    text = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    )
    talk = [user("Q"), assistant("A one"), user("R"), assistant("B")]
    expected, spans = render_jinja_template([talk], chat_template=text, return_assistant_tokens_mask=True)
    found = ChatTemplate(text).render_spans(talk)
    assert found.text == expected[0] and list(found.spans) == spans[0]
    assert [found.text[a:b] for a, b in found.spans] == ["A one</s>", "B</s>"]


def test_several_templates_by_name() -> None:
    both = ChatTemplate({"default": "plain", "tool_use": "with {{ tools | length }}"})
    assert both.render([user("x")]) == "plain" and both.render([user("x")], tools=list(TOOLS)) == "with 1"
    assert ChatTemplate({"default": "plain"}).render([user("x")], tools=list(TOOLS)) == "plain"
    with pytest.raises(UsageError, match="no template named 'default' among rag"):
        ChatTemplate({"rag": "x"}).render([user("x")])


def test_arguments_win_over_what_is_given_with_the_template() -> None:
    template = ChatTemplate("{{ bos_token }}{{ mood }}", {"bos_token": "<s>", "mood": "calm"})
    assert template.render([user("x")]) == "<s>calm"
    assert template.render([user("x")], mood="wild", bos_token="") == "wild"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "empty list"),
        ("hello", "got str"),
        (None, "got NoneType"),
        (["hello"], "message 0: got str"),
        ([{"content": "x"}], "message 0: role is None"),
        ([{"role": 3, "content": "x"}], "role is 3"),
        ([{"role": "user", "content": b"x"}], "a value is bytes"),
        ([{"role": "user", "content": object()}], "wanted JSON values only"),
    ],
)
def test_messages_that_are_none(messages: Any, says: str) -> None:
    with pytest.raises(ContentError, match=says):
        ChatTemplate(CLEAN).render(messages)


def test_a_template_that_is_none() -> None:
    for text in ("", {}, None, 3):
        with pytest.raises(UsageError, match="wanted its text"):
            ChatTemplate(text)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'tools' cannot be a default argument"):
        ChatTemplate("x", {"tools": []})


def test_surrogates_and_control_characters_come_back() -> None:
    for content in ("\ud800", "\x00\x1f", "\u2028\u2029", "𝔘", "e\u0301"):
        assert ChatTemplate("{{ messages[0].content }}").render([user(content)]) == content


def test_names_that_a_template_reads_from_outside() -> None:
    text = (
        "{% set a = 1 %}{% if b is defined %}{% set b = 2 %}{% endif %}{{ a }}{{ c }}{{ messages }}{{ tools }}"
        "{% for m in messages %}{% if m %}{% set late = m %}{% endif %}{% endfor %}{{ late }}"
    )
    assert ChatTemplate(text).names() == ("b", "c")


def test_renders_are_remembered_only_while_the_clock_stands() -> None:
    frozen = ChatTemplate("{{ range(10 ** 5) | random }}", now=FROZEN)
    assert len({frozen.render([user("x")]) for _ in range(5)}) == 1
    assert frozen.digest == ChatTemplate("{{ range(10 ** 5) | random }}").digest != ChatTemplate("x").digest


def test_messages_are_not_changed() -> None:
    talk = [user("Q"), assistant("A")]
    ChatTemplate(CLEAN).render(talk, continue_final_message=True)
    assert talk == [user("Q"), assistant("A")]


@pytest.mark.smollm2
def test_the_real_template_of_smollm2() -> None:
    """Rendered as transformers' tokenizer does, system prompt and all; append-only, so safe; nothing about tools."""
    from transformers import AutoTokenizer

    model = Path(__file__).resolve().parents[3] / "build" / "models" / "smollm2"
    theirs = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    tokenizer = open_tokenizer(str(model))
    mine = bind(None, tokenizer)
    for conversation in built_in()[:5]:
        for prompt in (True, False):
            options = {"tokenize": False, "add_generation_prompt": prompt}
            expected = theirs.apply_chat_template(list(conversation.messages), **options)
            assert mine.render(conversation.messages, add_generation_prompt=prompt) == expected
    report = check_template(tokenizer=tokenizer)
    assert report.safe and all(report.prefix_preserving.values()) and report.stop.suffix == "\n"
    assert all(f.severity is Severity.INFO for f in report.findings)


def test_the_packaged_tokenizer_renders_alike() -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(onepolicy.models.path("tiny")), local_files_only=True)
    mine = bind(None, open_tokenizer("tiny"))
    for conversation in built_in()[:5]:
        expected = theirs.apply_chat_template(list(conversation.messages), tokenize=False, add_generation_prompt=True)
        assert mine.render(conversation.messages, add_generation_prompt=True) == expected
