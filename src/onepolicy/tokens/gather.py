"""Findings of many records as one finding a kind: how many, the first of them, where. Constant memory on a stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from onepolicy.codes import CODES, by_rank
from onepolicy.types import Finding, Severity

#: Places and examples that are kept of each kind.
PLACES = 8


@dataclass(slots=True)
class Kind:
    """One kind of finding over all records: its first findings and how often it was met."""

    found: list[Finding]
    count: int = 1

    def add(self, one: Finding) -> None:
        self.count += 1
        if len(self.found) < PLACES:
            self.found.append(one)


@dataclass(slots=True)
class Gathered:
    """Findings by code, severity and class (`evidence["class"]`)."""

    kinds: dict[tuple[str, str, str], Kind] = field(default_factory=dict[tuple[str, str, str], Kind])

    def add(self, found: Iterable[Finding]) -> None:
        for f in found:
            key = (f.code, f.severity.value, str(f.evidence.get("class", "")))
            kind = self.kinds.get(key)
            if kind is None:
                self.kinds[key] = Kind([f])
            else:
                kind.add(f)

    def findings(self) -> list[Finding]:
        """One finding a kind, in the order of suspicion."""
        return by_rank([_one(kind) for kind in self.kinds.values()])

    def counts(self) -> dict[str, int]:
        """code -> how often, in the order of suspicion; notes are left out."""
        out: dict[str, int] = {}
        for (code, severity, _), kind in sorted(self.kinds.items(), key=lambda item: CODES[item[0][0]].rank):
            if severity != Severity.INFO.value:
                out[code] = out.get(code, 0) + kind.count
        return out


def _one(kind: Kind) -> Finding:
    first = kind.found[0]
    if kind.count == 1:
        return first
    examples = [{"place": f.place, "message": f.message, **f.evidence} for f in kind.found]
    places = [f.place for f in kind.found if f.place]
    evidence: dict[str, Any] = {**first.evidence, "records": kind.count, "places": places, "examples": examples}
    return replace(first, message=f"{kind.count:,} times, the first: {first.message}", evidence=evidence)
