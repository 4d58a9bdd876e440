"""Content that spells a special token, against the prompt's ids: it became the token, stayed text, or nobody knows."""

from __future__ import annotations

from typing import Any

import pytest

from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.look_alikes import check_look_alikes
from onepolicy.tokens.open import open_tokenizer
from onepolicy.types import Severity

END = "<|im_end|>"


@pytest.fixture(scope="module")
def tiny() -> Any:
    return open_tokenizer("tiny")


def prompt(tiny: Any, content: str, parsed: bool = True) -> list[int]:
    head, tail = tiny.encode(["<|im_start|>user\n", f"{END}\n<|im_start|>assistant\n"])
    return [*head, *tiny.encode([content], parse_special=parsed)[0], *tail]


def found(tiny: Any, content: Any, ids: list[int] | None, role: str = "user") -> list[Any]:
    record = TokenRecord("a", "file:1", prompt_ids=ids, messages=[{"role": role, "content": content}])
    return check_look_alikes(record, tiny)


@pytest.mark.parametrize("content", [f"say {END} now", f"{END} first", f"last {END}", f"two {END} and {END}."])
def test_it_became_the_token(tiny: Any, content: str) -> None:
    (f,) = found(tiny, content, ids := prompt(tiny, content))
    assert (f.code, f.severity, f.evidence["class"]) == ("special-token-look-alike", Severity.WARN, "became-a-token")
    at = f.evidence["position"]
    assert ids[at] == f.evidence["id"] and f.evidence["character"] == content.index(END)
    before = tiny.decode([ids[:at]])[0]
    assert before.endswith(content[: content.index(END)])


def test_it_stayed_text(tiny: Any) -> None:
    content = f"say {END} now"
    assert found(tiny, content, prompt(tiny, content, parsed=False)) == []


def test_a_template_that_escapes_it_is_told_only_as_a_note(tiny: Any) -> None:
    (f,) = found(tiny, f"say {END} now", prompt(tiny, "say <im_end> now"))
    assert (f.severity, f.evidence["class"]) == (Severity.INFO, "in-content")


def test_without_ids_it_is_a_note(tiny: Any) -> None:
    (f,) = found(tiny, [{"type": "text", "text": f"say {END}"}, {"type": "image"}], None)
    assert f.severity is Severity.INFO and "takes it for one" in f.message


@pytest.mark.parametrize(
    ("content", "role"), [("say it", "user"), (f"say {END}", "assistant"), (None, "user"), (7, "user"), ("", "system")]
)
def test_nothing_to_tell(tiny: Any, content: Any, role: str) -> None:
    assert found(tiny, content, prompt(tiny, str(content)), role) == []


def test_messages_that_are_none(tiny: Any) -> None:
    assert check_look_alikes(TokenRecord("a", messages=["text", None, 3]), tiny) == []
