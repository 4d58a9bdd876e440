"""Two lists of ids for one conversation: the smallest edits between them, and what stands after a stop token.

A template often writes a newline after the stop token that ends a turn; the sampler stopped before it. Where a rollout
goes on without it, every later turn was sampled after another prompt than the one that is trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from onepolicy.codes import finding
from onepolicy.types import Finding

#: Edits up to which the script is proven to be smallest; beyond, one edit spans what lies between the first and last.
LARGEST = 1024


@dataclass(frozen=True, slots=True)
class Edit:
    """a[at : at + len(deleted)] == deleted becomes b[at_b : at_b + len(inserted)] == inserted."""

    at: int
    at_b: int
    deleted: tuple[int, ...]
    inserted: tuple[int, ...]

    @property
    def op(self) -> str:
        return "replace" if self.deleted and self.inserted else "delete" if self.deleted else "insert"


@dataclass(frozen=True, slots=True)
class Edits:
    """The edits from a to b, in order. `minimal` False: more than `LARGEST`, so the middle is one edit."""

    edits: tuple[Edit, ...]
    minimal: bool = True


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids the two begin with in common."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    step, at = 256, 0
    while a[at : at + step] == b[at : at + step]:
        at += step
    return next(i for i in range(at, n) if a[i] != b[i])


def edits_between(a: Sequence[int], b: Sequence[int], largest: int = LARGEST) -> Edits:
    """A shortest edit script (insertions and deletions of single ids), neighbours joined.

    Myers, "An O(ND) difference algorithm and its variations" (1986). An insertion or deletion that could stand at
    several places stands at the last one, so what both begin with is never part of an edit.
    """
    a, b = list(a), list(b)
    head = common_prefix(a, b)
    tail = common_prefix(a[head:][::-1], b[head:][::-1])
    middle_a, middle_b = a[head : len(a) - tail], b[head : len(b) - tail]
    matches = _matches(middle_a, middle_b, largest)
    if matches is None:
        return Edits((Edit(head, head, tuple(middle_a), tuple(middle_b)),), minimal=False)
    pairs = [(head + i, head + j, size) for i, j, size in matches]
    found = list(_gaps(a, b, [(0, 0, head), *pairs, (len(a) - tail, len(b) - tail, tail)]))
    return Edits(tuple(_moved_right(a, found)))


def _matches(a: list[int], b: list[int], largest: int) -> list[tuple[int, int, int]] | None:
    """(start in a, start in b, length) of what a shortest script keeps; None beyond `largest` edits."""
    n, m = len(a), len(b)
    if not n or not m:
        return []
    furthest, trace = {1: 0}, list[dict[int, int]]()
    for d in range(min(n + m, largest) + 1):
        trace.append(furthest.copy())
        for k in range(-d, d + 1, 2):
            down = k == -d or (k != d and furthest[k - 1] < furthest[k + 1])
            x = furthest[k + 1] if down else furthest[k - 1] + 1
            while x < n and 0 <= x - k < m and a[x] == b[x - k]:
                x += 1
            furthest[k] = x
            if x >= n and x - k >= m:
                return _walked_back(trace, n, m)
    return None


def _walked_back(trace: list[dict[int, int]], n: int, m: int) -> list[tuple[int, int, int]]:
    out: list[tuple[int, int, int]] = []
    x, y = n, m
    for d in range(len(trace) - 1, -1, -1):
        furthest, k = trace[d], x - y
        down = k == -d or (k != d and furthest.get(k - 1, -1) < furthest.get(k + 1, -1))
        before = k + 1 if down else k - 1
        start = furthest[before] if d else 0
        at = (start, start - before) if d else (0, 0)
        first = (at[0], at[1] + 1) if down else (at[0] + 1, at[1])
        first = first if d else (0, 0)
        if x > first[0]:
            out.append((first[0], first[1], x - first[0]))
        x, y = at
    return out[::-1]


def _gaps(a: list[int], b: list[int], kept: list[tuple[int, int, int]]) -> Iterator[Edit]:
    """What lies between neighbours of what is kept."""
    for (i, j, size), (i2, j2, _) in pairwise(kept):
        if i + size < i2 or j + size < j2:
            yield Edit(i + size, j + size, tuple(a[i + size : i2]), tuple(b[j + size : j2]))


def _moved_right(a: list[int], edits: list[Edit]) -> list[Edit]:
    """Pure insertions and deletions at the last place where they say the same."""
    out: list[Edit] = []
    limit = len(a)
    for edit in reversed(edits):
        ids, size = list(edit.inserted or edit.deleted), len(edit.deleted)
        steps = 0
        while edit.op != "replace" and edit.at + size + steps < limit and a[edit.at + size + steps] == ids[0]:
            ids = [*ids[1:], ids[0]]
            steps += 1
        new = tuple(ids)
        moved = replace(edit, at=edit.at + steps, at_b=edit.at_b + steps)
        edit = replace(moved, inserted=new) if edit.op == "insert" else moved
        edit = replace(edit, deleted=new) if edit.op == "delete" else edit
        out.append(edit)
        limit = edit.at
    return out[::-1]


# what edits mean


def described(edit: Edit, names: Mapping[int, str] | None = None, *, harmless: bool = False) -> dict[str, Any]:
    """As evidence: `ids` of an insertion or deletion, `deleted` and `ids` (the new ones) of a replacement."""
    ids = edit.inserted or edit.deleted
    out: dict[str, Any] = {"op": edit.op, "at_rollout_index": edit.at, "at_rendered_index": edit.at_b, "ids": list(ids)}
    if edit.op == "replace":
        out["deleted"] = list(edit.deleted)
    if names:
        out["tokens"] = [names.get(i, str(i)) for i in ids]
    return out | ({"harmless": True} if harmless else {})


def check_suffixes(
    rollout_ids: Sequence[int],
    rendered_ids: Sequence[int],
    *,
    stop_ids: Sequence[int] = (),
    spans: Sequence[tuple[int, int]] = (),
    names: Mapping[int, str] | None = None,
    record_id: str = "",
    place: str = "",
) -> list[Finding]:
    """The ids that a rollout went through against the ids that the template renders for the same conversation.

    `spans`: `[start, stop)` in `rollout_ids` that were sampled; `stop_ids`: ids that end a turn (the last ids of the
    spans otherwise). Findings: `suffix-after-stop-missing` for what the template puts after a stop token and the
    rollout lacks, `sampled-span-changed` for edits inside a span, `prompt-ids-differ` for edits elsewhere. What is
    missing behind the rollout's very last id is harmless, and alone no finding.
    """
    edits = edits_between(rollout_ids, rendered_ids)
    ends = {stop for _, stop in spans}
    stops = set(stop_ids) or {rollout_ids[stop - 1] for _, stop in spans if stop}
    reader = _Reader(list(rollout_ids), stops, ends, list(spans))
    kinds = [reader.kind(edit) for edit in edits.edits]
    if all(kind == "harmless" for kind, _ in kinds):
        return []
    evidence = _evidence(edits, kinds, reader, common_prefix(list(rollout_ids), list(rendered_ids)), names)
    return [
        finding(code, _said(code, record_id, evidence), place=place, evidence={**evidence, "class": kind})
        for code, kind in dict.fromkeys((_CODES[kind], kind) for kind, _ in kinds if kind != "harmless")
    ]


_CODES: dict[str, str] = {
    "suffix-missing": "suffix-after-stop-missing",
    "suffix-extra": "suffix-after-stop-missing",
    "suffix-differs": "suffix-after-stop-missing",
    "stop-and-suffix-missing": "suffix-after-stop-missing",
    "span-changed": "sampled-span-changed",
    "between-turns": "prompt-ids-differ",
    "prompt": "prompt-ids-differ",
}
_TEXTS: dict[str, str] = {
    "suffix-after-stop-missing": "what the template puts after the stop token is not what the rollout has",
    "sampled-span-changed": "rendering changes sampled ids",
    "prompt-ids-differ": "rendering gives other ids between the sampled spans",
}
_BEFORE = "rendering gives other ids before the first sampled span"


@dataclass(frozen=True, slots=True)
class _Reader:
    """What an edit means, by where it stands in the rollout."""

    ids: list[int]
    stops: set[int]
    ends: set[int]
    spans: list[tuple[int, int]]

    def kind(self, edit: Edit) -> tuple[str, int | None]:
        """The kind, and the first turn (from 1) that was sampled after the edit, None where there is none."""
        start, stop = edit.at, edit.at + len(edit.deleted)
        turn = next((k + 1 for k, (first, _) in enumerate(self.spans) if first >= stop), None)
        if any(a < start < b or (start < stop and start < b and a < stop) for a, b in self.spans):
            return "span-changed", turn
        if not self._after_stop(edit):
            return ("between-turns" if any(b <= start for _, b in self.spans) else "prompt"), turn
        nothing_after = turn is None if self.spans else start >= len(self.ids)
        return ("harmless" if nothing_after else self._suffix(edit)), turn

    def _after_stop(self, edit: Edit) -> bool:
        """Whether it stands right behind a stop token, at any of the places where it says the same."""
        at, ids = edit.at, list(edit.inserted or edit.deleted)
        while True:
            if at in self.ends or (at > 0 and self.ids[at - 1] in self.stops):
                return True
            if edit.op == "replace" or at == 0 or self.ids[at - 1] != ids[-1]:
                return False
            at, ids = at - 1, [ids[-1], *ids[:-1]]

    def _suffix(self, edit: Edit) -> str:
        if edit.inserted and edit.inserted[0] in self.stops and self.ids[edit.at - 1] not in self.stops:
            return "stop-and-suffix-missing"
        return {"insert": "suffix-missing", "delete": "suffix-extra", "replace": "suffix-differs"}[edit.op]


def _evidence(
    edits: Edits, kinds: list[tuple[str, int | None]], reader: _Reader, first: int, names: Mapping[int, str] | None
) -> dict[str, Any]:
    serious = [(e, turn) for e, (kind, turn) in zip(edits.edits, kinds, strict=True) if kind != "harmless"]
    turns = [turn for _, turn in serious if turn is not None]
    shown = [
        described(e, names, harmless=kind == "harmless") | {"class": kind}
        for e, (kind, _) in zip(edits.edits, kinds, strict=True)
    ]
    places = [e.at for e, _ in serious]
    return {
        "edits": shown,
        "minimal": edits.minimal,
        "first_diff": first,
        "matters_from_turn": min(turns) if turns else None,
        "positions": places,
        "stop_ids": sorted(reader.stops),
    }


def _said(code: str, record_id: str, evidence: Mapping[str, Any]) -> str:
    first = next(e for e in evidence["edits"] if _CODES.get(e["class"]) == code)
    texts = first.get("tokens")
    what = f"{first['op']} {first['ids']}{f' ({texts})' if texts else ''} at {first['at_rollout_index']}"
    turn = evidence["matters_from_turn"]
    text = _BEFORE if first["class"] == "prompt" else _TEXTS[code]
    later = f"; it matters from turn {turn} on" if turn else ""
    return f"{f'{record_id}: ' if record_id else ''}{text}: {what}{later}"
