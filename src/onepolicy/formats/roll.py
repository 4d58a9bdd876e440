"""ROLL's recorded rollouts: `{dump_dir}/{train|val}/step_{N:06d}.pkl`, a pickled `DataProto`.

`input_ids [B, S]` are padded on the right; log-probs and advantages are `[B, S - 1]`, value i is about token i + 1;
`response_mask [B, S]` is 1 at the reply. `roll/distributed/scheduler/protocol.py`, `roll/utils/functionals.py`
(`postprocess_generate`), https://github.com/alibaba/ROLL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from onepolicy.errors import ContentError
from onepolicy.formats.base import BrokenRecord, Files, RawColumn, RawRecord, Shard, flags, floats
from onepolicy.formats.batches import Batch, each, fields, run_of_ones, scored, step_of, whole_numbers
from onepolicy.formats.unpickle import Opaque, opened

name = "roll"
says = "ROLL rollout_mock in dump mode: step_*.pkl (token ids, sampler log-probs; old log-probs if they were saved)"

#: In ROLL's own environment: the same batch in onepolicy's JSON lines.
EXPORT = """\
    import json, pickle
    b = pickle.load(open("step_000001.pkl", "rb")).batch
    with open("step_000001.jsonl", "w") as out:
        for i in range(len(b["input_ids"])):
            n = int(b["attention_mask"][i].sum())
            first = int(b["response_mask"][i].nonzero()[0])
            row = {"token_ids": b["input_ids"][i][:n].tolist(), "prompt_length": first}
            own, lp = b["response_mask"][i][:n].bool().tolist(), [0.0] + b["infer_logprobs"][i][: n - 1].tolist()
            row["drawn"] = row["loss_mask"] = own
            row["sampler_logprobs"] = [x if m else None for x, m in zip(lp, own)]
            print(json.dumps(row), file=out)
"""

#: ROLL's name -> ours. All of them are one shorter than the tokens.
_NEXT = {"old_log_probs": "old_logprobs", "ref_log_probs": "reference_logprobs", "advantages": "advantages"}
_STEP = re.compile(r"step_(\d{1,18})\.\w+$")


def claims(path: str, head: bytes, names: Sequence[str]) -> bool:
    """A pickle of ROLL's own `DataProto`."""
    return head.startswith(b"\x80") and b"roll.distributed.scheduler.protocol" in head


def shards(paths: Sequence[str]) -> list[Shard]:
    return [Shard(name, (path,)) for path in sorted(paths)]


def read(shard: Shard, files: Files) -> Iterator[RawRecord | BrokenRecord]:
    """Errors: `ContentError` for a file that cannot be read."""
    for path in shard.paths:
        with opened(path, files, EXPORT) as value:
            batch = _batch(path, value)
            try:
                n = len(batch.rows("input_ids"))
            except ValueError as err:
                raise ContentError(f"{path}: {err}") from None
            yield from each(batch, n, _record)


def _batch(path: str, value: Any) -> Batch:
    """State: `(buffer, objects, about)`, newer `(buffer, objects, remote, about)`; the buffer is a `BytesIO`."""
    if not isinstance(value, Opaque) or value.name != "DataProto" or not isinstance(value.state, tuple):
        raise ContentError(f"{path}: got {value!r:.100}, wanted a DataProto of ROLL")
    buffer, objects, *_, about = (*value.state, None, None)[: max(3, len(value.state))]
    return Batch(path, fields(buffer, path), objects, about)


def _record(batch: Batch, i: int) -> RawRecord:
    attention = batch.row("attention_mask", i)
    kept = run_of_ones(attention)
    ids, mask = whole_numbers(batch.row("input_ids", i)[kept]), batch.row("response_mask", i)[kept]
    at = np.flatnonzero(mask)
    if len(at) == 0:
        raise ValueError("response_mask is 0 at every token: no reply")
    after = slice(kept.start, kept.stop - 1)
    columns: dict[str, RawColumn] = {"drawn": flags(mask, "whole"), "loss_mask": flags(mask, "whole")}
    if batch.has("final_response_mask"):
        columns["loss_mask"] = flags(batch.row("final_response_mask", i)[after], "next")
    if batch.has("infer_logprobs"):
        columns["sampler_logprobs"] = scored(batch.row("infer_logprobs", i)[after], "next", mask[1:])
    for theirs, ours in _NEXT.items():
        if batch.has(theirs):
            columns[ours] = floats(batch.row(theirs, i)[after], "next")
    facts = _facts(batch, i) | {"padding_length": len(attention) - len(ids)}
    return RawRecord(f"{batch.place}[{i}]", ids, int(at[0]), columns, facts)


def _facts(batch: Batch, i: int) -> dict[str, Any]:
    named, told = _STEP.search(batch.place), step_of(batch.about.get("global_step"))
    group = batch.row("prompt_id", i).reshape(-1) if batch.has("prompt_id") else []
    scores = next((batch.row(k, i) for k in ("response_level_rewards", "scores") if batch.has(k)), None)
    return {
        "step": int(named.group(1)) if told is None and named else told,
        "group_id": str(group[0]) if len(group) == 1 else batch.object("traj_group_id", i),
        "trajectory_id": batch.object("traj_id", i),
        "env_id": batch.object("domain", i) or batch.object("tags", i),
        "reward": float(scores) if scores is not None and np.ndim(scores) == 0 else None,
    }
