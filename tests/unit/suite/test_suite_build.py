"""From items to ids: nothing drawn, exact lengths, and what does not fit is named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from onepolicy import models
from onepolicy.check import compare_rollouts
from onepolicy.engines.base import declared
from onepolicy.engines.fake import FakeEngine
from onepolicy.engines.texts import Texts
from onepolicy.errors import ContentError, EngineDied, EngineError, UsageError
from onepolicy.suite import Suite, encoded_prompts, fixed_rollouts, load
from onepolicy.suite.items import Made, SuitePrompt, SuiteText
from onepolicy.validate import validate

BOS, EOS = 300, 301


class Bytes:
    """A byte is a token; chats are refused by `error`, or are their contents."""

    def __init__(self, head: Sequence[int] = (), tail: Sequence[int] = (), error: Exception | None = None) -> None:
        self.head, self.tail, self.error = list(head), list(tail), error

    def encode(self, prompts: Sequence[str | list[dict[str, str]]]) -> list[list[int]]:
        return [self.one(p) for p in prompts]

    def one(self, prompt: str | list[dict[str, str]]) -> list[int]:
        if isinstance(prompt, str):
            return self.head + list(prompt.encode()) + self.tail
        if self.error:
            raise self.error
        return [*self.head, *"".join(turn["content"] for turn in prompt).encode(), 302]


def text(prompt, reply="", made: Made | None = None, name="t") -> SuiteText:
    return SuiteText(name, "c", "smoke", name, prompt, reply, made)


def suite(*items: SuiteText | SuitePrompt) -> Suite:
    prompts = tuple(x for x in items if isinstance(x, SuitePrompt))
    return Suite("smoke", "v", prompts, tuple(x for x in items if isinstance(x, SuiteText)))


CHAT = [{"role": "user", "content": "hi"}]
MADE = Made("chronicle", 1, 50, 20)


def test_prompt_and_reply_are_one_sequence():
    rollouts, left_out = fixed_rollouts(suite(text("ab", "cd")), Bytes())
    assert left_out == []
    assert bytes(rollouts.token_ids.tolist()) == b"abcd"
    assert rollouts.record("prompt_length", 0) == 2


@pytest.mark.parametrize(("head", "tail"), [([], []), ([BOS], []), ([], [EOS]), ([BOS], [EOS]), ([BOS, BOS], [EOS])])
def test_what_a_tokenizer_adds_stays_before_the_prompt_only(head: list[int], tail: list[int]):
    """The reply goes on where the prompt ends, as a drawn one does: no second start, no early end."""
    made = text("ab", made=Made("log", 1, None, 30), name="m")
    rollouts, _ = fixed_rollouts(suite(text("ab", "cd"), text(CHAT, "cd", name="u"), made), Bytes(head, tail))
    rows = [rollouts.token_ids[rollouts.sequence(i)].tolist() for i in range(3)]
    assert rows[0] == [*head, *b"abcd"]
    assert rows[1] == [*head, *b"hi", 302, *b"cd"]
    assert rows[2][: len(head) + 10] == [*head, *b"ab2031-03-"]
    assert [len(r) for r in rows] == [len(head) + 4, len(head) + 5, len(head) + 32]
    assert [rollouts.record("prompt_length", i) for i in range(3)] == [len(head) + 2, len(head) + 3, len(head) + 2]


def test_nothing_is_drawn_and_all_is_declared():
    rollouts, _ = fixed_rollouts(load("smoke"), Bytes())
    validate(rollouts)
    assert not rollouts.drawn.any()
    assert not rollouts.tokens["drawn"].values.any()
    row = declared(rollouts, "test")[0]
    assert (row["logprob_semantics"], row["temperature"], row["top_p"], row["top_k"]) == ("raw", 1.0, 1.0, 0)
    names = ("record_id", "group_id", "env_id", "run_id")
    assert [rollouts.record(name, 0) for name in names] == ["prose-ferry"] * 2 + ["prose", load("smoke").version]
    assert rollouts.record("prompt_text", 0) == load("smoke").texts[0].prompt
    assert rollouts.record("prompt_messages", 0) is None
    assert '"role": "system"' in rollouts.record("prompt_messages", 7)


def test_forms_of_one_text_are_one_cluster():
    rollouts, left_out = fixed_rollouts(load("default"), Bytes())
    assert left_out == []
    unit, keys = rollouts.clusters()
    assert unit == "group"
    assert len(set(keys)) == len(rollouts) - 1


@pytest.mark.parametrize("tokens", [21, 64, 1000, 5001])
@pytest.mark.parametrize("head", [[], [BOS]])
def test_made_lengths_are_exact(tokens: int, head: list[int]):
    engine = Bytes(head, [EOS])
    rollouts, _ = fixed_rollouts(suite(text("", made=Made("hindi", 1, tokens, 20))), engine)
    assert rollouts.n_tokens == tokens
    assert rollouts.record("prompt_length", 0) == tokens - 20
    assert rollouts.token_ids[: len(head)].tolist() == head
    assert EOS not in rollouts.token_ids


def test_a_coarse_tokenizer_gets_more_text():
    """Fifty characters a token: the first guess of six is too short."""

    class Coarse(Bytes):
        def encode(self, prompts):
            return [[sum(x[i : i + 50].encode()) for i in range(0, len(x), 50)] for x in prompts]

    a, b = (fixed_rollouts(suite(text("", made=Made("log", 1, n, 5))), Coarse())[0].token_ids for n in (300, 200))
    assert len(a) == 300
    assert np.array_equal(a[:200], b)


def test_as_long_as_the_model_takes():
    item = suite(text("", made=Made("chronicle", 1, "limit", 20)), text("a", "b", name="u"))
    assert fixed_rollouts(item, Bytes(), 777)[0].lengths.tolist() == [777, 2]
    assert fixed_rollouts(item, Bytes())[1] == ["t: as long as the model takes, which is not known"]
    assert fixed_rollouts(item, Bytes(), 20)[1] == ["t: its last 20 tokens alone fill the 20 there are"]


def test_what_is_too_long_is_left_out_whole():
    items = suite(
        text("abc", "def", name="fits"),
        text("abc", "defg", name="long"),
        text("", made=MADE, name="made"),
        text("a", made=Made("log", 1, None, 6), name="made-reply"),
        text("", made=Made("log", 1, 6, 2), name="made-fits"),
    )
    rollouts, left_out = fixed_rollouts(items, Bytes(), 6)
    assert [rollouts.record("record_id", i) for i in range(len(rollouts))] == ["fits", "made-fits"]
    assert rollouts.lengths.tolist() == [6, 6]
    assert left_out == [
        "long: 7 tokens, and there is room for 6",
        "made: 50 tokens, and there is room for 6",
        "made-reply: 7 tokens, and there is room for 6",
    ]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (UsageError("prompt 0 is chat messages, but /m has no chat template"), "is chat messages, but /m has no"),
        (EngineError("prompt 0: the chat template failed: no system"), "the chat template failed: no system"),
    ],
)
def test_a_model_without_that_chat_leaves_it_out(error: Exception, says: str):
    rollouts, left_out = fixed_rollouts(suite(text("ab", "c"), text(CHAT, "d", name="u")), Bytes(error=error))
    assert len(rollouts) == 1
    assert left_out == [f"u: {error.args[0].removeprefix('prompt 0').lstrip(': ')}"]
    assert left_out[0].startswith(f"u: {says}")


def test_a_dead_engine_is_no_reason_to_leave_out():
    with pytest.raises(EngineDied):
        fixed_rollouts(suite(text("ab", "c"), text(CHAT, "d", name="u")), Bytes(error=EngineDied("gone")))


def test_one_token_is_too_few_and_an_empty_reply_is_not():
    rollouts, left_out = fixed_rollouts(suite(text("a", name="one"), text("ab", "", name="two")), Bytes())
    assert rollouts.record("record_id", 0) == "two"
    assert rollouts.record("prompt_length", 0) == 2
    assert left_out == ["one: 1 tokens; the first has no log-prob, so nothing could be scored"]


def test_nothing_left_is_an_error():
    with pytest.raises(ContentError, match="no text to score: t: 6 tokens, and there is room for 3"):
        fixed_rollouts(suite(text("abc", "def")), Bytes(), 3)
    with pytest.raises(ContentError, match="it holds prompts only"):
        fixed_rollouts(suite(SuitePrompt("p", "c", "smoke", "p", "a")), Bytes())
    with pytest.raises(ContentError, match="it holds texts only"):
        encoded_prompts(suite(text("a", "b")), Bytes())


def prompt(what, name="p", made: Made | None = None) -> SuitePrompt:
    return SuitePrompt(name, "c", "smoke", name, what, made)


def test_prompts_leave_room_for_the_reply():
    items = suite(
        prompt("abcd"),
        prompt("abcde", "q"),
        prompt(CHAT, "chat"),
        prompt("", "made", Made("log", 1, 4)),
        prompt("", "limit", Made("log", 1, "limit")),
        prompt("", "empty"),
    )
    kept, ids, left_out = encoded_prompts(items, Bytes(), 14, 10)
    assert [(x.id, len(row)) for x, row in zip(kept, ids, strict=True)] == [
        ("p", 4),
        ("chat", 3),
        ("made", 4),
        ("limit", 4),
    ]
    assert left_out == [
        "q: 5 tokens, and there is room for 4",
        "empty: no tokens; a reply needs at least one before it",
    ]


def test_a_prompt_keeps_its_start_and_loses_an_end():
    assert encoded_prompts(suite(prompt("ab")), Bytes([BOS], [EOS]))[1] == [[BOS, 97, 98]]


def test_an_engine_scores_the_texts_and_the_fixed_view_judges_them():
    rollouts, left_out = fixed_rollouts(load("smoke"), FakeEngine("", seed=1))
    for name, order in (("sampler", "forward"), ("old", "reversed")):
        rollouts = rollouts.with_scoring(name, FakeEngine("", seed=1, order=order).score(rollouts))
    report = compare_rollouts(rollouts, bounds="fp32", view="fixed")
    assert left_out == []
    assert report.measurements["abs_log_ratio/max"].n == rollouts.n_tokens - len(rollouts)
    assert report.measurements["kl_sampler_scorer_k3/mean"].value is None


@pytest.mark.engines
def test_the_packaged_model_takes_all_but_the_longest_of_default():
    tokenizer = Texts(Path(models.path("tiny")))
    rollouts, left_out = fixed_rollouts(load("default"), tokenizer, 2048)
    assert [x.partition(":")[0] for x in left_out] == ["long-reply-4k"]
    tokens = rollouts.lengths.astype(float) - 1
    assert tokens.sum() ** 2 / (tokens**2).sum() > 30  # a gate wants 20 effective clusters
    assert 20_000 < tokens.sum() < 60_000
    brief = [i for i in range(len(rollouts)) if rollouts.record("env_id", i) == "brief"]
    replies = [int(rollouts.lengths[i]) - rollouts.record("prompt_length", i) for i in brief]
    assert replies.count(0) == 2 and replies.count(1) >= 2
    kept, _, left_out = encoded_prompts(load("full"), tokenizer, 2048, 128)
    assert len(kept) == 141 and len(left_out) == 3
