"""What a file looks like from its beginning: the head that `claims` sees, and the keys in it."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from onepolicy.errors import ContentError, MissingExtra
from onepolicy.formats import base
from onepolicy.formats.base import Files
from onepolicy.formats.files import guarded, packing
from onepolicy.formats.json_text import parsed
from onepolicy.formats.jsonl_lines import skip_line

PARQUET = b"PAR1"
#: Before the names of an .npz's arrays, a line each.
NPZ = b"\x93NPZ\n"
_ZIP = b"PK\x03\x04"
#: How much of a list, a text and of nested values an abridged head keeps.
_CELLS, _CHARS, _DEPTH = 3, 120, 8
#: Lines that are tried for one that is whole.
_LINES = 4

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\]]')


def head_of(path: str, files: Files) -> bytes:
    """What `claims` sees of a file (`base.HEAD_BYTES`). Errors: `ContentError` for a file that cannot be read."""
    with files.open(path) as file:
        raw = guarded(path, lambda: file.read(base.HEAD_BYTES))
        if raw.startswith(PARQUET) and packing(path) is None:
            return PARQUET + json.dumps(_parquet_columns(path, file)).encode()
        if raw.startswith(_ZIP) and packing(path) is None and (found := _npz_names(path, file, raw)):
            return NPZ + "\n".join(found).encode("utf-8", "replace")
        if not raw.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
            return raw
        return _first_record(path, file, raw) or raw


def _parquet_columns(path: str, file: Any) -> dict[str, None]:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtra("pyarrow", "cli", "reading Parquet") from None
    try:
        return dict.fromkeys(pq.ParquetFile(file).schema_arrow.names)
    except MissingExtra:
        raise
    except Exception as err:  # a damaged footer raises errors of many kinds
        what = " ".join(str(err).split())[:160].rstrip(". ")
        raise ContentError(f"{path}: not a whole Parquet file: {what}; truncated, or still being written?") from None


def _npz_names(path: str, file: Any, raw: bytes) -> list[str]:
    """Names of the arrays of an .npz; empty for another archive. Errors: `ContentError` for a damaged one."""
    first = raw[30 : 30 + int.from_bytes(raw[26:28], "little")]
    if not first.endswith(b".npy") or b"/" in first:
        return []
    try:
        with zipfile.ZipFile(file) as archive:
            return [x.removesuffix(".npy").replace("\n", " ") for x in archive.namelist()]
    except Exception as err:  # a damaged archive raises errors of many kinds
        what = " ".join(str(err).split())[:160].rstrip(". ")
        raise ContentError(f"{path}: not a whole .npz: {what}; truncated, or still being written?") from None


def arrays_of(head: bytes) -> list[str]:
    """Names of an .npz's arrays; empty for anything else."""
    return head.removeprefix(NPZ).decode().split("\n") if head.startswith(NPZ) else []


def _first_record(path: str, file: Any, raw: bytes) -> bytes:
    """The first line that parses, cut short; empty if none of the first does."""
    rest = raw
    for _ in range(_LINES):
        line, end, rest = rest.partition(b"\n")
        if not end:
            line += guarded(path, lambda: file.readline(base.LINE_BYTES))
            if len(line) >= base.LINE_BYTES and not line.endswith(b"\n"):
                skip_line(path, file)
                continue
        try:
            row = parsed(line.removeprefix(b"\xef\xbb\xbf"))
        except ValueError:
            row = None
        if isinstance(row, (dict, list)) and row:
            return json.dumps(_short(row, _DEPTH)).encode()
        if not line:
            break
    return b""


def _short(x: Any, depth: int) -> Any:
    if isinstance(x, str):
        return x[:_CHARS]
    if isinstance(x, dict):
        whole = depth == _DEPTH or len(cast(dict[str, Any], x)) <= 64
        items = list(cast(dict[str, Any], x).items())[: None if whole else 64]
        return {k: _short(v, depth - 1) for k, v in items} if depth else {}
    if isinstance(x, list):
        return [_short(v, depth - 1) for v in cast(list[Any], x)[:_CELLS]] if depth else []
    return x


@lru_cache(maxsize=64)
def keys_of(head: bytes) -> Mapping[str, Any]:
    """The keys of the first record (of a list, of its first one), with what is known of their values; of a Parquet file
    its columns. Empty for anything else."""
    try:
        row: Any = parsed(head.removeprefix(PARQUET))
    except ValueError:
        return _scanned(head)
    while isinstance(row, list) and row:
        row = cast(list[Any], row)[0]
    return cast(dict[str, Any], row) if isinstance(row, dict) else {}


def is_parquet(head: bytes) -> bool:
    return head.startswith(PARQUET)


def _scanned(head: bytes) -> dict[str, Any]:
    """Keys of the first object of JSON that is cut or spans lines; their values are not read."""
    found: dict[str, Any] = {}
    depth, base_depth = 0, 0
    for match in _TOKEN.finditer(head):
        token = match.group()
        if token in (b"{", b"["):
            depth += 1
            if token == b"{" and not base_depth:
                base_depth = depth
        elif token in (b"}", b"]"):
            depth -= 1
            if base_depth and depth < base_depth:
                break
        elif depth == base_depth and head[match.end() : match.end() + 8].lstrip()[:1] == b":":
            found[token[1:-1].decode("utf-8", "replace")] = None
    return found if base_depth else {}
