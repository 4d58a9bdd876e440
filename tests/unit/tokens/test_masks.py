"""The loss mask against what was drawn: undrawn tokens inside it by kind and place, holes, shifts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onepolicy.records import from_records
from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.columns import mask_suspects
from onepolicy.tokens.masks import check_masks, shift_of
from onepolicy.types import Finding, Severity

STOP = 7
#: prompt 5 5 | reply: 40 41 stop | tool 3 90 91 3 | 42 43 stop
PROMPT, REPLY = [5, 5], [40, 41, STOP, 3, 90, 91, 3, 42, 43, STOP]
SPANS = [(2, 5), (9, 12)]
DRAWN = [0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1]
LOGPROBS = [-1.0, -1.0, -0.1, None, None, None, None, -1.0, -1.0, -0.1]


def record(mask: Any, **more: Any) -> TokenRecord:
    given = {"prompt_ids": PROMPT, "reply_ids": REPLY, "spans": SPANS, "finish_reason": "stop"}
    return TokenRecord("r", "file:1", loss_mask=mask, stop_ids=(STOP,), **{**given, **more})


def seen(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(f.code, f.evidence["class"], f.severity.value) for f in findings]


@pytest.mark.parametrize("mask", [DRAWN, DRAWN[2:], [None, None, *DRAWN[2:]], [bool(x) for x in DRAWN], None, [1, 1]])
def test_a_mask_of_exactly_what_was_drawn_and_none(mask: Any) -> None:
    assert check_masks(record(mask)) == []
    assert check_masks(record(mask, spans=None, logprobs=LOGPROBS)) == []
    assert check_masks(TokenRecord("r", loss_mask=[1])) == []


def test_without_a_witness_only_the_prompt_can_be_judged() -> None:
    assert check_masks(TokenRecord("r", prompt_ids=PROMPT, reply_ids=REPLY, loss_mask=[1] * 10)) == []
    (found,) = check_masks(TokenRecord("r", prompt_ids=PROMPT, reply_ids=REPLY, loss_mask=[1] * 12))
    assert seen([found]) == [("undrawn-tokens-trained", "prompt", "fail")]
    assert found.evidence["positions"] == [0, 1] and found.evidence["reply_positions"] == [-2, -1]


def test_tool_output_inside_the_mask() -> None:
    mask = [0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1]
    (found,) = check_masks(record(mask))
    assert seen([found]) == [("undrawn-tokens-trained", "between turns", "fail")]
    assert found.evidence["runs"] == [["between turns", 6, 8]] and found.evidence["ids"] == [90, 91]
    assert found.evidence["drawn_by"] == "spans" and found.place == "file:1"
    (found,) = check_masks(record(mask, extra={"tool_spans": [[6, 8]], "template_spans": [[5, 6], [8, 9]]}))
    assert found.evidence["kinds"] == {"tool": 2}
    (found,) = check_masks(record(mask, spans=None, logprobs=LOGPROBS))
    assert found.evidence["drawn_by"] == "log-probs" and "no sampler log-prob" in found.message
    assert found.evidence["positions"] == [6, 7]


def test_spans_of_other_tokens_are_a_witness_of_their_own() -> None:
    more = {"spans": None, "extra": {"environment_spans": [[5, 9]], "tool_spans": "no spans"}}
    assert check_masks(record(DRAWN, **more)) == []
    (found,) = check_masks(record([0, 0, *[1] * 10], **more))
    assert found.evidence["kinds"] == {"environment": 4} and found.evidence["first"] == 5


ROLES = ["user"] * 2 + ["assistant"] * 3 + ["tool"] * 4 + ["assistant"] * 3


@pytest.mark.parametrize(
    "extra",
    [
        {"roles": ROLES},
        {"token_roles": ROLES[2:]},
        {"segments": [{"role": "Assistant", "start": 2, "stop": 5}, {"role": "tool", "start": 5, "end": 9}, 3]},
    ],
)
def test_roles_say_who_wrote_a_token(extra: dict[str, Any]) -> None:
    assert check_masks(record(DRAWN, spans=None, extra=extra)) == []
    (found,) = check_masks(record([0, 0, *[1] * 10], spans=None, extra=extra), names={90: "error"})
    assert found.evidence["kinds"] == {"tool": 4} and found.evidence["runs"] == [["tool", 5, 9]]
    assert found.evidence["tokens"] == ["3", "error", "91", "3"]


def test_everything_is_trained() -> None:
    (found,) = check_masks(record([1] * 12))
    assert found.evidence["kinds"] == {"prompt": 2, "between turns": 4} and found.evidence["count"] == 6


@pytest.mark.parametrize("more", [{"pad": 0}, {}])
def test_padding_behind_the_stop_token_is_trained(more: dict[str, Any]) -> None:
    one = TokenRecord("r", reply_ids=[40, 41, STOP, 0, 0], loss_mask=[1] * 5, stop_ids=(STOP,))
    (found,) = check_masks(one, **more)
    assert found.evidence["kinds"] == {"padding": 2} and found.evidence["positions"] == [3, 4]
    one.loss_mask = [1, 1, 1, 0, 0]
    assert check_masks(one, **more) == []


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
@pytest.mark.parametrize("whole", [True, False])
def test_a_mask_that_is_moved(shift: int, whole: bool) -> None:
    moved = np.zeros(12, dtype=int)
    moved[max(shift, 0) : 12 + min(shift, 0)] = DRAWN[max(-shift, 0) : 12 - max(shift, 0)]
    (found,) = check_masks(record(moved.tolist() if whole else moved.tolist()[2:]))
    assert seen([found]) == [("span-mask-wrong", "shifted", "fail")]
    assert found.evidence["shift"] == shift and f"shift {shift:+d}" in found.message
    assert ("late" if shift > 0 else "early") in found.message
    (found,) = check_masks(record(moved.tolist(), spans=None, logprobs=LOGPROBS))
    assert found.evidence["shift"] == shift and found.evidence["rivals"] == ["the log-probs are shifted"]


def test_two_errors_are_not_a_shift() -> None:
    mask = [0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0]
    assert "shifted" not in {f.evidence["class"] for f in check_masks(record(mask))}
    assert shift_of(*(np.array(x, dtype=bool) for x in (DRAWN, DRAWN, [1] * 12))) is None


@pytest.mark.parametrize(
    ("mask", "kind", "severity", "share"),
    [
        ([0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1], "first-token-not-trained", "warn", 2 / 6),
        ([0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1], "turns-not-trained", "info", 3 / 6),
        ([0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1], "holes", "info", 1 / 6),
    ],
)
def test_sampled_tokens_outside_the_mask(mask: list[int], kind: str, severity: str, share: float) -> None:
    (found,) = check_masks(record(mask))
    assert seen([found]) == [("sampled-not-trained", kind, severity)]
    assert found.evidence["share"] == pytest.approx(share)


def test_a_masked_stop_token_is_left_to_the_check_of_stop_tokens() -> None:
    assert check_masks(record([0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0])) == []
    one = record([0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0])
    one.stop_ids = ()
    (found,) = check_masks(one)  # without stop ids it is the last token of every turn
    assert seen([found]) == [("sampled-not-trained", "last-token-not-trained", "warn")]
    appended = TokenRecord("r", reply_ids=[40, STOP], loss_mask=[1, 1], stop_ids=(STOP,), spans=[(0, 1)])
    assert check_masks(appended) == [] and check_masks(appended, eos=3) == []


def test_nothing_is_trained() -> None:
    cut = {"reply_ids": [40, 41], "spans": None, "finish_reason": "length"}
    (found,) = check_masks(record([0, 0], **cut))
    assert seen([found]) == [("sampled-not-trained", "nothing-trained", "info")] and "filter" in found.message
    (found,) = check_masks(record([0, 0], **{**cut, "finish_reason": None}))
    assert found.severity is Severity.WARN and found.evidence["share"] == 1.0
    assert check_masks(record([0] * 12)) == []  # ended at a stop token: `check_stops` fails it


def test_a_trained_token_without_a_log_prob() -> None:
    holed = [-1.0, None, *LOGPROBS[2:]]
    (found,) = check_masks(record(DRAWN, logprobs=holed))
    assert seen([found]) == [("missing-logprobs", "trained-without-logprob", "warn")]
    assert found.evidence["first"] == 3 and found.evidence["positions"] == [3]
    (found,) = check_masks(record(DRAWN, logprobs=holed, spans=None))
    assert seen([found]) == [("undrawn-tokens-trained", "between turns", "fail")]  # nobody else says that it was drawn


def test_the_batch_names_the_same_sequences() -> None:
    rows = []
    for i in range(60):
        mask = list(DRAWN)
        if i % 3 == 0:
            mask[i % 12] = 1 - mask[i % 12]
        logprobs = [x if d else None for x, d in zip([-1.0] * 12, DRAWN, strict=True)]
        if i % 5 == 1:
            logprobs[3] = None
        row = {"token_ids": PROMPT + REPLY, "prompt_length": 2, "drawn": DRAWN, "loss_mask": mask}
        rows.append(row | {"sampler_logprobs": logprobs})
    odd = mask_suspects(from_records(rows))
    trained_hole = [i % 5 == 1 and not (i % 3 == 0 and i % 12 == 3) for i in range(60)]
    assert odd.tolist() == [i % 3 == 0 or trained_hole[i] for i in range(60)]
    assert not mask_suspects(from_records([{k: v for k, v in r.items() if k != "loss_mask"} for r in rows])).any()
