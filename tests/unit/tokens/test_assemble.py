"""The training sequence from sampled spans: masks and log-probs carried along, segments where history breaks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onepolicy.align import align
from onepolicy.errors import ContentError, UsageError
from onepolicy.records import from_records
from onepolicy.tokens.assemble import assemble
from onepolicy.tokens.columns import check_rollouts
from onepolicy.tokens.placing import Place
from onepolicy.types import Scoring, Values
from onepolicy.validate import validate

STOP, NEWLINE = 2, 3
P0, R0 = [1, 10, NEWLINE, 20, STOP, NEWLINE, 1, 11, NEWLINE], [30, 31, STOP]
TOOL, R1 = [NEWLINE, 1, 12, NEWLINE, 40, STOP, NEWLINE, 1, 11, NEWLINE], [33, STOP]
FIRST: dict[str, Any] = {"prompt_ids": P0, "reply_ids": R0, "logprobs": [-1.0, -2.0, -0.1]}
SECOND: dict[str, Any] = {"prompt_ids": P0 + R0 + TOOL, "reply_ids": R1, "logprobs": [-0.5, -0.2]}


class Letters:
    """A tokenizer of which ids below 100 are letters, and 100 + i is the two letters from i on."""

    def exists(self, token_id: int) -> bool:
        return 0 <= token_id < 200

    def decode(self, ids: Any, *, skip_special: bool = False) -> list[str]:
        return ["".join(chr(i) if i < 100 else chr(i - 100) + chr(i - 99) for i in one) for one in ids]


def test_two_turns_with_the_templates_own_ids_between_them() -> None:
    out = assemble([FIRST, SECOND])
    assert out.token_ids == P0 + R0 + TOOL + R1
    assert out.loss_mask == [0] * 9 + [1] * 3 + [0] * 10 + [1] * 2
    assert out.logprobs == [None] * 9 + FIRST["logprobs"] + [None] * 10 + SECOND["logprobs"]
    assert out.spans == (Place(0, 0, 9, 12), Place(1, 0, 22, 24)) and out.proof.ok
    assert out.token_ids[12] == NEWLINE and out.loss_mask[12] == 0  # the suffix after the stop token


def test_what_the_template_puts_after_a_reply_without_a_stop_token() -> None:
    cut = {"prompt_ids": P0, "reply_ids": R0[:-1]}
    later = {"prompt_ids": [*P0, *R0, *TOOL], "reply_ids": R1}
    out = assemble([cut, later])
    assert out.token_ids == P0 + R0 + TOOL + R1 and out.loss_mask[11] == 0  # the stop token was not sampled
    assert out.logprobs == [None] * 24


def test_between_instead_of_prompts() -> None:
    out = assemble([FIRST, {"reply_ids": R1}], [TOOL])
    assert out.token_ids == P0 + R0 + TOOL + R1 and out.proof.ok
    with pytest.raises(ContentError, match="between: got 1 lists for 1 turns, wanted 0"):
        assemble([FIRST], [TOOL])
    with pytest.raises(ContentError, match="turn 1: no 'prompt_ids'"):
        assemble([FIRST, {"reply_ids": R1}])


def test_a_rewritten_history_starts_a_new_segment_and_says_why() -> None:
    rewritten = P0 + R0[1:] + TOOL  # the first sampled id is dropped, as a template drops thinking
    out = assemble([FIRST, {**SECOND, "prompt_ids": rewritten}], names={30: "<think>"})
    assert [s.token_ids for s in out.segments] == [P0 + R0, rewritten + R1]
    assert [s.loss_mask for s in out.segments] == [[0] * 9 + [1] * 3, [0] * 21 + [1] * 2]
    why = out.segments[1].why
    assert (why["class"], why["turn"], why["first_diff"], why["in_reply_of"]) == ("history-rewritten", 1, 9, 0)
    assert why["edits"][0]["ids"] == [30] and why["edits"][0]["tokens"] == ["<think>"]
    assert out.segments[0].why == {} and out.spans == (Place(0, 0, 9, 12), Place(1, 1, 21, 23))
    with pytest.raises(UsageError, match=r"2 segments: turn 1 does not go on .* first at 9"):
        _ = out.token_ids


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        (P0, "prompt-shorter"),
        ([0, *P0, *R0, *TOOL], "other-prompt"),
        ([*P0, 130, STOP, *TOOL], "re-encoded"),
        ([*P0, 35, 36, STOP, *TOOL], "history-rewritten"),
    ],
)
def test_why_a_segment_begins(prompt: list[int], kind: str) -> None:
    out = assemble([FIRST, {**SECOND, "prompt_ids": prompt}], tokenizer=Letters())  # pyright: ignore[reportArgumentType]
    assert out.segments[1].why["class"] == kind and out.segments[1].token_ids == prompt + R1
    assert out.proof.ok


def test_a_conversation_goes_on_in_its_new_segment() -> None:
    rewritten = P0 + R0[1:] + TOOL
    third = {"prompt_ids": [*rewritten, *R1, NEWLINE, 50], "reply_ids": [60, STOP]}
    out = assemble([FIRST, {**SECOND, "prompt_ids": rewritten}, third])
    assert [len(s.spans) for s in out.segments] == [1, 2]


def test_segments_are_canonical_records() -> None:
    rewritten = P0 + R0[1:] + TOOL
    out = assemble([FIRST, {**SECOND, "prompt_ids": rewritten}])
    rollouts = from_records([s.row(f"r/{i}") for i, s in enumerate(out.segments)])
    validate(rollouts)
    assert rollouts.drawn.tolist() == [bool(x) for s in out.segments for x in s.loss_mask]
    assert {f.code for f in check_rollouts(rollouts, stop_ids=[STOP])} <= {"tokens-not-checked"}
    scorer = Scoring(Values(np.full(rollouts.n_tokens, -1.0), rollouts.drawn), scoring_id="b")
    pairs = align(rollouts.with_scoring("old", scorer))
    assert pairs.a[pairs.drawn].tolist() == [-1.0, -2.0, -0.1, -0.5, -0.2]


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([], "no turns to assemble"),
        ([{**FIRST, "logprobs": [-1.0]}], "turn 0: got 1 logprobs for 3 reply ids"),
        ([{"reply_ids": [1]}], "turn 0: no 'prompt_ids'"),
        ([{"prompt_ids": [1]}], "turn 0: no 'reply_ids'"),
        ([FIRST, {**SECOND, "reply_ids": [33, -1]}], "turn 1: 'reply_ids', position 1: got -1, wanted at least 0"),
        ([{**FIRST, "prompt_ids": [1, None]}], "turn 0: 'prompt_ids', position 1: got None"),
        ([{**FIRST, "prompt_ids": [1, True]}], "turn 0: 'prompt_ids', position 1: got True"),
    ],
)
def test_what_cannot_be_assembled(turns: Any, message: str) -> None:
    with pytest.raises(ContentError, match=message):
        assemble(turns)


def test_null_log_probs_stay_null() -> None:
    out = assemble([{**FIRST, "logprobs": [-1.0, float("nan"), None]}])
    assert out.logprobs[9:] == [-1.0, None, None]
    arrays = {k: np.array(v) for k, v in FIRST.items()}
    assert assemble([arrays]).logprobs[9:] == FIRST["logprobs"]


def test_a_failed_proof_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from onepolicy.tokens import assemble as room

    def lossy(segment: Any, k: int, number: int, prompt: Any, reply: Any, values: Any) -> None:
        room_add(segment, k, number, prompt, reply, values)
        segment.token_ids[-1] = 99

    room_add = room._add
    monkeypatch.setattr(room, "_add", lossy)
    with pytest.raises(ContentError, match="not proven: turn 0: the sampled span has other ids, first at position 2"):
        assemble([FIRST])
    monkeypatch.setattr(room, "_add", lambda *a: (room_add(*a), a[0].logprobs.reverse()))
    with pytest.raises(ContentError, match="log-probs are not those of the turns"):
        assemble([FIRST])
