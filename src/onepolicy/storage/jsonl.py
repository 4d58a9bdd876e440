"""JSON lines: one record (`onepolicy.records`) a line, UTF-8, read and written one batch at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onepolicy import schema
from onepolicy.declared import Header
from onepolicy.errors import ContentError, MissingExtra
from onepolicy.records import from_records, to_records
from onepolicy.rollouts import Rollouts
from onepolicy.values import json_text

#: Keys of a record under which any JSON may stand.
FREE = ("scorings", *(name for name, spec in schema.COLUMNS.items() if spec.dtype == "json"))
#: A line is held in memory, so it has a limit: bytes of one sequence with all its columns.
MAX_LINE = 1 << 28


def _orjson() -> Any:
    try:
        import orjson
    except ImportError:
        raise MissingExtra("orjson", "cli", "reading and writing JSON lines") from None
    return orjson


def write(rollouts: Rollouts, path: Path) -> None:
    """Errors: `ContentError` for a value that is not JSON; `OSError` of the file system."""
    orjson = _orjson()
    with path.open("xb") as file:
        for number, record in enumerate(to_records(rollouts), 1):
            file.write(_line(orjson, record, f"record {number}") + b"\n")


def _line(orjson: Any, record: dict[str, Any], place: str) -> bytes:
    """orjson is fast, but writes a NaN as null and a date as text, so the user's own values are tried first."""
    free = [json_text(f"{place}: {name!r}", record[name]) for name in FREE if record.get(name) is not None]
    if not any("NaN" in text or "Infinity" in text for text in free):
        try:
            return orjson.dumps(record)
        except TypeError:  # integers of more than 64 bits, lone surrogates: the standard library can
            pass
    return json_text(place, record).encode()


def shards(path: Path, max_tokens: int) -> Iterator[Rollouts]:
    """Errors: `ContentError` with file and line."""
    header = Header()
    batch: list[Any] = []
    places: list[str] = []
    n_tokens = 0
    for place, record in _records(path):
        length = _length(record)
        if batch and n_tokens + length > max_tokens:
            yield from_records(batch, header=header, places=places)
            batch, places, n_tokens = [], [], 0
        batch.append(record)
        places.append(place)
        n_tokens += length
    if batch:
        yield from_records(batch, header=header, places=places)


def _length(record: Any) -> int:
    ids = record.get("token_ids") if isinstance(record, dict) else None
    return len(ids) if isinstance(ids, list) else 0


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """(file:line, parsed line) of each line that is not blank."""
    orjson = _orjson()
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            place = f"{path}:{number}"
            if len(line) > MAX_LINE:
                raise ContentError(f"{place}: the line has more than {MAX_LINE >> 20} MiB; wanted one sequence a line")
            line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if line.strip():
                yield place, _parsed(orjson, line, place)


def _parsed(orjson: Any, line: bytes, place: str) -> Any:
    """One JSON value; `NaN` and `Infinity` without quotes are not JSON but Python writes them, so they are read."""
    try:
        return orjson.loads(line)
    except ValueError as err:
        reason = err
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as err:
        raise ContentError(f"{place}: not UTF-8 at byte {err.start}; wanted JSON lines in UTF-8") from None
    except json.JSONDecodeError as err:
        cut = "" if line.endswith(b"\n") else "; the line does not end, so the file may be cut off"
        raise ContentError(f"{place}: not JSON at character {err.pos}: {' '.join(err.msg.split())}{cut}") from None
    except (ValueError, RecursionError):  # thousands of digits, thousands of brackets
        raise ContentError(f"{place}: not JSON that can be read: {' '.join(str(reason).split())}") from None
