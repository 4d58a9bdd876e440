"""Public faults of chat templates (`cases/step3_templates.jsonl`) and their relatives: class, place, text, must_not.

The relatives are written for this project in the same form as the given case: a template, turns as they were sampled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onepolicy.tokens.open import open_tokenizer
from onepolicy.tokens.templates import TemplateReport, check_template
from onepolicy.types import Finding, Outcome, Severity

LINES = (Path(__file__).parent / "cases" / "step3_templates.jsonl").read_text(encoding="utf-8").splitlines()
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in map(json.loads, LINES)}
#: a case's `must_not` -> words that no message and no advice may have
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "blame the tokenizer": ("tokenizer", "tokeniser", "tokenization"),
    "cut the new turn as full[len(prefix):]": ("[len(", "full[", "slice", "cut the"),
}
VERDICTS = {Severity.FAIL: "fail", Severity.WARN: "warn", Severity.INFO: "pass"}
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
ASKED = {"role": "user", "content": "Pick a number."}
THOUGHT = "<think>\nSeven is common.\n</think>\n\n7"
MORE = {"role": "user", "content": "Double it."}


def body(expression: str) -> str:
    """ChatML with another expression for a message's text."""
    return PLAIN.replace("~ m.content", f"~ {expression}")


def turns(sampled: str, content: str, *after: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Two turns: a sampled text, and how the pipeline hands it to the template afterwards."""
    reply = {"role": "assistant", "content": content, **fields}
    return {
        "turns": [
            {"prompt_messages": [ASKED], "sampled_text": sampled},
            {"prompt_messages": [ASKED, reply, *(after or (MORE,))]},
        ]
    }


def found(report: TemplateReport, code: str) -> Finding:
    hits = [f for f in report.findings if f.code == code]
    assert hits, [f.code for f in report.findings]
    return hits[0]


def own(template: str, given: dict[str, Any], **more: Any) -> TemplateReport:
    return check_template(template, conversations=[given], with_built_in=False, **more)


@pytest.mark.parametrize("with_built_in", [True, False])
@pytest.mark.parametrize("tokenizer", [None, "tiny"])
def test_c02_a_template_that_drops_earlier_thinking(with_built_in: bool, tokenizer: str | None) -> None:
    case = CASES["C02"]
    given, expected = case["input"], case["expected"]
    report = check_template(
        given["template"],
        conversations=[{"turns": given["turns"], "alt_turn": given["alt_turn"]}],
        with_built_in=with_built_in,
        tokenizer=open_tokenizer(tokenizer) if tokenizer else None,
    )
    first = found(report, expected["finding"])
    assert VERDICTS[first.severity] == expected["verdict"] and first.outcome is Outcome.DRIFT
    for kind, kept in expected["prefix_preserving"].items():
        assert report.prefix_preserving[kind.removesuffix("_follow_up")] is kept
        assert report.own_prefix_preserving[kind.removesuffix("_follow_up")] is kept
    assert first.evidence["first_diff_char"] == expected["first_diff_char"]
    assert first.evidence["lost_text"] == expected["lost_text"] and first.evidence["inserted_text"] == ""
    assert first.evidence["class"] == "thinking-dropped" and first.evidence["turn"] == 0
    assert first.place == "conversation 0, reply 0, then user"
    if tokenizer:
        assert first.evidence["ids"]["first_diff_id"] is not None
    for f in report.findings:
        words = FORBIDDEN[expected["must_not"][0]] if f.code == expected["finding"] else ()
        for word in (*words, *FORBIDDEN[expected["must_not"][1]]):
            assert word not in (f.message + f.advice).lower()


#: what happened -> template, what was sampled and handed on, code, verdict, class, lost, inserted, first character
RELATIVES: dict[str, tuple[str, dict[str, Any], str, str, str, str | None, str | None, int | None]] = {
    "thinking emptied": (
        body(
            "(m.content if loop.last or m.role != 'assistant' else "
            "'<think>\\n\\n</think>\\n\\n' ~ m.content.split('</think>')[-1].strip())"
        ),
        turns(THOUGHT + "<|im_end|>", THOUGHT),
        "history-rewritten-by-template", "fail", "thinking-emptied", "Seven is common.", "", 72,
    ),
    "thinking doubled: in the content and in the field": (
        body("('<think>\\n' ~ m.reasoning_content ~ '\\n</think>\\n\\n' if m.reasoning_content else '') ~ m.content"),
        turns(THOUGHT + "<|im_end|>", THOUGHT, reasoning_content="Seven is common."),
        "history-rewritten-by-template", "fail", "thinking-doubled", "", None, None,
    ),
    "thinking moved behind the answer": (
        body("(m.content.split()[-1] ~ m.content.split('7')[0] if '<think>' in m.content else m.content)"),
        turns(THOUGHT + "<|im_end|>", THOUGHT),
        "history-rewritten-by-template", "fail", "thinking-moved", None, None, 64,
    ),
    "reply stripped": (
        body("m.content.strip()"),
        turns(" 7 \n<|im_end|>", " 7 \n"),
        "history-rewritten-by-template", "fail", "content-stripped", " ", "", 64,
    ),
    "default system prompt in the first turn only": (
        "{% if messages | length < 2 %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}" + PLAIN,
        turns("7<|im_end|>", "7"),
        "history-rewritten-by-template", "fail", "system-prompt-changed",
        "<|im_start|>system\nBe brief.<|im_end|>\n", "", 12,
    ),
    "stop token swapped in history": (
        body("m.content").replace(
            "'<|im_end|>\\n'", "('<|return|>' if loop.last and m.role != 'user' else '<|im_end|>') ~ '\\n'"
        ),
        turns("7<|return|>", "7"),
        "history-rewritten-by-template", "fail", "stop-changed", None, None, None,
    ),
    "the reply was parsed without its opening tag": (
        PLAIN.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}"),
        turns("Seven is common.\n</think>\n\n7<|im_end|>", "Seven is common.\n</think>\n\n7"),
        "history-rewritten-by-template", "fail", "thinking-opener-lost", "<think>\n", "", 64,
    ),
    "only the answer was handed on": (
        PLAIN,
        turns(THOUGHT + "<|im_end|>", "7"),
        "history-rewritten-by-template", "fail", "thinking-dropped", "<think>\nSeven is common.\n</think>\n\n", "", 64,
    ),
    "a character of the reply replaced": (
        body("m.content | replace('seven', '7')"),
        turns("It is seven, I say.<|im_end|>", "It is seven, I say."),
        "history-rewritten-by-template", "fail", "content-rewritten", "seven", "7", 70,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELATIVES)
def test_relatives_of_c02(name: str) -> None:
    template, given, code, verdict, change, lost, inserted, first = RELATIVES[name]
    report = own(template, given)
    finding = found(report, code)
    assert (VERDICTS[finding.severity], finding.evidence["class"]) == (verdict, change)
    assert lost is None or finding.evidence["lost_text"] == lost
    assert inserted is None or finding.evidence["inserted_text"] == inserted
    assert first is None or finding.evidence["first_diff_char"] == first
    assert report.own_prefix_preserving == {"user": False} and not report.safe


CALLS = body(
    "(m.content or '') ~ ('<call>' ~ (m.tool_calls[0].function | tojson(OPTIONS)) ~ '</call>' if m.tool_calls else '')"
)
ARGUMENTS = {"town": "Málaga", "days": 2}
AS_SAMPLED = '<call>{"name": "tide", "arguments": {"town": "Málaga", "days": 2}}</call><|im_end|>'
RESULT = {"role": "tool", "content": "1.8"}

#: what happened -> options of tojson, arguments as handed on, sampled text, class (None: nothing), equal as JSON
CALL_RELATIVES: dict[str, tuple[str, Any, str, str | None, bool]] = {
    "the same": ("", ARGUMENTS, AS_SAMPLED, None, True),
    "no blanks were sampled": ("", ARGUMENTS, AS_SAMPLED.replace(": ", ":").replace(", ", ","), "separators", True),
    "keys sorted": ("sort_keys=true", ARGUMENTS, AS_SAMPLED, "key-order", True),
    "letters escaped": ("ensure_ascii=true", ARGUMENTS, AS_SAMPLED, "escapes", True),
    "spread over lines": ("indent=2", ARGUMENTS, AS_SAMPLED, "indent", True),
    "arguments as text": ("", json.dumps(ARGUMENTS, ensure_ascii=False), AS_SAMPLED, "double-encoded", False),
    "a number became a text": ("", {"town": "Málaga", "days": "2"}, AS_SAMPLED, "values-differ", False),
    "a key was lost": ("", {"town": "Málaga"}, AS_SAMPLED, "values-differ", False),
}


@pytest.mark.parametrize("name", CALL_RELATIVES)
def test_a_sampled_call_against_the_rendered_one(name: str) -> None:
    options, arguments, sampled, change, equal = CALL_RELATIVES[name]
    call = {"type": "function", "function": {"name": "tide", "arguments": arguments}}
    report = own(CALLS.replace("OPTIONS", options), turns(sampled, "", RESULT, tool_calls=[call]))
    loud = [f for f in report.findings if f.severity is not Severity.INFO]
    if change is None:
        assert loud == [] and report.own_prefix_preserving == {"tool": True}
        return
    assert [(f.code, f.evidence["class"]) for f in loud] == [("tool-call-rewritten", change)]
    assert loud[0].severity is (Severity.WARN if equal else Severity.FAIL)
    assert loud[0].evidence["call"]["equal_as_json"] is equal and not loud[0].evidence["call"]["equal_as_text"]
    assert report.own_prefix_preserving == {"tool": False}


def test_a_rollout_that_is_kept_is_quiet() -> None:
    given = turns(THOUGHT + "<|im_end|>", THOUGHT)
    report = own(PLAIN, given)
    assert report.safe and report.own_prefix_preserving == {"user": True} and report.stop.suffix == "\n"
    assert [f for f in report.findings if f.severity is not Severity.INFO] == []
