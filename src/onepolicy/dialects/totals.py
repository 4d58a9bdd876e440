"""Totals of a part: integer sums on the grid, so that the bits do not depend on how a dump was split."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onepolicy.errors import ContentError
from onepolicy.grid import segment_sums, to_float


@dataclass(slots=True)
class Total:
    """A sum in grid units with the NaN and the infinities of each sign counted apart; or an extreme."""

    reduce: str
    total: int = 0
    nan: int = 0
    up: int = 0
    down: int = 0
    extreme: float | None = None

    def take(self, x: Any) -> None:
        """Add an array of values."""
        x = np.ascontiguousarray(x, dtype=np.float64).ravel()
        if not len(x):
            return
        if self.reduce != "sum":
            self._extend(float(x.max() if self.reduce == "max" else x.min()))
            return
        sums = segment_sums(x, np.zeros(1, dtype=np.int64), np.array([len(x)]))
        self.total += sums.to_int(0)
        if int(sums.nonfinite[0]):
            self.nan += int(np.isnan(x).sum())
            self.up += int((x == np.inf).sum())
            self.down += int((x == -np.inf).sum())

    def _extend(self, x: float | None) -> None:
        """NaN stays, as it does in the frameworks."""
        if x is None or (self.extreme is not None and math.isnan(self.extreme)):
            return
        worse = (
            self.extreme is None or math.isnan(x) or (x > self.extreme if self.reduce == "max" else x < self.extreme)
        )
        self.extreme = x if worse else self.extreme

    def merge(self, other: Total) -> None:
        self.total += other.total
        self.nan += other.nan
        self.up += other.up
        self.down += other.down
        self._extend(other.extreme)

    def value(self) -> float | None:
        """The sum as float64 would have it, NaN and infinities included; None for an extreme of nothing."""
        if self.reduce != "sum":
            return self.extreme
        if self.nan or (self.up and self.down):
            return math.nan
        return math.inf if self.up else -math.inf if self.down else to_float(self.total)

    # -- JSON ----------------------------------------------------------------------------------------------------------

    def to_list(self) -> list[Any]:
        if self.reduce == "sum":
            return [self.reduce, str(self.total), self.nan, self.up, self.down]
        return [self.reduce, None if self.extreme is None else self.extreme.hex()]

    @classmethod
    def from_list(cls, data: Sequence[Any]) -> Total:
        if data[0] == "sum":
            return cls("sum", int(data[1]), int(data[2]), int(data[3]), int(data[4]))
        if data[0] not in ("max", "min"):
            raise ContentError(f"saved totals: got {data[0]!r}, wanted sum, max or min")
        return cls(data[0], extreme=None if data[1] is None else float.fromhex(data[1]))
