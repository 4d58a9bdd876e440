"""Pareto k: whether the ratio's upper tail has the moments that means of it need.

Fit of a generalised Pareto distribution to the largest ratios by the quasi-Bayesian estimator of Zhang and Stephens
(2009), as in Pareto smoothed importance sampling (Vehtari et al., JMLR 2024). Above 0.7 the central limit theorem does
not help at any practical size, and intervals of ratio means are withheld.
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


def pareto_k(log_ratios: FloatArray, counts: FloatArray) -> float:
    """k of the upper tail of r = e^d from values of d (ascending, `[K]`) with counts `[K]`.

    NaN with fewer than twice `TAIL_LEAST` values, or when the tail is one single value (nothing to fit).
    """
    n = int(counts.sum())
    m = max(math.ceil(TAIL_SHARE * n), TAIL_LEAST)
    if n < 2 * TAIL_LEAST:
        return math.nan
    values, counts = log_ratios[::-1], counts[::-1]
    up_to = np.cumsum(counts)
    taken = np.clip(m - (up_to - counts), 0, counts)  # of each value, how many are among the m greatest
    threshold = values[np.searchsorted(up_to, m + 1)]
    # e^d - e^u relative to e^u: the shape does not depend on the scale, and this cannot overflow before expm1 does
    with np.errstate(over="ignore", invalid="ignore"):
        excess = np.expm1(values - threshold)
    keep = (taken > 0) & (excess > 0) & np.isfinite(excess)
    excess, taken = excess[keep][::-1], taken[keep][::-1]
    return _zhang_stephens(excess, taken) if taken.sum() >= TAIL_LEAST // 2 else math.nan


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
        "shape of the generalised Pareto tail of r: largest 5%, at least 50; above 0.7 ratio means have no interval",
        reducer="histogram",
        ideal=None,
        unit="shape",
        source="Zhang and Stephens 2009; Vehtari et al. 2024",
    )
]
