"""The stop token and what stands after it, for the ways in which templates end a reply."""

from __future__ import annotations

import pytest
from template_texts import ALWAYS_THINKING, BRACKETS, CLEAN, DATED, HYBRID, KEEPING

from onepolicy.tokens.templates import ChatTemplate, find_stop, suffix_after_stop

_HEADS = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
#: template -> stop, before, suffix, how, last only
ENDS: dict[str, tuple[str, tuple[str, str, str, str, str]]] = {
    "ChatML": (CLEAN, ("<|im_end|>", "", "\n", "spelling", "")),
    "keeping": (KEEPING, ("<|im_end|>", "", "\n", "spelling", "")),
    "hybrid": (HYBRID, ("<|im_end|>", "", "\n", "spelling", "")),
    "dated": (DATED, ("<|eot_id|>", "", "", "spelling", "")),
    "EOS": (BRACKETS, ("</s>", "", "", "eos_token", "")),
    "other brackets": (ALWAYS_THINKING, ("<｜end▁of▁sentence｜>", "", "", "spelling", "")),
    "a blank before": (_HEADS + "{{ ' </s>' }}{% endfor %}", ("</s>", " ", "", "eos_token", "")),
    "EOS at the very end": (
        _HEADS + "{{ '<|end|>\\n' }}{% endfor %}{{ '</s>' }}",
        ("<|end|>", "", "\n", "spelling", "</s>"),
    ),
    "another stop at the end": (
        _HEADS + "{{ '<|return|>' if loop.last else '<|end|>' }}{% endfor %}",
        ("<|return|>", "", "", "spelling", "<|return|>"),
    ),
    "no newline after the last": (
        _HEADS + "{{ '<|end|>' ~ ('' if loop.last else '\\n') }}{% endfor %}",
        ("<|end|>", "", "", "spelling", ""),
    ),
    "only between turns": (
        _HEADS + "{{ '' if loop.last else '</s>\\n' }}{% endfor %}",
        ("</s>", "", "\n", "eos_token", ""),
    ),
    "none": ("{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\\n' }}{% endfor %}", ("", "", "\n", "none", "")),
    "nothing": ("{% for m in messages %}{{ m.content }}{% endfor %}", ("", "", "", "none", "")),
}


@pytest.mark.parametrize("name", ENDS)
def test_how_a_reply_ends(name: str) -> None:
    text, expected = ENDS[name]
    template = ChatTemplate(text, {"eos_token": "</s>", "bos_token": "<s>"})
    found = find_stop(template)
    assert (found.stop, found.before, found.suffix, found.how, found.last_only) == expected
    assert suffix_after_stop(template) == found.suffix == found.to_json()["suffix_after_stop"]


def test_what_is_given_wins() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content ~ '@@#' ~ '</s>' ~ '\\n' }}{% endfor %}")
    assert find_stop(template).stop == "</s>"
    assert find_stop(template, specials=["@@", "@@#"]).stop == "@@#"
    given = find_stop(template, given=["@@"], specials=["@@#"])
    assert (given.stop, given.suffix, given.how) == ("@@", "#</s>\n", "given")
