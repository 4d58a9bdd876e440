"""The shapes that most keys have: a mean over tokens or sequences, an extreme, a spread.

A sum over tokens is never averaged again: the quirks of averages of averages are in the terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from onepolicy.dialects.key import Key, Options, Part, Term
from onepolicy.dialects.rounding import exp

N = Part("tokens", "sum", lambda v, o: np.array([len(v.sampler)]))
S = Part("sequences", "sum", lambda v, o: np.array([len(v.lengths)]))
FILLED = Part("sequences with tokens", "sum", lambda v, o: np.array([int(v.filled.sum())]))
#: What a batch that is padded to its longest reply holds; of one batch, so of a step or a whole dump.
WIDTH = Part("width", "max", lambda v, o: np.array([v.width]))


def divide(x: float, n: float) -> float | None:
    """x / n, None for nothing to divide by."""
    return x / n if n else None


def _mean(o: Options, x: float, n: float) -> float | None:
    return divide(x, n)


def mean(name: str, says: str, term: Term, count: Part, **more: Any) -> Key:
    """The sum of a term over what `count` counts."""
    return Key(name, says, (Part(f"sum {name}", "sum", term), count), _mean, **more)


def token_mean(name: str, says: str, term: Term, **more: Any) -> Key:
    """`term` `[N]`, over all tokens alike."""
    return mean(name, says, term, N, **more)


def sequence_mean(name: str, says: str, term: Term, **more: Any) -> Key:
    """`term` `[S]`, over all sequences, also those without tokens."""
    return mean(name, says, term, S, **more)


def by_sequence(name: str, says: str, term: Term, **more: Any) -> Key:
    """`term` `[N]`: the mean over all sequences of the sequence's mean, which is 0 without tokens."""
    return sequence_mean(name, says, lambda v, o: v.means(term(v, o)), **more)


def greatest(name: str, says: str, term: Term, **more: Any) -> Key:
    return Key(name, says, (Part(f"max {name}", "max", term),), lambda o, x: x, **more)


def least(name: str, says: str, term: Term, **more: Any) -> Key:
    return Key(name, says, (Part(f"min {name}", "min", term),), lambda o, x: x, **more)


def moments(name: str, term: Term, about: float = 0.0) -> tuple[Part, Part]:
    """Sums of a term and of its square, both about a value near its mean, so that little cancels."""
    return (
        Part(f"sum {name}", "sum", lambda v, o: _double(term(v, o)) - about),
        Part(f"sum2 {name}", "sum", lambda v, o: (_double(term(v, o)) - about) ** 2),
    )


def _double(x: Any) -> Any:
    return np.asarray(x, dtype=np.float64)


def std(x: float, xx: float, n: float, unbiased: bool = True, single: float = math.nan) -> float | None:
    """Standard deviation of n values with sum x and sum of squares xx; `single` for one value, where torch has NaN."""
    if n < 2:
        return single if n else None
    return math.nan if math.isnan(x + xx) else math.sqrt(max(xx - x * x / n, 0.0) / (n - 1 if unbiased else n))


def ess(o: Options, w: float, ww: float, n: float) -> float | None:
    """1 / mean((w / (mean w + 1e-8))^2) of n weights with sum w and sum of squares ww."""
    return (w / n + 1e-8) ** 2 / (ww / n) if n and ww else None


def spread(
    name: str, says: str, term: Term, count: Part = N, about: float = 0.0, single: float = math.nan, **more: Any
) -> Key:
    """The unbiased standard deviation of a term."""
    value = lambda o, x, xx, n: std(x, xx, n, single=single)
    return Key(name, says, (*moments(name, term, about), count), value, **more)


def pearson(name: str, says: str, least: float = 0.0, **more: Any) -> Key:
    """Correlation of the two sides' probabilities; `least`: what the product of variances is raised to."""

    def value(o: Options, p: float, q: float, pp: float, qq: float, pq: float, n: float) -> float | None:
        if not n:
            return None
        cov, var_p, var_q = pq / n - p / n * (q / n), pp / n - (p / n) ** 2, qq / n - (q / n) ** 2
        below = math.sqrt(max(var_p * var_q, least)) if not math.isnan(var_p * var_q) else math.nan
        return cov / below if below else math.nan

    terms: dict[str, Callable[[Any], Any]] = {
        "p": lambda v: _double(v.p),
        "q": lambda v: _double(v.q),
        "pp": lambda v: _double(v.p) ** 2,
        "qq": lambda v: _double(v.q) ** 2,
        "pq": lambda v: _double(v.p) * _double(v.q),
    }
    parts = tuple(Part(f"pearson {k}", "sum", lambda v, o, f=f: f(v)) for k, f in terms.items())
    return Key(name, says, (*parts, N), value, **more)


# -- terms -------------------------------------------------------------------------------------------------------------


def clamped(x: Any, bound: float) -> Any:
    return np.clip(x, -bound, bound)


def k3(d: Any) -> Any:
    """e^d - d - 1, in the order in which the frameworks subtract: in float32 it cancels for small d."""
    return exp(d) - d - 1


def ones(x: Any) -> Any:
    """A condition as 1 and 0."""
    return x.astype(np.float64)
