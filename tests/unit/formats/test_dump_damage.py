"""Damaged dumps, and whole ones with a wrong value somewhere: records or one error, never anything else."""

from __future__ import annotations

import io
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pickled_dumps import (
    Pickled,
    miles_samples,
    modules,
    roll_columns,
    sequences,
    skyrl_batch,
    train_columns,
    verl_columns,
    write_one,
)

from onepolicy.errors import ContentError
from onepolicy.formats.detect import format_of
from onepolicy.formats.files import Files
from onepolicy.formats.settle import settle


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    return modules(monkeypatch)


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
