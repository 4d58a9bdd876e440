"""Corrections replayed on packed tokens: what each sequence sums to, by the rules of `corrections` themselves.

Rules are asked on a few sequences at a time, so that their arrays stay in a CPU's cache, through a `Ratio` that makes
once what several of them ask for. What a rule makes of one value per sequence stays that (`PerSequence`): its sums need
no work per token. Every number is made of its sequence alone, so cutting a batch anywhere changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from onepolicy.corrections.ops import NumpyOps
from onepolicy.corrections.ratio import Inputs, Ratio, ratio_of
from onepolicy.corrections.rule import Stage, State
from onepolicy.types import BoolArray, FloatArray, IntArray

#: Tokens worked on at a time: few enough for a CPU's cache, enough to make little of the cost of a call.
CHUNK = 1 << 16
#: What is made for each sequence over its trained tokens, w the weight (0 where dropped), r the ratio held under
#: e^80, A the advantage: how many are kept; sums of w, w^2, |w - 1|, |w - r|; the largest w; sum and largest of w |A|.
COLUMNS: tuple[str, ...] = ("kept", "w", "w2", "moved", "off", "largest", "gradient", "largest gradient")
#: Rules in order, and what each sees: see `corrections.compose`.
Replay: TypeAlias = tuple[Sequence[Stage], str]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Packed `[T]`: log-probs (nats, finite, small enough to be squared and added up) of whole sequences of `lengths`
    `[S]`, each 1 or more. `advantages` None: none."""

    sampler: FloatArray
    policy: FloatArray
    trained: BoolArray
    advantages: FloatArray | None
    lengths: IntArray

    def chunks(self) -> Iterator[tuple[slice, Tokens]]:
        """(which sequences, their tokens): about `CHUNK` tokens, at least one sequence."""
        ends, first = np.cumsum(self.lengths), 0
        while first < len(ends):
            begin = int(ends[first] - self.lengths[first])
            last = max(first + 1, int(np.searchsorted(ends, begin + CHUNK, side="right")))
            which, at = slice(first, last), slice(begin, int(ends[last - 1]))
            advantages = None if self.advantages is None else self.advantages[at]
            yield which, Tokens(self.sampler[at], self.policy[at], self.trained[at], advantages, self.lengths[which])
            first = last


def replayed(tokens: Tokens, replays: Sequence[Replay]) -> FloatArray:
    """`[replays, COLUMNS, S]`: what each replay makes of each sequence; `gradient`s are 0 without advantages."""
    out = np.zeros((len(replays), len(COLUMNS), len(tokens.lengths)))
    with NumpyOps().tracking(False):
        for which, part in tokens.chunks():
            chunk = _Chunk(part)
            for i, replay in enumerate(replays):
                out[i, :, which] = chunk.columns(*judged(chunk.ratio, *replay))
    return out


def judged(ratio: Ratio, stages: Sequence[Stage], sees: str) -> tuple[Any, Any]:
    """(weights, keep) after all stages, as `corrections.correct` makes them; None: all 1, all kept. Weights of dropped
    tokens, and what is said of tokens that are not valid, mean nothing."""
    state, keep = State(ratio.valid, ratio.valid), None
    most = math.exp(ratio.ops.limit(ratio.log_ratio))
    for stage in stages:
        verdict = stage.rule(ratio, state, **stage.options)
        if verdict.weights is not None:
            both = verdict.weights if state.weights is None else state.weights * verdict.weights
            state.weights = both if state.weights is None else np.minimum(both, most)
        if verdict.keep is not None:
            keep = verdict.keep if keep is None else keep & verdict.keep
            state.keep = state.keep & verdict.keep
        state.seen = state.keep if sees == "kept" else ratio.valid
    return state.weights, keep


class PerSequence(NDArrayOperatorsMixin):
    """`values` `[S]` that stand for their tokens' `[T]`, `lengths` `[S]` of each. Elementwise functions of such values
    and single numbers give such values again; with anything else they are spread over the tokens first."""

    def __init__(self, values: Any, lengths: IntArray) -> None:
        self.values, self.lengths = values, lengths

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(np.repeat(self.values, self.lengths), dtype=dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        alone = method == "__call__" and not options
        if alone and all(isinstance(x, PerSequence) or np.ndim(x) == 0 for x in inputs):
            return PerSequence(ufunc(*(x.values if isinstance(x, PerSequence) else x for x in inputs)), self.lengths)
        spread = (np.asarray(x) if isinstance(x, PerSequence) else x for x in inputs)
        return getattr(ufunc, method)(*spread, **options)


def _added(x: Any, starts: IntArray) -> FloatArray:
    """Sums of stretches that begin at `starts` and have one token or more; trues are counted."""
    return np.add.reduceat(x, starts, dtype=np.int64 if x.dtype == bool else None).astype(np.float64)


class Sequences:
    """`corrections.rows.Rows` of packed sequences, none of them empty."""

    def __init__(self, lengths: IntArray) -> None:
        self.n, self.lengths = len(lengths), lengths
        self.starts = np.cumsum(lengths) - lengths

    def total(self, x: Any) -> FloatArray:
        return _added(np.asarray(x), self.starts)

    def most(self, x: Any) -> FloatArray:
        return np.maximum.reduceat(np.asarray(x), self.starts).astype(np.float64)

    def spread(self, x: Any) -> PerSequence:
        return PerSequence(x, self.lengths)

    def begins(self) -> BoolArray:
        out = np.zeros(int(self.lengths.sum()), dtype=bool)
        out[self.starts] = True
        return out


class _Ops(NumpyOps):
    """numpy; expm1 of the log ratio is made once, and ids are known to rise, as those of packed tokens' runs do."""

    def __init__(self, log_ratio: FloatArray) -> None:
        self._log_ratio, self._expm1 = log_ratio, np.expm1(log_ratio)

    def expm1(self, x: Any) -> Any:
        return self._expm1 if x is self._log_ratio else np.expm1(x)

    def scatter_total(self, x: Any, ids: Any, n: int) -> Any:
        starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
        return np.bincount(ids[starts], weights=_added(x, starts), minlength=n)


@dataclass
class _Once(Ratio):
    """A `Ratio` that makes once what several rules ask for. Nobody may write into what it gives."""

    made: dict[Any, Any] = field(default_factory=dict)

    def _once(self, key: Any, make: Any) -> Any:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def per_row(self, x: Any, seen: Any) -> Any:
        make = lambda: super(_Once, self).per_row(x, seen)
        return self._once("total", make) if x is self.log_ratio and seen is self.valid else make()

    def length(self, seen: Any) -> Any:
        make = lambda: super(_Once, self).length(seen)
        return self._once("length", make) if seen is self.valid else make()

    def exp(self, x: Any, low: float = 0.0, high: float = math.inf) -> Any:
        if x is not self.log_ratio:
            return super().exp(x, low, high)
        raw = self._once("exp", lambda: super(_Once, self).exp(x))
        return self._once((low, high), lambda: np.clip(raw, low, high) if low > 0.0 or high < math.inf else raw)

    def probabilities(self) -> Any:
        return self._once("probabilities", super().probabilities)


class _Chunk:
    """Some sequences, and their sums by weights and what is kept."""

    def __init__(self, tokens: Tokens) -> None:
        self.rows = Sequences(tokens.lengths)
        self.trained, self.all_trained = tokens.trained, bool(tokens.trained.all())
        self.ratio = self._ratio(tokens)
        self.one = self._masked(np.ones(len(tokens.trained)))
        self.r = self._masked(np.exp(np.minimum(tokens.policy - tokens.sampler, 80.0)))
        self.from_one = np.abs(self.r - self.one)
        self.size = None if tokens.advantages is None else self._masked(np.abs(tokens.advantages))
        self.n = self.rows.total(tokens.trained)
        self.none = np.zeros(self.rows.n)
        self.ones = self.rows.spread(self.none + 1.0)
        self.dropped = self.sums(self.rows.spread(self.none), self.none)
        self.summed: dict[int, tuple[Any, FloatArray]] = {}

    def _ratio(self, t: Tokens) -> _Once:
        given = {"sampler": t.sampler, "old": t.policy, "mask": t.trained, "advantages": t.advantages}
        plain = ratio_of(cast(Inputs, {**given, "offsets": np.append(0, np.cumsum(t.lengths))}), "replay")
        ratio = _Once(**{f.name: getattr(plain, f.name) for f in fields(Ratio)})
        ratio.ops, ratio.rows = _Ops(plain.log_ratio), self.rows
        return ratio

    def columns(self, weights: Any, keep: Any) -> FloatArray:
        """`[COLUMNS, S]` of one correction."""
        weights = self.ones if weights is None else weights
        if keep is None:
            return self._kept_all(weights)
        if isinstance(keep, PerSequence):
            return np.where(keep.values, self._kept_all(weights), self.dropped)
        kept = keep if self.all_trained else keep & self.trained
        n = self.rows.total(kept)
        return self._kept_as_one(kept, n) if weights is self.ones else self.sums(np.where(kept, weights, 0.0), n)

    def _kept_all(self, weights: Any) -> FloatArray:
        """Made once for the same array of weights, which is held so that its id stays its own."""
        if id(weights) not in self.summed:
            self.summed[id(weights)] = weights, self.sums(weights, self.n)
        return self.summed[id(weights)][1]

    def _kept_as_one(self, kept: BoolArray, n: FloatArray) -> FloatArray:
        """As `sums` of weights that are `kept`: most of them are counts."""
        off = self.total(np.where(kept, self.from_one, self.r))
        return np.stack([n, n, n, self.n - n, off, np.sign(n), *self._pull(kept)])

    def sums(self, w: Any, n: FloatArray) -> FloatArray:
        """`[COLUMNS, S]` of weights that are 0 where a token is dropped; `n` `[S]` are kept."""
        flat = self._masked(np.asarray(w))
        off = self.total(np.abs(flat - self.r))
        w, one = (w, 1.0) if isinstance(w, PerSequence) else (flat, self.one)
        total, most, square, moved = self.total(w), self.most(w), self.total(w * w), self.total(abs(w - one))
        return np.stack([n, total, square, moved, off, most, *self._pull(flat)])

    def _pull(self, w: Any) -> tuple[FloatArray, FloatArray]:
        """`[S]` sums and largest of w |A|."""
        pull = None if self.size is None else w * self.size
        return (self.none, self.none) if pull is None else (self.total(pull), self.most(pull))

    def _masked(self, x: Any) -> Any:
        """0 for tokens that are not trained; a value per sequence stays."""
        return x if self.all_trained or isinstance(x, PerSequence) else np.where(self.trained, x, 0.0)

    def total(self, x: Any) -> FloatArray:
        """`[S]` sums of what `_masked` gave."""
        return x.values * self.n if isinstance(x, PerSequence) else self.rows.total(x)

    def most(self, x: Any) -> FloatArray:
        """`[S]` the largest, 0 where none is trained; `x` is never negative."""
        return x.values * (self.n > 0) if isinstance(x, PerSequence) else self.rows.most(x)
