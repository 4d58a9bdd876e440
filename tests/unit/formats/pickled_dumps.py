"""Writers of pickled dumps for tests, and what has to be in the columns.

Made by the framework's own code, cut out of its wheel: SkyRL's batches, miles' samples, train files and policy loss,
verl's `DataProto`. After the documented layout: slime's train file of version 2, ROLL's `DataProto`, and `TensorDict`,
of which a stand-in with the same module, name and pickled forms (tensordict's `_reductions.py`) is pickled.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
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


def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
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


class Reduces:
    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


class Pickled:
    """An object of any class, with any state."""

    def __init__(self, module: str, name: str, state: Any) -> None:
        kind = type(name, (), {"__module__": module, "__qualname__": name})
        setattr(sys.modules[module], name, kind)
        self.kind, self.state = kind, state

    def __reduce__(self) -> Any:
        return self.kind, (), self.state
