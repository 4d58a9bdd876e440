"""Core metrics in million tokens a second and core, next to a plain numpy mean and to one read of memory."""

from __future__ import annotations

import numpy as np

from benchmarks.data import median_seconds, rollouts
from onepolicy.align import align
from onepolicy.estimate import measure
from onepolicy.metrics import METRICS
from onepolicy.reduce import reduce
from onepolicy.sums import Metric
from onepolicy.types import FloatArray

TOKENS = 2_000_000
#: The four numbers that most dashboards show.
FEW = ("abs_log_ratio/mean", "kl_sampler_scorer_k3/mean", "ratio/mean", "abs_log_ratio/max")


def main() -> None:
    data = rollouts(TOKENS)
    pairs = align(data)
    n = int(pairs.drawn.sum())
    a, b = pairs.a[pairs.drawn], pairs.b[pairs.drawn]
    sums = reduce(pairs, METRICS.values())
    rows = [
        ("one read of the two columns (sum)", median_seconds(lambda: (np.add.reduce(a), np.add.reduce(b)))),
        ("numpy: mean|d|, mean(expm1(d) - d), mean(exp d), max|d|", median_seconds(lambda: _plain(a, b))),
        ("onepolicy: the same four, exact sums, cluster rows", median_seconds(lambda: reduce(pairs, _few()))),
        (f"onepolicy: all {len(METRICS)} metrics", median_seconds(lambda: reduce(pairs, METRICS.values()))),
        ("onepolicy: align", median_seconds(lambda: align(data))),
        ("onepolicy: measurements with intervals, from sums", median_seconds(lambda: measure(sums))),
    ]
    plain = rows[1][1]
    print(f"core metrics, {n:,} drawn tokens of {data.n_tokens:,}, one core")
    for name, seconds in rows:
        print(f"  {name:58s} {n / seconds / 1e6:9.1f} M tokens/s   {seconds / plain:6.2f} x numpy's four")


def _few() -> list[Metric]:
    return [METRICS[key] for key in FEW]


def _plain(a: FloatArray, b: FloatArray) -> tuple[float, ...]:
    d = b - a
    return np.abs(d).mean(), (np.expm1(d) - d).mean(), np.exp(d).mean(), np.abs(d).max()
