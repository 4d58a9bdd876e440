"""Records of prompt and reply ids with log-probs under the names that people use; asked last.

A record with two sides' log-probs and no ids at all is read too (`ids_known` False): what needs the ids is not run on
it. Where the values of a column stand is told by how many there are: as many as the reply has tokens, as many as prompt
and reply, or one less. If they are none of these, the record is set aside with what was wanted.

What is masked and has no log-prob of the sampler, or 0.0, is tool output or padding: not drawn. Where a loss mask
stands beside a response, completion or action mask, the latter says what was drawn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.formats import jsonl_lines, parquet_rows
from onepolicy.formats.base import BrokenRecord, Files, Layout, RawColumn, RawRecord, Read, Shard
from onepolicy.formats.canonical import is_parquet
from onepolicy.formats.cells import Row, joined
from onepolicy.formats.jsonl_lines import WRONG, Line, why
from onepolicy.formats.sniff import keys_of
from onepolicy.values import quoted

name = "loose"
says = "records with prompt and reply ids and log-probs under common names"

#: Ids, from the most to the least certain spelling.
PROMPT_IDS = ("prompt_ids", "prompt_token_ids", "prompt_tokens", "prompt")
REPLY_IDS = (
    *("response_ids", "reply_ids", "completion_ids", "response_token_ids", "completion_token_ids", "output_ids"),
    *("output_token_ids", "sampled_ids", "response_tokens", "completion_tokens", "responses", "completion", "response"),
)
WHOLE_IDS = ("token_ids", "input_ids", "tokens", "sequences", "rollout_ids")
#: spelling -> token column. Where two of one column are there, the first counts.
COLUMNS: dict[str, str] = {
    "sampler_logprobs": "sampler_logprobs",
    "rollout_logprobs": "sampler_logprobs",
    "rollout_log_probs": "sampler_logprobs",
    "inference_logprobs": "sampler_logprobs",
    "infer_logprobs": "sampler_logprobs",
    "generation_logprobs": "sampler_logprobs",
    "sampling_logprobs": "sampler_logprobs",
    "sampling_per_token_logps": "sampler_logprobs",
    "engine_logprobs": "sampler_logprobs",
    "vllm_logprobs": "sampler_logprobs",
    "response_logprobs": "sampler_logprobs",
    "completion_logprobs": "sampler_logprobs",
    "behavior_logprobs": "sampler_logprobs",
    "logprobs": "sampler_logprobs",
    "old_logprobs": "old_logprobs",
    "old_log_probs": "old_logprobs",
    "old_per_token_logps": "old_logprobs",
    "prev_logprobs": "old_logprobs",
    "trainer_logprobs": "old_logprobs",
    "train_logprobs": "old_logprobs",
    "train_log_probs": "old_logprobs",
    "actor_logprobs": "old_logprobs",
    "scorer_logprobs": "old_logprobs",
    "proximal_logprobs": "old_logprobs",
    "log_probs": "old_logprobs",
    "current_logprobs": "current_logprobs",
    "per_token_logps": "current_logprobs",
    "ref_logprobs": "reference_logprobs",
    "ref_log_probs": "reference_logprobs",
    "ref_per_token_logps": "reference_logprobs",
    "reference_logprobs": "reference_logprobs",
    "loss_mask": "loss_mask",
    "response_mask": "loss_mask",
    "completion_mask": "loss_mask",
    "action_mask": "loss_mask",
    "drawn": "drawn",
    "advantages": "advantages",
    "sampler_entropy": "sampler_entropy",
    "sampler_varentropy": "sampler_varentropy",
    "old_entropy": "old_entropy",
    "old_varentropy": "old_varentropy",
    "entropy": "old_entropy",
}
#: record column -> (spellings, kind)
FACTS: dict[str, tuple[tuple[str, ...], str]] = {
    "record_id": (("record_id", "id", "uid", "uuid", "request_id", "rollout_id"), "name"),
    "group_id": (("group_id", "group", "group_index", "prompt_id", "prompt_idx"), "name"),
    "sample_id": (("sample_id", "sample_idx", "sample_index", "index"), "name"),
    "run_id": (("run_id",), "name"),
    "trajectory_id": (("trajectory_id", "episode_id"), "name"),
    "env_id": (("env_id", "env_name", "env", "data_source", "dataset"), "name"),
    "replica_id": (("replica_id", "replica", "dp_rank", "server_id", "engine_id"), "name"),
    "finish_reason": (("finish_reason", "stop_reason", "status"), "word"),
    "step": (("step", "global_step", "training_step"), "whole"),
    "turn": (("turn", "turn_id"), "short"),
    "scorer_version": (("scorer_version", "trainer_version"), "whole"),
    "weight_version": (("weight_version", "policy_version", "version", "model_version"), "whole"),
    "reward": (("reward", "score"), "number"),
    "temperature": (("temperature",), "number"),
    "top_p": (("top_p",), "number"),
    "min_p": (("min_p",), "number"),
    "top_k": (("top_k",), "short"),
    "repetition_penalty": (("repetition_penalty",), "number"),
    "presence_penalty": (("presence_penalty",), "number"),
    "frequency_penalty": (("frequency_penalty",), "number"),
    "padding_length": (("padding_length",), "short"),
    "cached_prefix_length": (("cached_prefix_length", "cached_tokens"), "short"),
    "logprob_semantics": (("logprob_semantics",), "semantics"),
}
LISTS = {
    "sampling_mask": "sampling_mask",
    "routed_experts": "routed_experts",
    "rollout_routed_experts": "routed_experts",
    "engine_routed_experts": "routed_experts",
    "experts_engine": "routed_experts",
    "scorer_routed_experts": "scorer_routed_experts",
    "trainer_routed_experts": "scorer_routed_experts",
    "train_routed_experts": "scorer_routed_experts",
    "experts_trainer": "scorer_routed_experts",
}
_MODES = {"raw": "raw", "temperature": "temperature", "processed": "processed"}
_MODES |= {"raw_logprobs": "raw", "processed_logprobs": "processed"}


def claims(path: str, head: bytes, names: Sequence[str]) -> bool:
    keys = keys_of(head)
    ids = [k for k in (*REPLY_IDS, *WHOLE_IDS) if k in keys]
    columns = {COLUMNS[k] for k in keys if k in COLUMNS}
    with_ids = any(keys[k] is None or _is_numbers(keys[k]) for k in ids)
    return bool(columns) if with_ids else _two_sides(columns)


def _two_sides(columns: Collection[str]) -> bool:
    return "sampler_logprobs" in columns and bool({"old_logprobs", "current_logprobs"} & set(columns))


def _is_numbers(x: Any) -> bool:
    """Also of one sequence in a list of its own."""
    return isinstance(x, list) and all(type(i) is int for i in x)  # pyright: ignore[reportUnknownVariableType]


def shards(paths: Sequence[str]) -> list[Shard]:
    return [Shard(name, (path,)) for path in paths]


def split(shard: Shard, files: Files) -> list[Shard]:
    cut = parquet_rows.split_groups if is_parquet(shard, files) else jsonl_lines.split_lines
    return cut(shard, files)


def read(shard: Shard, files: Files) -> Iterator[Read]:
    if not is_parquet(shard, files):
        yield from jsonl_lines.read_rows(shard, files, lambda line: [record(line)])
        return
    for line in parquet_rows.rows(shard, files):
        try:
            yield record(line)
        except WRONG as err:
            yield BrokenRecord(line.place, why(err))


def record(line: Line) -> Read:
    """One record from its keys. Errors: those of `WRONG`."""
    row = Row(line.value)
    ids, prompt, known = _ids(row)
    named = ids is not None
    ids = _counted(row) if ids is None else ids
    reply = len(ids) - (prompt or 0)
    columns: dict[str, RawColumn] = {}
    for key, column in COLUMNS.items():
        if key in row and column not in columns and isinstance(row.get(key), list):
            n = len(row.list(key) or ())
            columns[column] = _column(row, key, column, _layout(n, len(ids), reply, prompt is None, known))
    _empty_where_masked(columns)
    if "drawn" not in columns and (drawn := _drawn(row, columns, prompt)) is not None:
        columns["drawn"] = drawn
    facts = _facts(row)
    version = _versions(row, reply, facts.get("weight_version"))
    if version is not None:
        columns["policy_version"] = version
    claims = {what: n for what, key in _CLAIMS.items() if (n := _count(row, key)) is not None}
    if prompt is None:
        claims = {k: v for k, v in claims.items() if k == "token_ids"}
    lists = _lists(row, len(ids), reply, known)
    return RawRecord(line.place, ids, prompt, columns, facts, lists, claims=claims, prompt_known=known, ids_known=named)


def _empty_where_masked(columns: dict[str, RawColumn]) -> None:
    """The scorer's 0.0 at tokens that the mask takes out is what `logprobs * mask` leaves, no log-prob: null. Where
    other values stand at such tokens, its 0.0 is one of them."""
    mask = columns.get("loss_mask")
    if mask is None:
        return
    for name in ("old_logprobs", "current_logprobs", "reference_logprobs"):
        col = columns.get(name)
        if col is None or len(col.values) != len(mask.values) or col.layout != mask.layout:
            continue
        valid = np.ones(len(col.values), dtype=bool) if col.valid is None else col.valid
        out = valid & ~mask.values.astype(bool)
        if out.any() and (col.values[out] == 0.0).all():
            columns[name] = replace(col, valid=valid & ~out)


#: Masks of what the policy wrote; a loss mask beside one of them may take out more.
_REPLY_MASKS = ("response_mask", "completion_mask", "action_mask")


def _drawn(row: Row, columns: Mapping[str, RawColumn], prompt: int | None) -> RawColumn | None:
    """The tokens that the policy drew: those of a reply's mask where a loss mask stands beside it; else all of the
    reply but tool output and padding, which are masked and have no log-prob of the sampler, or 0.0. None: all of it."""
    mask, sampler = columns.get("loss_mask"), columns.get("sampler_logprobs")
    other = next((k for k in _REPLY_MASKS if isinstance(row.get(k), list)), None)
    if mask is not None and other is not None and isinstance(row.get("loss_mask"), list):
        told = row.flags(other, mask.layout)
        if told is not None and len(told.values) == len(mask.values):
            return told
    if mask is None or sampler is None or len(mask.values) != len(sampler.values):
        return None
    empty = sampler.values == 0.0
    empty = empty if sampler.valid is None else empty | ~sampler.valid
    own = ~(empty & ~mask.values)
    if mask.layout != "reply":  # the prompt is told, or ends where training begins
        first = int(mask.values.argmax()) if prompt is None else prompt - (mask.layout == "next")
        own[: max(0, first)] = False
    return RawColumn(own, mask.layout) if own.any() and not own.all() else None


def _counted(row: Row) -> NDArray[np.int64]:
    """Stand-ins for the ids, as many as the sampler's values. Errors: `ValueError` where only one side is there."""
    columns = {COLUMNS[key]: key for key in reversed(COLUMNS) if isinstance(row.get(key), list)}
    if not _two_sides(columns):
        said = quoted(sorted(map(str, row.row)), 120)
        raise ValueError(f"no token ids under a known name, and not both sides' log-probs; the keys are {said}")
    return np.arange(len(row.list(columns["sampler_logprobs"]) or ()), dtype=np.int64)


_CLAIMS = {"token_ids": "total_length", "prompt": "prompt_length", "reply": "response_length"}


def _count(row: Row, key: str) -> int | None:
    return row.whole(key) if type(row.get(key)) in (int, float) else None


def _ids(row: Row) -> tuple[Any, int | None, bool]:
    """(ids of prompt and reply, None without any; tokens of the prompt; whether the prompt is there)."""
    reply = _first_ids(row, REPLY_IDS)
    prompt = _first_ids(row, PROMPT_IDS)
    if reply is not None:
        return joined(prompt, reply), 0 if prompt is None else len(prompt), prompt is not None
    whole = _first_ids(row, WHOLE_IDS)
    if whole is None:
        return None, 0, False
    told, reply_told = _count(row, "prompt_length"), _count(row, "response_length")
    if told is None and reply_told is not None:
        told = len(whole) - reply_told
    if told is None and prompt is not None:
        told = len(prompt)
    return whole, told, True


def _first_ids(row: Row, keys: Sequence[str]) -> Any:
    """The first that is there and is no text: `prompt` may be either."""
    key = next((k for k in keys if isinstance(row.get(k), (list, np.ndarray))), None)
    if key is None or (cells := row.list(key)) is None:
        return None
    return None if cells and all(isinstance(c, (str, dict)) for c in cells) else row.ids(key)


def _layout(n: int, total: int, reply: int, no_length: bool, known: bool) -> Layout:
    """By the number of values. Without the prompt's ids, `n` is of the reply or wrong."""
    if not known:
        return "reply"
    if n == total and (no_length or n != reply):
        return "whole"
    if n == reply and not no_length:
        return "reply"
    return "next" if n == total - 1 else "whole" if no_length else "reply"


def _column(row: Row, key: str, column: str, layout: Layout) -> RawColumn:
    found = row.flags(key, layout) if column in ("loss_mask", "drawn") else row.floats(key, layout)
    assert found is not None
    return found


def _facts(row: Row) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for column, (keys, kind) in FACTS.items():
        for key in (k for k in keys if k in row):
            if (value := _fact(row, key, kind)) is not None:
                out[column] = value
                break
    return out


def _fact(row: Row, key: str, kind: str) -> Any:
    value = row.get(key)
    if kind == "semantics":
        return _MODES.get(value) if isinstance(value, str) else None
    if isinstance(value, (list, dict)):  # something else under that name, such as versions token by token
        return None
    if kind == "word":
        return row.text(key) if isinstance(value, str) else None
    if kind == "name":
        return row.name(key)
    return row.number(key) if kind == "number" else row.whole(key, 32 if kind == "short" else 64)


def _versions(row: Row, reply: int, label: int | None) -> RawColumn | None:
    """`version_spans` of the reply, `[start, stop, version]`; else versions token by token; else the record's one."""
    spans = row.list("version_spans")
    if spans is None:
        key = next((k for k in ("policy_version", "versions", "weight_versions") if isinstance(row.get(k), list)), None)
        if key is not None:
            values = row.ids(key)
            assert values is not None
            return RawColumn(values, "reply" if len(values) == reply else "whole")
        return None if label is None else RawColumn(np.full(reply, label, dtype=np.int64), "reply")
    values, valid = np.zeros(reply, dtype=np.int64), np.zeros(reply, dtype=bool)
    for span in spans:
        if not isinstance(span, list) or len(span) != 3 or not all(type(x) is int and abs(x) < 2**62 for x in span):  # pyright: ignore
            raise ValueError(f"'version_spans': got {quoted(span)}, wanted [start, stop, version]")  # pyright: ignore
        start, stop, version = span  # pyright: ignore[reportUnknownVariableType]
        if not 0 <= start <= stop <= reply:
            raise ValueError(f"'version_spans': got {quoted(span)}, but the reply has {reply} tokens")  # pyright: ignore
        values[start:stop], valid[start:stop] = version, True
    return RawColumn(values, "reply", None if valid.all() else valid)


def _lists(row: Row, total: int, reply: int, known: bool) -> dict[str, tuple[Any, Layout]]:
    out: dict[str, tuple[Any, Layout]] = {}
    for key, column in LISTS.items():
        if isinstance(row.get(key), list) and column not in out:
            cells = row.lists(key) or []
            out[column] = (cells, _layout(len(cells), total, reply, False, known))
    return out
