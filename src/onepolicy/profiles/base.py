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

from onepolicy.rollouts import Rollouts
from onepolicy.types import BoolArray, FloatArray, IntArray, LogprobPairs

#: Terms are integers in units of 2^-BITS nats; squares of a sequence's sums in units of 2^-SQUARE_BITS.
BITS, SQUARE_BITS = 32, 44
#: Terms above this are cut: ratio - 1 of one token, the sum of d of one sequence. They are counted in `cut`.
_MOST, _MOST_SUM = 2.0**18, 2.0**8
#: |d| / (1 - p + SHAPE), p the larger of the two probabilities; cut at MOST_SCALED, so that one outlier is one token.
SHAPE, MOST_SCALED = 0.003, 4.0
#: Squares of a sequence's `scaled` are added in units of 1/64.
_SCALED_UNIT = 64.0
#: |d| is binned by its float32 bits down to 3 mantissa bits: quantiles within 6% relative.
_SHIFT = 20

#: The bin of what is left of a profile with too many of them.
OTHERS = "(others)"
#: What a bin holds, in the order of `Bins.table`'s rows.
FIELDS = ("n", "sequences", "d", "abs", "ratio", "above", "dd", "nd", "aa", "na", "nn", "cut")
FIELDS += ("scaled", "ss", "ns", "square")


class Seen:
    """The tokens of one batch that a profile looks at: drawn, with two finite log-probs, in order.

    `at` `[N]`: where they stand in the flat columns; `sequence` `[N]`; `a`, `b`, `d` `[N]` nats.
    """

    def __init__(self, rollouts: Rollouts, pairs: LogprobPairs, mask: BoolArray) -> None:
        self.rollouts, self.pairs = rollouts, pairs
        self.at: IntArray = np.flatnonzero(mask)
        self.all_sequences = np.repeat(np.arange(len(rollouts)), rollouts.lengths)
        self.sequence: IntArray = self.all_sequences[self.at]
        self.a: FloatArray = pairs.a[self.at]
        self.b: FloatArray = pairs.b[self.at]
        self.d: FloatArray = self.b - self.a

    def __len__(self) -> int:
        return len(self.at)

    @cached_property
    def counts(self) -> IntArray:
        """`[S]` selected tokens of each sequence."""
        return np.bincount(self.sequence, minlength=len(self.rollouts))

    @cached_property
    def index(self) -> IntArray:
        """`[N]` the token's place among the selected tokens of its sequence."""
        starts = np.cumsum(self.counts) - self.counts
        return np.arange(len(self.at)) - starts[self.sequence]

    @cached_property
    def units(self) -> dict[str, FloatArray]:
        """The terms as whole numbers of units, in float64; exact to add up to 2^53."""
        with np.errstate(over="ignore"):
            ratio = np.expm1(self.d)
        cut = np.minimum(ratio, _MOST)
        d = np.clip(self.d, -_MOST, _MOST)
        scaled = {"d": np.rint(d * 2.0**BITS), "ratio": np.rint(cut * 2.0**BITS)}
        scaled |= {"scaled": np.rint(np.minimum(self.scaled, MOST_SCALED) * 2.0**BITS)}
        scaled |= {"square": np.rint(np.minimum(d * d, 2.0**16) * 2.0**BITS)}
        return scaled | {"abs": np.abs(scaled["d"]), "above": (self.d > 0).astype(np.float64)}

    @cached_property
    def scaled(self) -> FloatArray:
        """`[N]` |d| on the token's own scale: what the logits are off by, about."""
        p = np.exp(np.minimum(np.maximum(self.a, self.b), 0.0))
        return np.abs(self.d) / (1.0 - p + SHAPE)

    @cached_property
    def size_codes(self) -> IntArray:
        """`[N]` bins of |d|."""
        with np.errstate(over="ignore"):
            return (np.abs(self.d).astype(np.float32).view(np.uint32) >> _SHIFT).astype(np.int64)

    @cached_property
    def repeats(self) -> tuple[IntArray, BoolArray]:
        """(`[N]` how often the token was drawn before in its sequence, `[N]` whether it stood before undrawn)."""
        key, order = _sorted_keys(self.all_sequences, self.pairs.token_ids.astype(np.int64))
        first = np.concatenate([[True], key[1:] != key[:-1]]) if len(key) else np.zeros(0, dtype=bool)
        start = np.maximum.accumulate(np.where(first, np.arange(len(key)), 0)) if len(key) else first
        drawn = self.rollouts.drawn[order]
        before = np.concatenate([[0], np.cumsum(drawn)])
        times, others = np.empty(len(key), dtype=np.int64), np.empty(len(key), dtype=np.int64)
        times[order] = before[:-1] - before[start]
        others[order] = np.arange(len(key)) - start - times[order]
        return times[self.at], others[self.at] > 0

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


def _sorted_keys(sequence: IntArray, ids: IntArray) -> tuple[IntArray, IntArray]:
    """(keys of sequence and id, sorted; where each stood), equal ones in the order of their places.

    Where sequence, id and place fit into 63 bits together, one plain sort does it, five times as fast as `argsort`.
    """
    n = len(ids)
    bits = [int(x).bit_length() for x in (sequence.max(initial=0), ids.max(initial=0), n)]
    if sum(bits) <= 63 and ids.min(initial=0) >= 0:
        packed = np.sort(((sequence << bits[1]) | ids) << bits[2] | np.arange(n))
        return packed >> bits[2], packed & ((1 << bits[2]) - 1)
    key = sequence * (1 << 32) + ids
    order = np.argsort(key, kind="stable")
    return key[order], order


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
        unit = _SCALED_UNIT if name == "scaled" else 1.0
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
    edges = np.array([code << _SHIFT, (code + 1) << _SHIFT], dtype=np.uint32).view(np.float32).astype(np.float64)
    return 0.0 if code == 0 else float(2 * edges[0] * edges[1] / (edges[0] + edges[1]))


def profiled(seen: Seen, profile: Profile) -> Bins | None:
    """One batch's bins; None where the dump does not tell what the profile is about."""
    found = profile.bins(seen)
    if found is None:
        return None
    bins, labels = found
    made = (_by_sequence if profile.level == "record" else _by_token)(seen, bins, labels)
    return made.cut(profile.most)


#: Sums over the sequences of each bin: `[cells]` -> `[bins]`, exact for whole numbers.
Fold = Callable[[FloatArray], FloatArray]


def _by_token(seen: Seen, bins: IntArray, labels: Sequence[str]) -> Bins:
    """A cell is a sequence's share of a bin; where most cells would be empty, only those that are there are made."""
    width, rows = len(labels), len(seen.rollouts)
    inside = bins >= 0
    every = bool(inside.all())
    pick = (lambda x: x) if every else (lambda x: x[inside])
    bins = pick(bins)
    key, size = pick(seen.sequence) * width + bins, width * rows
    fold: Fold = lambda x: x.reshape(rows, width).sum(axis=0)
    if size > 4 * len(bins) + (1 << 16):
        there, key = np.unique(key, return_inverse=True)
        size = len(there)
        fold = lambda x: np.bincount(there % width, x, width).astype(np.float64)
    each: dict[str, FloatArray] = {k: np.bincount(key, pick(v), size).astype(np.float64) for k, v in seen.units.items()}
    each["n"] = np.bincount(key, minlength=size).astype(np.float64)
    return _totals(each, fold, _sizes(bins, pick(seen.size_codes), labels), labels)


def _by_sequence(seen: Seen, bins: IntArray, labels: Sequence[str]) -> Bins:
    """All tokens of a sequence are in one bin: a sequence is a cell."""
    width, rows = len(labels), len(seen.rollouts)
    use = bins >= 0
    each = {k: np.bincount(seen.sequence, v, rows)[use].astype(np.float64) for k, v in seen.units.items()}
    each["n"] = seen.counts[use].astype(np.float64)
    inside = use[seen.sequence]
    sizes = _sizes(bins[seen.sequence][inside], seen.size_codes[inside], labels)
    return _totals(each, lambda x: np.bincount(bins[use], x, width).astype(np.float64), sizes, labels)


def _sizes(bins: IntArray, codes: IntArray, labels: Sequence[str]) -> dict[str, dict[int, int]]:
    """How many tokens of each bin have a |d| of each code."""
    if len(labels) <= 64:
        counts = np.bincount((bins << 12) + codes, minlength=len(labels) << 12)
        keys = np.flatnonzero(counts)
        counts = counts[keys]
    else:
        keys, counts = np.unique((bins << 12) + codes, return_counts=True)
    out: dict[str, dict[int, int]] = {}
    starts = np.searchsorted(keys, np.arange(len(labels) + 1) << 12)
    for label, lo, hi in zip(labels, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if hi > lo:
            out[label] = dict(zip((keys[lo:hi] & 0xFFF).tolist(), counts[lo:hi].tolist(), strict=True))
    return out


def _totals(
    each: Mapping[str, FloatArray], fold: Fold, sizes: dict[str, dict[int, int]], labels: Sequence[str]
) -> Bins:
    """`[cells]` sums of each term, in units, into one integer a bin."""
    n, d, a = each["n"], each["d"] / 2.0**BITS, each["abs"] / 2.0**BITS
    cut = (np.abs(d) > _MOST_SUM) | (a > _MOST_SUM)
    d, a = np.clip(d, -_MOST_SUM, _MOST_SUM), np.minimum(a, _MOST_SUM)
    s = np.minimum(each["scaled"] / 2.0**BITS / _SCALED_UNIT, _MOST_SUM)
    counts = {"n": n, "sequences": (n > 0).astype(np.float64), "nn": n * n, "cut": cut.astype(np.float64)}
    counts |= {k: each[k] for k in ("d", "abs", "ratio", "above", "scaled", "square")}
    squares = {"dd": d * d, "nd": n * d, "aa": a * a, "na": n * a, "ss": s * s, "ns": n * s}
    rows = {k: _whole(x, fold) for k, x in counts.items()} | {k: _squares(x, fold) for k, x in squares.items()}
    there = [i for i, n_of in enumerate(rows["n"]) if n_of]
    return Bins({labels[i]: [rows[name][i] for name in FIELDS] for i in there}, sizes)


def _whole(x: FloatArray, fold: Fold) -> list[int]:
    """Sums of whole numbers below 2^53 each, exact: high and low halves are added apart."""
    high = np.floor(x / 2.0**26)
    low = x - high * 2.0**26
    return [(int(h) << 26) + int(v) for h, v in zip(fold(high).tolist(), fold(low).tolist(), strict=True)]


def _squares(x: FloatArray, fold: Fold) -> list[int]:
    """Sums of squares of nats, each rounded once to 2^-SQUARE_BITS."""
    high = np.floor(x * 2.0 ** (SQUARE_BITS - 30))
    low = np.rint((x - high * 2.0 ** (30 - SQUARE_BITS)) * 2.0**SQUARE_BITS)
    return [(int(h) << 30) + int(v) for h, v in zip(fold(high).tolist(), fold(low).tolist(), strict=True)]
