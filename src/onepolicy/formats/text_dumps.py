"""Dumps with text and no token ids: good for the template and re-encoding checks, and for nothing that needs a token.

TRL `completions/completions_{step}.parquet`, verl `{step}.jsonl` (input, output, gts, score), AReaL
`rollout/{version}/{task}.jsonl`, ms-swift `completions.jsonl` and ROLL's columns, of which one line holds a whole step.
Layouts: the packages trl 1.16, verl 0.9, areal 1.0, ms-swift 4.6; ROLL after its documentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from onepolicy.formats import jsonl_lines, parquet_rows
from onepolicy.formats.base import BrokenRecord, Files, Read, Shard, TextRecord
from onepolicy.formats.cells import Row, unicode
from onepolicy.formats.jsonl_lines import WRONG, Line, name_of, why
from onepolicy.formats.sniff import is_parquet, keys_of
from onepolicy.values import quoted

name = "text"
says = "text dumps of TRL, verl, AReaL, ms-swift and ROLL (no token ids)"

PROMPTS = ("prompt", "prompts", "prompt_text", "input", "inputs")
_PLAIN = ("completion", "completions", "response", "responses", "output", "outputs")
#: What is called a text needs no prompt beside it.
_CALLED = ("completion_text", "response_text", "reply_text", "output_text")
REPLIES = (*_PLAIN, *_CALLED)
_REWARDS = ("reward", "score", "rewards", "scores")
_IDS = re.compile(r"_ids$|^tokens$")
#: One side's log-probs are of no use without ids; two sides' are (`loose`).
_LOGPROBS = re.compile(r"(log_?probs?|logps)$")
_STEP = re.compile(r"(?:^|_|step)(\d{1,12})$")


def claims(path: str, head: bytes, names: Sequence[str]) -> bool:
    keys = keys_of(head)
    found = next((key for key in REPLIES if key in keys), None)
    if found is None or not (found in _CALLED or any(key in keys for key in PROMPTS)):
        return False
    if any(_IDS.search(key) for key in keys) or sum(_LOGPROBS.search(key) is not None for key in keys) > 1:
        return False
    value = keys[found]
    return value is None or isinstance(value, str) or _is_listed(value)


def _is_listed(value: Any) -> bool:
    """A list of texts, of messages, or of lists of messages."""
    first = value[0] if isinstance(value, list) and value else None  # pyright: ignore[reportUnknownVariableType]
    return isinstance(first, (str, Mapping)) or (isinstance(first, list) and not first) or _is_messages(first)


def shards(paths: Sequence[str]) -> list[Shard]:
    return [Shard(name, (path,)) for path in paths]


def split(shard: Shard, files: Files) -> list[Shard]:
    return [shard] if _is_parquet(shard, files) else jsonl_lines.split_lines(shard, files)


def _is_parquet(shard: Shard, files: Files) -> bool:
    with files.open(shard.paths[0]) as file:
        return is_parquet(file.read(4))


def read(shard: Shard, files: Files) -> Iterator[Read]:
    found = _STEP.search(name_of(shard.paths[0]).rpartition(".")[0])
    step = int(found.group(1)) if found else None
    if not _is_parquet(shard, files):
        yield from jsonl_lines.read_rows(shard, files, lambda line: _records(line, step))
        return
    for line in parquet_rows.rows(shard, files):
        try:
            yield _record(Row(line.value), line.place, step)
        except WRONG as err:
            yield BrokenRecord(line.place, why(err))


def _records(line: Line, step: int | None) -> Iterator[Read]:
    row = Row(line.value)
    reply = row.get(row.first(*REPLIES))
    if not isinstance(reply, list) or _is_messages(reply):
        yield _record(row, line.place, step)
        return
    n = len(cast(list[Any], reply))  # a line of columns
    for i in range(n):
        cells = {k: v[i] for k, v in row.row.items() if isinstance(v, list) and len(cast(list[Any], v)) == n}
        yield _record(Row(cells), f"{line.place}[{i}]", step)


def _is_messages(value: Any) -> bool:
    items = cast(list[Any], value) if isinstance(value, list) else []
    return bool(items) and all(isinstance(m, Mapping) and "role" in m for m in items)


def _record(row: Row, place: str, step: int | None) -> Read:
    key = row.first(*REPLIES)
    if key not in row:
        raise ValueError(f"no reply: none of {', '.join(REPLIES)} is there")
    prompt = row.first(*PROMPTS)
    texts: dict[str, Any] = {"reply_text": _text(key, row.get(key))}
    said = row.get(prompt)
    if _is_messages(said):
        texts["messages"] = said
    elif said is not None:
        texts["prompt_text"] = _text(prompt, said)
    strings = row.get("token_strings")
    if isinstance(strings, list) and all(isinstance(x, str) for x in cast(list[Any], strings)):
        texts["token_strings"] = [unicode("token_strings", x) for x in cast(list[str], strings)]
    return TextRecord(place, texts, _facts(row, step))


def _text(key: str, value: Any) -> str:
    """A text, or the text of one assistant message."""
    if _is_messages(value):
        contents = [cast(Mapping[str, Any], m).get("content") for m in value]
        value = "".join(c for c in contents if isinstance(c, str))
    if not isinstance(value, str):
        raise ValueError(f"{key!r}: got {quoted(value)}, wanted text")
    return unicode(key, value)


def _facts(row: Row, step: int | None) -> dict[str, Any]:
    said = row.get(row.first("step", "gen_step"))
    if isinstance(said, str) and said.isascii() and said.isdigit() and len(said) < 13:
        said = int(said)  # ms-swift writes it as text
    reward = row.get(row.first(*_REWARDS))
    task, name = row.name("task_id"), row.name(row.first("record_id", "id", "uid"))
    facts: dict[str, Any] = {
        "record_id": name,
        "step": said if type(said) is int and abs(said) < 2**62 else step,
        "reward": float(reward) if isinstance(reward, (int, float)) and abs(reward) < 1e300 else None,
        "group_id": task,
        "sample_id": row.name("sample_idx"),
    }
    counts = {key: row.whole(key) for key in ("seqlen", "prompt_len", "head_version", "tail_version")}
    return facts | {key: value for key, value in counts.items() if value is not None}
