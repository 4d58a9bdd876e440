"""SkyRL's dumped training batches: `dumped_data/global_step_{N}_training_input.pkl`, a pickled `TrainingInputBatch`.

`sequences [B, S]` are padded on the left; log-probs, masks and rewards are `[B, R]`, the reply at the right end (older
versions: at the left), `response_mask` tells where. SkyRL 0.3: `skyrl/backends/skyrl_train/training_batch.py`,
`skyrl/train/dataset/preprocess.py`, https://github.com/NovaSky-AI/SkyRL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from onepolicy.errors import ContentError
from onepolicy.formats.base import BrokenRecord, Files, RawColumn, RawRecord, Shard, flags, floats
from onepolicy.formats.batches import Batch, each, own_tokens, put, run_of_ones, scored, whole_numbers
from onepolicy.formats.storages import Array, DType
from onepolicy.formats.unpickle import Opaque, loads, opened

name = "skyrl"
says = "SkyRL dump_data_batch: global_step_*_training_input.pkl (token ids, both log-probs, masks, advantages)"

#: In SkyRL's own environment: the same batch in onepolicy's JSON lines.
EXPORT = """\
    import json, pickle
    b = pickle.load(open("global_step_1_training_input.pkl", "rb"))
    with open("global_step_1.jsonl", "w") as out:
        for i in range(len(b["sequences"])):
            ids = b["sequences"][i][b["attention_mask"][i].bool()].tolist()
            reply = b["response_mask"][i].bool()
            n = len(ids) - int(reply.sum())
            row = {"token_ids": ids, "prompt_length": n}
            mask, lp = b["loss_mask"][i][reply], b["rollout_logprobs"][i][reply]
            row["loss_mask"] = [False] * n + mask.bool().tolist()
            row["drawn"] = [False] * n + ((mask != 0) | (lp != 0)).tolist()
            for name, ours in (("rollout_logprobs", "sampler_logprobs"), ("action_log_probs", "old_logprobs")):
                row[ours] = [None] * n + b[name][i][reply].tolist()
            print(json.dumps(row), file=out)
"""

#: SkyRL's name -> ours. All of them cover the reply.
_REPLY = {
    "action_log_probs": "old_logprobs",
    "base_action_log_probs": "reference_logprobs",
    "advantages": "advantages",
}
_STEP = re.compile(r"global_step_(\d{1,18})")
_CLASSES = ("TensorBatch", "TrainingInputBatch", "TrainingOutputBatch")


def claims(path: str, head: bytes, names: Sequence[str]) -> bool:
    """A pickle of a batch of SkyRL's `training_batch`."""
    named = b"TrainingInputBatch" in head or b"TensorBatch" in head
    return head.startswith(b"\x80") and b"training_batch" in head and named


def shards(paths: Sequence[str]) -> list[Shard]:
    return [Shard(name, (path,)) for path in sorted(paths)]


def read(shard: Shard, files: Files) -> Iterator[RawRecord | BrokenRecord]:
    """Errors: `ContentError` for a file that cannot be read."""
    for path in shard.paths:
        with opened(path, files, EXPORT) as value:
            batch = _batch(path, value)
            try:
                n = len(batch.rows("sequences"))
            except ValueError as err:
                raise ContentError(f"{path}: {err}") from None
            yield from each(batch, max(0, n - _added(batch)), _record)


def _batch(path: str, value: Any) -> Batch:
    """`_rebuild_tensor_batch(class, state)`, or an object with that state."""
    state: Any = None
    if isinstance(value, Opaque) and value.name == "_rebuild_tensor_batch" and len(value.args) == 2:
        state = value.args[1]
    elif isinstance(value, Opaque) and value.name in _CLASSES:
        state = value.state if isinstance(value.state, dict) else {"batch_dict": value.items}
    columns: Any = state.get("batch_dict") if isinstance(state, dict) else None
    if not isinstance(columns, dict):
        raise ContentError(f"{path}: got {value!r:.100}, wanted a TrainingInputBatch of SkyRL")
    tensors = {k: _column(v, path) for k, v in columns.items() if isinstance(k, str) and v is not None}
    about: Any = state.get("metadata")
    return Batch(path, tensors, about, about)


def _column(value: Any, place: str) -> Any:
    """A tensor as SkyRL writes it: `{data: bytes, shape, dtype}`, or torch's own bytes where numpy has no such type."""
    if not isinstance(value, dict):
        return value
    if value.get("format") == "tensor_list" and isinstance(value.get("items"), list):
        return [_column(x, place) for x in value["items"]]
    data, kind = value.get("data"), value.get("dtype")
    if not isinstance(data, bytes):
        raise ContentError(f"{place}: damaged: a column without its bytes")
    if value.get("format") == "torch":
        return loads(data, place, EXPORT)
    if not isinstance(kind, str) or _numpy_name(kind) is None:
        raise ContentError(f"{place}: a column of the type {str(kind)[:40]!a}, which is not read")
    array = Array(place, value.get("shape"), DType(_numpy_name(kind)), False, data)  # type: ignore[arg-type]
    array.check()
    return array


def _numpy_name(kind: str) -> str | None:
    """`float32` -> `f4`."""
    match = re.fullmatch(r"(float|int|uint|bool)(8|16|32|64)?", kind)
    if match is None or (match.group(2) is None) != (match.group(1) == "bool"):
        return None
    letter = {"float": "f", "int": "i", "uint": "u", "bool": "b"}[match.group(1)]
    return DType.of_numpy(f"{letter}{int(match.group(2) or 8) // 8}")


def _added(batch: Batch) -> int:
    """Copies of the first row that only fill the batch up, by its own count."""
    n = batch.about.get("pad_size")
    return n if type(n) is int and n > 0 else 0


def _record(batch: Batch, i: int) -> RawRecord:
    attention = batch.row("attention_mask", i)
    ids = whole_numbers(batch.row("sequences", i)[run_of_ones(attention)])
    reply = run_of_ones(batch.row("response_mask", i), "response_mask")
    n = reply.stop - reply.start
    columns: dict[str, RawColumn] = {}
    mask = batch.row("loss_mask", i)[reply] if batch.has("loss_mask") else None
    if mask is not None:
        columns["loss_mask"] = flags(mask, "reply")
    if batch.has("rollout_logprobs"):
        sampler = batch.row("rollout_logprobs", i)[reply]
        columns["sampler_logprobs"] = scored(sampler, "reply", mask)
        put(columns, "drawn", own_tokens(mask, sampler, "reply"))
    for theirs, ours in _REPLY.items():
        if batch.has(theirs):
            columns[ours] = floats(batch.row(theirs, i)[reply], "reply")
    lists: dict[str, Any] = {}
    if batch.has("rollout_expert_indices"):
        lists["routed_experts"] = (list(batch.row("rollout_expert_indices", i)[run_of_ones(attention)]), "whole")
    reward = float(batch.row("rewards", i).sum()) if batch.has("rewards") else None
    named = _STEP.search(batch.place)
    facts = {
        "step": int(named.group(1)) if named else None,
        "group_id": batch.object("uids", i),
        "reward": reward,
        "padding_length": len(attention) - len(ids),
    }
    return RawRecord(f"{batch.place}[{i}]", ids, len(ids) - n, columns, facts, lists)
