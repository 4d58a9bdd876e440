"""Rollouts: taking, joining, naming, clusters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from onepolicy.errors import ContentError
from onepolicy.records import from_records, to_records
from onepolicy.rollouts import Rollouts, concat, concat_scorings
from onepolicy.types import Lists, Scoring, Values

RECORDS: list[dict[str, Any]] = [
    {
        "record_id": "a",
        "token_ids": [1, 2, 3],
        "prompt_length": 1,
        "sampler_logprobs": [None, -1, -2],
        "sampler_entropy": [None, 0.5, 0.25],
        "sampling_mask": [None, [2, 4], [3]],
        "stop_token_ids": [3],
    },
    {"record_id": "b", "token_ids": [], "prompt_length": 0},
    {"record_id": "c", "token_ids": [4, 5], "loss_mask": [0, 1], "sampling_mask": [[], [5, 6, 7]]},
]


def _plain(rollouts: Rollouts) -> list[dict[str, Any]]:
    return list(to_records(rollouts))


def test_take_is_the_records_in_that_order() -> None:
    r = from_records(RECORDS)
    for index in ([2, 0], [0, 0, 1], [1], []):
        taken, wanted = _plain(r.take(index)), [_plain(r)[i] | {"scorings": None} for i in index]
        assert [x | {"scorings": None} for x in taken] == wanted


def test_take_keeps_distributions_and_declarations() -> None:
    dist = np.arange(10.0).reshape(5, 2)
    r = from_records(RECORDS)
    r = r.with_scoring("old", Scoring(Values(np.zeros(5)), distributions=dist, semantics="raw", scoring_id="i"))
    old = r.take([2]).scorings["old"]
    assert old.distributions is not None
    assert old.distributions.tolist() == dist[3:].tolist()
    assert (old.semantics, old.scoring_id) == ("raw", "i")


def test_take_by_mask() -> None:
    r = from_records(RECORDS)
    assert _plain(r.take(np.array([True, False, True]))) == _plain(r.take([0, 2]))
    with pytest.raises(ContentError):
        r.take(np.array([True]))


def test_concat_undoes_take() -> None:
    r = from_records(RECORDS)
    assert _plain(concat([r.take([0]), r.take([1, 2])])) == _plain(r)


def test_concat_fills_what_a_part_lacks_with_null() -> None:
    parts = [from_records([x]) for x in RECORDS]
    joined = concat(parts)
    assert joined.record_ids() == ["a", "b", "c"]
    assert joined.scorings["sampler"].logprobs.mask().tolist() == [False, True, True, False, False]
    assert joined.tokens["loss_mask"].mask().tolist() == [False] * 3 + [True] * 2
    assert joined.lists["sampling_mask"].row(4).tolist() == [5, 6, 7]
    assert joined.record("prompt_length", 2) is None


def test_concat_refuses_nothing() -> None:
    with pytest.raises(ContentError):
        concat([])


def _scoring(**declared: Any) -> Scoring:
    return Scoring(Values(np.zeros(1)), **declared)


def test_joined_declarations() -> None:
    def joined(*parts: Scoring | None) -> Scoring:
        return concat_scorings(parts, [1] * len(parts))

    assert joined(_scoring(semantics="raw"), None, _scoring(semantics="raw")).semantics == "raw"
    assert joined(_scoring(semantics="raw"), _scoring()).semantics is None
    with pytest.raises(ContentError, match="differ in semantics: processed, raw"):
        joined(_scoring(semantics="raw"), _scoring(semantics="processed"))
    with pytest.raises(ContentError, match="differ in dtype"):
        joined(_scoring(dtype="float16"), _scoring(dtype="float32"))
    ids = [_scoring(scoring_id=x) for x in ("b", None, "a", "a+b")]
    assert joined(*ids).scoring_id == "a+b"
    prints = [_scoring(fingerprint={"torch": "2", "rank": i}) for i in range(2)]
    assert joined(*prints).fingerprint == {"torch": "2"}


def test_lengths_are_checked() -> None:
    offsets, ids = np.array([0, 2]), {"token_ids": Values(np.array([1, 2], dtype=np.int32))}
    one = Values(np.zeros(1))
    for kwargs in (
        {"tokens": ids | {"drawn": Values(np.zeros(3, dtype=bool))}},
        {"records": {"step": Values(np.zeros(2, dtype=np.int64))}},
        {"scorings": {"old": Scoring(one)}},
        {"scorings": {"old": Scoring(Values(np.zeros(2)), entropy=one)}},
        {"lists": {"sampling_mask": Lists(np.zeros(0, dtype=np.int32), np.array([0, 0]))}},
        {"lists": {"stop_token_ids": Lists(np.zeros(0, dtype=np.int32), np.array([0, 0, 0]))}},
        {"offsets": np.zeros(0, dtype=np.int64)},
        {"tokens": {}},
    ):
        columns: dict[str, Any] = {"offsets": offsets, "tokens": ids} | kwargs
        with pytest.raises(ContentError):
            Rollouts(**columns)


def test_drawn_without_a_column_is_nothing_and_null_is_false() -> None:
    r = Rollouts(np.array([0, 2]), {"token_ids": Values(np.array([1, 2], dtype=np.int32))})
    assert r.drawn.tolist() == [False, False]
    given = Values(np.array([True, True]), np.array([False, True]))
    assert replace(r, tokens={**r.tokens, "drawn": given}).drawn.tolist() == [False, True]


def test_content_ids_depend_on_content_only() -> None:
    x = {"token_ids": [1, 2], "sampler_logprobs": [None, -0.5]}
    y = {"token_ids": [1, 2], "sampler_logprobs": [None, -0.25]}
    names = from_records([x, y, x]).content_ids()
    assert names[0] == names[2] != names[1]
    assert from_records([y, x]).content_ids() == [names[1], names[0]]
    assert len({*names, *from_records([{"token_ids": [1, 2]}]).content_ids()}) == 3


def test_content_ids_do_not_read_under_a_null_nor_see_the_float_width() -> None:
    ids = {"token_ids": Values(np.array([1, 2, 3], dtype=np.int32))}

    def name(values: Any, valid: list[bool]) -> str:
        scoring = Scoring(Values(values, np.array(valid)))
        return Rollouts(np.array([0, 3]), ids, scorings={"sampler": scoring}).content_ids()[0]

    valid = [False, True, True]
    one = name(np.array([0, -0.5, np.nan]), valid)
    assert one == name(np.array([7, -0.5, -np.nan], dtype=np.float32), valid)
    assert one != name(np.array([0, -0.5, np.nan]), [False, True, False])


def test_record_ids_are_unique() -> None:
    def named(*ids: str) -> list[str]:
        return from_records([{"token_ids": [1], "record_id": x} for x in ids]).record_ids()

    assert named("a", "b", "a", "a") == ["a", "b", "a#2", "a#3"]
    assert named("a", "a", "a#2") == ["a", "a#3", "a#2"]
    assert len(set(named("a#2", "a", "a", "a#2", "a#2#2"))) == 5


def _clusters(*records: dict[str, Any]) -> tuple[str, list[str]]:
    return from_records([{"token_ids": [1, 2], "prompt_length": 1} | x for x in records]).clusters()


def test_groups_come_first() -> None:
    both = {"trajectory_id": "t", "run_id": "r", "step": 3}
    unit, keys = _clusters({"group_id": "g"} | both, {"group_id": "g"} | both, {"group_id": "h"} | both)
    assert unit == "group"
    assert keys[0] == keys[1] != keys[2]


def test_a_group_is_of_one_run_and_one_step() -> None:
    base = {"group_id": "g", "run_id": "r", "step": 1}
    _, keys = _clusters(base, base | {"run_id": "s"}, base | {"step": 2}, base)
    assert len(set(keys)) == 3
    assert keys[0] == keys[3]


def test_the_version_stands_for_a_step_that_is_unknown() -> None:
    x, y, z = ({"group_id": "g", "policy_version": [None, v]} for v in (1, 2, 1))
    _, keys = _clusters(x, y, z)
    assert keys[0] == keys[2] != keys[1]


def test_trajectories_then_sequences() -> None:
    x, y = ({"trajectory_id": "t", "policy_version": [None, v]} for v in (1, 2))
    unit, keys = _clusters(x, y)  # the turns of one trajectory are dependent, whichever version drew them
    assert (unit, len(set(keys))) == ("trajectory", 1)
    unit, keys = _clusters({"group_id": "g"}, {"trajectory_id": "t"})
    assert unit == "sequence"
    assert len(keys) == 2


def test_keys_do_not_run_into_each_other() -> None:
    _, keys = _clusters({"group_id": '1", "2', "run_id": "a"}, {"group_id": "2", "run_id": 'a", "1'})
    assert len(set(keys)) == 2
