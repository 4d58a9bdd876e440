"""Dumps of SkyRL, verl and ROLL, from the file to the columns; who makes them is told in `pickled_dumps`."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pickled_dumps import (
    Reduces,
    RollProto,
    TensorDict,
    data_proto,
    holds,
    miles_samples,
    modules,
    read_all,
    roll_columns,
    rollouts_of,
    save_rollout,
    sequences,
    skyrl_batch,
    tensordict,
    verl_columns,
    write_one,
)

from onepolicy.errors import ContentError
from onepolicy.formats import FORMATS, roll, skyrl, slime, verl
from onepolicy.formats.base import BrokenRecord, RawRecord
from onepolicy.formats.batches import fields
from onepolicy.formats.detect import detect, format_of
from onepolicy.formats.files import Files
from onepolicy.formats.unpickle import array, loads, rows


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    return modules(monkeypatch)


@pytest.mark.parametrize("module", ["skyrl.backends.skyrl_train", "skyrl_train"])
def test_skyrl_as_its_own_code_saves_it(tmp_path: Path, stand_in: Any, module: str) -> None:
    made = sequences()
    path = tmp_path / "global_step_12_training_input.pkl"
    skyrl_batch(stand_in, made, module=module).save(str(path))
    records = read_all(tmp_path)
    holds(rollouts_of(records), made)
    first = records[0]
    assert isinstance(first, RawRecord)
    width = max(len(o.prompt) + len(o.reply) for o in made)
    assert first.facts == {
        "step": 12,
        "group_id": "prompt-0",
        "reward": 0.0,
        "padding_length": width - len(made[0].prompt) - len(made[0].reply),
    }
    assert [r.facts["reward"] for r in records if isinstance(r, RawRecord)] == [0, 1, 2, 3]
    assert first.columns["advantages"].values.tolist() == [1.0] * len(made[0].reply)
    assert first.place == f"{path}[0]"


def test_skyrl_before_it_wrote_its_own_bytes(tmp_path: Path, stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `__reduce__`: a dict with its state, its tensors pickled as torch does."""
    made = sequences()
    batch = skyrl_batch(stand_in, made)
    monkeypatch.delattr(type(batch).__mro__[1], "__reduce__")
    batch.save(str(tmp_path / "global_step_1_training_input.pkl"))
    assert b"_load_from_bytes" in (tmp_path / "global_step_1_training_input.pkl").read_bytes()
    holds(rollouts_of(read_all(tmp_path)), made)


def test_skyrl_rows_that_fill_the_batch_up_are_left_out(tmp_path: Path, stand_in: Any) -> None:
    made = sequences(3)
    skyrl_batch(stand_in, made, pad=5).save(str(tmp_path / "global_step_1_training_input.pkl"))
    holds(rollouts_of(read_all(tmp_path)), made)


def test_skyrl_a_row_that_cannot_be_read_is_named(tmp_path: Path, stand_in: Any) -> None:
    batch = skyrl_batch(stand_in, sequences())
    batch["attention_mask"][1, -3] = 0
    batch["response_mask"][2] = 0
    batch.save(str(tmp_path / "global_step_1_training_input.pkl"))
    good, hole, empty, _ = read_all(tmp_path)
    assert isinstance(good, RawRecord)
    assert isinstance(hole, BrokenRecord) and "attention_mask has a hole at position" in hole.why
    assert isinstance(empty, BrokenRecord) and "response_mask is 0 at every position" in empty.why


@pytest.mark.parametrize("form", ["consolidated", "state", "files", "numpy"])
def test_verl_as_its_own_code_saves_it(
    tmp_path: Path, stand_in: Any, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    made = sequences()
    monkeypatch.setattr(TensorDict, "form", form)
    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", form if form == "numpy" else "")
    folder = tmp_path / "exp_project" / "GBS4_N2_in8_out15" / "7"
    folder.mkdir(parents=True)
    data_proto(stand_in, made).save_to_disk(folder / "gen_batch.dp")
    (folder / "meta.json").write_text('{"global_steps": 7}')
    records = [r for s in detect([tmp_path]).shards for r in format_of(s.format).read(s, Files())]
    holds(rollouts_of(records), made)
    second = records[1]
    assert isinstance(second, RawRecord)
    padded = sum(verl_columns(made)[k].shape[1] for k in ("prompts", "responses"))
    assert second.facts == {
        "step": 7,
        "group_id": "u0",
        "env_id": None,
        "reward": 1.0,
        "temperature": 0.7,
        "padding_length": padded - len(made[1].prompt) - len(made[1].reply),
    }
    assert second.texts == {"messages": [{"role": "user", "content": "question 1"}]}


def test_verl_of_older_versions(tmp_path: Path, stand_in: Any) -> None:
    """The batch in a `BytesIO`; a batch without `prompts`, which its `input_ids` have; half precision."""
    tensordict(stand_in)
    stand_in("verl.protocol", DataProto=RollProto)
    made = sequences()
    columns = verl_columns(made)
    del columns["prompts"]
    columns["old_log_probs"] = columns["old_log_probs"].half()
    (tmp_path / "gen_batch.dp").write_bytes(pickle.dumps(RollProto(TensorDict(columns), {}, {})))
    got = rollouts_of(read_all(tmp_path))
    holds(got, made, sides=("sampler",))
    assert got.scorings["old"].logprobs.values.dtype == np.float32


def test_verl_transfer_queue_batch(tmp_path: Path, stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tq_batch.pt`: nested tensors, not padded, and the keys `{uid}_{session}_{index}`."""
    tensordict(stand_in)
    made = sequences()
    nested = torch.nested._internal.nested_tensor._rebuild_njt  # type: ignore[attr-defined]

    class Jagged:
        def __init__(self, rows: list[list[Any]], dtype: torch.dtype) -> None:
            self.values = torch.tensor([x for r in rows for x in r], dtype=dtype)
            self.offsets = torch.tensor([0, *np.cumsum([len(r) for r in rows]).tolist()])

        def __reduce__(self) -> Any:
            return nested, ({"values": self.values, "offsets": self.offsets, "lengths": None},)

    columns = {
        "prompts": Jagged([o.prompt for o in made], torch.int64),
        "responses": Jagged([o.reply for o in made], torch.int64),
        "response_mask": Jagged([o.mask for o in made], torch.int64),
        "rollout_log_probs": Jagged([o.sampler for o in made], torch.float32),
        "old_log_probs": Jagged([o.old for o in made], torch.float32),
    }
    monkeypatch.setattr(TensorDict, "form", "state")
    keys = [f"{'ab'[i // 2]}_0_{i}" for i in range(len(made))]
    payload = {"tensordict": TensorDict(columns), "tags": [{}] * 4, "keys": keys, "global_steps": 9}  # type: ignore[arg-type]
    (tmp_path / "9" / "0").mkdir(parents=True)
    torch.save(payload, tmp_path / "9" / "0" / "tq_batch.pt")
    records = read_all(tmp_path)
    holds(rollouts_of(records), made)
    assert [(r.facts["group_id"], r.facts["step"]) for r in records if isinstance(r, RawRecord)] == [
        ("a", 9),
        ("a", 9),
        ("b", 9),
        ("b", 9),
    ]


def test_nested_columns_of_a_consolidated_batch(stand_in: Any) -> None:
    """Values, lengths and offsets are leaves of their own, marked; the last tells its ragged dimension, too."""
    values, offsets = torch.arange(7.0), torch.tensor([0, 3, 7])
    data = torch.cat([values.view(torch.uint8), torch.zeros(4, dtype=torch.uint8), offsets.view(torch.uint8)])
    leaves = {
        "<NJT_VALUES>x": ("torch.float32", [7], 0, 32, 4),
        "<NJT_OFFSETS>x": ("torch.int64", [3], 32, 56, 0, 1),
        "y": ("torch.float32", [2], "cpu", 0, 8, 0),
    }
    tensordict(stand_in)
    rebuild = sys.modules["tensordict._reductions"]._rebuild_tensordict_files_consolidated  # type: ignore[attr-defined]
    got = fields(loads(pickle.dumps(Reduces(rebuild, ({"leaves": leaves}, data))), "f.dp"), "f.dp")
    assert [r.tolist() for r in rows(got["x"])] == [[0, 1, 2], [3, 4, 5, 6]]
    assert array(got["y"]).tolist() == [0, 1]
    leaves["y"] = ("torch.float32", [2], 52, 60, 0)
    broken = pickle.dumps(Reduces(rebuild, ({"leaves": leaves}, data)))
    with pytest.raises(ContentError, match=r"f\.dp: damaged: 'y' lies outside the batch"):
        fields(loads(broken, "f.dp"), "f.dp")


def test_verl_without_what_it_needs(tmp_path: Path, stand_in: Any) -> None:
    proto = data_proto(stand_in, sequences())
    del proto.batch._tensordict["responses"]
    proto.save_to_disk(tmp_path / "gen_batch.dp")
    with pytest.raises(ContentError, match=r"gen_batch.dp: the batch has no 'responses'; it has attention_mask, "):
        read_all(tmp_path)
    del proto.batch._tensordict["attention_mask"]
    proto.batch._tensordict["responses"] = torch.ones(4, 3, dtype=torch.int64)
    proto.save_to_disk(tmp_path / "gen_batch.dp")
    assert [r.why for r in read_all(tmp_path) if isinstance(r, BrokenRecord)] == [
        "the batch has no 'attention_mask'; it has input_ids, old_log_probs, prompts, response_mask, responses, "
        "rm_scores, rollout_log_probs"
    ] * 4


@pytest.mark.parametrize("newer", [True, False])
def test_roll_after_its_layout(tmp_path: Path, stand_in: Any, newer: bool) -> None:
    tensordict(stand_in)
    stand_in("roll.distributed.scheduler.protocol", DataProto=RollProto)
    made = sequences()
    (tmp_path / "train").mkdir()
    rest = ({"domain": np.array(["math"] * 4, dtype=object)}, *([None] if newer else []), {"global_step": 5})
    with open(tmp_path / "train" / "step_000005.pkl", "wb") as file:
        pickle.dump(RollProto(TensorDict(roll_columns(made)), *rest), file)
    records = read_all(tmp_path)
    got = rollouts_of(records)
    holds(got, made, sides=("sampler",))
    old = got.scorings["old"].logprobs
    for i, o in enumerate(made):
        part = slice(int(got.offsets[i]) + len(o.prompt), int(got.offsets[i + 1]))
        assert np.array_equal(old.values[part].astype(np.float32), np.asarray(o.old, dtype=np.float32))
    last = records[3]
    assert isinstance(last, RawRecord)
    facts = dict(last.facts)
    assert facts.pop("padding_length") == 4 + max(len(o.prompt + o.reply) for o in made) - len(
        made[3].prompt + made[3].reply
    )
    assert facts == {"step": 5, "group_id": "1", "trajectory_id": None, "env_id": "math", "reward": 3.0}


def test_other_files_are_not_claimed(tmp_path: Path) -> None:
    torch.save({"model": torch.zeros(3), "rollout_data": 1}, tmp_path / "rollout_data.pt")
    torch.save({"x": {"samples": []}}, tmp_path / "samples.pt")
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"samples": [], "rollout_id": 3}))
    assert {os.path.basename(p) for p, _ in detect([tmp_path]).unclaimed} == {"rollout_data.pt", "samples.pt", "a.pkl"}
    words = b"verl.protocol DataProto roll.distributed.scheduler.protocol training_batch TrainingInputBatch rollout_id"
    for module in (slime, skyrl, verl, roll):
        assert not module.claims("a.jsonl", b'{"text": "' + words + b'"}', [])


class Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/never",)


@pytest.mark.parametrize("form", ["slime", "skyrl", "verl", "roll"])
def test_a_dump_that_names_more_is_refused_with_the_way_out(tmp_path: Path, stand_in: Any, form: str) -> None:
    path = write_one(form, tmp_path, stand_in, {"extra": Runs()})
    with pytest.raises(ContentError) as refused:
        read_all(tmp_path)
    first, *rest = str(refused.value).splitlines()
    assert first.startswith(f"{path}: refused: the pickle names posix.system, which is on no list of inert types; ")
    assert "\n".join(rest).rstrip() == format_of(form).EXPORT.rstrip()  # type: ignore[attr-defined]


def test_the_ways_out_are_python() -> None:
    for form in ("slime", "skyrl", "verl", "roll"):
        lines = format_of(form).EXPORT  # type: ignore[attr-defined]
        assert all(line.startswith("    ") for line in lines.splitlines())
        compile("if True:\n" + lines, form, "exec")


def test_the_ways_out_give_the_same_sequences(tmp_path: Path, stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as they stand, in the framework's own environment (its code, cut out of the wheel)."""
    made = sequences()
    monkeypatch.chdir(tmp_path)
    skyrl_batch(stand_in, made).save("global_step_1_training_input.pkl")
    run(skyrl.EXPORT)
    holds(rollouts_of(read_all(tmp_path / "global_step_1.jsonl")), made, sides=("old",))

    save_rollout(tmp_path / "rollout_data" / "0.pt", [s.to_dict() for s in miles_samples(stand_in, made)])
    run(slime.EXPORT)
    got = rollouts_of(read_all(tmp_path / "rollout.jsonl"))
    assert got.tokens["token_ids"].values.tolist() == [t for o in made for t in o.prompt + o.reply]

    columns = verl_columns(made)
    proto = types.SimpleNamespace(load_from_disk=lambda _: types.SimpleNamespace(batch=columns))
    stand_in("verl.protocol").DataProto = proto
    run(verl.EXPORT)
    holds(rollouts_of(read_all(tmp_path / "gen_batch.jsonl")), made, sides=("sampler",))

    (tmp_path / "step_000001.pkl").write_bytes(pickle.dumps(types.SimpleNamespace(batch=roll_columns(made))))
    run(roll.EXPORT)
    holds(rollouts_of(read_all(tmp_path / "step_000001.jsonl")), made, sides=("sampler",))


def run(export: str) -> None:
    exec(compile("if True:\n" + export, "export", "exec"), {})


def test_they_stand_in_the_table() -> None:
    assert [FORMATS[m.name] for m in (slime, skyrl, verl, roll)] == [m.__name__ for m in (slime, skyrl, verl, roll)]
    assert functools.reduce(lambda a, b: a and b, [m.says for m in (slime, skyrl, verl, roll)])
