"""torchtitan's recorded rollouts: `rollout_samples.jsonl`, one rollout a line, its turns inside; each turn is a record.

Ids are there with `log_tensors`, the sampler's log-probs with `log_logprobs`. The prompt of a turn is the first
`prompt_prefix_len` tokens of the turn before (its prompt and completion), then `prompt_delta_token_ids`; older files
have all of it as `prompt_token_ids`. There is no trainer side. Where `min_policy_version` and `max_policy_version`
differ, the first token has the one and the last the other, and between them it is unknown.
Layout: torchtitan's RolloutSampleRecorder (pytorch/torchtitan, torchtitan/rl).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.formats import jsonl_lines
from onepolicy.formats.base import BrokenRecord, Files, RawColumn, RawRecord, Read, Shard, TextRecord
from onepolicy.formats.cells import Row, present, unicode
from onepolicy.formats.jsonl_lines import Line, why
from onepolicy.formats.sniff import keys_of
from onepolicy.values import quoted

name = "torchtitan"
says = "torchtitan's recorded rollouts (rollout_samples.jsonl)"

split = jsonl_lines.split_lines
_IDS = NDArray[np.int64]


def claims(path: str, head: bytes, names: Sequence[str]) -> bool:
    return {"group_id", "rollout_id", "status", "turns"} <= keys_of(head).keys()


def shards(paths: Sequence[str]) -> list[Shard]:
    return [Shard(name, (path,)) for path in paths]


def read(shard: Shard, files: Files) -> Iterator[Read]:
    return jsonl_lines.read_rows(shard, files, _turns)


def _turns(line: Line) -> list[Read]:
    row = Row(line.value)
    shared = _shared(row)
    out: list[Read] = []
    before: _IDS | None = np.zeros(0, dtype=np.int64)
    for k, turn in enumerate(row.objects("turns")):
        place = f"{line.place}, turn {k}"
        try:
            record, before = _turn(turn, k, place, shared, before)
        except (ValueError, TypeError) as err:
            record, before = BrokenRecord(place, why(err), shared["trajectory_id"]), None
        out.append(record)
    if not out:
        raise ValueError("no 'turns'")
    return out


def _shared(row: Row) -> dict[str, Any]:
    group, rollout = row.name("group_id"), _rollout(row)
    whole = None if group is None or rollout is None else rollout if "/" in rollout else f"{group}/{rollout}"
    facts = {"group_id": group, "sample_id": rollout, "trajectory_id": whole, "reward": row.number("reward")}
    return facts | {"advantage": row.number("advantage")}


def _rollout(row: Row) -> str | None:
    """A number, or an object with the numbers of group and rollout."""
    said = row.get("rollout_id")
    if not isinstance(said, dict):
        return row.name("rollout_id")
    parts: list[Any] = [v for v in said.values() if v is not None]  # pyright: ignore[reportUnknownVariableType]
    if not all(isinstance(x, (int, str)) for x in parts):
        raise ValueError(f"'rollout_id': got {quoted(said)}, wanted a name")  # pyright: ignore
    return unicode("rollout_id", "/".join(map(str, parts)))


def _turn(turn: Row, k: int, place: str, shared: dict[str, Any], before: _IDS | None) -> tuple[Read, _IDS | None]:
    reply = turn.ids("completion_token_ids")
    facts = _facts(turn, k, shared)
    if reply is None:
        texts = {"messages": [turn.get("completion_message")]} if "completion_message" in turn else {}
        return TextRecord(place, texts, facts, "no token ids: the recorder's log_tensors was off"), None
    prompt = _prompt(turn, before)
    ids = reply if prompt is None else np.concatenate([prompt, reply])
    n_prompt = 0 if prompt is None else len(prompt)
    columns = present(
        sampler_logprobs=turn.floats("completion_logprobs", "reply"),
        loss_mask=turn.flags("completion_loss_mask", "reply"),
        policy_version=_versions(turn, len(reply)),
        advantages=_advantages(turn, shared, len(reply)),
    )
    record = RawRecord(place, ids, n_prompt, columns, facts, prompt_known=prompt is not None)
    return record, None if prompt is None else ids


def _prompt(turn: Row, before: _IDS | None) -> _IDS | None:
    """None where it cannot be rebuilt."""
    whole = turn.ids("prompt_token_ids")
    if whole is not None:
        return whole
    kept, added = turn.whole("prompt_prefix_len"), turn.ids("prompt_delta_token_ids")
    if kept is None or added is None or (kept and before is None):
        return None
    if before is None:
        return added
    if not 0 <= kept <= len(before):
        raise ValueError(f"'prompt_prefix_len': got {kept}, but the turn before has {len(before)} tokens")
    return np.concatenate([before[:kept], added])


def _versions(turn: Row, n: int) -> RawColumn | None:
    low, high = turn.whole("min_policy_version"), turn.whole("max_policy_version")
    if low is None or high is None:
        return None
    values = np.full(n, low, dtype=np.int64)
    if low == high or n == 0:
        return RawColumn(values, "reply")
    values[-1] = high
    valid = np.zeros(n, dtype=bool)
    valid[[0, -1]] = True
    return RawColumn(values, "reply", valid)


def _advantages(turn: Row, shared: dict[str, Any], n: int) -> RawColumn | None:
    if isinstance(turn.get("advantage"), list):
        return turn.floats("advantage", "reply")
    value = turn.number("advantage")
    value = shared["advantage"] if value is None else value
    return None if value is None else RawColumn(np.full(n, value), "reply")


def _facts(turn: Row, k: int, shared: dict[str, Any]) -> dict[str, Any]:
    whole = shared["trajectory_id"]
    return {
        **{key: value for key, value in shared.items() if key != "advantage"},
        "record_id": None if whole is None else f"{whole}/turn_{k}",
        "turn": k,
        "finish_reason": turn.text("finish_reason"),
    }
