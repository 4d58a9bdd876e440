"""Records: the hand-written form of rollouts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from onepolicy.errors import ContentError
from onepolicy.records import from_records, to_records
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring, Values

RECORD: dict[str, Any] = {
    "record_id": "a",
    "token_ids": [5, 6, 7, 8],
    "prompt_length": 2,
    "sampler_logprobs": [None, None, -0.5, "-Infinity"],
    "old_logprobs": [None, -0.1, "NaN", float("inf")],
    "sampling_mask": [None, None, [7, 9], []],
    "stop_token_ids": [8],
    "reward": 1,
}


def _refused(*records: Any) -> str:
    with pytest.raises(ContentError) as caught:
        from_records(records)
    assert caught.value.exit_code == 4
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_columns_of_one_record() -> None:
    r = from_records([RECORD])
    assert (len(r), r.n_tokens, r.token_ids.tolist()) == (1, 4, [5, 6, 7, 8])
    assert r.token_ids.dtype == np.int32
    assert r.drawn.tolist() == [False, False, True, True]
    lp = r.scorings["sampler"].logprobs
    assert lp.mask().tolist() == [False, False, True, True]
    assert lp.values[2:].tolist() == [-0.5, -np.inf]
    old = r.scorings["old"].logprobs
    assert np.isnan(old.values[2]) and old.values[3] == np.inf
    assert r.lists["sampling_mask"].row(2).tolist() == [7, 9]
    assert r.lists["sampling_mask"].valid is not None
    assert r.lists["sampling_mask"].valid.tolist() == [False, False, True, True]
    assert r.lists["stop_token_ids"].row(0).tolist() == [8]
    assert r.record("reward", 0) == 1.0


def test_a_record_reads_back_from_its_own_json() -> None:
    first = [json.loads(json.dumps(x, allow_nan=False)) for x in to_records(from_records([RECORD]))]
    assert first[0]["sampler_logprobs"] == [None, None, -0.5, "-Infinity"]
    assert first[0]["old_logprobs"] == [None, -0.1, "NaN", "Infinity"]
    assert first[0]["drawn"] == [False, False, True, True]
    assert first[0]["sampling_mask"] == [None, None, [7, 9], []]
    assert list(to_records(from_records(first))) == first


def test_absent_columns_are_null_for_that_record_only() -> None:
    r = from_records([RECORD, {"token_ids": [1, 2]}, RECORD | {"record_id": "c"}])
    assert r.offsets.tolist() == [0, 4, 6, 10]
    assert r.scorings["old"].logprobs.mask().tolist() == [False, True, True, True] + [False] * 2 + [False] + [True] * 3
    assert r.drawn.tolist() == [False, False, True, True, False, False, False, False, True, True]
    assert [r.record("record_id", i) for i in range(3)] == ["a", None, "c"]
    assert r.lists["stop_token_ids"].valid is not None
    assert r.lists["stop_token_ids"].valid.tolist() == [True, False, True]
    again = from_records(to_records(r))
    assert list(to_records(again)) == list(to_records(r))


def test_drawn_that_is_given_wins_over_prompt_length() -> None:
    given = {"token_ids": [1, 2, 3], "prompt_length": 1, "drawn": [0, 1, 0]}
    assert from_records([given]).drawn.tolist() == [False, True, False]
    assert from_records([{"token_ids": [1, 2, 3]}]).drawn.tolist() == [False] * 3


def test_numpy_arrays_and_tuples_are_lists() -> None:
    r = from_records([{"token_ids": np.array([1, 2]), "sampler_logprobs": (None, np.float32(-0.5))}])
    assert r.scorings["sampler"].logprobs.values[1] == -0.5


def test_no_records_are_empty_rollouts() -> None:
    r = from_records([])
    assert (len(r), r.n_tokens, list(to_records(r))) == (0, 0, [])


def test_declarations_and_single_precision_survive() -> None:
    r = from_records([{"token_ids": [1, 2], "drawn": [0, 1]}]).with_scoring(
        "old",
        Scoring(
            Values(np.array([0, -0.1], dtype=np.float32), np.array([False, True])),
            semantics="raw",
            dtype="bfloat16",
            fingerprint={"torch": "2.6", "tf32": False},
            scoring_id="x1",
        ),
    )
    again = from_records([json.loads(json.dumps(x)) for x in to_records(r)])
    old = again.scorings["old"]
    assert old.logprobs.values.dtype == np.float32
    assert old.logprobs.values[1] == np.float32(-0.1)
    assert (old.semantics, old.dtype, old.scoring_id) == ("raw", "bfloat16", "x1")
    assert old.fingerprint == {"torch": "2.6", "tf32": False}


def test_declarations_are_read_from_any_record() -> None:
    r = from_records([{"token_ids": [1]}, {"token_ids": [2], "scorings": {"old": {"dtype": "float32"}}}])
    assert r.scorings["old"].dtype == "float32"
    assert not r.scorings["old"].logprobs.mask().any()


def test_columns_of_ones_own_are_left_alone() -> None:
    r = from_records([{"token_ids": [1], "x_note": {"any": "thing"}, "x_my_logprobs": "mine"}])
    assert (set(r.records), set(r.scorings)) == (set(), set())


BASE = {"token_ids": [1, 2, 3, 4, 5], "prompt_length": 3}


def test_a_missing_leading_null_is_refused_with_the_hint() -> None:
    message = _refused(BASE, BASE | {"record_id": "b", "sampler_logprobs": [-1.0] * 4})
    assert message == (
        "record 2: record 'b': column 'sampler_logprobs': too few values: got 4, wanted 5; the value of token 0 seems "
        "to be left out: index 0 is null, put a null first"
    )


def test_values_of_drawn_tokens_only_are_refused_with_the_hint() -> None:
    message = _refused(BASE | {"old_logprobs": [-1.0] * 2})
    assert "got 2, wanted 5; 2 tokens are drawn: a value stands at its token's index" in message
    message = _refused(BASE | {"drawn": [0, 0, 1, 1, 1], "old_logprobs": [-1.0] * 3})
    assert "got 3, wanted 5; 3 tokens are drawn" in message


@pytest.mark.parametrize(("n", "word"), [(1, "too few"), (6, "too many"), (0, "too few")])
def test_other_lengths_are_refused(n: int, word: str) -> None:
    message = _refused(BASE | {"old_logprobs": [None] * n})
    assert f"record 1: column 'old_logprobs': {word} values: got {n}, wanted 5, one for each of token_ids" in message


@pytest.mark.parametrize("column", ["loss_mask", "drawn", "advantages", "sampling_mask"])
def test_other_token_columns_have_the_length_of_token_ids(column: str) -> None:
    assert f"column '{column}': too few values: got 1, wanted 5" in _refused(BASE | {column: [None]})


def test_a_value_at_index_0_is_refused() -> None:
    message = _refused(BASE | {"record_id": "z", "old_logprobs": [0.0, -1, -1, -1, -1]})
    assert message.startswith("record 1: record 'z': column 'old_logprobs', position 0: got 0.0, wanted null;")


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"sampler_logprob": []}, "unknown column 'sampler_logprob'; did you mean 'sampler_logprobs'?"),
        ({"tokenids": []}, "did you mean 'token_ids'?"),
        ({"zzz": 1}, "unknown column 'zzz'; see docs/columns.md"),
        ({3: 1}, "unknown column 3"),
        ({"token_ids": None}, "no 'token_ids'"),
        ({"token_ids": 7}, "column 'token_ids': got 7, wanted a list"),
        ({"token_ids": "123"}, "column 'token_ids': got '123', wanted a list"),
        ({"token_ids": [1, None]}, "column 'token_ids', position 1: got null"),
        ({"token_ids": [1, "2"]}, "column 'token_ids', position 1: got '2', wanted a whole number in 32 bits"),
        ({"drawn": [0, None, 1, 1, 1]}, "column 'drawn', position 1: got null"),
        ({"old_logprobs": [None, "low", -1, -1, -1]}, "column 'old_logprobs', position 1: got 'low', wanted a number"),
        ({"prompt_length": "3"}, "column 'prompt_length': got '3', wanted a whole number"),
        ({"reward": [1]}, "column 'reward': got [1], wanted a number"),
        ({"sampling_mask": [1, 2, 3, 4, 5]}, "column 'sampling_mask': got 1, wanted a list"),
        ({"sampling_mask": [[1], None, [2, "x"], [], []]}, "column 'sampling_mask', position 1: got 'x'"),
        ({"stop_token_ids": [1, None]}, "column 'stop_token_ids', position 1: got null"),
        ({"scorings": []}, "scorings: got [], wanted an object"),
        ({"scorings": {"old": {"semantic": "raw"}}}, "unknown declaration 'semantic'; did you mean 'semantics'?"),
        ({"scorings": {"old": {"semantics": "row"}}}, "got 'row', wanted one of raw, temperature, processed"),
        ({"scorings": {"old": {"dtype": 16}}}, "scorings.old.dtype: got 16, wanted text"),
        ({"scorings": {"o\nld": {}}}, "scoring 'o\\nld': wanted a name of letters, digits and '_'"),
        ({"scorings": {"old": {"d\ntype": ""}}}, "scorings.old: unknown declaration 'd\\ntype'; did you mean 'dtype'?"),
        ({"float32": "old_logprobs"}, "float32: got 'old_logprobs', wanted a list of column names"),
    ],
)
def test_what_is_refused_in_one_record(extra: dict[Any, Any], said: str) -> None:
    message = _refused(BASE, BASE | extra)
    assert message.startswith("record 2: ")
    assert said in message


def test_declarations_must_agree() -> None:
    first, second = ({"token_ids": [1], "scorings": {"old": {"dtype": d}}} for d in ("float32", "bfloat16"))
    message = _refused(first, second)
    assert "record 2: scorings.old.dtype: got 'bfloat16', but it was 'float32' before" in message


@pytest.mark.parametrize("record", [None, 3, "text", [1, 2]])
def test_what_is_no_record(record: Any) -> None:
    assert "wanted an object" in _refused(record)


def test_writing_is_lazy_and_one_record_at_a_time() -> None:
    r = Rollouts(np.array([0, 1, 2]), {"token_ids": Values(np.array([1, 2], dtype=np.int32))})
    records = to_records(r)
    assert next(records) == {"token_ids": [1], "drawn": [False]}
