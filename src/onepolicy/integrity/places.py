"""Tokens and records worth naming: picked in one order for any split, told as evidence and as a place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onepolicy.counted import SPOTS, Counted, Spot
from onepolicy.integrity.base import Batch
from onepolicy.types import IntArray

#: How many places a message names.
_NAMED = 3


def spot_tokens(counted: Counted, name: str, batch: Batch, at: IntArray, notes: Mapping[str, Any]) -> None:
    """Keeps the first of the flat tokens `at` `[N]`, each with its value of every note, an array `[N]`."""
    if not len(at):
        return
    offsets = batch.rollouts.offsets
    record = np.searchsorted(offsets, at, side="right") - 1
    spots: list[Spot] = []
    by_record = np.argsort(record, kind="stable")
    lo = np.searchsorted(record[by_record], chosen := _first_records(batch, record))
    hi = np.searchsorted(record[by_record], chosen, side="right")
    for s, first, end in zip(chosen, lo.tolist(), hi.tolist(), strict=True):
        for i in by_record[first : min(end, first + SPOTS)].tolist():
            position = int(at[i] - offsets[s])
            told = {k: number(v[i]) for k, v in notes.items()}
            reply = position - int(batch.prompts[s])
            spots.append(Spot(batch.names[s], position, _text({"reply_position": reply, **told}), batch.places[s]))
    counted.spot(name, spots)


def spot_records(counted: Counted, name: str, batch: Batch, records: Any, notes: Mapping[str, Any]) -> None:
    """Keeps the first of the sequences `records` `[N]`; a note has a value for each of them."""
    rows = np.asarray(records, dtype=np.int64)
    place = {int(s): i for i, s in enumerate(rows)}
    spots = [
        Spot(batch.names[s], -1, _text({k: number(v[place[s]]) for k, v in notes.items()}), batch.places[s])
        for s in _first_records(batch, rows)
    ]
    counted.spot(name, spots)


def spot(record: str | None, place: str, note: Mapping[str, Any], position: int = -1) -> Spot:
    """One place that is not in the batch's rollouts."""
    return Spot(record or "", position, _text(note), place)


def _first_records(batch: Batch, record: IntArray) -> list[int]:
    """The sequences among `record` whose names come first: enough of them to hold the first `SPOTS` places."""
    found, counts = np.unique(record, return_counts=True)
    order = sorted(zip(found.tolist(), counts.tolist(), strict=True), key=lambda x: batch.names[x[0]])
    out: list[int] = []
    n, last = 0, None
    for s, count in order:
        if n >= SPOTS and batch.names[s] != last:
            break
        out.append(s)
        n, last = n + count, batch.names[s]
    return out


def number(x: Any) -> Any:
    """JSON-able: numpy scalars as Python's, what is not finite as its word."""
    x = x.item() if isinstance(x, np.generic) else x
    return str(x) if isinstance(x, float) and not np.isfinite(x) else x


def _text(note: Mapping[str, Any]) -> str:
    return json.dumps(dict(note), ensure_ascii=False)


def note_of(spot: Spot) -> dict[str, Any]:
    return json.loads(spot.what) if spot.what else {}


def places(spots: Sequence[Spot]) -> list[dict[str, Any]]:
    """As evidence: record, position, the notes, file and line."""
    out: list[dict[str, Any]] = []
    for s in spots:
        position = {} if s.position < 0 else {"position": s.position}
        out.append({"record": s.record, **position, **note_of(s), **({"place": s.place} if s.place else {})})
    return out


def place(spots: Sequence[Spot]) -> str:
    """The first few in words, each record once with its positions: in the reply, where they are in the reply."""
    by_record: dict[tuple[str, str], list[Spot]] = {}
    for s in spots:
        by_record.setdefault((s.record, s.place), []).append(s)
    words = [_words(record, at, some) for (record, at), some in list(by_record.items())[:_NAMED]]
    return "; ".join(words)


def _words(record: str, at: str, spots: Sequence[Spot]) -> str:
    named = f"record {record}" if record else ""
    inside = [s for s in spots if s.position >= 0][:_NAMED]
    replies = [note_of(s).get("reply_position", -1) for s in inside]
    if inside:
        of_reply = min(replies) >= 0
        positions = replies if of_reply else [s.position for s in inside]
        what = f"{'reply ' if of_reply else ''}position{'s' if len(inside) > 1 else ''}"
        named += f", {what} {', '.join(str(p) for p in positions)}"
    return f"{named} ({at})" if at and named else at or named


def share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def many(n: int, what: str, more: str | None = None) -> str:
    """`1 record`, `12 records`; `more`: its plural where that is no `s`."""
    return f"{n:,} {what if n == 1 else more or what + 's'}"
