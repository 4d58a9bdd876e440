"""Where one text stops being the beginning of another, and what was dropped or inserted there."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_PIECES = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,20}\]|\w+|\s|.", re.DOTALL)
_MOST_PIECES = 4000
_MOST_CELLS = 400_000  # of the table of the shortest difference
_PROBE = 8
_SURE = 4  # characters that must be left behind a deletion for it to be one and not a chance


@dataclass(frozen=True, slots=True)
class Edit:
    """`lost` stood in the first text at `at`; the second has `inserted` instead, at `at_other`."""

    at: int
    lost: str
    inserted: str
    at_other: int

    def to_json(self) -> dict[str, Any]:
        return {"at": self.at, "lost": shorten(self.lost), "inserted": shorten(self.inserted)}


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the common beginning of two texts or lists of ids."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # slices compare at the speed of memory
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def edits_to_prefix(text: str, longer: str) -> list[Edit]:
    """What makes of `text` the beginning of `longer`: empty where it is that already.

    One deletion or one insertion if that is enough, the smallest; else the pieces in which the two differ. What
    `longer` has after the end of `text` is no edit.
    """
    at = common_prefix(text, longer)
    if at == len(text):
        return []
    rest, other = text[at:], longer[at:]
    kept = overlap(rest, other)
    if kept >= min(_SURE, len(rest) - 1) and kept > 0:
        return [_slid(text, Edit(at, rest[: len(rest) - kept], "", at), 0)]
    inserted = other.find(rest)
    if inserted > 0 and len(rest) >= _SURE:
        return [Edit(at, "", other[:inserted], at)]
    out: list[Edit] = []
    for edit in _pieces(rest, other, at):
        floor = out[-1].at + len(out[-1].lost) if out else 0
        out.append(_slid(text, edit, floor) if edit.lost and not edit.inserted else edit)
    return out


def overlap(text: str, other: str) -> int:
    """Length of the longest end of `text` that is a beginning of `other`."""
    at = text.find(other[:_PROBE])
    while 0 <= at <= len(text) - _PROBE:
        if other.startswith(text[at:]):
            return len(text) - at
        at = text.find(other[:_PROBE], at + 1)
    most = min(_PROBE, len(text), len(other))
    return next((n for n in range(most, 0, -1) if other.startswith(text[-n:])), 0)


def _slid(text: str, edit: Edit, floor: int) -> Edit:
    """A deletion, moved to the left to where a tag begins, if it is the same there; not below `floor`."""
    n, start = len(edit.lost), edit.at
    while not _opens_tag(text, start) and start > floor and text[start - 1] == text[start + n - 1]:
        start -= 1
    if not _opens_tag(text, start):
        return edit
    return Edit(start, text[start : start + n], "", edit.at_other - (edit.at - start))


def _opens_tag(text: str, at: int) -> bool:
    piece = _PIECES.match(text, at)
    return piece is not None and len(piece.group()) > 2 and text[at] in "<[" and text[at + 1] != "/"


def _pieces(rest: str, other: str, at: int) -> list[Edit]:
    a, b = _split(rest), _split(other[: 2 * len(rest) + 2000])
    if len(a) > _MOST_PIECES:
        return [Edit(at, rest, other[: len(rest)], at)]
    b = b[:_MOST_PIECES]
    codes = _shortest(a, b) if len(a) * len(b) <= _MOST_CELLS else _roughly(a, b)
    out: list[Edit] = []
    for i1, i2, j1, j2 in codes:
        out.append(Edit(at + len("".join(a[:i1])), "".join(a[i1:i2]), "".join(b[j1:j2]), at + len("".join(b[:j1]))))
    return out or [Edit(at, rest, other[: len(rest)], at)]


def _shortest(a: list[str], b: list[str]) -> list[tuple[int, int, int, int]]:
    """Fewest pieces lost and inserted so that `a` becomes some beginning of `b`: (i1, i2, j1, j2) of each change."""
    n, m = len(a), len(b)
    cost = [list(range(m + 1))] + [[i + 1] + [0] * m for i in range(n)]
    for i in range(n):
        row, above, piece = cost[i + 1], cost[i], a[i]
        for j in range(m):
            row[j + 1] = above[j] if piece == b[j] else 1 + min(above[j + 1], row[j])
    i, j = n, min(range(m + 1), key=cost[n].__getitem__)
    out: list[tuple[int, int, int, int]] = []
    while i or j:
        if i and j and a[i - 1] == b[j - 1] and cost[i][j] == cost[i - 1][j - 1]:
            i, j = i - 1, j - 1
            continue
        up = i and cost[i][j] == cost[i - 1][j] + 1
        new = (i - 1, i, j, j) if up else (i, i, j - 1, j)
        i, j = new[0], new[2]
        joined = out and out[-1][0] == new[1] and out[-1][2] == new[3]
        out = [*out[:-1], (i, out[-1][1], j, out[-1][3])] if joined else [*out, new]
    return out[::-1]


def _roughly(a: list[str], b: list[str]) -> list[tuple[int, int, int, int]]:
    """The same by difflib, which is quicker and not always the fewest."""
    codes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    out: list[tuple[int, int, int, int]] = []
    for tag, i1, i2, j1, j2 in codes:
        last = i2 == len(a)
        if tag != "equal" and not (tag == "insert" and last):
            end = j1 if tag == "delete" else min(j2, j1 + i2 - i1) if last else j2  # the rest is what comes next
            out.append((i1, i2, j1, end))
    return out


def _split(text: str) -> list[str]:
    return _PIECES.findall(text)


def shorten(text: str, most: int = 400) -> str:
    """A long text with its middle left out."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}[... {len(text) - 2 * half} characters ...]{text[-half:]}"


def around(text: str, at: int, before: int = 24, after: int = 40) -> str:
    """The text near a place, for people."""
    return text[max(0, at - before) : at + after]
