"""Doubled and missing records, from one small row a sequence: both need all records at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.codes import finding
from onepolicy.integrity.places import many, share
from onepolicy.types import BoolArray, Finding, FloatArray, IntArray

#: A reply of less surprisal (nats) is drawn twice by chance now and then: e^-15 is one in three million.
_BY_CHANCE = 15.0
#: Share of groups that have the usual size, and how many groups it takes to speak of a usual one.
_USUAL, _GROUPS = 0.8, 5
#: Holes in a numbering up to this share of it are missing records; more, and the numbering was never whole.
_HOLES = 0.2
_NAMED = 16

Hashes = NDArray[Any]


def duplicate_findings(
    content: Hashes,
    record: Hashes,
    places: Sequence[str] = (),
    surprisal: FloatArray | None = None,
    named: bool = True,
) -> list[Finding]:
    """`content` `[S]`: 64-bit hashes of ids and log-probs; `record` `[S]`: of the record's id; `places` `[S]`.

    `surprisal` `[S]`: nats of each reply, so that a short reply that was drawn twice is no copy; `named` False: records
    have no ids of their own.
    """
    if not len(content):
        return []
    out: list[Finding] = []
    copies = _again(content)
    if named:
        by_chance = np.zeros(len(content), dtype=bool) if surprisal is None else surprisal < _BY_CHANCE
        copies &= ~by_chance | _again(_joined(content, record))
    elif surprisal is not None:
        copies &= surprisal >= _BY_CHANCE
    if copies.any():
        out.append(_doubled(content, copies, places))
    if named:
        other = _again(record) & ~_again(_joined(content, record))
        if other.any():
            out.append(_other_content(record, other, places))
    return out


def _again(x: Hashes) -> BoolArray:
    """True at every element that equals an earlier one."""
    _, first = np.unique(x, return_index=True)
    out = np.ones(len(x), dtype=bool)
    out[first] = False
    return out


def _joined(a: Hashes, b: Hashes) -> Hashes:
    pair = np.zeros(len(a), dtype=[("a", np.uint64), ("b", np.uint64)])
    pair["a"], pair["b"] = a, b
    return pair


def _some(at: IntArray, places: Sequence[str]) -> list[str]:
    return sorted({str(places[i]) for i in at.tolist()} - {""})[:_NAMED] if len(places) else []


def _doubled(content: Hashes, copies: BoolArray, places: Sequence[str]) -> Finding:
    n, of = int(copies.sum()), len(content)
    sequences = len(np.unique(content[copies]))
    message = f"{n:,} of {many(of, 'record')} repeat the ids and log-probs of another ({many(sequences, 'sequence')})"
    where = _pairs(content, copies, places)
    evidence = {"copies": n, "records": of, "share": n / of, "sequences": sequences, "places": where}
    return finding("duplicate-records", message, place="; ".join(where[:3]), evidence=evidence, origin="run")


def _pairs(content: Hashes, copies: BoolArray, places: Sequence[str]) -> list[str]:
    """The places of copies, each with that of the first of its kind where it has another name."""
    if not len(places):
        return []
    _, first, inverse = np.unique(content, return_index=True, return_inverse=True)
    pairs = {(str(places[i]), str(places[int(first[inverse[i]])])) for i in np.flatnonzero(copies).tolist()}
    return [a if a == b or not b else f"{a} (as {b})" for a, b in sorted(pairs) if a][:_NAMED]


def _other_content(record: Hashes, other: BoolArray, places: Sequence[str]) -> Finding:
    n, ids = int(other.sum()), len(np.unique(record[other]))
    message = (
        f"{many(ids, 'record id stands', 'record ids stand')} for more than one sequence ({many(n, 'record')} too many)"
    )
    where = _some(np.flatnonzero(other), places)
    evidence = {"ids": ids, "records": n, "of": len(record), "places": where}
    return finding("record-id-repeated", message, place="; ".join(where[:3]), evidence=evidence, origin="run")


def missing_findings(groups: Sequence[Any], samples: Sequence[Any] = ()) -> list[Finding]:
    """`groups` `[S]`: the group of each record, None if unknown; `samples` `[S]`: its number within its group or within
    the dump, as far as it is a number. Holes in the numbering, and groups smaller than is usual."""
    out = [_holes(groups, samples), _small(groups)]
    found = [f for f in out if f is not None]
    return found[:1]


def _integers(samples: Sequence[Any]) -> list[int] | None:
    out: list[int] = []
    for x in samples:
        text = str(x)
        if x is None or not text.lstrip("-").isdigit():
            return None
        out.append(int(text))
    return out or None


def _holes(groups: Sequence[Any], samples: Sequence[Any]) -> Finding | None:
    numbers = _integers(samples)
    if numbers is None:
        return None
    if len(set(numbers)) == len(numbers):
        missing = _gaps(numbers)
        wanted, where = len(numbers) + len(missing), [str(i) for i in missing]
    else:
        missing, wanted, where = _gaps_by_group(groups, numbers)
    if not missing or len(missing) > _HOLES * wanted:
        return None
    message = f"{many(len(missing), 'record')} of {wanted:,} are missing from the numbering: {', '.join(where[:5])}"
    message += ", ..." if len(where) > 5 else ""
    evidence = {"missing": len(missing), "of": wanted, "share": share(len(missing), wanted), "numbers": where[:_NAMED]}
    return finding("records-missing", message, place=f"number {where[0]}", evidence=evidence, origin="run")


def _gaps(numbers: Sequence[int]) -> list[int]:
    """Numbers between the least and the greatest that nobody has."""
    have = set(numbers)
    low, high = min(have), max(have)
    if high - low + 1 > len(have) * 2:
        return list(range(len(have) * 2))  # never a whole numbering; the caller sees too many
    return [i for i in range(low, high + 1) if i not in have]


def _gaps_by_group(groups: Sequence[Any], numbers: Sequence[int]) -> tuple[list[int], int, list[str]]:
    """Samples numbered from the same first number in each group, up to the greatest that any group has."""
    have: dict[Any, set[int]] = {}
    for group, i in zip(groups, numbers, strict=True):
        have.setdefault(group, set()).add(i)
    low, high = min(numbers), max(numbers)
    size = high - low + 1
    if size > 4096:
        return [], len(numbers), []
    full = set(range(low, high + 1))
    missing = [(g, i) for g in sorted(have, key=str) for i in sorted(full - have[g])]
    return [i for _, i in missing], size * len(have), [f"{g}/{i}" for g, i in missing]


def _small(groups: Sequence[Any]) -> Finding | None:
    known = [g for g in groups if g is not None]
    sizes = Counter(known)
    if len(sizes) < _GROUPS or len(known) < len(groups):
        return None
    usual, n = Counter(sizes.values()).most_common(1)[0]
    small = {g: k for g, k in sizes.items() if k < usual}
    if not small or n < _USUAL * len(sizes) or usual < 2:
        return None
    missing = sum(usual - k for k in small.values())
    first = sorted(small, key=str)[:_NAMED]
    message = (
        f"{many(len(small), 'group')} of {len(sizes):,} have fewer than the usual {usual} records: {missing:,} missing"
    )
    evidence = {"groups": len(small), "of": len(sizes), "usual": usual, "missing": missing,
                "sizes": {str(g): small[g] for g in first}}  # fmt: skip
    return finding("records-missing", message, place=f"group {first[0]}", evidence=evidence, origin="run")
