"""Parquet: one row a sequence, token columns as lists. Written in row groups, read in batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy import schema
from onepolicy.declared import Header, declarations
from onepolicy.errors import ContentError, MissingExtra
from onepolicy.records import refuse_unknown, token_columns
from onepolicy.rollouts import Rollouts
from onepolicy.storage.arrow import rollouts_of
from onepolicy.types import IntArray, Lists, Values
from onepolicy.values import json_text, listed

VERSION = "1"
#: Values of one row group; a token counts as four (its usual columns), an element of a list a token as one.
_GROUP_VALUES = 1 << 22
#: Stored bytes of a token, more than it usually has: caps a batch of sequences that are longer than the first ones.
_TOKEN_BYTES = 64
#: Bytes of a column that are read at a time; with pyarrow's `pre_buffer` it would be all of a row group.
_BUFFER = 1 << 20


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("pyarrow", "cli", "reading and writing Parquet") from None
    return pyarrow, pyarrow.parquet


# writing


def write(rollouts: Rollouts, path: Path) -> None:
    """Errors: `ContentError` for text that is not Unicode or not JSON; `OSError` of the file system."""
    pa, pq = _pyarrow()
    metadata = {"onepolicy.schema": VERSION, "onepolicy.scorings": json_text("scorings", declarations(rollouts))}
    fields = _table(pa, rollouts.take(range(0))).schema.with_metadata(metadata)
    floats = [_leaf(pa, field) for field in fields if pa.types.is_floating(_element(pa, field.type))]
    others = [_leaf(pa, field) for field in fields if not pa.types.is_floating(_element(pa, field.type))]
    # byte planes of floats compress better than the floats; a dictionary of log-probs would only cost
    options = {"compression": "zstd", "use_dictionary": others, "use_byte_stream_split": floats}
    options["write_page_checksum"] = True  # a damaged byte is an error, not another log-prob
    with pq.ParquetWriter(path, fields, **options) as writer:
        for start, stop in _groups(rollouts):
            writer.write_table(_table(pa, rollouts.take(range(start, stop))).cast(fields))


def _element(pa: Any, kind: Any) -> Any:
    return _element(pa, kind.value_type) if pa.types.is_list(kind) else kind


def _leaf(pa: Any, field: Any) -> str:
    """The name of a column's values inside the file."""
    depth, kind = 0, field.type
    while pa.types.is_list(kind):
        depth, kind = depth + 1, kind.value_type
    return field.name + ".list.element" * depth


def _groups(rollouts: Rollouts) -> Iterator[tuple[int, int]]:
    """Row ranges of about `_GROUP_VALUES` values each."""
    load = rollouts.offsets * 4
    for name, lists in rollouts.lists.items():
        if schema.COLUMNS[name].level == "token_list":
            load = load + lists.offsets[rollouts.offsets]
    start = 0
    while start < len(rollouts):
        fits = int(np.searchsorted(load, load[start] + _GROUP_VALUES, side="right")) - 1
        stop = max(start + 1, fits)
        yield start, stop
        start = stop


def _table(pa: Any, rollouts: Rollouts) -> Any:
    columns = {n: _array(pa, n, col) for n, col in rollouts.records.items()}
    tokens = token_columns(rollouts)
    columns |= {n: _listed(pa, rollouts.offsets, _array(pa, n, tokens[n])) for n in tokens}
    for name, lists in rollouts.lists.items():
        inner = _csr(pa, lists)
        in_tokens = schema.COLUMNS[name].level == "token_list"
        columns[name] = _listed(pa, rollouts.offsets, inner) if in_tokens else inner
    return pa.table(columns)


def _listed(pa: Any, offsets: IntArray, values: Any) -> Any:
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), values)


def _csr(pa: Any, lists: Lists) -> Any:
    """A list a row. Not by null offsets: what stands under a null row would go to the row before it."""
    null = None if lists.valid is None else pa.array(~lists.valid)
    return pa.ListArray.from_arrays(pa.array(lists.offsets.astype(np.int32)), pa.array(lists.values), mask=null)


def _array(pa: Any, name: str, col: Values) -> Any:
    spec = schema.column(name)
    assert spec is not None
    mask = None if col.valid is None else ~col.valid
    if spec.dtype not in ("string", "json"):
        values = col.values.astype(np.float32) if col.values.dtype == np.float16 else col.values
        return pa.array(values, mask=mask)
    items = [None if null else x for x, null in zip(col.values, ~col.mask(), strict=True)]
    if spec.dtype == "json":
        items = [None if x is None else json_text(f"column {name!r}", x) for x in items]
    try:
        return pa.array(items, type=pa.string())
    except (TypeError, ValueError, pa.ArrowException) as err:  # a UnicodeEncodeError is a ValueError
        raise ContentError(f"column {name!r}: not {spec.dtype} that can be stored: {_line(err)}") from err


# reading


def shards(
    path: Path | str, max_tokens: int, start: int | None = None, stop: int | None = None, source: Any = None
) -> Iterator[Rollouts]:
    """`start`, `stop`: only these row groups. `source`: an open binary file that is read instead of `path`.

    Errors: `ContentError` with the file, and the record where one is to blame.
    """
    pa, pq = _pyarrow()
    options = {"buffer_size": _BUFFER, "pre_buffer": False, "page_checksum_verification": True}
    try:
        with pq.ParquetFile(path if source is None else source, **options) as file:
            names = _columns(file.schema_arrow.names)
            header = _header(file.schema_arrow.metadata or {})
            groups = range(file.num_row_groups)[start:stop]
            first = sum(file.metadata.row_group(g).num_rows for g in range(groups.start))
            rows = _batch_rows(file, max_tokens)
            for batch in file.iter_batches(batch_size=rows, row_groups=list(groups), columns=names):
                yield from _pieces(rollouts_of(pa, batch, header, first), max_tokens)
                first += batch.num_rows
    except ContentError as err:
        raise ContentError(f"{path}: {err}") from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as err:
        raise ContentError(f"{path}: cannot be read as Parquet: {_line(err)}; is the file complete?") from err


def _line(err: BaseException) -> str:
    return " ".join(str(err).split())[:200].rstrip(". ")


def _columns(names: list[str]) -> list[str]:
    """The columns to read."""
    if "token_ids" not in names:
        raise ContentError(f"no column 'token_ids' in this Parquet; it has {listed(names) or 'no columns'}")
    refuse_unknown(names)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ContentError(f"column {twice[0]!r} is there {names.count(twice[0])} times, wanted once")
    return [name for name in names if schema.column(name)]


def _header(metadata: dict[bytes, bytes]) -> Header:
    version = metadata.get(b"onepolicy.schema", VERSION.encode()).decode("utf-8", "replace")
    if version != VERSION:
        raise ContentError(
            f"metadata 'onepolicy.schema': got {version!r}, wanted {VERSION!r}; a newer onepolicy reads it"
        )
    header = Header()
    try:
        header.add(json.loads(metadata.get(b"onepolicy.scorings", b"{}")))
    except (ContentError, ValueError, RecursionError) as err:
        raise ContentError(f"metadata 'onepolicy.scorings': {_line(err)}") from None
    return header


def _batch_rows(file: Any, max_tokens: int) -> int:
    """Rows of a batch of about `max_tokens` tokens: by the first sequences, and by bytes in case later ones are longer.

    The column statistics would say, but pyarrow ends the process when it reads damaged ones.
    """
    rows = max(1, file.metadata.num_rows)
    size = sum(file.metadata.row_group(g).total_byte_size for g in range(file.metadata.num_row_groups))
    fits = min(max_tokens / max(1.0, _mean_length(file)), max_tokens * _TOKEN_BYTES / max(1, size / rows))
    return min(max(1, int(fits)), 1 << 16)


def _mean_length(file: Any) -> float:
    """Tokens of one of the first sequences, 0 if nothing can be said."""
    for head in file.iter_batches(batch_size=64, columns=["token_ids"]):
        ids = head.column(0)
        return len(ids.flatten()) / max(1, len(ids)) if hasattr(ids, "flatten") else 0.0
    return 0.0


def _pieces(rollouts: Rollouts, max_tokens: int) -> Iterator[Rollouts]:
    """Consecutive sequences of at most `max_tokens` tokens, at least one sequence."""
    start = 0
    while start < len(rollouts):
        limit = rollouts.offsets[start] + max_tokens
        stop = max(start + 1, int(np.searchsorted(rollouts.offsets, limit, side="right")) - 1)
        whole = start == 0 and stop == len(rollouts)
        yield rollouts if whole else rollouts.take(range(start, stop))
        start = stop
