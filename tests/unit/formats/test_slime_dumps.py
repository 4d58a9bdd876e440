"""Dumps of slime and miles, from the files to the columns: what is joined, what is missing, what contradicts itself.

miles' files are made by its own code; slime's train file of version 2 after its documented layout (`pickled_dumps`).
"""

from __future__ import annotations

import gzip
import os
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pickled_dumps import (
    holds,
    miles_samples,
    modules,
    read_all,
    rollouts_of,
    save_rank,
    save_rollout,
    sequences,
    train_columns,
)

from framework_code import cut
from onepolicy.errors import ContentError
from onepolicy.formats import slime
from onepolicy.formats.base import BrokenRecord, RawRecord
from onepolicy.formats.detect import detect
from onepolicy.formats.settle import settle


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    return modules(monkeypatch)


def test_miles_ranks_joined_with_the_rollout(tmp_path: Path, stand_in: Any) -> None:
    made = sequences()
    save_rollout(tmp_path / "rollout_data" / "3.pt", [s.to_dict() for s in miles_samples(stand_in, made)])
    save_rank(tmp_path, train_columns(made, [0, 2]), 0)
    save_rank(tmp_path, train_columns(made, [1, 3]), 1)
    found = detect([tmp_path])
    assert [(s.format, len(s.paths)) for s in found.shards] == [("slime", 3)]
    records = read_all(tmp_path)
    holds(rollouts_of(records), made)
    first = records[0]
    assert isinstance(first, RawRecord)
    assert first.facts == {"step": 3, "group_id": "0", "sample_id": "100", "reward": 0.0, "finish_reason": "length"}
    assert first.texts == {"prompt_text": "prompt 0", "reply_text": "reply 0"}
    assert first.columns["policy_version"].values.tolist() == [3] * len(made[0].reply)
    assert first.columns["reference_logprobs"].values == pytest.approx(np.float32(made[0].old) - 0.5)
    assert first.claims == {"token_ids": len(made[0].prompt + made[0].reply), "reply": len(made[0].reply)}


def test_slime_version_2_joined_with_the_rollout(tmp_path: Path) -> None:
    """After the documented layout: one file of all ranks; two samples of one index are told apart by their place."""
    made = sequences()
    rollout = [
        {"index": 7 if i < 2 else i, "group_index": 0, "tokens": o.prompt + o.reply, "response_length": len(o.reply)}
        | {"loss_mask": o.mask, "rollout_log_probs": o.sampler, "status": "completed", "reward": {"a": 1}}
        for i, o in enumerate(made)
    ]
    train = [
        {"sample_index": 7 if i < 2 else i, "rollout_position": i, "data_parallel_rank": i % 2}
        | {"tokens": torch.tensor(o.prompt + o.reply), "log_probs": torch.tensor(o.old)}
        | {"loss_masks": torch.tensor(o.mask), "entropy": torch.ones(len(o.reply))}
        for i, o in reversed(list(enumerate(made)))
    ]
    save_rollout(tmp_path / "rollout_data" / "3.pt", rollout)
    (tmp_path / "train_data").mkdir()
    torch.save({"format_version": 2, "samples": train, "dp_shards": []}, tmp_path / "train_data" / "3.pt")
    records = read_all(tmp_path)
    holds(rollouts_of(records), made)
    assert all(isinstance(r, RawRecord) and r.columns["old_entropy"].values.sum() > 5 for r in records)


def test_each_file_alone(tmp_path: Path, stand_in: Any) -> None:
    made = sequences()
    save_rollout(tmp_path / "a" / "rollout_data" / "3.pt", miles_samples(stand_in, made))
    got = rollouts_of(read_all(tmp_path / "a"))
    holds(got, made, sides=("sampler",))
    assert "old" not in got.scorings
    save_rank(tmp_path / "b", train_columns(made, range(4)), 0)
    holds(rollouts_of(read_all(tmp_path / "b")), made)


def test_what_one_file_lacks_is_named(tmp_path: Path, stand_in: Any) -> None:
    made = sequences(5)
    samples = [s.to_dict() for s in miles_samples(stand_in, made)]
    save_rollout(tmp_path / "rollout_data" / "3.pt", samples[:4])
    save_rank(tmp_path, train_columns(made, [0, 2]), 0)
    save_rank(tmp_path, train_columns(made, [3, 4]), 1)
    records = read_all(tmp_path)
    assert [type(r) for r in records] == [RawRecord, BrokenRecord, RawRecord, RawRecord, BrokenRecord]
    lost, extra = records[1], records[4]
    assert isinstance(lost, BrokenRecord) and isinstance(extra, BrokenRecord)
    assert (lost.why, lost.record_id) == ("missing: sample 101 of rollout 3 has no values of the trainer", "101")
    assert lost.place.endswith("rollout_data/3.pt[1]")
    assert (extra.why, extra.record_id) == ("missing: sample 104 of rollout 3 is in no rollout file", "104")
    assert extra.place.endswith("train_data/3_1.pt[1]")


def test_ranks_with_the_same_sample(tmp_path: Path, stand_in: Any) -> None:
    """Tensor parallel ranks hold the same values: read once. Where they differ, that is said."""
    made = sequences()
    save_rollout(tmp_path / "rollout_data" / "3.pt", [s.to_dict() for s in miles_samples(stand_in, made)])
    save_rank(tmp_path, train_columns(made, range(4)), 0)
    again = train_columns(made, range(4))
    save_rank(tmp_path, again, 1)
    holds(rollouts_of(read_all(tmp_path)), made)
    again["log_probs"][2] = again["log_probs"][2] + 1e-3
    save_rank(tmp_path, again, 1)
    records = read_all(tmp_path)
    assert len(records) == 5 and isinstance(records[4], BrokenRecord)
    assert records[4].why.startswith("sample 102: old_logprobs is not that of ")


def test_tokens_that_differ_between_the_files(tmp_path: Path, stand_in: Any) -> None:
    made = sequences()
    save_rollout(tmp_path / "rollout_data" / "3.pt", [s.to_dict() for s in miles_samples(stand_in, made)])
    columns = train_columns(made, range(4))
    columns["tokens"][1][4] += 1
    save_rank(tmp_path, columns, 0)
    record = read_all(tmp_path)[1]
    assert isinstance(record, BrokenRecord)
    token = (made[1].prompt + made[1].reply)[4]
    assert record.why.endswith(f"train_data/3_0.pt[1] (position 4: {token + 1} and {token})")


def test_rollouts_are_shards_in_order(tmp_path: Path, stand_in: Any) -> None:
    made = sequences(2)
    samples = [s.to_dict() for s in miles_samples(stand_in, made)]
    for step in (10, 9):
        save_rollout(tmp_path / "rollout_data" / f"{step}.pt", samples, step)
        save_rank(tmp_path, train_columns(made, range(2)), 0, step)
        save_rollout(tmp_path / "rollout_data" / f"eval_{step}.pt", samples, step)
    paths = [str(p) for p in tmp_path.rglob("*.pt")]
    found = [[os.path.relpath(p, tmp_path) for p in s.paths] for s in slime.shards(paths)]
    assert found == [
        ["rollout_data/9.pt", "train_data/9_0.pt"],
        ["rollout_data/eval_9.pt"],
        ["rollout_data/10.pt", "train_data/10_0.pt"],
        ["rollout_data/eval_10.pt"],
    ]


@pytest.mark.parametrize("kind", ["legacy", "packed", "no number"])
def test_other_forms_of_the_same_files(tmp_path: Path, stand_in: Any, kind: str) -> None:
    made = sequences()
    samples = [s.to_dict() for s in miles_samples(stand_in, made)]
    rollout = {"rollout_id": 3, "samples": samples}
    train = {"rollout_id": 3, "rank": 0, "rollout_data": train_columns(made, range(4))}
    for name, value in (("rollout", rollout), ("train_rank0", train)):
        path = tmp_path / (f"{name}.pt" if kind == "no number" else f"{name}_3.pt")
        torch.save(value, path, _use_new_zipfile_serialization=kind != "legacy")
        if kind == "packed":
            path.with_suffix(".pt.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    assert [len(s.paths) for s in detect([tmp_path]).shards] == [2]
    holds(rollouts_of(read_all(tmp_path)), made)


def test_trainer_values_of_another_rollout_are_not_joined(tmp_path: Path, stand_in: Any) -> None:
    """The file's name says 3, its content 4: the content counts."""
    made = sequences(2)
    save_rollout(tmp_path / "rollout_data" / "3.pt", [s.to_dict() for s in miles_samples(stand_in, made)])
    save_rank(tmp_path, train_columns(made, range(2)), 0, rollout_id=4)
    (tmp_path / "train_data" / "4_0.pt").rename(tmp_path / "train_data" / "3_0.pt")
    kinds = [r.why if isinstance(r, BrokenRecord) else sorted(r.columns) for r in read_all(tmp_path)]
    assert "old_logprobs" not in kinds[0] and "old_logprobs" not in kinds[1]
    assert kinds[2:] == [f"missing: sample {i} of rollout 4 is in no rollout file" for i in (100, 101)]


def test_one_file_of_several_that_cannot_be_read(tmp_path: Path, stand_in: Any) -> None:
    made = sequences()
    save_rollout(tmp_path / "rollout_data" / "3.pt", [s.to_dict() for s in miles_samples(stand_in, made)])
    for rank, which in enumerate(([0, 2], [1, 3])):
        save_rank(tmp_path, train_columns(made, which), rank)
    cut_off = tmp_path / "train_data" / "3_1.pt"
    cut_off.write_bytes(cut_off.read_bytes()[:-100])
    records = read_all(tmp_path)
    assert [type(r) for r in records] == [RawRecord, BrokenRecord, RawRecord, BrokenRecord, BrokenRecord]
    last = records[4]
    assert isinstance(last, BrokenRecord) and last.place == str(cut_off) and "damaged or cut off" in last.why
    (tmp_path / "rollout_data" / "3.pt").write_bytes((tmp_path / "rollout_data" / "3.pt").read_bytes()[:2000])
    assert [type(r) for r in read_all(tmp_path)] == [RawRecord, RawRecord, BrokenRecord, BrokenRecord]
    (tmp_path / "train_data" / "3_0.pt").unlink()
    with pytest.raises(ContentError, match="damaged or cut off"):
        read_all(tmp_path)


def test_kept_sets_and_experts(tmp_path: Path) -> None:
    """CSR of the top-p sets over the reply; experts of every token but the last, which is never fed."""
    experts = np.arange(5 * 2 * 2, dtype=np.int32).reshape(5, 2, 2)
    sample = {"index": 0, "tokens": [1, 2, 3, 4, 5, 6], "response_length": 3, "rollout_log_probs": [-1.0, None, -0.5]}
    sample |= {"rollout_top_p_token_ids": torch.tensor([4, 9, 5, 6, 7, 8])}
    sample |= {"rollout_top_p_token_offsets": torch.tensor([0, 2, 3, 6]), "rollout_routed_experts": experts}
    save_rollout(tmp_path / "rollout_data" / "0.pt", [sample], 0)
    got = rollouts_of(read_all(tmp_path))
    kept = got.lists["sampling_mask"]
    assert kept.offsets.tolist() == [0, 0, 0, 0, 2, 3, 6] and kept.values.tolist() == [4, 9, 5, 6, 7, 8]
    routes = got.lists["routed_experts"]
    assert routes.offsets.tolist() == [0, 4, 8, 12, 16, 20, 20] and routes.values.tolist() == list(range(20))
    assert got.scorings["sampler"].logprobs.mask().tolist() == [False, False, False, True, False, True]


def test_counts_that_contradict_each_other_reach_the_checks(tmp_path: Path, stand_in: Any) -> None:
    """One log-prob too few, a response longer than all tokens: handed on, and set aside by `settle`."""
    samples = [s.to_dict() for s in miles_samples(stand_in, sequences())]
    samples[0]["rollout_log_probs"].pop()
    samples[1]["response_length"] = 999
    samples[2]["response_length"] = None
    save_rollout(tmp_path / "rollout_data" / "3.pt", samples)
    settled = settle(read_all(tmp_path))
    assert [faults[0].kind for _, faults in settled.aside] == ["length", "length", "broken"]
    assert len(settled.places) == 1


def test_miles_policy_loss(tmp_path: Path) -> None:
    """By miles' own `maybe_dump_policy_loss_debug`: log-probs of both sides, and no ids."""
    made = sequences()
    given = {"Path": Path, "dist": types.SimpleNamespace(is_available=lambda: False), "Namespace": object}
    given |= {"RolloutBatch": dict}
    code = cut(
        "miles_rl",
        "miles/backends/training_utils/debug_dump.py",
        "maybe_dump_policy_loss_debug",
        "_POLICY_LOSS_DUMP_COUNTER",
        **given,
    )
    tensors = {
        "train_log_probs": [torch.tensor(o.old) + 0.25 for o in made],
        "old_log_probs": [torch.tensor(o.old) for o in made],
        "rollout_log_probs": [torch.tensor(o.sampler) for o in made],
        "advantages": [torch.ones(len(o.reply)) for o in made],
        "local_loss_masks": [torch.tensor(o.mask) for o in made],
    }
    lengths = {
        "total_lengths": [len(o.prompt + o.reply) for o in made],
        "response_lengths": [len(o.reply) for o in made],
    }
    code["maybe_dump_policy_loss_debug"](
        args=types.SimpleNamespace(dump_details=str(tmp_path)),
        batch=lengths,
        ppo_kl=torch.zeros(3),
        pg_loss=torch.zeros(3),
        **tensors,
    )
    records = read_all(tmp_path)
    assert len(records) == 4
    for record, o in zip(records, made, strict=True):
        assert isinstance(record, RawRecord)
        assert not record.prompt_known and not record.ids_known and record.token_ids.tolist() == [*range(len(o.reply))]
        assert record.columns["drawn"].values.tolist() == [bool(m) for m in o.mask]
        assert record.columns["current_logprobs"].values == pytest.approx(np.float32(o.old) + np.float32(0.25))
        assert record.columns["old_logprobs"].values.tolist() == np.float32(o.old).tolist()
        assert record.columns["loss_mask"].values.tolist() == [bool(m) for m in o.mask]
        assert record.claims == {"reply": len(o.reply)}
    assert records[1].facts["sample_id"] == "rank-call-index 0-0-1"  # type: ignore[union-attr]
