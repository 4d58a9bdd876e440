"""What is followed over steps: the gap at a fixed mix of probabilities, against a frozen baseline and a trailing one.

Entropy falls over a run, so sure tokens, whose gap is small, grow more: the plain mean |d| falls although nothing got
better, and a fault can hide in that. So each step is held against what the baseline predicts *for its own mix*:
y = log(sum |d| / sum over buckets of (tokens in the bucket x the baseline's mean |d| there)), the logarithm of what
epidemiology calls a standardised ratio. Everything here is arrays over R runs; a monitor has R = 1, studies have many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from onepolicy.monitor.vector import BINS, BUCKETS, bin_edges, bin_middles
from onepolicy.types import BoolArray, FloatArray, IntArray

#: Judged steps before the baseline is frozen; before small jumps and growth can be seen; of the trailing window; the
#: first ones, which growth within the warm-up is held against.
WARM_UP, LEAST, TRAILING, EARLY = 32, 8, 32, 4
#: Shares of the baseline's tokens that are called its tails, and the least tail tokens a bucket needs to take part.
TAILS, TAIL_LEAST = (0.005, 0.0005), 10.0
#: A gap that is harmless whatever it was before: what the preset `fp32` allows the mean and any single token, in nats.
#: A policy whose entropy collapses gets there; many times nearly nothing is still nearly nothing.
HARMLESS_MEAN, HARMLESS_TOKEN = 1e-4, 5e-3
#: Tokens by which a bucket's mean is drawn to the mean of all.
_SHRINK = 50.0
_MIDDLES = bin_middles()
_LOG_EDGES = np.log(bin_edges())
_PLACES = np.arange(BINS)
#: The first edge that is no lower than a harmless token's |d|.
_LOWEST_TAIL = int(np.searchsorted(_LOG_EDGES, np.log(HARMLESS_TOKEN)))
#: The share of a tail in which the baseline has no token; 0 is of a bucket that takes no part.
_NONE_THERE = 1e-9


def by_bucket(bins: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(tokens, sum of |d|), `[R, BUCKETS]` each, of `bins` `[R, BUCKETS, BINS]`."""
    return bins.sum(-1, dtype=np.float64), bins @ _MIDDLES.astype(bins.dtype)


def means(tokens: FloatArray, sums: FloatArray) -> FloatArray:
    """`[..., BUCKETS]` mean |d| by bucket, drawn to the mean of all where a bucket has few tokens."""
    with np.errstate(divide="ignore", invalid="ignore"):
        overall = sums.sum(-1, keepdims=True) / tokens.sum(-1, keepdims=True)
    overall = np.where(np.isfinite(overall), overall, 0.0)
    return (sums + _SHRINK * overall) / (tokens + _SHRINK)


def standardised(tokens: FloatArray, sums: FloatArray, mean: FloatArray) -> FloatArray:
    """`[R]` y: the log of observed over predicted |d|. NaN where nothing was seen or predicted."""
    with np.errstate(divide="ignore", invalid="ignore"):
        y = np.log(sums.sum(-1) / (tokens * mean).sum(-1))
    return np.where(np.isfinite(y), y, np.nan)


@dataclass
class State:
    """Arrays over R runs that are saved and restored as plain lists."""

    def to_dict(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name).tolist() for f in fields(self)}

    def load(self, data: Mapping[str, Any]) -> None:
        for f in fields(self):
            mine = getattr(self, f.name)
            setattr(self, f.name, np.array(data[f.name], dtype=mine.dtype).reshape(mine.shape))


@dataclass
class Baseline(State):
    """The first `WARM_UP` judged steps, then frozen."""

    steps: IntArray
    tokens: FloatArray
    sums: FloatArray
    bins: FloatArray
    early_tokens: FloatArray
    early_sums: FloatArray
    edge: FloatArray
    share: FloatArray

    @classmethod
    def of(cls, runs: int) -> Baseline:
        flat = lambda: np.zeros((runs, BUCKETS))
        bins = np.zeros((runs, BUCKETS, BINS))
        tails = lambda: np.zeros((runs, len(TAILS), BUCKETS))
        return cls(np.zeros(runs, dtype=np.int64), flat(), flat(), bins, flat(), flat(), tails(), tails())

    @property
    def frozen(self) -> BoolArray:
        return self.steps >= WARM_UP

    def add(self, bins: FloatArray, tokens: FloatArray, sums: FloatArray, used: BoolArray) -> BoolArray:
        """Adds the step to the runs that are still warming up. Returns those that are frozen by it."""
        on = used & ~self.frozen
        if not on.any():
            return on
        early = on & (self.steps < EARLY)
        for into, x, where in (
            (self.tokens, tokens, on),
            (self.sums, sums, on),
            (self.bins, bins, on),
            (self.early_tokens, tokens, early),
            (self.early_sums, sums, early),
        ):
            into[where] += x[where]
        self.steps[on] += 1
        done = on & self.frozen
        if done.any():
            self._set_tails(done)
        return done

    def _set_tails(self, done: BoolArray) -> None:
        """Where each tail of each bucket begins, as log |d|, and the share that lies above it; 0 where too few tokens
        are known. No tail begins below `HARMLESS_TOKEN`."""
        for run in np.flatnonzero(done):
            above = np.cumsum(self.bins[run, :, ::-1], axis=-1)[:, ::-1]
            above = np.concatenate([above, np.zeros((BUCKETS, 1))], axis=-1)
            for level, tail in enumerate(TAILS):
                wanted = above[:, :1] * tail
                at = np.maximum((above > wanted).sum(-1), _LOWEST_TAIL)  # the first edge with at most that many above
                share = np.take_along_axis(above, at[:, None], -1)[:, 0] / np.maximum(above[:, 0], 1.0)
                self.edge[run, level] = _LOG_EDGES[at]
                self.share[run, level] = np.where(wanted[:, 0] >= TAIL_LEAST, np.maximum(share, _NONE_THERE), 0.0)

    def gap(self, tokens: FloatArray, sums: FloatArray) -> FloatArray:
        """`[R]` y against the frozen baseline."""
        return standardised(tokens, sums, means(self.tokens, self.sums))

    def tail(self, bins: FloatArray, tokens: FloatArray, shift: FloatArray) -> tuple[FloatArray, FloatArray]:
        """`[R, TAILS]` (log of tail tokens over predicted, how many were predicted). `shift`: y, by which the edges of
        the tails move up: a gap that grows as a whole is no heavier tail. They do not move down: where the gap shrinks
        as a whole, tokens that are as far off as they were are no heavier tail either."""
        found = [self._beyond(bins, tokens, shift, level) for level in range(len(TAILS))]
        count, predicted = (np.stack([f[i] for f in found], axis=-1) for i in (0, 1))
        return np.log((count + 0.5) / (predicted + 0.5)), predicted

    def _beyond(
        self, bins: FloatArray, tokens: FloatArray, shift: FloatArray, level: int
    ) -> tuple[FloatArray, FloatArray]:
        """`[R]` tokens beyond one tail's edge, and how many the baseline predicts there."""
        share = self.share[:, level]
        edge = np.maximum(np.where(share > 0, self.edge[:, level], 0.0), _LOG_EDGES[_LOWEST_TAIL])
        edge = edge + np.maximum(np.nan_to_num(shift), 0.0)[:, None]
        place = np.clip(np.interp(edge, _LOG_EDGES, np.arange(BINS + 1.0)), 0, BINS - 1e-9)
        index = place.astype(np.int64)
        count = np.take_along_axis(bins, index[..., None], -1)[..., 0] * (index + 1 - place)
        count = count + (bins * (index[..., None] < _PLACES)).sum(-1, dtype=np.float64)
        return np.where(share > 0, count, 0.0).sum(-1), (tokens * share).sum(-1)


@dataclass
class Trailing(State):
    """The last `TRAILING` judged steps that were no candidates for a jump, in rings."""

    tokens: FloatArray
    sums: FloatArray
    y: FloatArray
    count: IntArray

    @classmethod
    def of(cls, runs: int) -> Trailing:
        ring = lambda: np.zeros((runs, TRAILING, BUCKETS))
        return cls(ring(), ring(), np.full((runs, TRAILING), np.nan), np.zeros(runs, dtype=np.int64))

    def gap(self, tokens: FloatArray, sums: FloatArray) -> FloatArray:
        """`[R]` y against the window."""
        return standardised(tokens, sums, means(self.tokens.sum(1), self.sums.sum(1)))

    def spread(self) -> FloatArray:
        """`[R]` robust standard deviation of y over the window, 0 where it holds too little."""
        if (self.count < LEAST).all():
            return np.zeros(len(self.count))
        y = np.where(np.isnan(self.y), np.inf, self.y)
        held = np.minimum(np.isfinite(self.y).sum(1), TRAILING)
        center = _middle(y, held)
        return np.where(held >= LEAST, 1.4826 * _middle(np.abs(y - center[:, None]), held), 0.0)

    def add(self, tokens: FloatArray, sums: FloatArray, y: FloatArray, used: BoolArray) -> None:
        runs = np.flatnonzero(used)
        at = self.count[runs] % TRAILING
        self.tokens[runs, at], self.sums[runs, at], self.y[runs, at] = tokens[runs], sums[runs], y[runs]
        self.count[runs] += 1


def _middle(x: FloatArray, held: IntArray) -> FloatArray:
    """`[R]` median of the `held` smallest entries of each row (the rest is inf), the upper one of two; 0 for none."""
    ordered = np.sort(x, axis=1)
    found = np.take_along_axis(ordered, np.minimum(held // 2, x.shape[1] - 1)[:, None], 1)[:, 0]
    return np.where((held > 0) & np.isfinite(found), found, 0.0)
