"""The same numbers by simulation: answers whose tokens are drawn from the gap's law, summed as they grow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onepolicy.errors import UsageError
from onepolicy.metrics.whole_answer import FACTORS, HALF, READINGS, Answers, Gap, band, readings, token_band
from onepolicy.types import FloatArray, IntArray

#: Tokens drawn by default, and the most that are drawn when asked.
_TOKENS, _MOST_TOKENS = 40_000_000, 4_000_000_000
_BLOCK = 1 << 19
#: Walks that are drawn, and their points.
DRAWN, POINTS = 8, 160


@dataclass(frozen=True, slots=True)
class Walks:
    """`sums` `[N, P]`: centred log-ratios (nats) of N answers after `lengths` `[P]` tokens. `outside`: reading ->
    share of tokens whose ratio is outside the clip."""

    gap: Gap
    length: int
    lengths: IntArray
    sums: FloatArray
    outside: Mapping[str, float]

    def at(self, length: int) -> FloatArray:
        """`[N]` centred log-ratios after one of `lengths`."""
        return self.sums[:, int(np.searchsorted(self.lengths, length))]


def default_answers(tokens: int) -> int:
    """As many answers of `tokens` tokens as take about a second."""
    return max(50, min(4000, _TOKENS // tokens))


def how_far(length: int, halves: Sequence[int | None]) -> int:
    """Tokens to simulate: a little beyond the lengths where half of the answers are off, unless that is far away."""
    return max([length, *(math.ceil(1.3 * h) for h in halves if h is not None and h <= 3 * length)])


def simulate(gap: Gap, length: int, until: int, answers: int, seed: int, clip: tuple[float, float]) -> Walks:
    """`answers` answers of `until` tokens (at least `length`). Errors: `UsageError` for more than can be drawn."""
    if answers * until > _MOST_TOKENS:
        raise UsageError(
            f"{answers:,} answers, {until:,} tokens each: at most {_MOST_TOKENS:,} tokens are drawn; "
            "ask for fewer answers"
        )
    lengths = _places(length, until)
    bands = {
        name: token_band(gap, reading.drift(gap, length) / length, clip) for name, reading in readings(gap).items()
    }
    grower = _Grower(gap, answers, np.random.default_rng(seed), bands)
    sums = np.stack([grower.grow(int(n)) for n in np.diff(lengths, prepend=0)], axis=1)
    return Walks(gap, length, lengths, sums * gap.sd, grower.shares())


def _places(length: int, until: int) -> IntArray:
    """Lengths at which the sums are kept: even steps for the drawing, growing ones for the solver."""
    even = np.linspace(0, length, POINTS + 1)[1:]
    growing = np.geomspace(1, until, 200)
    return np.unique(np.ceil(np.concatenate([even, growing])).astype(np.int64).clip(1, until))


class _Grower:
    """Answers that grow, in units of the sd. The sum of an AR(1) needs only its ends:
    (1 - rho) sum x_t = sum e_t + rho (x_first - x_last). Single tokens are looked at in those ends alone, then."""

    def __init__(self, gap: Gap, answers: int, rng: np.random.Generator, bands: Mapping[str, tuple[float, float]]):
        self._gap, self._answers, self._rng, self._bands = gap, answers, rng, bands
        # the first token of an AR(1) has no token before it
        self._ahead = 1 if gap.autocorrelation else 0
        self._last = gap.law.draw(rng, (1, answers))[0] if self._ahead else np.zeros(answers)
        self._sum = self._last.copy()
        self._seen, self._outside = 0, dict.fromkeys(bands, 0)

    def grow(self, tokens: int) -> FloatArray:
        """`[N]` the sums after `tokens` more."""
        tokens, self._ahead = tokens - self._ahead, 0
        step = max(1, _BLOCK // self._answers)
        for start in range(0, tokens, step):
            self._block(min(step, tokens - start))
        return self._sum.copy()

    def shares(self) -> dict[str, float]:
        return {name: n / max(self._seen, 1) for name, n in self._outside.items()}

    def _block(self, n: int) -> None:
        rho, law = self._gap.autocorrelation, self._gap.law
        if rho == 0:
            x = law.draw(self._rng, (n, self._answers))
            self._sum += x.sum(axis=0)
            self._count(x)
            return
        before = self._last
        errors = law.draw(self._rng, (n, self._answers)) * math.sqrt(1 - rho * rho)
        self._last = rho**n * before + rho ** np.arange(n - 1, -1, -1.0) @ errors
        self._sum += (errors.sum(axis=0) + rho * (before - self._last)) / (1 - rho)
        self._count(self._last)

    def _count(self, x: FloatArray) -> None:
        self._seen += x.size
        for name, (low, high) in self._bands.items():
            self._outside[name] += int(np.count_nonzero((x <= low) | (x >= high)))


def simulated(walks: Walks, reading: str, sequence_clip: tuple[float, float]) -> dict[str, Any]:
    """The keys of `whole_answer.closed`, from the walks."""
    gap, n = walks.gap, walks.length
    d = walks.at(n) + READINGS[reading].drift(gap, n)
    low, high = (x * n for x in band(sequence_clip))
    weight = np.exp(d - d.max())
    spread = float(d.std()) if gap.sd else 0.0
    return {
        "drift": float(d.mean()),
        "spread": spread,
        "median_ratio": math.exp(min(float(np.median(d)), 700)),
        "typical_factor": math.exp(min(spread, 700)),
        "off_by": {f"{f:g}": float(np.mean(np.abs(d) >= math.log(f))) for f in FACTORS},
        "ess_share": float(weight.sum() ** 2 / (weight @ weight) / len(d)),
        "tokens_outside_clip": walks.outside[reading],
        "answers_outside_clip": float(np.mean((d <= low) | (d >= high))),
        "half_off_by_2": _half(walks, reading),
    }


def _half(walks: Walks, reading: str) -> int | None:
    """The length at which half of the walks are off, between the places where they were looked at; None: not yet."""
    drift = np.array([READINGS[reading].drift(walks.gap, int(n)) for n in walks.lengths])
    share = np.mean(np.abs(walks.sums + drift) >= math.log(HALF), axis=0)
    reached = np.flatnonzero(share >= 0.5)
    if not len(reached):
        return None
    # the share wavers around a half for a while: between its first time above and its last time below
    first, below = int(reached[0]), np.flatnonzero(share < 0.5)
    last = int(below[-1]) if len(below) else 0
    return math.ceil((int(walks.lengths[first]) + int(walks.lengths[max(first - 1, last)])) / 2)


def drawn(walks: Walks, reading: str) -> dict[str, Any]:
    """The first eight walks for a drawing, with the envelope, drift minus and plus spread: `tokens` `[P]`, `log_ratio`
    `[8, P]`, `drift`, `lower`, `upper` `[P]`, nats; at 0 tokens everything is 0."""
    even = np.unique(np.ceil(np.linspace(0, walks.length, POINTS + 1)[1:]).astype(np.int64))
    drift = np.array([READINGS[reading].drift(walks.gap, n) for n in even.tolist()])
    spread = np.array([Answers(walks.gap, n).spread for n in even.tolist()])
    sums = walks.sums[:DRAWN, np.searchsorted(walks.lengths, even)] + drift
    return {
        "reading": reading,
        "tokens": [0, *even.tolist()],
        "log_ratio": [[0.0, *row] for row in sums.tolist()],
        "drift": [0.0, *drift.tolist()],
        "lower": [0.0, *(drift - spread).tolist()],
        "upper": [0.0, *(drift + spread).tolist()],
    }
