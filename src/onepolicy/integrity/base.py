"""What a check of the record looks at, and how it is judged: counted batch by batch, judged once on the total.

A check is one module with

    look(batch: Batch) -> Counted          of one batch; names in it start with the check's own key ("fills:...")
    judge(total: Counted, told: Told) -> list[Finding]

and one line in `CHECKS`. `look` never raises on odd data. Only integers and places merge, and what is counted of a
record depends on that record alone, so any split of a dump gives the same total. Counters say `a` and `b` for the two
scorings; `Told.names` has their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from onepolicy.formats.settle import Settled
from onepolicy.grid import segment_sums, selected_segments
from onepolicy.rollouts import Rollouts
from onepolicy.types import BoolArray, FloatArray, IntArray

Side = Literal["a", "b"]
SIDES: tuple[Side, Side] = ("a", "b")


@dataclass(frozen=True, slots=True)
class Pair:
    """Tokens that count and that both sides scored with a finite value, one after another.

    `a`, `b`, `gap` (|b - a|): `[N]`; `at`: `[N]` their flat places; `starts`, `lengths`: `[S]` of each sequence.
    """

    a: FloatArray
    b: FloatArray
    gap: FloatArray
    at: IntArray
    starts: IntArray
    lengths: IntArray

    def of(self, side: Side) -> FloatArray:
        return self.a if side == "a" else self.b

    def take(self, rows: IntArray) -> Pair:
        """The tokens of these sequences alone."""
        chosen = np.zeros(len(self.lengths), dtype=bool)
        chosen[rows] = True
        inside, lengths = np.repeat(chosen, self.lengths), self.lengths[rows]
        starts = np.cumsum(lengths) - lengths
        return Pair(self.a[inside], self.b[inside], self.gap[inside], self.at[inside], starts, lengths)

    def per_record(self, x: Any) -> FloatArray:
        """`[S]` sums of `x` `[N]` over each sequence; the same bits in any batch."""
        out = np.zeros(len(self.starts))
        full = self.lengths > 0
        if full.any():
            out[full] = np.add.reduceat(x, self.starts[full], dtype=np.float64)
        return out


@dataclass(frozen=True, eq=False)
class Batch:
    """Some sequences of a dump. `settled` has what was set aside (None for a canonical file, where nothing can be).

    `rollouts`: what fits; `names`: its record ids `[S]`, `places` `[S]`. `a`, `b`: the scorings that are compared, None
    where the dump has only one. `vocab_size`: of the model, None if unknown. `order`: `[S]` where each sequence stands
    in the dump, None if unknown; `asked`: the scorings asked for, which records that are set aside may have.
    """

    rollouts: Rollouts
    names: tuple[str, ...]
    places: tuple[str, ...]
    a: str | None
    b: str | None
    settled: Settled | None = None
    vocab_size: int | None = None
    order: IntArray | None = None
    asked: tuple[str | None, str | None] = (None, None)

    def values(self, scoring: str) -> FloatArray:
        """`[T]` log-probs of a scoring in float64, NaN where null."""
        col = self.rollouts.scorings[scoring].logprobs
        out = np.array(col.values, dtype=np.float64)
        if col.valid is not None:
            out[~col.valid] = np.nan
        return out

    def scored(self, scoring: str) -> BoolArray:
        """`[T]` where a scoring has a value (it may be NaN or infinite)."""
        return self.rollouts.scorings[scoring].logprobs.mask()

    def where(self, at: int) -> tuple[str, int, str]:
        """(record id, position, place) of flat token `at`."""
        s = int(np.searchsorted(self.rollouts.offsets, at, side="right")) - 1
        return self.names[s], at - int(self.rollouts.offsets[s]), self.places[s]

    def sequence_of(self) -> IntArray:
        """`[T]` the sequence of each token."""
        return np.repeat(np.arange(len(self.rollouts)), self.rollouts.lengths)

    # -- worked out once for all checks; not to be written to -----------------------------------------------------

    @cached_property
    def side_values(self) -> dict[Side, FloatArray]:
        """The values `[T]` of the sides that there are."""
        named = zip(SIDES, (self.a, self.b), strict=True)
        return {side: self.values(name) for side, name in named if name is not None}

    @cached_property
    def trained(self) -> BoolArray | None:
        """`[T]` False where the loss mask says 0; None without one."""
        return self.rollouts.trained

    @cached_property
    def live(self) -> BoolArray:
        """`[T]` drawn tokens that count: what the loss mask takes out may hold any filler."""
        return self.rollouts.drawn if self.trained is None else self.rollouts.drawn & self.trained

    @cached_property
    def usual_gap(self) -> FloatArray:
        """`[S]` mean gap of each sequence's tokens of the pair, each counted up to 1 nat; 0 without any."""
        if self.pair is None:
            return np.zeros(len(self.rollouts))
        return self.pair.per_record(np.minimum(self.pair.gap, 1.0)) / np.maximum(self.pair.lengths, 1)

    @cached_property
    def prompts(self) -> IntArray:
        """`[S]` tokens of each prompt; where that is not told, those before the first drawn one, 0 without any."""
        col = self.rollouts.records.get("prompt_length")
        if col is not None and col.valid is None:
            return col.values.astype(np.int64)
        at = np.flatnonzero(self.rollouts.drawn)
        rows, first = np.unique(np.searchsorted(self.rollouts.offsets, at, side="right") - 1, return_index=True)
        before = np.zeros(len(self.rollouts), dtype=np.int64)
        before[rows] = at[first] - self.rollouts.offsets[rows]
        return before if col is None else np.where(col.mask(), col.values, before).astype(np.int64)

    @cached_property
    def finite(self) -> dict[Side, FloatArray]:
        """The finite values of the sides at tokens that count, each one after another."""
        out: dict[Side, FloatArray] = {}
        for side, values in self.side_values.items():
            good = self.live & np.isfinite(values)
            # the pair's are among them: as many are the same ones
            alike = self.pair is not None and len(self.pair.a) == np.count_nonzero(good)
            out[side] = self.pair.of(side) if self.pair is not None and alike else values[good]
        return out

    @cached_property
    def pair(self) -> Pair | None:
        """None where the dump has one side only."""
        if len(self.side_values) < 2:
            return None
        a, b = self.side_values["a"], self.side_values["b"]
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.abs(b - a)
        both = self.live & np.isfinite(gap)  # inf - inf is NaN, so both are finite
        at = np.flatnonzero(both)
        starts, lengths = selected_segments(self.rollouts.offsets, both)
        return Pair(a[at], b[at], gap[at], at, starts, lengths)


def total_of(values: FloatArray) -> int:
    """The sum of finite values in grid units, exact after each is rounded to the grid once."""
    one = np.zeros(1, dtype=np.int64)
    return segment_sums(np.asarray(values, dtype=np.float64), one, np.array([len(values)], dtype=np.int64)).to_int(0)


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of the whole dump when checks are judged. `vocab_size`: of the model, None if unknown; `names`: the
    two scorings; `facts`: declared sampling parameters, dtypes, ... as sets of values seen, JSON-able."""

    names: tuple[str | None, str | None]
    vocab_size: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def name(self, side: Side) -> str:
        return (self.names[0] or "a") if side == "a" else (self.names[1] or "b")
