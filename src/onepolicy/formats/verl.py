"""verl's skipped rollouts: `gen_batch.dp` (a pickled `DataProto`) and `tq_batch.pt` (its `TransferQueue` batch).

`prompts [B, P]` are padded on the left, `responses [B, R]` on the right; log-probs, masks, advantages cover the reply.
`response_mask` is 1 at the tokens that the policy drew, 0 at tool output. verl 0.9: `verl/protocol.py`,
`verl/utils/skip/rollout_skip.py`, https://github.com/volcengine/verl.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.errors import ContentError
from onepolicy.formats.base import BrokenRecord, Files, RawColumn, RawRecord, Shard, flags, floats
from onepolicy.formats.batches import Batch, each, fields, put, run_of_ones, scored, step_of, whole_numbers
from onepolicy.formats.unpickle import Jagged, Opaque, opened

name = "verl"
says = "verl RolloutSkip: gen_batch.dp, tq_batch.pt (token ids, rollout log-probs; old log-probs if they were saved)"

#: In verl's own environment: the same batch in onepolicy's JSON lines.
EXPORT = """\
    import json
    from verl.protocol import DataProto
    b = DataProto.load_from_disk("gen_batch.dp").batch
    with open("gen_batch.jsonl", "w") as out:
        for i in range(len(b["responses"])):
            kept, width = b["attention_mask"][i].bool(), b["prompts"].shape[1]
            n, r = int(kept[:width].sum()), int(kept[width:].sum())
            own, lp = b["response_mask"][i][:r].bool().tolist(), b["rollout_log_probs"][i][:r].tolist()
            row = {"token_ids": b["input_ids"][i][kept].tolist(), "prompt_length": n}
            row["drawn"] = row["loss_mask"] = [False] * n + own
            row["sampler_logprobs"] = [None] * n + [x if m else None for x, m in zip(lp, own)]
            print(json.dumps(row), file=out)
"""

#: verl's name -> ours. All of them cover the reply.
_REPLY = {
    "old_log_probs": "old_logprobs",
    "ref_log_prob": "reference_logprobs",
    "ref_log_probs": "reference_logprobs",
    "advantages": "advantages",
    "entropys": "old_entropy",
}
_REWARDS = ("token_level_scores", "rm_scores", "token_level_rewards")
_STEP = re.compile(r"(?:^|[/\\])(\d+)[/\\](?:\d+[/\\])?[^/\\]+$")


def claims(path: str, head: bytes, names: Sequence[str]) -> bool:
    """A pickle of `verl.protocol.DataProto`, or torch's file of a `tensordict` with its `keys` and `tags`."""
    if head.startswith(b"\x80") and b"verl.protocol" in head and b"DataProto" in head:
        return True
    return head.startswith(b"PK") and b"tensordict" in head and (b"tq_batch" in head or path.endswith("tq_batch.pt"))


def shards(paths: Sequence[str]) -> list[Shard]:
    return [Shard(name, (path,)) for path in sorted(paths)]


def read(shard: Shard, files: Files) -> Iterator[RawRecord | BrokenRecord]:
    """Errors: `ContentError` for a file that cannot be read."""
    for path in shard.paths:
        with opened(path, files, EXPORT) as value:
            batch = _batch(path, value)
            yield from each(batch, _count(batch), _record)


def _batch(path: str, value: Any) -> Batch:
    if isinstance(value, Opaque) and value.name == "DataProto" and isinstance(value.state, tuple):
        tensors, objects, about = (*value.state, None, None, None)[:3]
        return Batch(path, fields(tensors, path), objects, about)
    if isinstance(value, dict) and "tensordict" in value:
        keys: Any = value.get("keys")
        groups = [str(k).split("_")[0] for k in keys] if isinstance(keys, list) else None
        about = {"global_steps": value.get("global_steps")}
        return Batch(path, fields(value["tensordict"], path), {"uid": groups}, about)
    raise ContentError(f"{path}: got {value!r:.100}, wanted a DataProto of verl")


def _count(batch: Batch) -> int:
    try:
        return len(batch.rows("responses"))
    except ValueError as err:
        raise ContentError(f"{batch.place}: {err}") from None


def _record(batch: Batch, i: int) -> RawRecord:
    ids, prompt, reply, padding, whole = _tokens(batch, i)
    columns: dict[str, RawColumn] = {}
    mask = _cut(batch, "response_mask", i, reply) if batch.has("response_mask") else None
    if mask is not None:
        columns["drawn"] = columns["loss_mask"] = flags(mask, "reply")
    if batch.has("rollout_log_probs"):
        columns["sampler_logprobs"] = scored(_cut(batch, "rollout_log_probs", i, reply), "reply", mask)
    for theirs, ours in _REPLY.items():
        if batch.has(theirs):
            put(columns, ours, floats(_cut(batch, theirs, i, reply), "reply"))
    lists: dict[str, Any] = {}
    if batch.has("routed_experts"):
        experts = batch.row("routed_experts", i)
        lists["routed_experts"] = (list(experts[whole] if whole is not None else experts), "whole")
    return RawRecord(
        f"{batch.place}[{i}]",
        ids,
        prompt,
        columns,
        _facts(batch, i, reply) | {"padding_length": padding},
        lists,
        texts=_texts(batch, i),
    )


def _tokens(batch: Batch, i: int) -> tuple[NDArray[Any], int, slice, int, NDArray[Any] | None]:
    """Ids, prompt tokens, where the reply lies in its columns, padding, and which columns of the batch are tokens."""
    response = batch.row("responses", i)
    whole = batch.row("input_ids", i) if batch.has("input_ids") and not batch.has("prompts") else None
    prompt = batch.row("prompts", i) if whole is None else whole[: len(whole) - len(response)]
    if isinstance(batch.tensors["responses"], Jagged):
        ids = whole_numbers(np.concatenate([prompt, response]))
        return ids, len(prompt), slice(0, len(response)), 0, None
    attention = batch.row("attention_mask", i)
    if len(attention) != len(prompt) + len(response):
        raise ValueError(
            f"attention_mask has {len(attention)} positions, prompt and response {len(prompt) + len(response)}"
        )
    run_of_ones(attention)
    kept = attention != 0
    n_prompt = int(kept[: len(prompt)].sum())
    ids = whole_numbers(np.concatenate([prompt, response])[kept])
    return ids, n_prompt, slice(0, len(ids) - n_prompt), len(attention) - len(ids), kept


def _cut(batch: Batch, column: str, i: int, reply: slice) -> NDArray[Any]:
    """The reply's values. A row that ends before is handed on as it is: its length is judged later."""
    return batch.row(column, i)[reply]


def _facts(batch: Batch, i: int, reply: slice) -> dict[str, Any]:
    reward = next((float(_cut(batch, k, i, reply).sum()) for k in _REWARDS if batch.has(k)), None)
    step = step_of(batch.about.get("global_steps"))
    named = _STEP.search(batch.place)
    temperature = batch.about.get("temperature")
    return {
        "step": int(named.group(1)[:18]) if step is None and named else step,
        "group_id": batch.object("uid", i),
        "env_id": batch.object("data_source", i),
        "reward": reward,
        "temperature": temperature if type(temperature) in (int, float) else None,
    }


def _texts(batch: Batch, i: int) -> dict[str, Any]:
    messages = batch.object("raw_prompt", i)
    return {"messages": messages} if isinstance(messages, list) else {}
