"""The built-in conversations, and the user's own from JSON lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onepolicy.errors import ContentError, UsageError
from onepolicy.tokens.templates import StopText, built_in, conversation_from, load_conversations
from onepolicy.tokens.templates.conversations import FOLLOW_UPS, assistant, user
from onepolicy.tokens.templates.render import check_messages
from onepolicy.tokens.templates.sides import steps_of

STOP = StopText("<|e|>", "", "\n", "given")


def test_the_built_in_set_holds_what_templates_stumble_over() -> None:
    given = {c.name: c for c in built_in()}
    holds = {c.holds for c in given.values()}
    assert len(given) == len(built_in()) >= 16
    assert {"plain", "system", "thinking", "reasoning", "calls", "parallel calls", "text parts", "documents"} <= holds
    for c in given.values():
        check_messages(c.messages)
        json.dumps([*c.messages, c.options()])
        assert not c.own and any(m["role"] == "assistant" for m in c.messages)
    assert given["call-content-null"].messages[1]["content"] is None
    assert isinstance(given["call-arguments-text"].messages[1]["tool_calls"][0]["function"]["arguments"], str)
    assert len(given["calls-parallel"].messages[1]["tool_calls"]) == 2
    assert "[THINK]" in built_in("[THINK]", "[/THINK]", "thinking")[3].messages[1]["content"]


def test_every_reply_meets_every_kind_of_next_message() -> None:
    plain = built_in()[0]
    steps = list(steps_of(plain, STOP))
    assert {(s.turn, s.kind) for s in steps} == {(t, k) for t in (0, 1) for k in FOLLOW_UPS}
    assert [s.kind for s in steps if s.real] == ["user", "user"]
    assert all(s.following[: len(s.prompt) + 1] == (*s.prompt, s.reply) for s in steps)
    parallel = next(c for c in built_in() if c.name == "calls-parallel")
    first = next(s for s in steps_of(parallel, STOP) if s.real)
    assert [m["role"] for m in first.following] == ["user", "assistant", "tool", "tool"]


def test_messages_with_sampled_texts() -> None:
    given = {"messages": [user("Q"), assistant("A", sampled_text="A <|e|>"), user("R")], "name": "mine"}
    found = conversation_from(given)
    assert found.name == "mine" and found.own and found.sampled == {1: "A <|e|>"}
    assert "sampled_text" not in found.messages[1]
    assert {s.sampled for s in steps_of(found, STOP)} == {"A <|e|>"}


def test_turns_and_other_turns() -> None:
    asked, reply = user("Q"), assistant("A")
    given = {
        "turns": [
            {"prompt_messages": [asked], "sampled_text": "A<|e|>"},
            {"prompt_messages": [asked, reply, user("R")], "sampled_text": "B<|e|>"},
        ],
        "alt_turn": {"prompt_messages": [asked, reply, {"role": "tool", "content": "t"}]},
    }
    steps = list(steps_of(conversation_from(given), STOP))
    assert [(s.turn, s.kind) for s in steps if s.real] == [(0, "user"), (0, "tool")]
    last = [s for s in steps if s.turn == 1]
    assert {s.kind for s in last} == set(FOLLOW_UPS) and last[0].reply == assistant("B")


def test_arguments_and_tools_come_along() -> None:
    given = {"messages": [user("Q")], "tools": [{"x": 1}], "chat_template_kwargs": {"enable_thinking": False}}
    assert conversation_from(given).options() == {"tools": [{"x": 1}], "documents": None, "enable_thinking": False}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (3, "got int"),
        ("text", "got str"),
        ({}, "no 'messages' and no 'turns' among its keys"),
        ({"prompt": "x"}, r"among its keys \(prompt\)"),
        ([], "empty list"),
        ([user("x"), 3], "message 1: got int"),
        ({"messages": [user("x")], "tools": {"a": 1}}, "'tools' is dict"),
        ({"turns": []}, "'turns' is"),
        ({"turns": [{"prompt_messages": None}]}, "turn 0"),
        ({"turns": [{"prompt_messages": [user("x")], "sampled_text": 3}]}, "sampled_text is 3"),
    ],
)
def test_what_is_no_conversation(value: Any, says: str) -> None:
    with pytest.raises(ContentError, match=says):
        conversation_from(value, "line 7")


def test_a_file_with_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    good = json.dumps({"messages": [user("Q"), assistant("A")]})
    path.write_text(f"{good}\n\nnot json\n[3]\n{json.dumps([user('only')])}\n")
    found, skipped = load_conversations(path)
    assert [c.name for c in found] == ["talks.jsonl, line 1", "talks.jsonl, line 5"]
    assert skipped[0].code == "lines-skipped" and skipped[0].evidence["skipped"] == 2
    assert "talks.jsonl, line 3: no JSON" in skipped[0].evidence["first"][0]
    with pytest.raises(ContentError, match="line 3: no JSON"):
        load_conversations(path, strict=True)
    path.write_text("\n")
    with pytest.raises(ContentError, match="no conversation in it"):
        load_conversations(path)
    with pytest.raises(UsageError, match="No such file"):
        load_conversations(tmp_path / "none.jsonl")
