"""Breaks of the contract that make data unusable, and what must not be taken for one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from onepolicy.errors import ContentError
from onepolicy.records import from_records
from onepolicy.rollouts import Rollouts
from onepolicy.types import Lists, Scoring, Values
from onepolicy.validate import validate, validate_columns


def _rollouts(**columns: Any) -> Rollouts:
    good = {"record_id": "r", "token_ids": [1, 2, 3], "prompt_length": 1, "sampler_logprobs": [None, -1, -2]}
    return from_records([{"token_ids": [9], "record_id": "first"}, good | columns])


def _refused(rollouts: Rollouts) -> str:
    with pytest.raises(ContentError) as caught:
        validate(rollouts)
    assert caught.value.exit_code == 4
    message = str(caught.value)
    assert "\n" not in message
    return message


def _scored(**columns: Any) -> Rollouts:
    base = Scoring(Values(np.zeros(4), np.zeros(4, dtype=bool)))
    return _rollouts().with_scoring("old", replace(base, **{k: Values(np.array(v)) for k, v in columns.items()}))


def test_good_rollouts_pass() -> None:
    validate(_rollouts())


def test_what_is_judged_later_passes() -> None:
    validate(_rollouts(sampler_logprobs=[None, None, "NaN"]))
    validate(_rollouts(sampler_logprobs=[None, "-inf", "inf"]))
    validate(_rollouts(sampler_logprobs=[None, 3.0, 0.0]))
    validate(_rollouts(prompt_length=0))  # the first token may be drawn; it is unscored
    validate(_rollouts(sampler_entropy=[None, -1e-7, 0.0]))


def test_empty_input() -> None:
    assert "empty: 0 sequences, 0 tokens" in _refused(from_records([]))
    assert "empty: 1 sequences, 0 tokens" in _refused(from_records([{"token_ids": []}]))
    validate_columns(from_records([{"token_ids": []}]))


def test_offsets() -> None:
    ids = {"token_ids": Values(np.arange(4, dtype=np.int32))}
    assert _refused(Rollouts(np.array([0, 3, 2, 4]), ids)) == (
        "offsets[2]: got 2, wanted at least 3; offsets start at 0 and never decrease"
    )
    assert "offsets[0]: got 1, wanted 0" in _refused(Rollouts(np.array([1, 4]), ids))


def test_lists_end_at_their_values() -> None:
    bad = Lists(np.array([1, 2], dtype=np.int32), np.array([0, 1, 1]))
    assert "column 'stop_token_ids': its offsets go from 0 to 1" in _refused(
        replace(_rollouts(), lists={"stop_token_ids": bad})
    )


def test_negative_ids() -> None:
    assert _refused(_rollouts(token_ids=[1, -100, -100])) == (
        "record 2 ('r'), column 'token_ids', position 1: got -100, wanted an id of at least 0 (padding is left out) "
        "(1 more like it)"
    )


@pytest.mark.parametrize("length", [-1, 4])
def test_prompt_length_inside_the_sequence(length: int) -> None:
    message = _refused(_rollouts(prompt_length=length, drawn=[False] * 3))
    assert message == (
        f"record 2 ('r'), column 'prompt_length': got {length}, wanted 0 to 3, the length of the sequence"
    )


def test_drawn_inside_the_prompt() -> None:
    message = _refused(_rollouts(prompt_length=2, drawn=[False, True, True]))
    assert "column 'drawn', position 1: got True, wanted false inside the prompt" in message


def test_unknown_semantics() -> None:
    message = _refused(_rollouts(logprob_semantics="raw_logprobs"))
    assert message == (
        "record 2 ('r'), column 'logprob_semantics': got 'raw_logprobs', wanted one of raw, temperature, processed"
    )
    rollouts = _rollouts()
    odd = replace(rollouts.scorings["sampler"], semantics="odd")
    assert "scoring 'sampler': semantics: got 'odd'" in _refused(rollouts.with_scoring("sampler", odd))


def test_negative_entropy() -> None:
    message = _refused(_rollouts(sampler_entropy=[None, 0.5, -2e-6]))
    assert "column 'sampler_entropy', position 2: got -2e-06, wanted at least 0 (nats)" in message


@pytest.mark.parametrize("what", ["logprobs", "entropy", "varentropy"])
def test_index_0_is_null(what: str) -> None:
    message = _refused(_scored(**{what: [1.0, 1.0, 1.0, 1.0]}))
    assert message.startswith(f"record 1 ('first'), column 'old_{what}', position 0: got 1.0, wanted null; ")


def test_empty_sequences_have_no_index_0() -> None:
    r = from_records([{"token_ids": []}, {"token_ids": [1, 2], "old_logprobs": [None, -1]}, {"token_ids": []}])
    validate(r)


def test_records_are_counted_through_the_file() -> None:
    with pytest.raises(ContentError, match=r"^record 12 \('r'\)"):
        validate_columns(_rollouts(token_ids=[1, -1, 2]), first=10)
