"""miles' debug files: `rank_*.json` of its logprob comparator, and the Parquet of its dashboard.

The comparator's ranks hold slices of one batch: each entry is the log-prob of the label at `global_position`, the
token after it. Ranks of a folder are joined by batch and position, equal ones kept once. Two folders side by side
called `baseline` and `target` are one comparison: baseline is `reference`, target is `old`; a folder alone is `old`.
Only labels are in the file, so the first token of a text is not known and nothing is known to be drawn.
Layouts: the package miles-rl 0.0.2 (run_megatron/worker/output.py); the dashboard after its documentation:
sample_index, response_length, total_length, tokens, loss_mask, rollout_log_probs, the last two of the reply alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from onepolicy.errors import ContentError
from onepolicy.formats import base, parquet_rows
from onepolicy.formats.base import BrokenRecord, Files, RawColumn, RawRecord, Read, Shard
from onepolicy.formats.cells import Row, present
from onepolicy.formats.files import guarded
from onepolicy.formats.json_text import parsed
from onepolicy.formats.jsonl_lines import CUT, WRONG, Line, name_of, why
from onepolicy.formats.sniff import is_parquet, keys_of

name = "miles_debug"
says = "miles' logprob comparator (rank_*.json) and dashboard (Parquet)"

_DASHBOARD = {"sample_index", "response_length", "total_length", "tokens"}
#: folder -> the scoring that its values are
SIDES = {"baseline": "reference", "target": "old"}
_STEP = re.compile(r"(\d{1,12})(?!.*\d)")


def claims(path: str, head: bytes, names: Sequence[str]) -> bool:
    keys = keys_of(head).keys()
    return keys >= _DASHBOARD if is_parquet(head) else {"logprob_entries", "rank"} <= keys


def shards(paths: Sequence[str]) -> list[Shard]:
    ranks = [p for p in paths if p.endswith(".json")]
    out = [Shard(name, (path,)) for path in paths if not path.endswith(".json")]
    groups: dict[str, list[str]] = {}
    for path in ranks:
        folder = os.path.dirname(path)
        pair = os.path.basename(folder) in SIDES
        groups.setdefault(os.path.dirname(folder) + "/*" if pair else folder, []).append(path)
    return out + [Shard(name, tuple(sorted(group))) for group in groups.values()]


def split(shard: Shard, files: Files) -> list[Shard]:
    return [shard] if shard.paths[0].endswith(".json") else parquet_rows.split_groups(shard, files)


def read(shard: Shard, files: Files) -> Iterator[Read]:
    if shard.paths[0].endswith(".json"):
        yield from _compared(shard, files)
        return
    found = _STEP.search(name_of(shard.paths[0]).rpartition(".")[0])
    for line in parquet_rows.rows(shard, files):
        try:
            yield _dashboard(line, int(found.group(1)) if found else None)
        except WRONG as err:
            yield BrokenRecord(line.place, why(err))


def _dashboard(line: Line, step: int | None) -> Read:
    row = Row(line.value)
    ids, index = row.ids("tokens"), row.name("sample_index")
    reply, total = row.whole("response_length"), row.whole("total_length")
    if ids is None or reply is None:
        raise ValueError(f"no {'tokens' if ids is None else 'response_length'!r}")
    columns = present(
        loss_mask=row.flags("loss_mask", "reply"), sampler_logprobs=row.floats("rollout_log_probs", "reply")
    )
    facts = {"sample_id": index, "step": step, "reward": row.number("reward")}
    claims = {} if total is None else {"token_ids": total, "prompt": total - reply}
    return RawRecord(line.place, ids, len(ids) - reply, columns, facts, claims=claims)


# the comparator

#: (batch, position) -> (label, log-prob)
_Entries = dict[tuple[int, int], tuple[int, float]]


def _compared(shard: Shard, files: Files) -> Iterator[Read]:
    """Both sides of a comparison, or one; a rank that cannot be read is named and left out."""
    sides: dict[str, _Entries] = {}
    for path in shard.paths:
        side = SIDES.get(os.path.basename(os.path.dirname(path)), "old")
        try:
            _merge(sides.setdefault(side, {}), _payload(path, files))
        except ContentError as err:
            yield BrokenRecord(path, str(err).removeprefix(f"{path}: "))
        except WRONG as err:
            yield BrokenRecord(path, why(err))
    batches = sorted({batch for entries in sides.values() for batch, _ in entries})
    folder = os.path.dirname(shard.paths[0])
    for batch in batches:
        try:
            yield _joined(sides, batch, f"{folder}[{batch}]")
        except WRONG as err:
            yield BrokenRecord(f"{folder}[{batch}]", why(err))


def _payload(path: str, files: Files) -> list[Any]:
    limit = base.LINE_BYTES
    with files.open(path) as file:
        text = guarded(path, lambda: file.read(limit + 1))
    if len(text) > limit:
        raise ValueError(f"one JSON value of more than {limit} bytes")
    try:
        row = Row(parsed(text))
    except ValueError as err:
        raise ValueError(f"{err}; {CUT}, or it is not JSON") from None
    return row.list("logprob_entries") or []


def _merge(entries: _Entries, batches: list[Any]) -> None:
    found: _Entries = {}
    for b, batch in enumerate(batches):
        for i, item in enumerate(Row({"logprob_entries": batch}).objects("logprob_entries")):
            position, label, value = item.whole("global_position"), item.whole("token_id", 32), item.number("logprob")
            if position is None or not 0 <= position < 1 << 31:
                raise ValueError(f"batch {b}, entry {i}: 'global_position': got {position}, wanted a position")
            if item.get("is_valid") and label is not None and value is not None:
                found[b, position] = (label, value)
    for key, (label, value) in found.items():
        if key in entries and entries[key][0] != label:
            raise ValueError(f"batch {key[0]}, position {key[1]}: ranks have the labels {entries[key][0]} and {label}")
        entries.setdefault(key, (label, value))


def _joined(sides: dict[str, _Entries], batch: int, place: str) -> Read:
    at = {side: {p: e for (b, p), e in entries.items() if b == batch} for side, entries in sides.items()}
    positions = sorted({p for entries in at.values() for p in entries})
    first, n = positions[0], positions[-1] - positions[0] + 1
    if n > 4 * len(positions) + 1024:
        raise ValueError(f"positions go from {first} to {positions[-1]}, but only {len(positions)} have a value")
    ids, labelled = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=bool)
    columns: dict[str, RawColumn] = {}
    for side, entries in at.items():
        values, valid = np.full(n, np.nan), np.zeros(n, dtype=bool)
        for p, (label, value) in entries.items():
            if labelled[p - first] and ids[p - first] != label:
                raise ValueError(f"position {p}: the two sides score the tokens {ids[p - first]} and {label}")
            ids[p - first], labelled[p - first] = label, True
            values[p - first], valid[p - first] = value, True
        columns[f"{side}_logprobs"] = RawColumn(values, "reply", valid)
    columns["loss_mask"] = RawColumn(labelled, "reply")
    columns["drawn"] = RawColumn(np.zeros(n, dtype=bool), "reply")
    return RawRecord(place, ids, 0, columns, {"sample_id": str(batch)}, prompt_known=False)
