"""Our own files, Parquet and JSON lines, as `storage` writes them.

Parquet has a fast way, `rollouts`: whole columns at a time, strict, a range of row groups a shard. `read` goes record
by record and is lenient: a column that does not fit its tokens is told of that record, and the others stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from onepolicy import schema
from onepolicy.declared import Header
from onepolicy.errors import ContentError
from onepolicy.formats import jsonl_lines, parquet_rows
from onepolicy.formats.base import BrokenRecord, Files, RawColumn, RawRecord, Read, Shard
from onepolicy.formats.cells import Row, ids_of, inner
from onepolicy.formats.files import is_url, packing
from onepolicy.formats.jsonl_lines import WRONG, Line, why
from onepolicy.formats.sniff import PARQUET, keys_of
from onepolicy.records import HEADER_KEYS, refuse_unknown
from onepolicy.rollouts import Rollouts
from onepolicy.storage import parquet
from onepolicy.validate import validate_columns

name = "canonical"
says = "onepolicy's own Parquet and JSON lines"


def claims(path: str, head: bytes, names: Sequence[str]) -> bool:
    """All names are of the contract; a file with others is one more spelling (`loose`)."""
    keys = keys_of(head)
    known = (schema.column(k) or k in HEADER_KEYS or k.startswith("x_") for k in keys)
    return "token_ids" in keys and all(known)


def shards(paths: Sequence[str]) -> list[Shard]:
    return [Shard(name, (path,)) for path in paths]


def split(shard: Shard, files: Files) -> list[Shard]:
    """Parts of a JSON lines file also need what its first record declares."""
    if is_parquet(shard, files):
        return parquet_rows.split_groups(shard, files)
    parts = jsonl_lines.split_lines(shard, files)
    if len(parts) == 1:
        return parts
    first = next(jsonl_lines.lines(shard.paths[0], files), None)
    said = first.value if isinstance(first, Line) and isinstance(first.value, dict) else {}
    declared = {key: said[key] for key in HEADER_KEYS if key in said}
    return [replace(part, options={**part.options, **declared}) for part in parts]


def is_parquet(shard: Shard, files: Files) -> bool:
    """Whether the shard can be read by `rollouts`."""
    with files.open(shard.paths[0]) as file:
        return file.read(len(PARQUET)) == PARQUET


def rollouts(shard: Shard, files: Files, max_tokens: int) -> Iterator[Rollouts]:
    """A Parquet shard in batches of about `max_tokens`. Errors: `ContentError` for the first record that breaks the
    contract: `read` tells of each of them."""
    path, n_records = shard.paths[0], 0
    with files.open(path) as file:  # a local file is read by pyarrow itself, which is faster
        source = file if is_url(path) or packing(path) else None
        for part in parquet.shards(path, max_tokens, shard.start, shard.stop, source):
            try:
                validate_columns(part, first=n_records)
            except ContentError as err:
                raise ContentError(f"{path}: {err}") from None
            n_records += len(part)
            yield part


def read(shard: Shard, files: Files) -> Iterator[Read]:
    reader = _Reader({key: shard.options[key] for key in HEADER_KEYS if key in shard.options})
    if not is_parquet(shard, files):
        yield from jsonl_lines.read_rows(shard, files, lambda line: [reader.record(line)])
        return
    with parquet_rows.opened(shard.paths[0], files) as file:
        reader = _Reader(_declared(file))
    for line in parquet_rows.rows(shard, files):
        try:
            yield reader.record(line)
        except WRONG as err:
            yield BrokenRecord(line.place, why(err))


def _declared(file: Any) -> dict[str, Any]:
    """What a Parquet file's metadata and column types say."""
    metadata: Mapping[bytes, bytes] = file.schema_arrow.metadata or {}
    single = [f.name for f in file.schema_arrow if str(getattr(f.type, "value_type", "")) in ("float", "halffloat")]
    try:
        scorings = json.loads(metadata.get(b"onepolicy.scorings", b"{}"))
    except (ValueError, RecursionError):
        scorings = {}
    return {"scorings": scorings, "float32": single}


class _Reader:
    """Reads records of one file; what an early one declares holds for those after it."""

    def __init__(self, declared: Mapping[str, Any]) -> None:
        self._header = Header()
        self._declare(declared)

    def record(self, line: Line) -> RawRecord:
        row = Row(line.value)
        refuse_unknown(row.row)
        self._declare(row.row)
        ids = row.ids("token_ids")
        if ids is None:
            raise ValueError("no 'token_ids'; it is the one column that is required")
        columns: dict[str, RawColumn] = {}
        facts: dict[str, Any] = {}
        lists: dict[str, Any] = {}
        for key, value in row.row.items():
            spec = schema.column(key)
            if spec is None or value is None or key in ("token_ids", "prompt_length"):
                continue
            if spec.level == "token":
                columns[key] = self._token_column(row, key, spec.dtype)
            elif spec.level == "token_list":
                lists[key] = (row.lists(key), "whole")
            else:
                facts[key] = _fact(row, key, spec)
        prompt = row.whole("prompt_length", 32)
        if prompt is None and "drawn" not in columns:  # by the contract nothing is drawn then
            columns["drawn"] = RawColumn(np.zeros(len(ids), dtype=bool), "whole")
        declared = {k: dict(v) for k, v in self._header.scorings.items()}
        return RawRecord(line.place, ids, prompt, columns, facts, lists, declared)

    def _declare(self, said: Mapping[str, Any]) -> None:
        if said.get("scorings") is not None:
            self._header.add(said["scorings"])
        single = said.get("float32")
        if isinstance(single, list):
            self._header.float32.update(x for x in cast(list[Any], single) if isinstance(x, str))

    def _token_column(self, row: Row, key: str, dtype: str) -> RawColumn:
        column = _TOKENS.get(dtype, _floats)(row, key)
        if key not in self._header.float32 or column.values.dtype != np.float64:
            return column
        with np.errstate(over="ignore"):
            return RawColumn(column.values.astype(np.float32), column.layout, column.valid, column.at_zero)


def _floats(row: Row, key: str) -> RawColumn:
    """Index 0 has to be null: a value there is kept, so that it is seen."""
    return cast(RawColumn, row.floats(key, "whole", at_zero=False))


def _whole(row: Row, key: str) -> RawColumn:
    cells = row.list(key) or []
    null = np.array([x is None for x in cells], dtype=bool)
    try:
        values = ids_of([0 if x is None else x for x in cells])
    except ValueError as err:
        raise ValueError(f"{key!r}: {err}") from None
    return RawColumn(values, "whole", ~null if null.any() else None)


def _flags(row: Row, key: str) -> RawColumn:
    return cast(RawColumn, row.flags(key, "whole"))


_TOKENS: dict[str, Callable[[Row, str], RawColumn]] = {"bool": _flags, "int32": _whole, "int64": _whole}


def _fact(row: Row, key: str, spec: schema.Column) -> Any:
    if spec.level == "record_list":
        cells = row.ids(key)
        return None if cells is None else inner(cells, 1 << 31)
    if spec.dtype == "string":
        return row.name(key)
    if spec.dtype in ("int32", "int64"):
        return row.whole(key, int(spec.dtype[3:]))
    return _parsed(row.get(key)) if spec.dtype == "json" else row.number(key)


def _parsed(value: Any) -> Any:
    """Parquet holds JSON as text."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
