"""A whole answer's log-ratio D in closed form: its spread and drift from one token's law, and what follows.

Tokens are an AR(1) process: d_t - m = rho (d_(t-1) - m) + e_t with stationary sd s, so

    Var(D) = s^2 (n (1 + rho) / (1 - rho) - 2 rho (1 - rho^n) / (1 - rho)^2)

Exact for normal tokens, and for a mixture of independent ones; elsewhere the shares are those of a normal D with the
exact spread, and what needs E e^(k D) uses the token's own law.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from onepolicy.errors import UsageError
from onepolicy.metrics.laws import Law, Normal, normal_outside

#: Factors of the table, and the one whose length is solved for.
FACTORS = (1.5, 2.0, 10.0)
HALF = 2.0
_LONGEST = 10**12
#: Nats. No two log-probs that mean the same are that far apart.
_WIDEST = 100.0


@dataclass(frozen=True, slots=True)
class Gap:
    """What is known of one token's log-ratio: `sd` (nats), its law, the correlation of neighbours, `mean` (nats a
    token, None where it is not known), and where the mean is from. Errors: `UsageError` for numbers that cannot be."""

    sd: float
    law: Law = field(default_factory=Normal)
    autocorrelation: float = 0.0
    mean: float | None = None
    mean_is: Literal["given", "measured"] = "given"

    def __post_init__(self) -> None:
        if not 0 <= self.sd <= _WIDEST:
            raise UsageError(f"gap {self.sd:g}: wanted the sd of a token's log-ratio, 0 to {_WIDEST:g} nats, as 0.01")
        if not -1 < self.autocorrelation < 1:
            raise UsageError(f"autocorrelation {self.autocorrelation:g}: wanted more than -1 and less than 1")
        if self.mean is not None and not abs(self.mean) <= _WIDEST:
            raise UsageError(f"bias {self.mean:g}: wanted the mean of a token's log-ratio, -{_WIDEST:g} to {_WIDEST:g}")


def inflation(rho: float, n: int) -> float:
    """Var(D) / s^2 of `n` tokens: n when independent, n (1 + rho) / (1 - rho) in the long run."""
    rest = 1 - rho
    if n * rest < 1e-4:  # both terms of the formula are huge there
        return n * n - rest * n * (n * n - 1) / 3
    power = 1 - rho**n if rho <= 0 else -math.expm1(n * math.log(rho))
    return n * (1 + rho) / rest - 2 * rho * power / (rest * rest)


@dataclass(frozen=True, slots=True)
class Answers:
    """The centred log-ratio of answers of `length` tokens."""

    gap: Gap
    length: int

    @property
    def spread(self) -> float:
        """Standard deviation, nats."""
        return self.gap.sd * math.sqrt(inflation(self.gap.autocorrelation, self.length))

    def exact(self) -> bool:
        """Whether the shares are exact, not those of a normal D."""
        return isinstance(self.gap.law, Normal) or self._closed(0.0, 0.0) is not None

    def outside(self, low: float, high: float) -> float:
        """P(centred D <= low or >= high), nats."""
        if self.gap.sd == 0:
            return float(low >= 0 or high <= 0)
        closed = self._closed(low / self.gap.sd, high / self.gap.sd)
        return normal_outside(low / self.spread, high / self.spread) if closed is None else closed

    def _closed(self, low: float, high: float) -> float | None:
        if self.gap.autocorrelation and self.length > 1:
            return None
        return self.gap.law.sum_outside(self.length, low, high)

    def log_mgf(self, k: float) -> float:
        """ln E e^(k centred D); inf where it does not exist."""
        rho, n, unit = self.gap.autocorrelation, self.length, k * self.gap.sd
        if unit == 0:
            return 0.0
        if isinstance(self.gap.law, Normal):
            return (k * self.spread) ** 2 / 2
        if rho == 0:
            return n * float(self.gap.law.log_mgf(np.array([unit]))[0])
        first = unit * (1 - rho**n) / (1 - rho)
        return float(self.gap.law.log_mgf(np.array([first]))[0]) + _innovations(self.gap.law, unit, rho, n - 1)


def _innovations(law: Law, unit: float, rho: float, n: int) -> float:
    """Sum over the `n` innovations of their log_mgf at unit sqrt(1 - rho^2) (1 - rho^k) / (1 - rho), k = 1 .. n.

    The weights settle; the way there is summed whole, or at 50,000 places an odd stride apart where it is longer.
    """
    if n == 0:
        return 0.0
    settling = min(n, math.ceil(40 / -math.log(abs(rho))))
    stride = 1 if settling <= 50_000 else settling // 50_000 | 1
    k = np.arange(1, settling + 1, stride, dtype=np.float64)
    scale = unit * math.sqrt(1 - rho * rho) / (1 - rho)
    weights = scale * (1 - np.sign(rho) ** k * abs(rho) ** k)
    grid, values = _grid(law, 2 * scale)
    return settling * float(np.interp(weights, grid, values).mean()) + (n - settling) * float(
        np.interp(scale, grid, values)
    )


@functools.lru_cache(maxsize=16)
def _grid(law: Law, top: float) -> tuple[Any, Any]:
    grid = np.linspace(0.0, top, 2049)
    return grid, law.log_mgf(grid)


# -- readings ----------------------------------------------------------------------------------------------------------


def _normalised(gap: Gap, n: int) -> float:
    """-ln E e^(centred D), which makes E e^D = 1; half the variance where that mean is infinite."""
    answers = Answers(gap, n)
    found = answers.log_mgf(1.0)
    return -found if math.isfinite(found) else -(answers.spread**2) / 2


@dataclass(frozen=True, slots=True)
class Reading:
    """What the errors of an answer are centred on: `drift(gap, n)` in nats."""

    label: str
    drift: Callable[[Gap, int], float]
    meaning: str


def _by_mean(gap: Gap, n: int) -> float:
    return (gap.mean or 0.0) * n


#: Each reading of one gap; the last two need a mean.
READINGS: dict[str, Reading] = {
    "walk": Reading(
        "textbook walk", lambda gap, n: 0.0, "errors add up around zero, although the mean ratio is then above 1"
    ),
    "normalised": Reading(
        "normalised",
        _normalised,
        "the mean ratio of answers is 1, as between two distributions, so the log drifts by minus half the variance",
    ),
    "given": Reading("given bias", _by_mean, "drifts by the given mean log-ratio a token"),
    "measured": Reading("measured drift", _by_mean, "drifts by the measured mean log-ratio a token"),
}


def readings(gap: Gap) -> dict[str, Reading]:
    """Those that the gap has the numbers for."""
    known = ("walk", "normalised") if gap.mean is None else ("walk", "normalised", gap.mean_is)
    return {name: READINGS[name] for name in known}


def closed(
    gap: Gap, reading: str, length: int, clip: tuple[float, float], sequence_clip: tuple[float, float]
) -> dict[str, Any]:
    """All numbers of one reading; `clip`: how far below and above 1 a token's ratio, and an answer's geometric mean
    ratio, may be. Keys as in `horizon.horizon`."""
    answers = Answers(gap, length)
    drift = READINGS[reading].drift(gap, length)
    first, second = answers.log_mgf(1.0), answers.log_mgf(2.0)
    low, high = band(sequence_clip)
    token_low, token_high = token_band(gap, drift / length, clip)
    return {
        "label": READINGS[reading].label,
        "meaning": READINGS[reading].meaning,
        "drift": drift,
        "spread": answers.spread,
        "median_ratio": math.exp(min(drift, 700)),
        "typical_factor": math.exp(min(answers.spread, 700)),
        "off_by": {f"{f:g}": _off(answers, drift, f) for f in FACTORS},
        "ess_share": math.exp(2 * first - second) if math.isfinite(second) else 0.0,
        "tokens_outside_clip": gap.law.outside(token_low, token_high) if gap.sd else float(token_low > 0),
        "answers_outside_clip": answers.outside(low * length - drift, high * length - drift),
        "half_off_by_2": half_length(gap, reading),
    }


def band(clip: tuple[float, float]) -> tuple[float, float]:
    """The log-ratios at which a ratio leaves 1 - low .. 1 + high."""
    return math.log1p(-clip[0]), math.log1p(clip[1])


def token_band(gap: Gap, mean: float, clip: tuple[float, float]) -> tuple[float, float]:
    """The band in units of the token's law: everything or nothing is outside where the tokens have no spread."""
    low, high = band(clip)
    if gap.sd == 0:
        return (-math.inf, math.inf) if low < mean < high else (math.inf, -math.inf)
    return (low - mean) / gap.sd, (high - mean) / gap.sd


def _off(answers: Answers, drift: float, by: float) -> float:
    """P(|D| >= ln by)."""
    return answers.outside(-math.log(by) - drift, math.log(by) - drift)


def half_length(gap: Gap, reading: str, by: float = HALF) -> int | None:
    """The first length at which at least half of the answers are off by `by` or more, either way; None if never."""

    def reached(n: int) -> bool:
        return _off(Answers(gap, n), READINGS[reading].drift(gap, n), by) >= 0.5

    if gap.autocorrelation < 0:  # short answers go up and down there
        for n in range(1, 65):
            if reached(n):
                return n
    high = 1
    while not reached(high):
        high *= 2
        if high > _LONGEST:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high
