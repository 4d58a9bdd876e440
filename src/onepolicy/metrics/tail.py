"""Pareto k: whether the ratio's upper tail has the moments that means of it need.

Fit of a generalised Pareto distribution to the largest ratios by the quasi-Bayesian estimator of Zhang and Stephens
(2009), as in Pareto smoothed importance sampling (Vehtari et al., JMLR 2024). Above 0.7 the central limit theorem does
not help at any practical size, and intervals of ratio means are withheld; unless the tail is too small to matter. The
shape says nothing of the size: where truncation pulls most ratios below 1, the largest ones are those near 1 and their
rounding, a heavy shape a hundredth wide.
"""

from __future__ import annotations

import math

import numpy as np

from onepolicy.sums import Metric
from onepolicy.types import FloatArray

#: Share of the largest ratios that is fitted, and the least number of them.
TAIL_SHARE, TAIL_LEAST = 0.05, 50
#: Above this the interval of a ratio mean is withheld (Vehtari et al.).
WITHHOLD_ABOVE = 0.7
#: A tail that holds less than this of the variance of r carries no mean, whatever its shape. Noise around 1 whose
#: fitted shape is beyond the limit holds a third or more (Student's t with 2 or 3 degrees, 1,500 and 4,000 tokens).
TAIL_HOLDS = 0.05


def is_heavy(log_ratios: FloatArray, counts: FloatArray) -> bool:
    """Whether means of r = e^d have no interval: the tail's shape is beyond the limit, and it is not negligible."""
    return pareto_k(log_ratios, counts) > WITHHOLD_ABOVE and not tail_share(log_ratios, counts) < TAIL_HOLDS


def tail_share(log_ratios: FloatArray, counts: FloatArray) -> float:
    """Of the variance of r, the share that the largest ratios hold by what they exceed the threshold by. As
    `pareto_k`; NaN where the ratios are all equal or overflow."""
    threshold, taken = _tail(log_ratios, counts)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        excess = np.expm1(log_ratios - threshold)  # in units of the threshold, which cancels
        mean = (excess * counts).sum() / counts.sum()
        variance = ((excess - mean) ** 2 * counts).sum()
        return float((excess**2 * taken).sum() / variance)


def pareto_k(log_ratios: FloatArray, counts: FloatArray) -> float:
    """k of the upper tail of r = e^d from values of d (ascending, `[K]`) with counts `[K]`.

    NaN with fewer than twice `TAIL_LEAST` values, or when the tail is one single value (nothing to fit).
    """
    if int(counts.sum()) < 2 * TAIL_LEAST:
        return math.nan
    threshold, taken = _tail(log_ratios, counts)
    # e^d - e^u relative to e^u: the shape does not depend on the scale, and this cannot overflow before expm1 does
    with np.errstate(over="ignore", invalid="ignore"):
        excess = np.expm1(log_ratios - threshold)
    keep = (taken > 0) & (excess > 0) & np.isfinite(excess)
    excess, taken = excess[keep], taken[keep]
    return _zhang_stephens(excess, taken) if taken.sum() >= TAIL_LEAST // 2 else math.nan


def _tail(log_ratios: FloatArray, counts: FloatArray) -> tuple[float, FloatArray]:
    """(the greatest value below the tail, `[K]` how many of each value are in the tail)."""
    m = max(math.ceil(TAIL_SHARE * counts.sum()), TAIL_LEAST)
    values, from_top = log_ratios[::-1], counts[::-1]
    up_to = np.cumsum(from_top)
    taken = np.clip(m - (up_to - from_top), 0, from_top)
    at = min(int(np.searchsorted(up_to, m + 1)), len(values) - 1)
    return float(values[at]), taken[::-1]


def _zhang_stephens(x: FloatArray, counts: FloatArray) -> float:
    """Shape of a generalised Pareto distribution fitted to exceedances `x` `[K]` (ascending, positive) with counts.

    Each value once, however often it occurs: a tail of a million tokens lies in some hundred bins.
    """
    n = float(counts.sum())
    m = 30 + int(math.sqrt(n))
    quartile = x[np.searchsorted(np.cumsum(counts), max(math.floor(n / 4 + 0.5), 1))]
    grid = 1 / x[-1] + (1 - np.sqrt(m / (np.arange(1, m + 1) - 0.5))) / (3 * quartile)
    k = (np.log1p(-grid[:, None] * x[None, :]) * counts).sum(axis=1) / n
    likelihood = n * (np.log(-grid / k) - k - 1)
    with np.errstate(over="ignore"):  # a grid point that is far less likely gets weight 1 / inf = 0
        weights = 1 / np.exp(likelihood[None, :] - likelihood[:, None]).sum(axis=1)
    theta = float((grid * weights).sum() / weights.sum())
    shape = float((np.log1p(-theta * x) * counts).sum() / n)
    # weakly informative prior towards 0.5 of ten observations, as published with PSIS
    return (shape * n + 0.5 * 10) / (n + 10)


METRICS = [
    Metric(
        "ratio/pareto_k",
        "token",
        "scored",
        {},
        lambda t: t.pareto_k("log_ratio"),
        "shape of the generalised Pareto tail of r: largest 5%, at least 50; above 0.7 ratio means have no interval, "
        "where that tail holds 5% of the variance or more",
        reducer="histogram",
        ideal=None,
        unit="shape",
        source="Zhang and Stephens 2009; Vehtari et al. 2024",
    )
]
