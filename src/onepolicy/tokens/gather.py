"""Findings of many records as one finding a kind: how many, the first of them, where. Constant memory on a stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from onepolicy.codes import CODES, by_rank
from onepolicy.types import Finding

#: Places that are kept of each kind.
PLACES = 8


@dataclass(slots=True)
class Kind:
    """One kind of finding over all records: its first finding and how often it was met."""

    first: Finding
    count: int = 1
    places: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class Gathered:
    """Findings by code, severity and class (`evidence["class"]`)."""

    kinds: dict[tuple[str, str, str], Kind] = field(default_factory=dict[tuple[str, str, str], Kind])

    def add(self, found: Iterable[Finding]) -> None:
        for f in found:
            key = (f.code, f.severity.value, str(f.evidence.get("class", "")))
            kind = self.kinds.get(key)
            if kind is None:
                kind = self.kinds[key] = Kind(f)
            else:
                kind.count += 1
            if f.place and len(kind.places) < PLACES:
                kind.places.append(f.place)

    def findings(self) -> list[Finding]:
        """One finding a kind, in the order of suspicion."""
        return by_rank([_one(kind) for kind in self.kinds.values()])

    def counts(self) -> dict[str, int]:
        """code -> records, in the order of suspicion."""
        out: dict[str, int] = {}
        for (code, _, _), kind in sorted(self.kinds.items(), key=lambda item: CODES[item[0][0]].rank):
            out[code] = out.get(code, 0) + kind.count
        return out


def _one(kind: Kind) -> Finding:
    if kind.count == 1:
        return kind.first
    evidence: dict[str, Any] = {**kind.first.evidence, "records": kind.count, "places": list(kind.places)}
    message = f"{kind.count:,} times, the first: {kind.first.message}"
    return replace(kind.first, message=message, evidence=evidence)
