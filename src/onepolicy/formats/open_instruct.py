"""open-instruct's traces: `{run}_rollouts_{shard}.jsonl`, one sequence a line, the sampler's log-probs only.

`prompt_tokens` and `response_tokens` are ids, `logprobs` has one value for each response token. There is no trainer
side: a scorer has to fill it in. Layout: `save_traces` in https://github.com/allenai/open-instruct.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from onepolicy.formats import jsonl_lines
from onepolicy.formats.base import Files, RawColumn, RawRecord, Read, Shard
from onepolicy.formats.cells import Row, joined, present, unicode
from onepolicy.formats.jsonl_lines import Line
from onepolicy.formats.sniff import keys_of
from onepolicy.values import quoted

name = "open_instruct"
says = "open-instruct's traces ({run}_rollouts_*.jsonl)"

split = jsonl_lines.split_lines


def claims(path: str, head: bytes, names: Sequence[str]) -> bool:
    keys = keys_of(head).keys()
    return {"prompt_tokens", "response_tokens"} <= keys and bool(keys & {"prompt_idx", "sample_idx", "request_info"})


def shards(paths: Sequence[str]) -> list[Shard]:
    return [Shard(name, (path,)) for path in paths]


def read(shard: Shard, files: Files) -> Iterator[Read]:
    return jsonl_lines.read_rows(shard, files, _records)


def _records(line: Line) -> list[Read]:
    row = Row(line.value)
    prompt, reply = row.ids("prompt_tokens"), row.ids("response_tokens")
    if reply is None:
        raise ValueError("no 'response_tokens'")
    columns = present(
        sampler_logprobs=row.floats("logprobs", "reply"),
        loss_mask=row.flags(row.first("masks", "mask"), "reply"),
        advantages=_advantages(row, len(reply)),
    )
    n_prompt = 0 if prompt is None else len(prompt)
    known = prompt is not None
    return [RawRecord(line.place, joined(prompt, reply), n_prompt, columns, _facts(row), prompt_known=known)]


def _advantages(row: Row, n: int) -> RawColumn | None:
    """One for the sequence, in newer versions one for each token."""
    if isinstance(row.get("advantage"), list):
        return row.floats("advantage", "reply")
    value = row.number("advantage")
    return None if value is None else RawColumn(np.full(n, value), "reply")


def _facts(row: Row) -> dict[str, Any]:
    step, sample, prompt = row.whole("step"), row.name("sample_idx"), row.name("prompt_idx")
    known = step is not None and sample is not None
    return {
        "record_id": f"step_{step}/{prompt}/{sample}" if known else None,
        "step": step,
        "group_id": None if prompt is None else f"{step}/{prompt}",
        "sample_id": sample,
        "reward": row.number("reward"),
        "finish_reason": row.text("finish_reason"),
        "env_id": _dataset(row),
    }


def _dataset(row: Row) -> str | None:
    """A name or a list of names."""
    said = row.get("dataset")
    names: list[Any] = said if isinstance(said, list) else [] if said is None else [said]
    if not all(isinstance(x, str) for x in names):
        raise ValueError(f"'dataset': got {quoted(said)}, wanted a name")
    return unicode("dataset", ",".join(names)) or None
