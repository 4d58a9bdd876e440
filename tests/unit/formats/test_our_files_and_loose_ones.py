"""Canonical files read leniently and fast, and records under the names that people use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dump_samples import (
    OLD,
    PROMPT,
    REPLY,
    SAMPLER,
    broken,
    canonical_row,
    lines,
    loose_row,
    only,
    read_dump,
    scored,
    settled,
)
from onepolicy import storage
from onepolicy.errors import ContentError
from onepolicy.formats import canonical, parquet_rows
from onepolicy.formats.base import BrokenRecord, RawRecord
from onepolicy.formats.detect import detect
from onepolicy.formats.files import Files
from onepolicy.records import from_records, to_records
from onepolicy.rollouts import Rollouts, concat
from onepolicy.storage import parquet

NONE = [None] * len(PROMPT)


def batch(n: int = 12) -> Rollouts:
    rows = [
        canonical_row(record_id=str(i), float32=["sampler_logprobs"], sampling_mask=[None] * 6 + [[1, 2]])
        for i in range(n)
    ]
    rows[0]["scorings"] = {"sampler": {"semantics": "processed", "dtype": "bfloat16"}}
    return from_records(rows)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_what_storage_writes_is_read_to_the_last_bit(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"r{suffix}"
    storage.write(batch(), path)
    found, items = read_dump(path)
    assert found.formats == ("canonical",)
    result = settled(items)
    assert not result.aside and result.rollouts is not None
    assert list(to_records(result.rollouts)) == list(to_records(batch()))


def test_parquet_goes_the_fast_way_in_ranges_of_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_GROUP_VALUES", 60)
    monkeypatch.setattr(parquet_rows, "SHARD_BYTES", 500)
    path = tmp_path / "r.parquet"
    storage.write(batch(), path)
    shards = detect([path]).shards
    assert len(shards) > 2
    parts = [part for shard in shards for part in canonical.rollouts(shard, Files(), 1000)]
    assert list(to_records(concat(parts))) == list(to_records(batch()))
    places = [x.place for x in read_dump(path)[1]]
    assert places == [f"{path}[{i}]" for i in range(12)]


def test_a_record_that_breaks_the_contract_stops_the_fast_way_and_is_told_by_the_other(tmp_path: Path) -> None:
    rows = list(to_records(batch(3)))
    rows[1]["old_logprobs"] = [None, -1.0]
    keys = ("record_id", "token_ids", "prompt_length", "sampler_logprobs", "old_logprobs")
    pq.write_table(pa.table({key: [row[key] for row in rows] for key in keys}), tmp_path / "r.parquet")
    (shard,) = detect([tmp_path]).shards
    with pytest.raises(ContentError, match="old_logprobs"):
        list(canonical.rollouts(shard, Files(), 1000))
    result = settled(read_dump(tmp_path)[1])
    ((_, faults),) = result.aside
    assert [(f.kind, f.record_id, f.column, f.got, f.wanted) for f in faults] == [("length", "1", "old_logprobs", 2, 7)]
    assert len(result.rollouts) == 2  # type: ignore[arg-type]


def test_faults_of_canonical_lines(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        canonical_row(),
        canonical_row(loss_mask=[1]),
        canonical_row(sampler_logprobs=[-0.5] * 7),
        canonical_row(los_mask=[]),
        canonical_row(scorings={"sampler": {"semantics": "rew"}}),
        canonical_row(policy_version=[1, 2.5, *[None] * 5]),
        canonical_row(step="x"),
    ]
    path = lines(tmp_path / "r.jsonl", rows)
    _, items = read_dump(path)
    says = {int(b.place.rpartition(":")[2]): b.why for b in broken(path)}
    assert set(says) == {4, 5, 6, 7}
    assert "did you mean 'loss_mask'?" in says[4] and "wanted one of raw" in says[5]
    assert "'policy_version': position 1: got 2.5" in says[6] and "'step': got 'x'" in says[7]
    result = settled(items)
    assert next([f.column for f in faults if f.kind == "length"] for _, faults in result.aside) == ["loss_mask"]
    assert scored(result, "sampler", 1) == [-0.5] * 7  # a value at index 0 is kept, to be seen


# loose


def test_the_field_cases_form(tmp_path: Path) -> None:
    record = only(lines(tmp_path / "a.jsonl", [loose_row(prompt_ids=None)]))
    assert not record.prompt_known and record.token_ids.tolist() == REPLY
    result = settled([record])
    assert scored(result, "sampler") == [None, *SAMPLER] and scored(result, "old") == [None, *OLD]


def test_one_value_too_many_or_too_few_is_never_fitted(tmp_path: Path) -> None:
    rows = [loose_row(prompt_ids=None, rollout_logprobs=x) for x in ([*SAMPLER, -1.0], SAMPLER[:3])]
    result = settled(read_dump(lines(tmp_path / "a.jsonl", rows))[1])
    assert [(f.column, f.got, f.wanted) for _, faults in result.aside for f in faults] == [
        ("sampler_logprobs", 5, 4),
        ("sampler_logprobs", 3, 4),
    ]


@pytest.mark.parametrize(
    "row",
    [
        {
            "prompt_ids": PROMPT,
            "completion_ids": REPLY,
            "sampling_per_token_logps": SAMPLER,
            "old_per_token_logps": OLD,
        },
        {
            "input_ids": PROMPT + REPLY,
            "prompt_length": 3,
            "logprobs": [0, -9, -9, *SAMPLER],
            "old_log_probs": [-9, -9, *OLD],
        },
        {"tokens": PROMPT + REPLY, "response_length": 4, "rollout_log_probs": SAMPLER, "log_probs": OLD},
        {"prompt_token_ids": PROMPT, "output_token_ids": REPLY, "completion_logprobs": SAMPLER, "actor_logprobs": OLD},
        {"prompt": PROMPT, "response": REPLY, "infer_logprobs": SAMPLER, "train_logprobs": OLD},
    ],
)
def test_spellings(tmp_path: Path, row: dict[str, Any]) -> None:
    found, items = read_dump(lines(tmp_path / "a.jsonl", [row]))
    result = settled(items)
    assert found.formats == ("loose",) and not result.aside
    assert scored(result, "sampler")[3:] == SAMPLER and scored(result, "old")[3:] == OLD
    assert result.rollouts.token_ids.tolist() == PROMPT + REPLY  # type: ignore[union-attr]


def test_versions_spans_and_label(tmp_path: Path) -> None:
    spans = {"version_spans": [[0, 3, 12], [3, 4, 13]], "weight_version": 13, "trainer_version": 14}
    record = only(lines(tmp_path / "a.jsonl", [loose_row(**spans)]))
    assert record.columns["policy_version"].values.tolist() == [12, 12, 12, 13]
    assert record.facts["weight_version"] == 13 and record.facts["scorer_version"] == 14
    (found,) = broken(lines(tmp_path / "b.jsonl", [loose_row(version_spans=[[0, 9, 1]])]))
    assert "'version_spans': got [0, 9, 1], but the reply has 4 tokens" in found.why


def test_what_a_loose_record_says_of_itself(tmp_path: Path) -> None:
    told = {"dp_rank": 3, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0, "env": "math"}
    record = only(lines(tmp_path / "a.jsonl", [loose_row(**told, old_varentropy=[0.5] * len(REPLY))]))
    wanted = {"replica_id": "3", "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.0}
    assert {k: record.facts[k] for k in wanted} == wanted and record.facts["env_id"] == "math"
    assert record.columns["old_varentropy"].values.tolist() == [0.5] * len(REPLY)


def test_what_a_mask_has_multiplied_away_is_no_log_prob(tmp_path: Path) -> None:
    """`logprobs * mask` of the scorer, beside the sampler's own values; other values at masked tokens stay."""
    mask = [1] * (len(REPLY) - 2) + [0, 0]
    masked = [x * m for x, m in zip(OLD, mask, strict=True)]
    record = only(lines(tmp_path / "a.jsonl", [loose_row(trainer_logprobs=masked, loss_mask=mask)]))
    valid = record.columns["old_logprobs"].valid
    assert valid is not None and valid.tolist() == [bool(m) for m in mask]
    assert record.columns["sampler_logprobs"].values.tolist() == SAMPLER
    record = only(lines(tmp_path / "b.jsonl", [loose_row(trainer_logprobs=[*masked[:-1], OLD[-1]], loss_mask=mask)]))
    assert record.columns["old_logprobs"].valid is None or record.columns["old_logprobs"].valid.all()


def test_loose_parquet(tmp_path: Path) -> None:
    table = {"prompt_ids": [PROMPT], "response_ids": [REPLY], "rollout_logprobs": [np.array(SAMPLER)], "step": [3]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    found, items = read_dump(tmp_path)
    assert found.formats == ("loose",) and items[0].facts["step"] == 3  # type: ignore[union-attr]
    assert scored(settled(items), "sampler") == [*NONE, *SAMPLER]


def test_two_sides_without_ids_are_read_and_one_is_not(tmp_path: Path) -> None:
    pair = {"rollout_logprobs": SAMPLER, "trainer_logprobs": OLD, "loss_mask": [1, 1, 1, 0]}
    path = lines(tmp_path / "a.jsonl", [pair, {"rollout_logprobs": SAMPLER}, {**pair, "trainer_logprobs": [*OLD, 0.0]}])
    found, items = read_dump(path)
    record, alone, longer = items
    assert found.formats == ("loose",) and isinstance(record, RawRecord) and not record.ids_known
    result = settled(items)
    assert scored(result, "sampler") == [None, *SAMPLER] and scored(result, "old") == [None, *OLD]
    assert isinstance(alone, BrokenRecord) and "not both sides' log-probs" in alone.why
    assert result.aside[1][0] is longer and result.aside[1][1][0].column == "old_logprobs"


def test_counts_that_the_record_states(tmp_path: Path) -> None:
    row = loose_row(prompt_length=5, response_length=4)
    (fault,) = settled(read_dump(lines(tmp_path / "a.jsonl", [row]))[1]).kept_faults
    assert (fault.column, fault.got, fault.wanted) == ("prompt", 3, 5)
    _, (record,) = read_dump(lines(tmp_path / "b.jsonl", [{**row, "top_p": 0.9, "logprob_semantics": "raw_logprobs"}]))
    assert isinstance(record, RawRecord) and record.facts["logprob_semantics"] == "raw" and record.facts["top_p"] == 0.9
