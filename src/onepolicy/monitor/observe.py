"""From a batch's arrays to the fixed-length vector, on the arrays' own device, without reading it.

The terms are those of `onepolicy.metrics`, written once; here they are float64 sums. Rows go through in blocks, so the
temporaries do not grow with the batch; sequences are never cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from onepolicy.arrays import Array
from onepolicy.monitor import vector
from onepolicy.monitor.batch import Batch
from onepolicy.monitor.kinds import kind_of
from onepolicy.monitor.staleness import Versions
from onepolicy.monitor.vector import EXPONENT_LIMIT, LOOP, TOKEN_TERMS, term_key
from onepolicy.reduce import POSITIVE_ABOVE
from onepolicy.views import SEQUENCE_TERMS, Sequences, Tokens

#: A log-prob at or below this is a fill value; so is 0.0 (certain) where the other side gives the token less than 1/e.
FILL_BELOW, CERTAIN_BUT = -1000.0, -1.0
_EDGES = tuple(math.log(p) for p in vector.BUCKET_EDGES)
_LN2 = math.log(2.0)
_OUTSIDE = (math.log(0.8), math.log(1.2))
#: The token sums behind `Sequences`, by the slots they are in.
_OF_SEQUENCE = {
    "log_ratio": "token:scored:log_ratio",
    "log_ratio_squared": "token:scored:log_ratio_squared",
    "k3": "token:finite:k3",
    "a": "token:scored:a",
    "b": "token:scored:b",
    "mult_prob_error": "token:finite:mult_prob_error",
}
assert set(_OF_SEQUENCE) == set(SEQUENCE_TERMS)
_TERM = {term_key(m, name): term for m in LOOP.values() for name, term in m.terms.items() if m.reducer == "sum"}
_SEQUENCE_TERM = {key: _TERM[key] for key in vector.SEQUENCE_TERMS}
#: Row sums that are kept until the end of the batch.
_KEPT = tuple(dict.fromkeys([*_OF_SEQUENCE.values(), *vector.ROWED.values()]))


def observed(batch: Batch, clip: tuple[float, float] = (0.2, 0.2), *, first: bool = False, kind: Any = None) -> Array:
    """`[LENGTH]` float64: a tensor on the batch's device, numpy for numpy and for tensors on the CPU. `first`: the very
    first batch, whose identities are looked at.

    `clip`: how far below and above 1 the loss clips its ratio.
    """
    kind = kind or kind_of(batch.sampler)
    rows, tokens = (int(n) for n in batch.sampler.shape)
    if rows * tokens == 0:
        return _nothing(kind)
    blocks = [Block(kind, batch, part, clip) for part in _parts(rows, tokens, kind.block(rows * tokens))]
    sums: dict[str, Array] = {}
    kept: list[Array] = []
    greatest: list[Array] = []
    with np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore"):
        while blocks:
            block = blocks.pop(0)  # each lets go of its columns
            for name, x in block.sums().items():
                sums[name] = sums[name] + x if name in sums else x
            kept.append(block.kept_rows)
            greatest.append(block.greatest())
        table = kind.join(kept)
        sums["sequences"], worst = _sequences(kind, table)
        sums["rows"] = _row_squares(kind, table)
    if first:
        sums["zero_update"] = sums.get("update", kind.zeros(len(vector.MOMENTS)))
        sums["zero_reference"] = sums.get("reference", kind.zeros(len(vector.MOMENTS)))
    parts = [sums[name] if name in sums else kind.zeros(n) for name, n in _SEGMENTS]
    return kind.join([*parts, _extremes(kind, greatest, worst), kind.zeros(len(vector.OWN))])


def _nothing(kind: Any) -> Array:
    out = kind.zeros(vector.LENGTH)
    out[vector.GREATEST_AT] = -math.inf
    return out


_MOMENTS = len(vector.MOMENTS)
#: The parts of the vector's sums, in its order.
_SEGMENTS: tuple[tuple[str, int], ...] = (
    ("counts", len(vector.COUNTS)),
    ("terms", len(TOKEN_TERMS)),
    ("sequences", 2 * len(vector.SEQUENCE_TERMS)),
    ("rows", 2 * len(vector.ROWED) + 1),
    *((pair, _MOMENTS) for pair in vector.PAIRS),
    ("versions", len(vector.VERSIONS)),
    ("updates", len(vector.UPDATES)),
    ("clip", len(vector.CLIPS) * len(vector.SIGNS)),
    ("corrected", len(vector.CORRECTED)),
    ("bins", vector.BUCKETS * vector.BINS),
)
assert sum(n for _, n in _SEGMENTS) == len(vector.SUMS)


def _parts(rows: int, tokens: int, block: int) -> Iterator[slice]:
    step = max(1, block // tokens)
    return (slice(at, min(at + step, rows)) for at in range(0, rows, step))


def _sequences(kind: Any, table: Array) -> tuple[Array, Array]:
    """(sum and count of every sequence term, the greatest sequence mean of e^|d|). `table`: `[len(_KEPT) + 1, B]`."""
    xp = kind.xp
    length = table[-1]
    some = length > 0
    sums = {name: table[_KEPT.index(key)] for name, key in _OF_SEQUENCE.items()}
    x = Sequences(xp.floor_at(length, 1.0), sums)
    zero, out = length * 0, list[Array]()
    for term in _SEQUENCE_TERM.values():
        value = term(xp, x)
        used = some & xp.isfinite(value)
        out += [xp.where(used, value, zero).sum(), kind.count(used)]
    return kind.stack(out), kind.greatest(xp.where(some, x.mult_prob_error / x.tokens, zero))


def _row_squares(kind: Any, table: Array) -> Array:
    """What the standard errors of token means are made of, rows as clusters."""
    length, out = table[-1], list[Array]()
    for key in vector.ROWED.values():
        row = table[_KEPT.index(key)]
        out += [(row * row).sum(), (row * length).sum()]
    return kind.stack([*out, (length * length).sum()])


def _extremes(kind: Any, greatest: list[Array], worst: Array) -> Array:
    """In the order of `vector.GREATEST`; the sequences' own stands in its place."""
    found = kind.stack(greatest)
    found = found.amax(0) if hasattr(found, "amax") else found.max(axis=0)
    at = vector.GREATEST.index("mult_prob_error_of_sequence")
    return kind.join([found[:at], kind.stack([worst]), found[at + 1 :]])


@dataclass
class Block:
    """Some rows of a batch. Masked places hold 0 in every clean column, whatever was given there."""

    kind: Any
    batch: Batch
    rows: slice
    clip: tuple[float, float]

    def sums(self) -> dict[str, Array]:
        """The segments of the vector that this block adds to."""
        out = {"counts": self._counts(), "terms": self.term_rows.sum(-1), "bins": self._bins()}
        out["updates"] = self._updates()
        if self.batch.versions is not None:
            out |= self._by_version()
        if self.batch.current is not None:
            out |= {"update": self._moments(self._current - self.tokens.b, self._has_current)}
            out |= {"current": self._moments(self._current - self.tokens.a, self._has_current)}
        if self.batch.reference is not None:
            x, has = self._other(self.batch.reference)
            out["reference"] = self._moments(x - self.tokens.b, has)
        if self.batch.advantages is not None:
            out["clip"] = self._clips()
        if self.batch.weights is not None or self.batch.keep is not None:
            out["corrected"], self._heaviest = self._corrected()
        return out

    # -- columns ---------------------------------------------------------------------------------------------------

    @cached_property
    def a(self) -> Array:
        return self.kind.wide(self.batch.sampler, self.rows)

    @cached_property
    def b(self) -> Array:
        return self.kind.wide(self.batch.old, self.rows)

    @cached_property
    def mask(self) -> Array:
        return self.kind.part(self.batch.mask, self.rows) != 0

    @cached_property
    def zero(self) -> Array:
        return self.kind.full(self.a, 0.0)

    @cached_property
    def scored(self) -> Array:
        xp = self.kind.xp
        return self.mask & xp.isfinite(self.a) & xp.isfinite(self.b)

    @cached_property
    def on(self) -> Array:
        """1 where scored, float64."""
        return self.kind.xp.indicator(self.scored)

    @cached_property
    def finite(self) -> Array:
        """Scored, and e^d and both probabilities stay finite when they are squared."""
        t = self.tokens
        return self.scored & (t.abs_log_ratio < EXPONENT_LIMIT) & (t.a < EXPONENT_LIMIT) & (t.b < EXPONENT_LIMIT)

    @cached_property
    def on_finite(self) -> Array:
        return self.kind.xp.indicator(self.finite)

    @cached_property
    def tokens(self) -> Tokens:
        where = self.kind.xp.where
        return Tokens(where(self.scored, self.a, self.zero), where(self.scored, self.b, self.zero))

    @cached_property
    def small(self) -> Tokens:
        """The columns for terms with an exponential: 0 where it would overflow."""
        t, where = self.tokens, self.kind.xp.where
        out = Tokens(where(self.finite, t.a, self.zero), where(self.finite, t.b, self.zero))
        # what `outside_clip` asks of the tokens that overflow is the sign and size of d, which d itself has
        t.__dict__["ratio_minus_one"] = where(self.finite, out.ratio_minus_one, t.log_ratio)
        return out

    @cached_property
    def term_rows(self) -> Array:
        """`[terms, b]` row sums of every token term."""
        kind, small = self.kind, self.small
        out = list[Array]()
        for key in TOKEN_TERMS:
            x, on = (small, self.on_finite) if ":finite:" in key else (self.tokens, self.on)
            out.append(kind.row_dot(_TERM[key](kind.xp, x), on))
        return kind.stack(out)

    @cached_property
    def over_two(self) -> Array:
        """`[b]` ratios above 2 in each row."""
        return self.kind.row_dot(self.kind.xp.indicator(self.tokens.log_ratio > _LN2), self.on)

    @cached_property
    def kept_rows(self) -> Array:
        """`[len(_KEPT) + 1, b]`: the row sums that sequences and standard errors need, and the scored tokens."""
        own = {"over_two": self.over_two}
        rows = [own[key] if key in own else self.term_rows[TOKEN_TERMS.index(key)] for key in _KEPT]
        return self.kind.stack([*rows, self.on.sum(-1)])

    @cached_property
    def _versions(self) -> Versions:
        return Versions(self.kind, self.batch, self.rows, self.mask, self.scored, self.zero)

    def _other(self, column: Array | None) -> tuple[Array, Array]:
        """(another policy's log-probs, 0 where there are none; where there are)."""
        x = self.kind.wide(column, self.rows)
        has = self.scored & self.kind.xp.isfinite(x)
        return self.kind.xp.where(has, x, self.zero), has

    @cached_property
    def _current_and_has(self) -> tuple[Array, Array]:
        return self._other(self.batch.current)

    @property
    def _current(self) -> Array:
        return self._current_and_has[0]

    @property
    def _has_current(self) -> Array:
        return self._current_and_has[1]

    # -- segments --------------------------------------------------------------------------------------------------

    def _counts(self) -> Array:
        kind, mask = self.kind, self.mask
        on = self.on.sum(-1)
        out = [mask, self.scored, self.finite, mask.any(-1), on > 0]
        counts: list[Array] = [kind.count(x) for x in out] + [self.over_two.sum()]
        sides = ((self.a, self.b), (self.b, self.a))
        for state in (_null, _neg_inf, _pos_inf, _positive, _placeholder):
            counts += [kind.count(mask & state(kind.xp, x, y)) for x, y in sides]
        return kind.stack(counts)

    def _bins(self) -> Array:
        kind, t = self.kind, self.tokens
        place = kind.clip(kind.bits(t.abs_log_ratio, vector.BIN_SHIFT) - vector.BIN_LOWEST, 0, vector.BINS - 1)
        index = kind.above(t.a, _EDGES) * vector.BINS + place
        return kind.histogram(index, self.on, vector.BUCKETS * vector.BINS)

    def _moments(self, d: Array, used: Array) -> Array:
        """See `vector.MOMENTS`; over the tokens with |d| below the limit."""
        xp = self.kind.xp
        used = used & (xp.abs(d) < EXPONENT_LIMIT)
        d = xp.where(used, d, self.zero)
        return self._moments_of(d, xp.expm1(d), xp.indicator(used))

    def _moments_of(self, d: Array, e: Array, on: Array) -> Array:
        kind, xp = self.kind, self.kind.xp
        outside = xp.indicator((d < _OUTSIDE[0]) | (d > _OUTSIDE[1]))
        terms = (xp.abs(d), d, d * d, e - d, e, e * e, outside)
        return kind.stack([on.sum(), *(kind.dot(x, on) for x in terms)])

    def _by_version(self) -> dict[str, Array]:
        d, e = self.small.log_ratio, self.small.ratio_minus_one
        on = {"lag0": self._versions.same, "stale": self._versions.behind}
        out = {name: self._moments_of(d, e, self.kind.xp.indicator(x & self.finite)) for name, x in on.items()}
        return {**out, "versions": self._versions.counts()}

    def _updates(self) -> Array:
        """Per batch, not per block, for the two that count calls: the first block counts them."""
        kind = self.kind
        first, given = self.rows.start == 0, self.batch.current is not None
        one = self.zero.sum() + 1
        equal = kind.count(self._has_current & (self._current == self.tokens.b)) if given else one * 0
        return kind.stack([equal, one * (first and given), one * (first and not self.batch.corrected)])

    def _clips(self) -> Array:
        """Decisions with the ratio that the loss clips (current against old) and with the true one (against the
        sampler), by the advantage's sign. Without a current policy nothing is clipped yet."""
        kind, t = self.kind, self.tokens
        low, high = (math.log1p(-self.clip[0]) if self.clip[0] < 1 else -math.inf, math.log1p(self.clip[1]))
        current = kind.xp.where(self._has_current, self._current, t.b) if self.batch.current is not None else t.b
        used, true = current - t.b, current - t.a
        advantage = kind.wide(self.batch.advantages, self.rows) + self.zero
        by_sign = list[tuple[Array, ...]]()
        for sign in vector.SIGNS:
            above = sign == "positive"
            of = self.scored & (advantage > 0 if above else advantage < 0)
            clipped, should = (of & (x > high if above else x < low) for x in (used, true))
            by_sign.append((of, clipped, clipped & ~should, should & ~clipped))
        return kind.stack([kind.count(pair[i]) for i in range(len(vector.CLIPS)) for pair in by_sign])

    def _corrected(self) -> tuple[Array, Array]:
        """What the loss is multiplied by, against the raw token ratio. Returns also the greatest weight."""
        kind, xp = self.kind, self.kind.xp
        given, keep = self.batch.weights, self.batch.keep
        raw = self.zero + 1 if given is None else kind.wide(given, self.rows) + self.zero
        kept = self.scored if keep is None else self.scored & (kind.part(keep, self.rows) != 0)
        bad = self.scored & ~xp.isfinite(raw)
        w = xp.where(kept & ~bad, raw, self.zero)
        kept = kept & (w != 0)
        r, near = self.small.ratio, _nearness(given)
        lowered, raised = self.scored & (w < r * (1 - near)), self.scored & (w > r * (1 + near))
        emptied = (self.on.sum(-1) > 0) & ~kept.any(-1)
        counts = [kind.count(x) for x in (kept, lowered, raised, bad, emptied)]
        return kind.stack([self.on.sum(), w.sum(), (w * w).sum(), *counts]), kind.greatest(w)

    def greatest(self) -> Array:
        """In the order of `vector.GREATEST`."""
        kind, t = self.kind, self.tokens
        zero = self.zero.sum()
        lag, newest, change = zero, zero, (zero - math.inf, zero - math.inf)
        if self.batch.versions is not None:
            lag, newest = self._versions.greatest()
            change = self._versions.change()
        probability_gap = kind.greatest(kind.xp.abs(self.small.probability_diff) * self.on_finite)
        d = t.log_ratio
        # masked places hold 0: where all ratios lie on one side of 1 they must not win
        far = self.zero - math.inf
        above, below = (kind.greatest(kind.xp.where(self.scored, x, far)) for x in (d, -d))
        heaviest = getattr(self, "_heaviest", zero)
        largest = kind.greatest(t.abs_log_ratio)
        return kind.stack([largest, above, below, probability_gap, zero, lag, newest, heaviest, *change])


def _nearness(weights: Array | None) -> float:
    """Relative distance at which a weight counts as another number than the ratio, by its precision."""
    size = 4 if weights is None else weights.itemsize if hasattr(weights, "itemsize") else weights.element_size()
    return 1e-5 if size >= 4 else 1e-2


def _null(xp: Any, x: Array, y: Array) -> Array:
    return x != x


def _neg_inf(xp: Any, x: Array, y: Array) -> Array:
    return x == -math.inf


def _pos_inf(xp: Any, x: Array, y: Array) -> Array:
    return x == math.inf


def _positive(xp: Any, x: Array, y: Array) -> Array:
    return (x > POSITIVE_ABOVE) & xp.isfinite(x)


def _placeholder(xp: Any, x: Array, y: Array) -> Array:
    return ((x == 0) & (y < CERTAIN_BUT)) | ((x <= FILL_BELOW) & xp.isfinite(x))
