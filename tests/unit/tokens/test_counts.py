"""Counts against each other: what does not count the ids is named and explained, what does is silent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.cells import empty, finish_of, of_reply, sampler_logprobs
from onepolicy.tokens.counts import check_counts, counts
from onepolicy.types import Finding, Severity

IDS = [40, 41, 42, 43]
LOGPROBS = [-2.5, -0.2, -1.1, -4.0]


def record(**more: Any) -> TokenRecord:
    return TokenRecord("r", "file:1", **{"reply_ids": IDS, **more})


def only(findings: list[Finding]) -> Finding:
    (found,) = findings
    assert found.code == "counts-disagree" and found.place == "file:1"
    assert found.evidence["usable"] is False
    return found


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": LOGPROBS, "scorer_logprobs": LOGPROBS, "loss_mask": [1, 1, 1, 0]},
        {"prompt_ids": [1, 2], "loss_mask": [0, 0, 1, 1, 1, 1]},
        {"prompt_ids": [1, 2], "logprobs": [None, None, *LOGPROBS]},
        {"usage": {"completion_tokens": 4, "prompt_tokens": 2}, "prompt_ids": [1, 2]},
        {"usage": {"completion_tokens": 2}, "spans": [(0, 1), (3, 4)]},
        {"usage": {"completion_tokens": 1}, "turns": [{"reply_ids": [40, 41]}, {"reply_ids": [43]}]},
        {"usage": {"completion_tokens": 3}, "logprobs": [-1.0, -1.0, -1.0, None]},
        {"usage": {"completion_tokens": 3}, "loss_mask": [1, 1, 1, 0]},
        {"token_strings": ["a", "b", "c", "d"], "reply_text": "abcd"},
        {"token_strings": ["a", "b", "c", "</s>"], "reply_text": "abc"},
        {"token_strings": [" a", "b", "c", "d"], "reply_text": "abcd"},
        {"token_strings": ["\u0120a", "b", "c", "d"], "reply_text": "something else"},
        {"token_strings": [f"token_id:{i}" for i in IDS], "reply_text": "something else"},
        {"token_bytes": [[97], [195], [169], [98]], "reply_text": "aéb"},
        {"token_bytes": [[97], [300], [169], None], "reply_text": "aéb"},
    ],
)
def test_what_counts_right_is_silent(more: dict[str, Any]) -> None:
    assert check_counts(record(**more)) == []


@pytest.mark.parametrize(
    ("more", "why", "extra"),
    [
        ({"logprobs": [*LOGPROBS, -0.001], "finish_reason": "stop"}, "tail", 1),
        ({"logprobs": [*LOGPROBS, -0.001]}, "tail", 1),
        ({"logprobs": [None, *LOGPROBS]}, "placeholder at the front", 1),
        ({"logprobs": [1.0, *LOGPROBS]}, "placeholder at the front", 1),
        ({"logprobs": LOGPROBS[1:], "stop_ids": (43,)}, "last value missing", -1),
        ({"logprobs": LOGPROBS[1:]}, "first value missing", -1),
        ({"logprobs": [*LOGPROBS, None, None, None]}, "padding at the tail", 3),
        ({"logprobs": [0.0, 0.0, *LOGPROBS]}, "padding at the front", 2),
        ({"prompt_ids": [1, 2], "logprobs": [-1.0, -1.0, *LOGPROBS]}, "prompt included", 2),
        (
            {"prompt_ids": [1, 2, 3], "logprobs": [-1.0, -1.0, *LOGPROBS]},
            "prompt included, without its first token",
            2,
        ),
        ({"logprobs": [-1.0] * 9, "usage": {"completion_tokens": 9}}, "the engine counts these, not the ids", 5),
        ({"logprobs": [-1.0] * 9}, None, 5),
    ],
)
def test_log_probs_that_do_not_count_the_ids(more: dict[str, Any], why: str | None, extra: int) -> None:
    found = next(f for f in check_counts(record(**more)) if f.evidence["what"] == "logprobs")
    assert found.severity is Severity.FAIL
    assert (found.evidence["explanation"], found.evidence["extra"]) == (why, extra)
    assert found.evidence["counts"]["reply_ids"] == 4
    assert found.message.startswith(f"r: {4 + extra} logprobs for 4 reply ids ({extra:+d})")


def test_ends_that_cannot_be_told_apart_are_rivals() -> None:
    assert only(check_counts(record(logprobs=[0.0, *LOGPROBS]))).evidence["rivals"] == ["tail"]
    assert only(check_counts(record(logprobs=LOGPROBS[1:], stop_ids=(43,)))).evidence["rivals"] == [
        "first value missing"
    ]
    # a reply that still has its stop token lost none
    assert only(check_counts(record(logprobs=[*LOGPROBS, -1.0], stop_ids=(43,)))).evidence["explanation"] is None


@pytest.mark.parametrize(
    ("sampler", "scorer", "what", "why"),
    [
        (lambda x: [*x, -0.01], lambda x: x, "logprobs", "tail"),
        (lambda x: [-3.3, *x], lambda x: x, "logprobs", "placeholder at the front"),
        (lambda x: x[1:], lambda x: x, "logprobs", "first value missing"),
        (lambda x: x[:-1], lambda x: x, "logprobs", "last value missing"),
        (lambda x: x, lambda x: x[1:], "scorer_logprobs", "first value missing"),
        (lambda x: x, lambda x: [*x, -2.0], "scorer_logprobs", "tail"),
        (
            lambda x: [*x[:7], -1.9, -2.7, *x[8:]],
            lambda x: x,
            "logprobs",
            "ids were re-encoded: two sampled tokens became id 7",
        ),
    ],
)
def test_the_other_side_tells_which_end_it_is(sampler: Any, scorer: Any, what: str, why: str) -> None:
    rng = np.random.default_rng(0)
    true = -rng.exponential(2, 16)
    near = (true + rng.normal(0, 0.02, 16)).tolist()
    one = record(reply_ids=list(range(16)), logprobs=sampler(true.tolist()), scorer_logprobs=scorer(near))
    found = only(check_counts(one))
    assert found.evidence["what"] == what and found.evidence["explanation"] == why
    assert found.evidence["rivals"] == []
    assert found.evidence["lag"]["pieces"]


def test_an_end_that_is_dropped_never_stands_for_an_explanation() -> None:
    rng = np.random.default_rng(1)
    one = record(
        reply_ids=list(range(30)),
        logprobs=(-rng.exponential(2, 31)).tolist(),
        scorer_logprobs=(-rng.exponential(2, 30)).tolist(),
    )
    found = only(check_counts(one))
    assert found.evidence["explanation"] not in ("tail", "placeholder at the front")
    assert found.evidence["max_abs_after_drop_tail"] > 1


@pytest.mark.parametrize(
    ("mask", "why"),
    [([1, 1, 1], "first value missing"), ([1] * 5, "tail"), ([1, 1, 1, 1, 0, 0], "padding at the tail"), ([], None)],
)
def test_a_mask_that_does_not_count_the_ids(mask: list[int], why: str | None) -> None:
    found = only(check_counts(record(loss_mask=mask)))
    assert found.evidence["what"] == "loss_mask" and found.evidence["explanation"] == why


@pytest.mark.parametrize(
    ("said", "more", "why"),
    [
        (5, {"finish_reason": "stop"}, "stop token trimmed"),
        (5, {"finish_reason": "length"}, "reply cut after sampling"),
        (5, {"stop_ids": (43,)}, "reply cut after sampling"),
        (9, {"finish_reason": "stop"}, "reply cut after sampling"),
        (3, {}, "tokens added after sampling"),
    ],
)
def test_completion_tokens(said: int, more: dict[str, Any], why: str) -> None:
    found = only(check_counts(record(usage={"completion_tokens": said}, **more)))
    assert (found.evidence["what"], found.evidence["explanation"]) == ("usage.completion_tokens", why)
    assert found.evidence["extra"] == said - 4


def test_prompt_tokens() -> None:
    found = only(check_counts(record(prompt_ids=[1, 2], usage={"prompt_tokens": 3})))
    assert "beginning-of-sequence" in found.message + found.evidence["explanation"] and found.evidence["extra"] == 1
    found = only(check_counts(record(prompt_ids=[1, 2], usage={"prompt_tokens": 30})))
    assert found.evidence["explanation"] == "other prompt"
    turns = [{"prompt_ids": [1], "reply_ids": [40]}, {"prompt_ids": [1, 40, 5], "reply_ids": [43]}]
    assert check_counts(record(prompt_ids=[1], usage={"prompt_tokens": 3}, turns=turns)) == []


def test_every_turn_counts_for_itself() -> None:
    turns = [{"reply_ids": [40, 41], "logprobs": [-1, -2]}, {"reply_ids": [42, 43], "logprobs": [-1, -2, -3]}]
    found = only(check_counts(record(turns=turns)))
    assert (found.evidence["what"], found.evidence["turn"], found.evidence["extra"]) == ("turn.logprobs", 1, 1)


def test_token_strings_of_other_ids() -> None:
    found = only(check_counts(record(token_strings=["token_id:40", "token_id:41", "token_id:99", "token_id:43"])))
    assert found.evidence["first_diff"] == 2 and "names id 99, the id there is 42" in found.message


def test_a_text_that_its_tokens_do_not_spell() -> None:
    found = only(check_counts(record(token_strings=["a", "b", "c", "d"], reply_text="abXd")))
    assert found.severity is Severity.WARN and found.evidence["first_diff_byte"] == 2
    found = only(check_counts(record(token_bytes=[[97], [98], [99], [100]], reply_text="abc, and more")))
    assert found.evidence["explanation"] == "text of other tokens"
    found = only(check_counts(record(reply_ids=[], reply_text="abc")))
    assert "no ids" in found.message


def test_a_record_without_ids_is_not_checked() -> None:
    (found,) = check_counts(TokenRecord("r", logprobs=[-1.0]))
    assert found.code == "tokens-not-checked" and found.evidence["lacks"] == ["reply_ids"]
    assert check_counts(TokenRecord("r", reply_text="abc")) == []


def test_values_of_the_reply_whatever_the_layout() -> None:
    one = record(prompt_ids=[1, 2], loss_mask=[0, 0, 1, 1, 1, 0], logprobs=[None, None, *LOGPROBS])
    assert of_reply(one.loss_mask, one) == [1, 1, 1, 0] and sampler_logprobs(one) == LOGPROBS
    assert of_reply([1, 2, 3], one) is None and of_reply(None, one) is None
    assert sampler_logprobs(record(logprobs=[None, float("nan"), "NaN", None])) is None
    assert empty("NaN") and not empty("-inf") and not empty(0.0)
    assert counts(one) == {"prompt_ids": 2, "reply_ids": 4, "logprobs": 6, "loss_mask": 6}
    assert [finish_of(record(finish_reason=x)) for x in ("Stop", "length ", "?", None)] == [
        "stop",
        "length",
        None,
        None,
    ]
