"""Where the gap is: integer sums by bin, the same bits for any split and order.

A profile says which bin a token is in. Each bin holds, over its tokens with two finite log-probs: how many, the sums of
d, |d|, d^2, ratio - 1 and |d| on the token's own scale, how many d are above 0, a histogram of |d|, and what the
standard error of its means needs, with the sequence as the cluster. Terms are rounded once to multiples of 2^-32 nats.

A token's own scale is 1 - p: an error of the logits moves a likely token's log-prob by that share of it. On this scale
(`scaled`) a stretch of sure tokens does not look like a smaller gap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.profiles.blocks import Block, blocks, sums_in_order
from onepolicy.profiles.repeats import repeats
from onepolicy.rollouts import Rollouts
from onepolicy.types import BoolArray, FloatArray, IntArray, LogprobPairs

#: Terms are integers in units of 2^-BITS nats; squares of a sequence's sums in units of 2^-SQUARE_BITS.
BITS, SQUARE_BITS = 32, 44
#: Terms above this are cut: d and ratio - 1 of one token.
_MOST = 2.0**18
#: Sums of whole numbers whose sizes add up to less than this are exact, with room for the rounding of that sum itself.
_EXACT = 2.0**52
#: |d| / (1 - p + SHAPE), p the larger of the two probabilities; cut at MOST_SCALED, so that one outlier is one token.
SHAPE, MOST_SCALED = 0.003, 4.0
#: A gap beyond this, nats, says that a record is broken: signatures cut it here, so that one token decides no fit.
MOST_GAP = 30.0
#: Squares of a sequence's `scaled` are added in units of 1/64.
SCALED_UNIT = 64.0
#: |d| is binned by its float32 bits down to 3 mantissa bits: quantiles within 6% relative.
_SHIFT = 20

#: The bin of what is left of a profile with too many of them.
OTHERS = "(others)"
#: What a bin holds, in the order of `Bins.table`'s rows.
FIELDS = ("n", "sequences", "d", "abs", "ratio", "above", "dd", "nd", "aa", "na", "nn", "cut")
FIELDS += ("scaled", "ss", "ns", "square")


#: No log-prob is larger; what is held at this cannot overflow when it is squared and added up.
_MOST_NATS = 1e100


def _held(x: FloatArray) -> FloatArray:
    inside = not len(x) or (x.min() >= -_MOST_NATS and x.max() <= _MOST_NATS)
    return x if inside else np.clip(x, -_MOST_NATS, _MOST_NATS)


class Seen:
    """The tokens of one batch that a profile looks at: drawn, with two finite log-probs, in order.

    `at` `[N]`: where they stand in the flat columns; `sequence` `[N]`; `a`, `b`, `d` `[N]` nats, held
    within 1e100.
    """

    def __init__(self, rollouts: Rollouts, pairs: LogprobPairs, mask: BoolArray) -> None:
        self.rollouts, self.pairs = rollouts, pairs
        self.at: IntArray = np.flatnonzero(mask)
        self.all_sequences = np.repeat(np.arange(len(rollouts)), rollouts.lengths)
        self.sequence: IntArray = self.all_sequences[self.at]
        self.a: FloatArray = _held(pairs.a[self.at])
        self.b: FloatArray = _held(pairs.b[self.at])
        self.d: FloatArray = self.b - self.a

    def __len__(self) -> int:
        return len(self.at)

    @cached_property
    def counts(self) -> IntArray:
        """`[S]` selected tokens of each sequence."""
        return np.bincount(self.sequence, minlength=len(self.rollouts))

    @cached_property
    def starts(self) -> IntArray:
        """`[S]` where each sequence's selected tokens begin."""
        return np.cumsum(self.counts) - self.counts

    @cached_property
    def index(self) -> IntArray:
        """`[N]` the token's place among the selected tokens of its sequence."""
        return np.arange(len(self.at)) - np.repeat(self.starts, self.counts)

    def per_sequence(self, x: FloatArray) -> FloatArray:
        """`[S]` sums of `x` `[N]`. Each is made of its sequence alone, but in an order of its own: floats that are not
        whole numbers may differ in the last bit from a plain loop."""
        out, full = np.zeros(len(self.counts)), self.counts > 0
        if full.any():
            out[full] = np.add.reduceat(x, self.starts[full])
        return out

    @cached_property
    def blocks(self) -> list[Block]:
        """The selected tokens, some whole sequences at a time."""
        return blocks(self.counts)

    def sums_in_order(self, columns: Callable[[slice], Mapping[str, FloatArray]]) -> dict[str, FloatArray]:
        """`[S]` sums over sequences of each of the columns that `columns` makes for a slice of tokens, the terms of
        each sequence one after the other."""
        return sums_in_order(self.blocks, len(self.counts), columns)

    @cached_property
    def size(self) -> FloatArray:
        """`[N]` |d|."""
        return np.abs(self.d)

    @cached_property
    def clipped(self) -> FloatArray:
        """`[N]` d, cut at `MOST_GAP` either way."""
        return np.clip(self.d, -MOST_GAP, MOST_GAP) if self.size.max(initial=0.0) > MOST_GAP else self.d

    @cached_property
    def units(self) -> dict[str, FloatArray]:
        """The terms as whole numbers of units, in float64; exact to add up to 2^53."""
        # d is cut at MOST_GAP under exp: beyond it ratio - 1 is above _MOST, or -1 to the unit
        d, ratio = np.clip(self.d, -_MOST, _MOST), np.expm1(self.clipped)
        square = d * d
        np.minimum(ratio, _MOST, out=ratio)
        np.minimum(square, 2.0**16, out=square)
        columns = {"ratio": ratio, "square": square, "d": d, "scaled": np.minimum(self.scaled, MOST_SCALED)}
        for x in columns.values():
            np.multiply(x, 2.0**BITS, out=x)
            np.rint(x, out=x)
        return columns | {"abs": np.abs(d), "above": (self.d > 0).astype(np.float64)}

    @cached_property
    def exact(self) -> bool:
        """Whether all sums of `units` over tokens of one sequence are exact, in any order."""
        sums = {k: self.per_sequence(self.units[k]) for k in ("abs", "ratio", "scaled", "square")}
        sums["ratio"] += 2.0 * 2.0**BITS * self.counts  # none is below -1: this is above the sum of their sizes
        return all(x.max(initial=0.0) < _EXACT for x in sums.values())

    @cached_property
    def unit_sums(self) -> dict[str, FloatArray]:
        """`[S]` sums of the `units` over each sequence."""
        if self.exact:
            return {k: self.per_sequence(v) for k, v in self.units.items()}
        return {k: np.bincount(self.sequence, v, len(self.counts)).astype(np.float64) for k, v in self.units.items()}

    @cached_property
    def scaled(self) -> FloatArray:
        """`[N]` |d| on the token's own scale: what the logits are off by, about."""
        out = self.likely()
        np.subtract(1.0, out, out=out)
        out += SHAPE
        return np.divide(self.size, out, out=out)

    def likely(self, at: slice = slice(None)) -> FloatArray:
        """Of the tokens `at` the larger of the two probabilities, at most 1."""
        out = np.maximum(self.a[at], self.b[at])
        np.minimum(out, 0.0, out=out)
        return np.exp(out, out=out)

    @cached_property
    def sizes(self) -> tuple[IntArray, NDArray[np.int16]]:
        """Bins of |d|: (`[C]` the codes that there are, `[N]` which of them each token has)."""
        with np.errstate(over="ignore"):
            codes = self.size.astype(np.float32).view(np.uint32)
        codes >>= _SHIFT
        there = np.bincount(codes, minlength=1 << (32 - _SHIFT)) > 0
        return np.flatnonzero(there), (np.cumsum(there) - 1).astype(np.int16)[codes]

    @cached_property
    def sequence_sizes(self) -> IntArray | None:
        """`[S, C]` tokens of each sequence by bin of |d|; None where most would be 0."""
        codes, code = self.sizes
        shape = len(self.rollouts), len(codes)
        if not len(self) or shape[0] * shape[1] > len(self):
            return None
        key = self.sequence * shape[1]
        key += code
        return np.bincount(key, minlength=shape[0] * shape[1]).reshape(shape)

    @cached_property
    def repeats(self) -> tuple[NDArray[np.int32], BoolArray]:
        """(`[N]` how often the token was drawn before in its sequence, `[N]` whether it stood before undrawn)."""
        times, undrawn = repeats(self.rollouts.offsets, self.pairs.token_ids, self.rollouts.drawn)
        return times[self.at], undrawn[self.at]

    def record(self, name: str) -> tuple[IntArray, list[str]] | None:
        """A record column as (code of each sequence `[S]`, -1 where null; labels). None where it is not recorded."""
        col = self.rollouts.records.get(name)
        if col is None:
            return None
        mask = col.mask()
        values = [str(x) for x in col.values[mask].tolist()]
        labels = sorted(set(values), key=_natural)
        number = {label: i for i, label in enumerate(labels)}
        out = np.full(len(self.rollouts), -1, dtype=np.int64)
        out[mask] = [number[v] for v in values]
        return out, labels


def _natural(label: str) -> tuple[int, float, str]:
    """Numbers by value, before words."""
    try:
        number = float(label)
    except ValueError:
        return 1, 0.0, label
    return (0, number, label) if math.isfinite(number) else (1, 0.0, label)


#: Bin of each token `[N]` (-1: in none) and the bins' labels; None where the dump does not tell.
Binned = tuple[IntArray, Sequence[str]] | None


@dataclass(frozen=True, slots=True)
class Profile:
    """One way to cut the tokens. `needs`: the column it reads, for the line that says why it is missing.

    `level` record: all tokens of a sequence are in one bin, and `bins` gives `[S]`. `order`: of labels that are no
    numbers. `most`: bins that are kept apart, 0: all; names come from the dump, and may be as many as its records.
    """

    key: str
    title: str
    bins: Callable[[Seen], Binned]
    needs: str = ""
    level: str = "token"
    order: tuple[str, ...] = ()
    most: int = 0

    def place_of(self, label: str) -> tuple[int, float, str]:
        """Sorts labels: as `order` has them, else numbers by value, before words."""
        return (0, float(self.order.index(label)), "") if label in self.order else _natural(label)


@dataclass(slots=True)
class Bins:
    """One profile, added up: label -> integers by the names in `FIELDS`, and the histogram of |d|."""

    table: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    sizes: dict[str, dict[int, int]] = field(default_factory=dict[str, dict[int, int]])

    def add(self, other: Bins) -> None:
        for label, row in other.table.items():
            mine = self.table.setdefault(label, [0] * len(FIELDS))
            self.table[label] = [x + y for x, y in zip(mine, row, strict=True)]
        for label, sizes in other.sizes.items():
            into = self.sizes.setdefault(label, {})
            for code, n in sizes.items():
                into[code] = into.get(code, 0) + n

    def cut(self, most: int) -> Bins:
        """The first `most` bins, all others as one: the same for any split, since a bin that is among the first of all
        is among the first of any part."""
        names = [k for k in self.labels() if k != OTHERS]
        if not most or len(names) <= most:
            return self
        gone = {*names[most:], OTHERS}
        out = Bins({k: v for k, v in self.table.items() if k not in gone}, {k: self.sizes[k] for k in names[:most]})
        out.add(Bins({OTHERS: [sum(x) for x in zip(*(self.table[k] for k in self.table if k in gone), strict=True)]}))
        for label in (k for k in self.sizes if k in gone):
            out.add(Bins({}, {OTHERS: self.sizes[label]}))
        return out

    def to_dict(self) -> dict[str, Any]:
        sizes = {k: [sorted(v), [v[c] for c in sorted(v)]] for k, v in sorted(self.sizes.items())}
        return {"table": {k: [str(x) for x in v] for k, v in sorted(self.table.items())}, "sizes": sizes}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Bins:
        sizes = {k: dict(zip(codes, n, strict=True)) for k, (codes, n) in data["sizes"].items()}
        return cls({k: [int(x) for x in v] for k, v in data["table"].items()}, sizes)

    # -- what is read from it ------------------------------------------------------------------------------------------

    def labels(self) -> list[str]:
        """The bins that hold tokens, numbers in their order."""
        return sorted((k for k, row in self.table.items() if row[0]), key=_natural)

    def get(self, label: str, name: str) -> int:
        row = self.table.get(label)
        return 0 if row is None else row[FIELDS.index(name)]

    def n(self, label: str) -> int:
        return self.get(label, "n")

    def mean(self, label: str, name: str = "abs") -> float:
        """Mean of `abs`, `d` (nats), `scaled` or `ratio` (ratio - 1) over the bin's tokens; NaN for none."""
        n = self.n(label)
        return self.get(label, name) / n / 2.0**BITS if n else math.nan

    def above(self, label: str) -> float:
        """Share of tokens with d > 0."""
        n = self.n(label)
        return self.get(label, "above") / n if n else math.nan

    def std_error(self, label: str, name: str = "abs") -> float:
        """Of `mean(label, name)` for `abs`, `d`, `scaled`; sequences are the clusters. NaN for fewer than two."""
        n, s = self.n(label), self.get(label, "sequences")
        if s < 2:
            return math.nan
        m = self.mean(label, name)
        square, cross = {"abs": ("aa", "na"), "d": ("dd", "nd"), "scaled": ("ss", "ns")}[name]
        scale = 2.0**SQUARE_BITS
        unit = SCALED_UNIT if name == "scaled" else 1.0
        squares, crosses = self.get(label, square) / scale * unit**2, self.get(label, cross) / scale * unit
        total = squares - 2 * m * crosses + m * m * self.get(label, "nn")
        return math.sqrt(max(0.0, total) * s / (s - 1)) / n

    def sd(self, label: str) -> float:
        """Of d over the bin's tokens, nats; NaN for none."""
        n = self.n(label)
        mean = self.mean(label, "d")
        return math.sqrt(max(0.0, self.get(label, "square") / n / 2.0**BITS - mean * mean)) if n else math.nan

    def merged(self, labels: Sequence[str], name: str) -> Bins:
        """One bin, called `name`, of these. The same sequence in two of them counts as two clusters."""
        out = Bins()
        for label in labels:
            if self.n(label):
                out.add(Bins({name: self.table[label]}, {name: self.sizes[label]}))
        return out

    def quantile(self, label: str, q: float) -> float:
        """Of |d|, nearest rank, within 6%; NaN for no tokens."""
        sizes = self.sizes.get(label)
        if not sizes:
            return math.nan
        codes = sorted(sizes)
        rank = max(1, math.ceil(q * sum(sizes.values()) - 1e-9))
        seen = 0
        for code in codes:
            seen += sizes[code]
            if seen >= rank:
                break
        return size_of(code)  # pyright: ignore[reportPossiblyUnboundVariable]


def size_of(code: int) -> float:
    """The value in the middle of a bin of |d|."""
    with np.errstate(invalid="ignore"):  # above the last bin of floats
        edges = np.array([code << _SHIFT, (code + 1) << _SHIFT], dtype=np.uint32).view(np.float32).astype(np.float64)
    return 0.0 if code == 0 else float(2 * edges[0] * edges[1] / (edges[0] + edges[1]))
