"""prime-rl's token export: `token_exports/step_{s}/rank_{r}.jsonl`, one trained sequence a line, schema_version 1.

Every list is as long as `token_ids`, and place i is about token i. `trainer_logprobs` is the CURRENT policy inside the
update: there is no old one, so staleness is part of the gap. null is a non-finite number. `inference_logprobs` has 0.0
where nothing was sampled. What the engine's log-probs mean is not in the file.
Layout: src/prime_rl/trainer/rl/token_export.py of PrimeIntellect-ai/prime-rl.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from onepolicy.formats import jsonl_lines
from onepolicy.formats.base import Files, RawColumn, RawRecord, Read, Shard
from onepolicy.formats.cells import Row, drawn_by, present, prompt_of, unfilled
from onepolicy.formats.jsonl_lines import Line
from onepolicy.formats.sniff import keys_of

name = "prime_rl"
says = "prime-rl's token export (token_exports/step_*/rank_*.jsonl)"

_KEYS = {"schema_version", "micro_sequence_idx", "export_sequence_idx"}
split = jsonl_lines.split_lines


def claims(path: str, head: bytes, names: Sequence[str]) -> bool:
    keys = keys_of(head).keys()
    return keys >= _KEYS or {"token_ids", "inference_logprobs", "trainer_logprobs", "micro_step"} <= keys


def shards(paths: Sequence[str]) -> list[Shard]:
    return [Shard(name, (path,)) for path in paths]


def read(shard: Shard, files: Files) -> Iterator[Read]:
    return jsonl_lines.read_rows(shard, files, _records)


def _records(line: Line) -> list[Read]:
    row = Row(line.value)
    version = row.whole("schema_version")
    if version not in (None, 1):
        raise ValueError(f"'schema_version': got {version}, wanted 1; a newer onepolicy may read it")
    ids = row.ids("token_ids")
    if ids is None:
        raise ValueError("no 'token_ids'")
    columns = _columns(row)
    whole = RawRecord(line.place, ids, _prompt(columns), columns, _facts(row))
    cuts = _restarts(row, len(ids))
    return [whole] if not cuts else list(_packed(whole, [0, *cuts, len(ids)]))


def _columns(row: Row) -> dict[str, RawColumn]:
    mask = row.flags("loss_mask", "whole")
    sampler = row.floats("inference_logprobs", "whole")
    drawn = drawn_by(mask, sampler)
    if sampler is not None and drawn is not None:
        sampler = unfilled(sampler, drawn)
    return present(
        drawn=None if drawn is None else RawColumn(drawn, "whole"),
        loss_mask=mask,
        sampler_logprobs=sampler,
        current_logprobs=row.floats("trainer_logprobs", "whole"),
        current_entropy=row.floats("entropy", "whole"),
        advantages=row.floats("advantages", "whole"),
    )


def _facts(row: Row) -> dict[str, Any]:
    step, rank, index = (row.whole(k) for k in ("step", "rank", "export_sequence_idx"))
    export_step = row.whole("export_step")
    exported = step if export_step is None else export_step
    known = exported is not None and index is not None
    run = row.name("run_id")
    return {
        "record_id": f"{run + '/' if run else ''}step_{exported}/rank_{rank}/{index}" if known else None,
        "run_id": run,
        "step": step,
        "env_id": row.text("env_name"),
        "reward": _reward(row),
    }


def _reward(row: Row) -> float | None:
    """`rewards` has the sequence's reward at every token, null outside of it."""
    rewards = row.floats("rewards", "whole")
    if rewards is None:
        return None
    known = rewards.values if rewards.valid is None else rewards.values[rewards.valid]
    return float(known[0]) if len(known) and (known == known[0]).all() else None


def _restarts(row: Row, n: int) -> list[int]:
    """Where `position_ids` begins anew: sequences that were packed into one record."""
    positions = row.ids("position_ids")
    if positions is None or len(positions) != n:
        return []
    return (np.flatnonzero(positions[1:] == 0) + 1).tolist()


def _packed(record: RawRecord, edges: list[int]) -> Iterator[RawRecord]:
    fits = all(len(c.values) == edges[-1] for c in record.columns.values())
    if not fits:  # told as it is: cutting would hide which column does not fit
        yield record
        return
    for k, (a, b) in enumerate(pairwise(edges)):
        facts = {**record.facts, "record_id": f"{record.facts['record_id']}/{k}" if record.facts["record_id"] else None}
        columns = {key: _part(col, a, b) for key, col in record.columns.items()}
        yield RawRecord(f"{record.place}[{k}]", record.token_ids[a:b], _prompt(columns), columns, facts)


def _prompt(columns: dict[str, RawColumn]) -> int | None:
    return prompt_of(columns["drawn"].values) if "drawn" in columns else None


def _part(column: RawColumn, a: int, b: int) -> RawColumn:
    valid = None if column.valid is None else column.valid[a:b]
    return RawColumn(column.values[a:b], column.layout, valid, column.at_zero)
