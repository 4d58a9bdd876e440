"""What the audit counts besides the Sums: integers, exact sums, places. It merges in any order to the same bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Places kept of one kind: the first ones by record and position; of these kinds, more.
SPOTS = 16
LIMITS = {"exchanged:sketches": 2048}


@dataclass(frozen=True, slots=True, order=True)
class Spot:
    """A token or record that is worth naming. `position` -1: the whole record. `what`: one line about it."""

    record: str
    position: int
    what: str = ""
    place: str = ""  # file:line


@dataclass(slots=True)
class Counted:
    """`counts`: how many; `sums`: integers in units of 2^-61 (`grid.py`); `spots`: places; `most`: largest values."""

    counts: dict[str, int] = field(default_factory=dict[str, int])
    sums: dict[str, int] = field(default_factory=dict[str, int])
    spots: dict[str, list[Spot]] = field(default_factory=dict[str, list[Spot]])
    most: dict[str, float] = field(default_factory=dict[str, float])

    def count(self, name: str, n: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + int(n)

    def spot(self, name: str, spots: Iterable[Spot]) -> None:
        """Keeps the first `SPOTS` of a kind by record, position and text."""
        self.spots[name] = sorted({*self.spots.get(name, []), *spots})[: LIMITS.get(name, SPOTS)]

    def greatest(self, name: str, value: float) -> None:
        self.most[name] = max(self.most.get(name, value), value)

    def add(self, other: Counted) -> None:
        """Merges `other` into this one."""
        for name, n in other.counts.items():
            self.count(name, n)
        for name, total in other.sums.items():
            self.sums[name] = self.sums.get(name, 0) + total
        for name, spots in other.spots.items():
            self.spot(name, spots)
        for name, value in other.most.items():
            self.greatest(name, value)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, in one canonical order."""
        return {
            "counts": dict(sorted(self.counts.items())),
            "sums": {k: str(v) for k, v in sorted(self.sums.items())},
            "spots": {k: [[s.record, s.position, s.what, s.place] for s in v] for k, v in sorted(self.spots.items())},
            "most": {k: repr(float(v)) for k, v in sorted(self.most.items())},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Counted:
        return cls(
            {str(k): int(v) for k, v in data["counts"].items()},
            {str(k): int(v) for k, v in data["sums"].items()},
            {str(k): [Spot(str(r), int(p), str(w), str(at)) for r, p, w, at in v] for k, v in data["spots"].items()},
            {str(k): float(v) for k, v in data["most"].items()},
        )
