"""Rows of a Parquet file as mappings, a few at a time, and the file cut into ranges of row groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

from onepolicy.errors import ContentError, MissingExtra
from onepolicy.formats.base import Files, Shard
from onepolicy.formats.files import one_line
from onepolicy.formats.jsonl_lines import Line

#: Bytes of row groups (as they are in memory) that one shard holds at least, where there are more groups.
SHARD_BYTES = 1 << 27
#: Rows that are converted at a time.
_ROWS = 64


@contextmanager
def opened(path: str, files: Files) -> Iterator[Any]:
    """A `pyarrow.parquet.ParquetFile`. Errors: `ContentError` for what pyarrow refuses, also while it is read."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtra("pyarrow", "cli", "reading Parquet") from None
    with files.open(path) as raw:
        try:
            yield pq.ParquetFile(raw, pre_buffer=False, page_checksum_verification=True)
        except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError, MemoryError) as err:
            raise ContentError(f"{path}: cannot be read as Parquet: {one_line(err)}; is the file complete?") from None


def rows(shard: Shard, files: Files) -> Iterator[Line]:
    """Each row of the shard's row groups. Errors: as `opened`."""
    path = shard.paths[0]
    with opened(path, files) as file:
        groups = range(file.num_row_groups)[shard.start : shard.stop]
        number = sum(file.metadata.row_group(g).num_rows for g in range(groups.start))
        for batch in file.iter_batches(batch_size=_ROWS, row_groups=list(groups)) if groups else ():
            for row in batch.to_pylist():
                yield Line(f"{path}[{number}]", row, number + 1)
                number += 1


def split_groups(shard: Shard, files: Files) -> list[Shard]:
    """The shard cut into ranges of row groups of about `SHARD_BYTES`."""
    with opened(shard.paths[0], files) as file:
        sizes = [file.metadata.row_group(g).total_byte_size for g in range(file.num_row_groups)]
    edges, held = [0], 0
    for g, size in enumerate(sizes):
        held += size
        if held >= SHARD_BYTES and g + 1 < len(sizes):
            edges.append(g + 1)
            held = 0
    edges.append(len(sizes))
    if len(edges) == 2:
        return [shard]
    return [replace(shard, start=a, stop=b) for a, b in pairwise(edges)]
