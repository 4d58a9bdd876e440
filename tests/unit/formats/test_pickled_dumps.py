"""Pickled dumps of slime, miles, SkyRL, verl and ROLL, from the file to the columns.

Made by the framework's own code, cut out of its wheel: SkyRL's batches, miles' samples, train files and policy loss,
verl's `DataProto`. After the documented layout: slime's train file of version 2, ROLL's `DataProto`, and `TensorDict`,
of which a stand-in with the same module, name and pickled forms (tensordict's `_reductions.py`) is pickled.
"""

from __future__ import annotations

import copy
import functools
import io
import os
import pickle
import random
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from framework_code import cut
from onepolicy.errors import ContentError
from onepolicy.formats import FORMATS, roll, skyrl, slime, verl
from onepolicy.formats.base import BrokenRecord, RawRecord
from onepolicy.formats.detect import detect, format_of
from onepolicy.formats.files import Files
from onepolicy.formats.settle import settle
from onepolicy.rollouts import Rollouts


@dataclass
class One:
    """A sequence, and what each side says of its reply."""

    prompt: list[int]
    reply: list[int]
    mask: list[int]
    sampler: list[float]
    old: list[float]
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


def sequences(n: int = 4, seed: int = 0) -> list[One]:
    """Of unequal lengths; from the second on with a tool's answer in the middle: masked, and 0.0 from the sampler."""
    rng = np.random.default_rng(seed)
    made: list[One] = []
    for i in range(n):
        p, r = int(rng.integers(2, 6)), int(rng.integers(6, 12))
        values = rng.normal(-1, 0.3, (2, r)).astype(np.float32).clip(max=-0.01)
        mask = [1] * r
        if i:
            mask[2:4] = [0, 0]
            values[0, 2:4] = 0.0
        ids = rng.integers(5, 90_000, p + r).tolist()
        made.append(One(ids[:p], ids[p:], mask, values[0].tolist(), values[1].tolist()))
    return made


def read_all(*paths: Path) -> list[RawRecord | BrokenRecord]:
    found = detect(paths)
    assert not found.unclaimed, found.unclaimed
    return [r for shard in found.shards for r in format_of(shard.format).read(shard, Files())]


def rollouts_of(records: Sequence[RawRecord | BrokenRecord]) -> Rollouts:
    settled = settle(records)
    assert not settled.aside and not settled.kept_faults, (settled.aside, settled.kept_faults)
    assert settled.rollouts is not None
    return settled.rollouts


def holds(got: Rollouts, wanted: list[One], sides: Sequence[str] = ("sampler", "old")) -> None:
    """Ids, masks and log-probs of every sequence; null at the prompt, and where the policy drew nothing."""
    assert len(got) == len(wanted)
    for i, one in enumerate(wanted):
        lo, hi = int(got.offsets[i]), int(got.offsets[i + 1])
        part = slice(lo, hi)
        n = len(one.prompt)
        assert got.tokens["token_ids"].values[part].tolist() == one.prompt + one.reply
        assert got.tokens["drawn"].values[part].tolist() == [False] * n + [bool(m) for m in one.mask]
        mask = got.tokens["loss_mask"]
        assert (mask.values[part] & mask.mask()[part]).tolist() == [False] * n + [bool(m) for m in one.mask]
        for side in sides:
            col = got.scorings[side].logprobs
            values, valid = col.values[part], col.mask()[part]
            there = [side != "sampler" or bool(m) for m in one.mask]
            assert valid.tolist() == [False] * n + there, side
            told = np.asarray(one.sampler if side == "sampler" else one.old, dtype=np.float32)
            assert np.array_equal(values[n:][there].astype(np.float32), told[there]), side


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`stand_in(module, **members)`: a module of that name, so that its members pickle by it."""

    def make(name: str, **members: Any) -> Any:
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            path = ".".join(parts[:i])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
        module = sys.modules[name]
        for key, member in members.items():
            member.__module__, member.__qualname__ = name, key
            setattr(module, key, member)
            for inner in (x for x in vars(member).values() if isinstance(x, type)):
                inner.__module__ = name
        return module

    return make


# -- SkyRL: the wheel's own code -------------------------------------------------------------------------------------

SKYRL = "skyrl/backends/skyrl_train/training_batch.py"


def skyrl_batch(stand_in: Any, made: list[One], pad: int = 0, module: str = "skyrl.backends.skyrl_train") -> Any:
    names = ("TensorList", "_rebuild_tensor_batch", "TensorBatch", "TrainingInput", "TrainingInputBatch")
    helpers = ("_serialize_tensor", "_deserialize_tensor", "DictType", "pad_training_input_batch")
    given = {"np": np, "copy": copy, "io": io, "pickle": pickle}
    code = cut("skyrl", SKYRL, *names, *helpers, **given)
    stand_in(f"{module}.training_batch", **{n: code[n] for n in names})
    logger = types.SimpleNamespace(warning=print)
    convert = cut(
        "skyrl",
        "skyrl/train/dataset/preprocess.py",
        "convert_prompts_responses_to_batch_tensors",
        "_verify_inputs",
        logger=logger,
    )["convert_prompts_responses_to_batch_tensors"]
    rewards = [[0.0] * (len(o.reply) - 1) + [float(i)] for i, o in enumerate(made)]
    sequences_, attention, response, rewards_, loss, sampler, _ = convert(
        types.SimpleNamespace(pad_token_id=0),
        [o.prompt for o in made],
        [o.reply for o in made],
        rewards,
        [o.mask for o in made],
        [o.sampler for o in made],
    )
    old = torch.zeros_like(sampler)
    for i, o in enumerate(made):
        old[i, -len(o.old) :] = torch.tensor(o.old)
    columns = {"sequences": sequences_, "attention_mask": attention, "response_mask": response, "rewards": rewards_}
    columns |= {"loss_mask": loss, "rollout_logprobs": sampler, "action_log_probs": old, "values": None}
    columns["advantages"] = response.to(torch.bfloat16)
    batch = code["TrainingInputBatch"](columns)
    batch.metadata = {"uids": [f"prompt-{i // 2}" for i in range(len(made))], "response_length": response.shape[1]}
    return code["pad_training_input_batch"](batch, pad)


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


# -- verl: the wheel's DataProto, with a stand-in for tensordict -----------------------------------------------------


class TensorDict:
    """Holds tensors; pickled in one of tensordict's forms (`form`)."""

    form = "consolidated"

    def __init__(self, source: dict[str, torch.Tensor], batch_size: Any = None, device: Any = None) -> None:
        self._tensordict, self.batch_size, self.device = dict(source), batch_size, device

    def keys(self) -> Any:
        return self._tensordict.keys()

    def items(self) -> Any:
        return self._tensordict.items()

    def contiguous(self) -> TensorDict:
        return self

    consolidate = contiguous

    def __reduce__(self) -> Any:
        reductions: Any = sys.modules["tensordict._reductions"]
        if self.form == "state":
            return reductions._make_td, (TensorDict, {"_tensordict": self._tensordict, "_batch_size": self.batch_size})
        if self.form == "files":
            flat = {(k,): v for k, v in self._tensordict.items()}
            return reductions._rebuild_tensordict_files, (flat, {"leaves": dict.fromkeys(self._tensordict)})
        leaves: dict[str, Any] = {}
        parts: list[torch.Tensor] = []
        at = 0
        for key, value in self._tensordict.items():
            data = value.contiguous().reshape(-1).view(torch.uint8)
            pad = -len(data) % 8
            parts += [data, torch.zeros(pad, dtype=torch.uint8)]
            leaves[key] = (str(value.dtype), list(value.shape), at, at + len(data) + pad, pad)
            at += len(data) + pad
        about = {"cls": "TensorDict", "non_tensors": {}, "leaves": leaves, "cls_metadata": {"batch_size": [1]}}
        return reductions._rebuild_tensordict_files_consolidated, (about, torch.cat(parts))


def tensordict(stand_in: Any) -> Any:
    def function() -> Any:
        return lambda *args: None

    names = ("_make_td", "_rebuild_tensordict_files", "_rebuild_tensordict_files_consolidated")
    stand_in("tensordict._reductions", **{n: function() for n in names})
    stand_in("tensordict._td", TensorDict=TensorDict)
    return types.SimpleNamespace(__version__="0.10.0")


def verl_columns(made: list[One], width: int = 3) -> dict[str, torch.Tensor]:
    """Prompts padded on the left, replies on the right, both by `width` more than the longest."""
    P = max(len(o.prompt) for o in made) + width
    R = max(len(o.reply) for o in made) + width

    def left(x: list[int]) -> list[int]:
        return [0] * (P - len(x)) + x

    def right(x: list[Any]) -> list[Any]:
        return x + [0] * (R - len(x))

    prompts, responses = torch.tensor([left(o.prompt) for o in made]), torch.tensor([right(o.reply) for o in made])
    attention = [left([1] * len(o.prompt)) + right([1] * len(o.reply)) for o in made]
    scores = torch.zeros(len(made), R)
    for i, o in enumerate(made):
        scores[i, len(o.reply) - 1] = float(i)
    return {
        "prompts": prompts,
        "responses": responses,
        "response_mask": torch.tensor([right(o.mask) for o in made]),
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": torch.tensor(attention),
        "rollout_log_probs": torch.tensor([right(o.sampler) for o in made]),
        "old_log_probs": torch.tensor([right(o.old) for o in made]),
        "rm_scores": scores,
    }


def data_proto(stand_in: Any, made: list[One]) -> Any:
    given = {"np": np, "os": os, "pickle": pickle, "io": io, "tensordict": tensordict(stand_in)}
    given["version"] = __import__("packaging.version").version
    given["TensorDict"] = TensorDict
    names = ("DataProto", "serialize_tensordict", "serialize_single_tensor")
    code = cut("verl", "verl/protocol.py", *names, **given)
    stand_in("verl.protocol", DataProto=code["DataProto"])
    proto = code["DataProto"].__new__(code["DataProto"])
    proto.batch = TensorDict(verl_columns(made), batch_size=(len(made),))
    uids = np.array([f"u{i // 2}" for i in range(len(made))], dtype=object)
    chats = np.empty(len(made), dtype=object)
    chats[:] = [[{"role": "user", "content": f"question {i}"}] for i in range(len(made))]
    proto.non_tensor_batch = {"uid": uids, "raw_prompt": chats, "__num_turns__": np.arange(len(made), dtype=np.int32)}
    proto.meta_info = {"metrics": [{"time": 0.5}], "temperature": 0.7}
    return proto


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


# -- ROLL: after its layout ------------------------------------------------------------------------------------------


class RollProto:
    """State as in `roll/distributed/scheduler/protocol.py`: the tensors in a `BytesIO` that `torch.save` wrote."""

    def __init__(self, *state: Any) -> None:
        self.state = state

    def __getstate__(self) -> Any:
        buffer = io.BytesIO()
        torch.save(self.state[0], buffer)
        return (buffer, *self.state[1:])


def roll_columns(made: list[One]) -> dict[str, torch.Tensor]:
    S = max(len(o.prompt) + len(o.reply) for o in made) + 4

    def right(x: list[Any], n: int = S) -> list[Any]:
        return x + [0] * (n - len(x))

    def after(o: One, values: list[float]) -> list[Any]:
        return right([0.0] * (len(o.prompt) - 1) + values, S - 1)

    return {
        "input_ids": torch.tensor([right(o.prompt + o.reply) for o in made]),
        "attention_mask": torch.tensor([right([1] * (len(o.prompt) + len(o.reply))) for o in made]),
        "response_mask": torch.tensor([right([0] * len(o.prompt) + o.mask) for o in made]),
        "infer_logprobs": torch.tensor([after(o, o.sampler) for o in made]),
        "old_log_probs": torch.tensor([after(o, o.old) for o in made]),
        "prompt_id": torch.tensor([i // 2 for i in range(len(made))]),
        "scores": torch.arange(float(len(made))),
    }


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


# -- slime and miles -------------------------------------------------------------------------------------------------


def miles_samples(stand_in: Any, made: list[One]) -> list[Any]:
    code = cut("miles_rl", "miles/utils/types.py", "Sample", Enum=Enum, numpy=np)
    stand_in("miles.utils.types", Sample=code["Sample"])
    out: list[Any] = []
    for i, o in enumerate(made):
        sample = code["Sample"](group_index=i // 2, index=100 + i, prompt=f"prompt {i}", tokens=o.prompt + o.reply)
        sample.response, sample.response_length = f"reply {i}", len(o.reply)
        sample.loss_mask, sample.rollout_log_probs = list(o.mask), list(o.sampler)
        sample.reward, sample.weight_versions = float(i), ["3"]
        sample.status = code["Sample"].Status.COMPLETED if i else code["Sample"].Status.TRUNCATED
        out.append(sample)
    return out


def save_rollout(path: Path, samples: list[Any], rollout_id: Any = 3) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": rollout_id, "samples": samples}, path)


def train_columns(made: list[One], which: Sequence[int], bf16: bool = False) -> dict[str, Any]:
    """What miles' actor holds when it saves: lists of tensors, a column each."""
    chosen = [made[i] for i in which]
    kind = torch.bfloat16 if bf16 else torch.float32
    return {
        "tokens": [torch.tensor(o.prompt + o.reply) for o in chosen],
        "response_lengths": [len(o.reply) for o in chosen],
        "total_lengths": [len(o.prompt + o.reply) for o in chosen],
        "rewards": [0.5] * len(chosen),
        "raw_reward": [float(i) for i in range(len(made))],
        "sample_indices": [100 + i for i in which],
        "loss_masks": [torch.tensor(o.mask, dtype=torch.int) for o in chosen],
        "rollout_log_probs": [torch.tensor(o.sampler) for o in chosen],
        "log_probs": [torch.tensor(o.old).to(kind) for o in chosen],
        "ref_log_probs": [torch.tensor(o.old) - 0.5 for o in chosen],
        "advantages": [torch.full((len(o.reply),), 0.25) for o in chosen],
        "dynamic_global_batch_size": 4,
    }


def save_rank(path: Path, data: dict[str, Any], rank: int, rollout_id: int = 3) -> None:
    """By miles' own `save_debug_train_data`."""
    distributed = types.SimpleNamespace(get_rank=lambda: rank)
    given = {"torch": types.SimpleNamespace(distributed=distributed, save=torch.save), "Path": Path}
    given["logger"] = types.SimpleNamespace(info=lambda *_: None)
    save = cut("miles_rl", "miles/utils/train_dump_utils.py", "save_debug_train_data", **given)["save_debug_train_data"]
    template = str(path / "train_data" / "{rollout_id}_{rank}.pt")
    save(types.SimpleNamespace(save_debug_train_data=template), rollout_id=rollout_id, rollout_data=data)


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


def test_trainer_values_of_another_rollout_are_not_joined(tmp_path: Path, stand_in: Any) -> None:
    """The file's name says 3, its content 4: the content counts."""
    made = sequences(2)
    save_rollout(tmp_path / "rollout_data" / "3.pt", [s.to_dict() for s in miles_samples(stand_in, made)])
    save_rank(tmp_path, train_columns(made, range(2)), 0, rollout_id=4)
    (tmp_path / "train_data" / "4_0.pt").rename(tmp_path / "train_data" / "3_0.pt")
    kinds = [r.why if isinstance(r, BrokenRecord) else sorted(r.columns) for r in read_all(tmp_path)]
    assert "old_logprobs" not in kinds[0] and "old_logprobs" not in kinds[1]
    assert kinds[2:] == [f"missing: sample {i} of rollout 4 is in no rollout file" for i in (100, 101)]


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


# -- what is not a dump, or not readable -----------------------------------------------------------------------------


def test_other_files_are_not_claimed(tmp_path: Path) -> None:
    torch.save({"model": torch.zeros(3), "rollout_data": 1}, tmp_path / "rollout_data.pt")
    torch.save({"x": {"samples": []}}, tmp_path / "samples.pt")
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"samples": [], "rollout_id": 3}))
    assert {os.path.basename(p) for p, _ in detect([tmp_path]).unclaimed} == {"rollout_data.pt", "samples.pt", "a.pkl"}


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


def write_one(form: str, folder: Path, stand_in: Any, extra: dict[str, Any] | None = None) -> Path:
    """A dump of that format, with something more in what it says of itself."""
    made = sequences(2)
    if form == "slime":
        path = folder / "rollout_data" / "3.pt"
        samples = [s.to_dict() for s in miles_samples(stand_in, made)]
        samples[1]["metadata"] = extra or {}
        save_rollout(path, samples)
        return path
    path = (
        folder / {"skyrl": "global_step_1_training_input.pkl", "verl": "gen_batch.dp", "roll": "step_000001.pkl"}[form]
    )
    if form == "skyrl":
        batch = skyrl_batch(stand_in, made)
        batch.metadata |= extra or {}
        batch.save(str(path))
    elif form == "verl":
        proto = data_proto(stand_in, made)
        proto.meta_info |= extra or {}
        proto.save_to_disk(path)
    else:
        tensordict(stand_in)
        stand_in("roll.distributed.scheduler.protocol", DataProto=RollProto)
        path.write_bytes(pickle.dumps(RollProto(TensorDict(roll_columns(made)), {}, None, extra or {})))
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["slime", "skyrl", "verl", "roll"])
def test_damaged_dumps_give_records_or_one_error(tmp_path: Path, stand_in: Any, form: str) -> None:
    path = write_one(form, tmp_path, stand_in)
    data, rng = path.read_bytes(), random.Random(form)
    module, errors = format_of(form), []
    for i in range(250):
        broken = bytearray(data if i % 4 else data[: rng.randrange(len(data))])
        for _ in range(rng.choice((0, 1, 3)) if i % 4 == 0 else rng.choice((1, 2, 8))):
            broken[rng.randrange(len(broken) or 1) % max(1, len(broken))] = rng.randrange(256) if broken else 0
        path.write_bytes(broken)
        for shard in module.shards([str(path)]):
            try:
                settle(list(module.read(shard, Files())))
            except ContentError as err:
                errors.append(str(err))
    assert len(errors) > 20
    assert all(e.startswith(str(tmp_path)) and e.splitlines()[0].isprintable() for e in errors)


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


# -- values of the wrong kind at any place ---------------------------------------------------------------------------

JUNK: list[Any] = [
    *(None, True, -1, 2**70, 0.5, float("nan"), "x", "", b"\xff", [], [[]], [None], ["a"], [2**70], {}, {"a": 1}),
    *((), (1, 2), {1}, range(10**12), np.zeros((2, 3)), np.array(["a"]), np.array([None, {}], dtype=object)),
    *(torch.zeros(()), torch.zeros(2, 0), torch.ones(3, dtype=torch.bool), torch.ones(1, 2, 3), torch.complex64),
]


def spoiled(value: Any, rng: random.Random) -> Any:
    """The same tree with something else at one place."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        return {**value, key: spoiled(value[key], rng)}
    if isinstance(value, (list, tuple)) and value and rng.random() < 0.6:
        at = rng.randrange(len(value))
        return type(value)(spoiled(x, rng) if i == at else x for i, x in enumerate(value))
    return rng.choice(JUNK)


def trees(form: str, stand_in: Any) -> Any:
    """The value that a dump of this format pickles, and what makes its bytes of it."""
    made = sequences(2)
    saved = lambda v: (buffer := io.BytesIO(), torch.save(v, buffer))[0].getvalue()
    if form == "slime":
        return {"rollout_id": 3, "samples": [dict(s.to_dict()) for s in miles_samples(stand_in, made)]}, saved
    if form == "train":
        return {"rollout_id": 3, "rank": 0, "rollout_data": train_columns(made, range(2))}, saved
    if form == "verl":
        state = (verl_columns(made), {"uid": ["a", "b"], "raw_prompt": [[], []]}, {"temperature": 1.0})
        return state, lambda v: pickle.dumps(Pickled("verl.protocol", "DataProto", v))
    if form == "verl numpy":
        leaves = {k: (str(v.dtype).removeprefix("torch."), tuple(v.shape), v.numpy().tobytes()) for k, v in
                  verl_columns(made).items()}  # fmt: skip
        return ((2,), None, leaves), lambda v: pickle.dumps(Pickled("verl.protocol", "DataProto", (v, {}, {})))
    if form == "roll":
        state = (roll_columns(made), {}, {"global_step": 1})
        return state, lambda v: pickle.dumps(Pickled("roll.distributed.scheduler.protocol", "DataProto", v))
    batch = skyrl_batch(stand_in, made)
    return batch.__getstate__(), lambda v: pickle.dumps(Pickled("skyrl_train.training_batch", "TrainingInputBatch", v))


class Pickled:
    """An object of any class, with any state."""

    def __init__(self, module: str, name: str, state: Any) -> None:
        kind = type(name, (), {"__module__": module, "__qualname__": name})
        setattr(sys.modules[module], name, kind)
        self.kind, self.state = kind, state

    def __reduce__(self) -> Any:
        return self.kind, (), self.state


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["slime", "train", "verl", "verl numpy", "roll", "skyrl"])
def test_wrong_values_give_records_or_one_error(tmp_path: Path, stand_in: Any, form: str) -> None:
    for module in ("verl.protocol", "roll.distributed.scheduler.protocol", "skyrl_train.training_batch"):
        stand_in(module)
    tree, write = trees(form, stand_in)
    rng, path, outcomes = random.Random(form), tmp_path / "3.pt", set[str]()
    module = format_of({"train": "slime", "verl numpy": "verl"}.get(form, form))
    for _ in range(150):
        path.write_bytes(write(spoiled(spoiled(tree, rng), rng)))
        try:
            settled = settle(list(module.read(module.shards([str(path)])[0], Files())))
            outcomes.add("aside" if settled.aside else "read")
        except ContentError as err:
            outcomes.add("refused" if str(err).startswith(str(tmp_path)) else str(err))
    assert {"read", "refused"} <= outcomes <= {"aside", "read", "refused"}
