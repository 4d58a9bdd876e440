"""JSON lines as a stream: one parsed line at a time, in bounded memory, whatever stands in the file.

A line that cannot be read is a `BrokenRecord` with its file and line. A big file is cut into byte ranges at line
starts; where the cuts are depends on the file alone, so that a report does not depend on the number of workers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, BinaryIO

from onepolicy.formats import base
from onepolicy.formats.base import BrokenRecord, Files, Read, Shard
from onepolicy.formats.files import guarded, is_url, packing
from onepolicy.formats.json_text import parsed

#: Bytes of a shard of a big file; a file that is not twice as long stays whole.
SHARD_BYTES = 1 << 28
_BLOCK = 1 << 22
#: What a reader may meet in a record that is not what it should be.
WRONG = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError, MemoryError)
CUT = "the file is truncated or still being written"


@dataclass(frozen=True, slots=True)
class Line:
    """A parsed line. `number`: counted from 1, from the start of the file; None where that is not known."""

    place: str
    value: Any
    number: int | None = None


#: One row -> what is read from it; raises one of `WRONG` for a row that is broken.
RowReader = Callable[[Line], Iterable[Read]]


def read_rows(shard: Shard, files: Files, reader: RowReader) -> Iterator[Read]:
    """Each row of the shard's files through `reader`; rows that it cannot read are named. Errors: `ContentError`."""
    for path in shard.paths:
        for line in lines(path, files, shard):
            if isinstance(line, BrokenRecord):
                yield line
                continue
            try:
                yield from list(reader(line))
            except WRONG as err:
                yield BrokenRecord(line.place, why(err), _name(line.value))


def why(err: BaseException) -> str:
    """One line that says what is wrong with a record."""
    text = " ".join(str(err).split())[:300]
    if isinstance(err, KeyError):
        return f"no {text}"
    return text if isinstance(err, ValueError) and text else f"wrong type: {text or type(err).__name__}"


def _name(row: Any) -> str | None:
    name = row.get("record_id", row.get("id")) if isinstance(row, dict) else None  # pyright: ignore
    return str(name)[:200] if isinstance(name, (str, int)) else None


def lines(path: str, files: Files, shard: Shard | None = None) -> Iterator[Line | BrokenRecord]:
    """The rows of a JSON lines file; the elements of one JSON array; one JSON value that spans lines.

    `shard` with `start` and `stop`: only the lines that start there. Errors: `ContentError` for a file that cannot be
    opened or unpacked.
    """
    start, stop = (shard.start, shard.stop) if shard is not None else (None, None)
    first = (shard.options.get("line") if shard is not None else None) if start else 1
    whole = not start and _spans_lines(path, files)
    with files.open(path) as file:
        if whole:
            yield from _whole(path, file)
            return
        if start:
            guarded(path, lambda: file.seek(start))
        yield from _stream(path, file, start or 0, stop, first)


def _stream(path: str, file: BinaryIO, at: int, stop: int | None, number: int | None) -> Iterator[Line | BrokenRecord]:
    limit = base.LINE_BYTES
    while stop is None or at < stop:
        begin = at
        line = guarded(path, lambda: file.readline(limit + 1))
        if not line:
            return
        at += len(line)
        place = f"{path}:{number}" if number is not None else f"{path}:byte {begin}"
        if len(line) > limit and not line.endswith(b"\n"):
            at += skip_line(path, file)
            yield BrokenRecord(place, f"the line has more than {limit} bytes; wanted one sequence a line")
        else:
            yield from _parsed(line, place, begin, number)
        number = None if number is None else number + 1


def _parsed(line: bytes, place: str, begin: int, number: int | None) -> Iterator[Line | BrokenRecord]:
    text = line.removeprefix(b"\xef\xbb\xbf") if begin == 0 else line
    if not text or text.isspace():
        return
    try:
        value = parsed(text)
    except ValueError as err:
        cut = f"; {CUT}" if not line.endswith(b"\n") else ""
        yield BrokenRecord(place, f"{err}{cut}")
        return
    if isinstance(value, list):  # an array in one line
        yield from _elements(value, place)
    else:
        yield Line(place, value, number)


def _elements(items: list[Any], place: str) -> Iterator[Line]:
    for i, item in enumerate(items):
        yield Line(f"{place}[{i}]", item, i + 1)


def skip_line(path: str, file: BinaryIO) -> int:
    """Reads past the rest of a line, in pieces. Returns its bytes."""
    n = 0
    while part := guarded(path, lambda: file.readline(_BLOCK)):
        n += len(part)
        if part.endswith(b"\n"):
            break
    return n


def _spans_lines(path: str, files: Files) -> bool:
    """Whether the file is one JSON value over several lines."""
    with files.open(path) as file:
        head = guarded(path, lambda: file.read(base.HEAD_BYTES))
    first, end, _ = head.lstrip(b"\xef\xbb\xbf \t\r\n").partition(b"\n")
    return bool(end) and first.strip() in (b"{", b"[", b"[{", b"[[")


def _whole(path: str, file: BinaryIO) -> Iterator[Line | BrokenRecord]:
    limit = base.LINE_BYTES
    text = guarded(path, lambda: file.read(limit + 1))
    if len(text) > limit:
        yield BrokenRecord(path, f"one JSON value of more than {limit} bytes; wanted JSON lines, one sequence a line")
        return
    try:
        value = parsed(text.removeprefix(b"\xef\xbb\xbf"))
    except ValueError as err:
        yield BrokenRecord(path, f"{err}; {CUT}, or it is not JSON")
        return
    yield from _elements(value, path) if isinstance(value, list) else [Line(path, value, 1)]


# cutting a big file


def split_lines(shard: Shard, files: Files) -> list[Shard]:
    """The shard cut at line starts, about every `SHARD_BYTES`; whole where it is packed, small or not of lines.

    A local file is read through once, so that each part knows the number of its first line; a remote one is looked at
    around its cuts only, and places in it are told by byte.
    """
    path = shard.paths[0]
    if len(shard.paths) != 1 or packing(path) or files.size(path) < 2 * SHARD_BYTES:
        return [shard]
    if _spans_lines(path, files):
        return [shard]
    with files.open(path) as file:
        size = files.size(path)
        cuts = guarded(path, lambda: (_seek_cuts if is_url(path) else _count_cuts)(file, size))
    edges = [*cuts, (size, None)]
    return [
        replace(shard, start=a, stop=b, options={**shard.options, "line": number})
        for (a, number), (b, _) in pairwise(edges)
    ]


def _count_cuts(file: BinaryIO, size: int) -> list[tuple[int, int | None]]:
    """(byte, line number) of each part's first line."""
    cuts: list[tuple[int, int | None]] = [(0, 1)]
    at, line = 0, 1
    file.seek(0)
    while block := file.read(min(_BLOCK, SHARD_BYTES)):
        due = cuts[-1][0] + SHARD_BYTES
        if at + len(block) >= due and (found := block.find(b"\n", max(0, due - at))) >= 0:
            start = at + found + 1
            if start < size:
                cuts.append((start, line + block.count(b"\n", 0, found + 1)))
        line += block.count(b"\n")
        at += len(block)
    return cuts


def _seek_cuts(file: BinaryIO, size: int) -> list[tuple[int, int | None]]:
    cuts: list[tuple[int, int | None]] = [(0, 1)]
    while (due := cuts[-1][0] + SHARD_BYTES) < size:
        file.seek(due)
        while (part := file.readline(_BLOCK)) and not part.endswith(b"\n"):
            pass
        start = file.tell()
        if not part or start >= size:
            break
        cuts.append((start, None))
    return cuts


def name_of(path: str) -> str:
    """The last part of a path or URL, without the suffix of its packing."""
    name = os.path.basename(path.rstrip("/"))
    return os.path.splitext(name)[0] if packing(name) else name
