"""Laws of one token's log-ratio, centred, with standard deviation 1: how often the gap is how large.

To add one: a class with the four methods of `Law`, a line in `TAILS`, and a test against an independent reference.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from onepolicy.errors import UnknownName, UsageError
from onepolicy.intervals import t_cdf
from onepolicy.types import FloatArray


class Law(Protocol):
    """The law of x = (d - mean d) / sd."""

    @property
    def about(self) -> str:
        """In words, for a report."""
        ...

    def log_mgf(self, c: FloatArray) -> FloatArray:
        """`[C]` ln E e^(c x); inf where the mean does not exist."""
        ...

    def outside(self, low: float, high: float) -> float:
        """P(x <= low or x >= high)."""
        ...

    def sum_outside(self, n: int, low: float, high: float) -> float | None:
        """The same for the sum of `n` independent tokens; None where there is no closed form."""
        ...

    def draw(self, rng: np.random.Generator, shape: tuple[int, int]) -> FloatArray:
        """`shape` independent values."""
        ...


def normal_outside(low: float, high: float) -> float:
    """P(z <= low or z >= high) of a standard normal."""
    return 0.5 * (math.erfc(-low / math.sqrt(2)) + math.erfc(high / math.sqrt(2)))


@dataclass(frozen=True, slots=True)
class Normal:
    """Errors of every size in their Gaussian proportion."""

    about: str = "normal"

    def log_mgf(self, c: FloatArray) -> FloatArray:
        return c * c / 2

    def outside(self, low: float, high: float) -> float:
        return normal_outside(low, high)

    def sum_outside(self, n: int, low: float, high: float) -> float | None:
        return normal_outside(low / math.sqrt(n), high / math.sqrt(n))

    def draw(self, rng: np.random.Generator, shape: tuple[int, int]) -> FloatArray:
        return rng.standard_normal(shape)


@dataclass(frozen=True, slots=True)
class StudentT:
    """Power-law tails. The ratio e^x has no finite mean, whatever `df` is."""

    df: float

    def __post_init__(self) -> None:
        if not 2 < self.df < math.inf:
            raise UsageError(f"tail t:{self.df:g}: wanted more than 2 degrees of freedom, else it has no sd; as t:4")

    @property
    def about(self) -> str:
        return f"Student t, {self.df:g} degrees of freedom"

    def _scale(self) -> float:
        return math.sqrt((self.df - 2) / self.df)

    def log_mgf(self, c: FloatArray) -> FloatArray:
        return np.where(c == 0, 0.0, math.inf)

    def outside(self, low: float, high: float) -> float:
        left, right = (min(max(x / self._scale(), -1e100), 1e100) for x in (low, -high))
        return t_cdf(left, self.df) + t_cdf(right, self.df)

    def sum_outside(self, n: int, low: float, high: float) -> float | None:
        return self.outside(low, high) if n == 1 else None

    def draw(self, rng: np.random.Generator, shape: tuple[int, int]) -> FloatArray:
        return rng.standard_t(self.df, shape) * self._scale()


@dataclass(frozen=True, slots=True)
class Mixture:
    """Two normals: `share` of the tokens has an sd `size` times that of the rest."""

    share: float
    size: float

    def __post_init__(self) -> None:
        if not (0 < self.share < 1 and 0 < self.size < math.inf):
            wanted = "a share between 0 and 1 and a positive size, as mixture:0.01,10"
            raise UsageError(f"tail mixture:{self.share:g},{self.size:g}: wanted {wanted}")

    @property
    def about(self) -> str:
        return f"mixture, {100 * self.share:g}% of the tokens {self.size:g} times as far off"

    def sds(self) -> tuple[float, float]:
        """Of the rest and of the share."""
        rest = 1 / math.sqrt(1 - self.share + self.share * self.size**2)
        return rest, rest * self.size

    def log_mgf(self, c: FloatArray) -> FloatArray:
        rest, far = self.sds()
        return np.logaddexp(
            math.log1p(-self.share) + c * c * rest * rest / 2, math.log(self.share) + c * c * far * far / 2
        )

    def outside(self, low: float, high: float) -> float:
        rest, far = self.sds()
        return (1 - self.share) * normal_outside(low / rest, high / rest) + self.share * normal_outside(
            low / far, high / far
        )

    def sum_outside(self, n: int, low: float, high: float) -> float | None:
        """Over the number k of far tokens, which is binomial: given k, the sum is normal."""
        rest, far = self.sds()
        out = 0.0
        for k, weight in zip(*_binomial(n, self.share), strict=True):
            sd = math.sqrt((n - k) * rest * rest + k * far * far)
            out += weight * normal_outside(low / sd, high / sd)
        return out

    def draw(self, rng: np.random.Generator, shape: tuple[int, int]) -> FloatArray:
        rest, far = self.sds()
        return rng.standard_normal(shape) * np.where(rng.random(shape) < self.share, far, rest)


def _binomial(n: int, p: float) -> tuple[list[float], list[float]]:
    """(counts, weights) of a binomial within 9 sd, at most 2,001 evenly spaced counts for large n."""
    width = 9 * math.sqrt(n * p * (1 - p)) + 9
    first, last = max(0, math.floor(n * p - width)), min(n, math.ceil(n * p + width))
    k = np.arange(first, last + 1, max(1, (last - first) // 2000), dtype=np.float64)
    choose = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in k.tolist()])
    log_weight = choose + k * math.log(p) + (n - k) * math.log1p(-p)
    weight = np.exp(log_weight - log_weight.max())
    return k.tolist(), (weight / weight.sum()).tolist()


@dataclass(frozen=True, eq=False)
class Histogram:
    """What was measured: `values` `[K]` in units of the sd, ascending, and their `weights` `[K]` (any scale)."""

    values: FloatArray
    weights: FloatArray
    about: str = "as measured"
    _p: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        p = self.weights / self.weights.sum()
        mean = p @ self.values
        sd = math.sqrt(p @ (self.values - mean) ** 2)
        object.__setattr__(self, "values", (self.values - mean) / sd)  # bins round: exactly mean 0, sd 1 again
        object.__setattr__(self, "_p", p)

    def log_mgf(self, c: FloatArray) -> FloatArray:
        out = np.empty(len(c))
        for i, one in enumerate(c.tolist()):
            x = one * self.values
            top = x.max()
            out[i] = top + math.log(self._p @ np.exp(x - top))
        return out

    def outside(self, low: float, high: float) -> float:
        return float(self._p[(self.values <= low) | (self.values >= high)].sum())

    def sum_outside(self, n: int, low: float, high: float) -> float | None:
        return self.outside(low, high) if n == 1 else None

    def draw(self, rng: np.random.Generator, shape: tuple[int, int]) -> FloatArray:
        """By Walker's alias method: two uniform numbers a value."""
        keep, other = self._alias
        at = rng.integers(len(keep), size=shape)
        return self.values[np.where(rng.random(shape) < keep[at], at, other[at])]

    @functools.cached_property
    def _alias(self) -> tuple[FloatArray, Any]:
        """(share of its slot that each value keeps, who has the rest), both `[K]`."""
        keep, other = self._p * len(self._p), np.arange(len(self._p))
        small, large = (list(np.flatnonzero(side)) for side in (keep < 1, keep >= 1))
        while small and large:
            s, t = small.pop(), large[-1]
            other[s] = t
            keep[t] -= 1 - keep[s]
            if keep[t] < 1:
                small.append(large.pop())
        keep[small] = 1.0  # what rounding left over
        return keep, other


#: name -> (the law of its numbers, how it is written)
TAILS: dict[str, tuple[Callable[..., Law], str]] = {
    "normal": (Normal, "normal"),
    "t": (StudentT, "t:DEGREES"),
    "mixture": (Mixture, "mixture:SHARE,SIZE"),
}


def law_of(text: str) -> Law:
    """`normal`, `t:4` or `mixture:0.01,10` as a law. Errors: `UsageError`."""
    name, _, rest = text.partition(":")
    if name not in TAILS:
        raise UnknownName("tail", name, TAILS)
    make, form = TAILS[name]
    try:
        numbers = [float(x) for x in rest.split(",")] if rest else []
    except ValueError:
        raise UsageError(f"tail {text}: wanted {form}") from None
    if len(numbers) != form.count(",") + (":" in form):
        raise UsageError(f"tail {text}: wanted {form}")
    return make(*numbers)
