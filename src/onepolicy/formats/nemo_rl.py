"""NeMo-RL's train data: `train_data_step{N}.jsonl`, one sequence a line.

Each line is a batch of one (`"token_ids": [[...]]`, `"rewards": [0.5]`); flat lines and larger batches are read as
well. Lists are padded at the right to the longest sequence of the step; `input_lengths` says how much is real. Place i
is about token i, index 0 is not used. `generation_logprobs` is the sampler (0.0 where nothing was sampled),
`prev_logprobs` the policy before the update. What is trained is `token_loss_mask` times `sample_loss_mask`.
Older versions write no `token_ids`: text only. Layout: nemo_rl/algorithms/grpo.py and nemo_rl/utils/logger.py of
NVIDIA-NeMo/RL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onepolicy.formats import jsonl_lines
from onepolicy.formats.base import Files, RawColumn, RawRecord, Read, Shard, TextRecord
from onepolicy.formats.cells import Row, drawn_by, present, prompt_of, unfilled, unicode
from onepolicy.formats.jsonl_lines import Line, name_of
from onepolicy.formats.sniff import keys_of
from onepolicy.values import quoted

name = "nemo_rl"
says = "NeMo-RL's train data (train_data_step*.jsonl)"

_STEP = re.compile(r"_step(\d{1,12})(?!\d)")
_TOKENS = ("token_ids", "token_loss_mask", "generation_logprobs", "prev_logprobs")
split = jsonl_lines.split_lines


def claims(path: str, head: bytes, names: Sequence[str]) -> bool:
    keys = keys_of(head).keys()
    ours = {"generation_logprobs", "prev_logprobs"} <= keys and bool(keys & {"input_lengths", "token_loss_mask"})
    return ours or (name_of(path).startswith("train_data_step") and {"content", "input_lengths"} <= keys)


def shards(paths: Sequence[str]) -> list[Shard]:
    return [Shard(name, (path,)) for path in paths]


def read(shard: Shard, files: Files) -> Iterator[Read]:
    found = _STEP.search(name_of(shard.paths[0]))
    step = int(found.group(1)) if found else None
    return jsonl_lines.read_rows(shard, files, lambda line: _samples(line, step))


def _samples(line: Line, step: int | None) -> Iterator[Read]:
    """A line's samples: one where its lists are flat, else as many as the batch has."""
    row = Row(line.value)
    length = row.get("input_lengths")
    if not isinstance(length, list):
        yield _record(row, line.place, step)
        return
    n = len(length)
    for i in range(n):
        place = line.place if n == 1 else f"{line.place}[{i}]"
        yield _record(Row(_sample(row.row, i, n)), place, step)


def _sample(batch: Mapping[str, Any], i: int, n: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in batch.items():
        if not isinstance(value, list):
            out[key] = value
        elif len(value) == n:
            out[key] = value[i]
        else:
            raise ValueError(f"{key!r}: got {len(value)} samples, wanted {n} as 'input_lengths' has")
    return out


def _record(row: Row, place: str, step: int | None) -> Read:
    facts = _facts(row, step)
    texts = {} if not isinstance(row.get("content"), str) else {"text": unicode("content", row.get("content"))}
    ids = row.ids("token_ids")
    if ids is None:
        return TextRecord(place, texts, facts, "no token_ids: written by an older NeMo-RL; text only")
    told = row.whole("input_lengths")
    real = len(ids) if told is None or not 0 < told <= len(ids) else told
    columns = _columns(row, len(ids), real)
    prompt = prompt_of(columns["drawn"].values) if "drawn" in columns else None
    facts["padding_length"] = len(ids) - real
    claims = {} if told is None else {"token_ids": told}
    return RawRecord(place, ids[:real], prompt, columns, facts, claims=claims, texts=texts)


def _columns(row: Row, padded: int, real: int) -> dict[str, RawColumn]:
    """Cut to the real tokens where they are as long as the padded ids; else as they are, for `settle` to tell."""
    mask = _cut(row.flags("token_loss_mask", "whole"), padded, real)
    sampler = _cut(row.floats("generation_logprobs", "whole"), padded, real)
    advantages = row.floats("advantages", "whole") if isinstance(row.get("advantages"), list) else None
    drawn = drawn_by(mask, sampler)
    if drawn is not None and sampler is not None:
        sampler = unfilled(sampler, drawn)
    kept = row.number("sample_loss_mask")
    if mask is not None and kept == 0.0:
        mask = RawColumn(mask.values & False, "whole", mask.valid)
    return present(
        drawn=None if drawn is None else RawColumn(drawn, "whole"),
        loss_mask=mask,
        sampler_logprobs=sampler,
        old_logprobs=_cut(row.floats("prev_logprobs", "whole"), padded, real),
        advantages=_cut(advantages, padded, real),
    )


def _cut(column: RawColumn | None, padded: int, real: int) -> RawColumn | None:
    if column is None or len(column.values) != padded or real == padded:
        return column
    valid = None if column.valid is None else column.valid[:real]
    return RawColumn(column.values[:real], column.layout, valid, column.at_zero)


def _facts(row: Row, step: int | None) -> dict[str, Any]:
    index = row.name("idx")
    agent = row.get("agent_ref")
    env = agent.get("name") if isinstance(agent, Mapping) else agent  # pyright: ignore[reportUnknownMemberType]
    if env is not None and not isinstance(env, str):
        raise ValueError(f"'agent_ref': got {quoted(env)}, wanted an object with a name")
    rewarded = row.first("rewards", "filtered_rewards")
    return {
        "record_id": f"step_{step}/{index}" if step is not None and index is not None else None,
        "sample_id": index,
        "step": step,
        "reward": row.number(rewarded),
        "env_id": None if env is None else unicode("agent_ref", env),
    }
