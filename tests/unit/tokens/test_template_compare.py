"""Two sides' templates: the first conversation and character that differ, and what makes them differ."""

from __future__ import annotations

import json

import pytest
from template_texts import BRACKETS, CLEAN, HYBRID, KEEPING

from onepolicy.tokens.open import open_tokenizer
from onepolicy.tokens.templates import ChatTemplate, compare_templates
from onepolicy.tokens.templates.conversations import assistant, user

TALK = [user("Q"), assistant("A"), user("R")]


def test_a_template_is_itself() -> None:
    for text in (CLEAN, KEEPING, HYBRID, BRACKETS):
        found = compare_templates(text, text)
        assert found.same and found.findings == () and len(found.views) > 20
    dated = "{{ strftime_now('%f') }}" + CLEAN
    assert compare_templates(dated, dated).same


def test_the_first_character_that_differs() -> None:
    other = CLEAN.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")
    found = compare_templates(CLEAN, other, [TALK], names=("engine", "trainer"))
    (one,) = found.findings
    assert one.code == "chat-template-differs" and one.place == "conversation 0, prompt of reply 0"
    prompt = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    assert one.evidence["first_diff_char"] == len(prompt)
    assert one.evidence["texts"] == {"engine": prompt, "trainer": prompt + "<think>\n"}
    assert (one.evidence["lost_text"], one.evidence["inserted_text"]) == ("", "<think>\n")
    assert (one.evidence["differing"], one.evidence["renders"]) == (2, 3)
    assert "the engine has ''" in one.message and "the trainer '<think>" in one.message
    json.dumps(dict(one.evidence))


def test_only_some_conversations_differ() -> None:
    other = CLEAN.replace("m.content", "m.content | trim")
    found = compare_templates(CLEAN, other)
    assert found.findings[0].evidence["conversations"] == ["call-content-null", "parts", "edges"]
    assert compare_templates(CLEAN, other, [TALK]).same


def test_arguments_that_differ_are_named() -> None:
    text = "{{ bos_token }}" + CLEAN
    sides = ChatTemplate(text, {"bos_token": "<s>"}), ChatTemplate(text, {"bos_token": "<|b|>", "mood": 1})
    (one,) = compare_templates(*sides, [TALK]).findings
    assert one.evidence["template_text_equal"] is True
    assert one.evidence["arguments_that_differ"] == {"bos_token": ["<s>", "<|b|>"], "mood": [None, 1]}


def test_a_refusal_on_one_side_differs_a_refusal_on_both_says_nothing() -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CLEAN
    (one,) = compare_templates(CLEAN, strict).findings
    assert one.evidence["class"] == "refused on one side" and "no system" in one.evidence["why"]["scorer"]
    assert "the template of the scorer gives no text" in one.message
    assert compare_templates(strict, strict).same


def test_ids_on_both_sides() -> None:
    tiny = open_tokenizer("tiny")
    other = CLEAN.replace("assistant\\n' }}{% endif %}", "assistant:' }}{% endif %}")
    found = compare_templates(CLEAN, other, [TALK], tokenizers=(tiny, tiny))
    evidence = found.findings[0].evidence
    a, b = (tiny.encode([evidence["texts"][side]])[0] for side in ("sampler", "scorer"))
    at = evidence["first_diff_id"]
    assert a[:at] == b[:at] and a[at:] != b[at:] and evidence["n_ids"] == {"sampler": len(a), "scorer": len(b)}
    assert compare_templates(CLEAN, CLEAN, [TALK], tokenizers=(tiny, tiny)).same


class Shifted:
    """A tokenizer whose ids are all one more."""

    def __init__(self) -> None:
        self.inner = open_tokenizer("tiny")

    def encode(self, texts: list[str], **options: bool) -> list[list[int]]:
        return [[i + 1 for i in ids] for ids in self.inner.encode(texts, **options)]


def test_one_text_and_other_ids() -> None:
    pair = (open_tokenizer("tiny"), Shifted())
    found = compare_templates(CLEAN, CLEAN, [TALK], tokenizers=pair)  # type: ignore[arg-type]
    assert [f.code for f in found.findings] == ["prompt-ids-differ"] and not found.same
    assert found.findings[0].evidence["first_diff_id"] == 0


@pytest.mark.parametrize("same", [True, False])
def test_another_spelling_of_one_template_is_the_same(same: bool) -> None:
    other = "{%- for m in messages -%}{{- '<|im_start|>' ~ m['role'] ~ '\\n' -}}"
    other += "{{- m['content'] -}}{{- '<|im_end|>\\n' -}}"
    other += "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    other = other if same else other.replace("m['content']", "m['content'].strip()")
    assert compare_templates(CLEAN, other, [TALK, [user(" x")]]).same is same
