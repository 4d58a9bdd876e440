"""From Sums to Measurements: each metric's number, its counts, and its cluster-jackknife interval."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from onepolicy import histogram as hist
from onepolicy.grid import to_float
from onepolicy.intervals import CONFIDENCE, t_cdf, t_quantile
from onepolicy.metrics import METRICS
from onepolicy.metrics.tail import WITHHOLD_ABOVE, is_heavy, pareto_k
from onepolicy.sums import Metric, Quantile, Sums, Total
from onepolicy.types import FloatArray, IntArray, Measurement

#: Fewer effective clusters than this: no interval can be trusted (`coverage` in the docs), a gate is inconclusive.
LEAST_CLUSTERS = 20
#: Hashed groups of clusters that a quantile's limits need: 20 clusters fall into about 15 of the 32.
LEAST_GROUPS = 12


class Totals:
    """What a metric's `compute` sees: totals of its terms, as floats or as `[C]` arrays with one cluster left out."""

    def __init__(self, sums: Sums, metric: Metric) -> None:
        self._sums, self._keys = sums, metric.term_keys()
        self._left_out: dict[str, tuple[Any, Any]] = {}

    def without_each(self, ids: list[int]) -> Totals:
        """The same totals minus each cluster in turn (arrays over `ids`)."""
        out = Totals.__new__(Totals)
        out._sums, out._keys = self._sums, self._keys
        out._left_out = {}
        for name, key in self._keys.items():
            total, rows = self._sums.totals[key], self._sums.rows[key]
            found = [rows.get(i, (0, 0)) for i in ids]
            x = np.array([to_float(total.total - row[0]) for row in found])
            n = np.array([total.n - row[1] for row in found], dtype=np.float64)
            out._left_out[name] = (x, n)
        return out

    def sum(self, term: str) -> Any:
        return self._left_out[term][0] if self._left_out else to_float(self._total(term).total)

    def n(self, term: str) -> Any:
        return self._left_out[term][1] if self._left_out else self._total(term).n

    def mean(self, term: str) -> Any:
        return self.divide(self.sum(term), self.n(term))

    def greatest(self, term: str) -> float:
        value = self._sums.totals[f"extremes:{self._keys[term]}"].greatest
        return math.nan if value is None else value

    def least(self, term: str) -> float:
        value = self._sums.totals[f"extremes:{self._keys[term]}"].least
        return math.nan if value is None else value

    def quantile(self, read: Quantile) -> float:
        codes, counts = quantile_table(self._sums, read)
        value = _read(hist.quantile(codes, counts.sum(axis=0), read.q), read)
        if read.over is None or value == 0:  # nothing differs up to here, whatever it is divided by
            return value
        return self.divide(value, self.quantile(_denominator(read)))

    def pareto_k(self, name: str) -> float:
        codes, counts = self._sums.histograms[name].table()
        return pareto_k(hist.bin_values(codes), counts.sum(axis=0).astype(np.float64))

    @staticmethod
    def exp(x: float) -> float:
        try:
            return math.exp(x)
        except OverflowError:
            return math.inf

    @staticmethod
    def divide(x: Any, y: Any) -> Any:
        """x / y, NaN where y is 0."""
        if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
            with np.errstate(divide="ignore", invalid="ignore"):
                return np.where(np.asarray(y) == 0, np.nan, np.asarray(x) / np.asarray(y))
        return x / y if y else math.nan

    def _total(self, term: str) -> Total:
        return self._sums.totals[self._keys[term]]


def quantile_table(sums: Sums, read: Quantile) -> tuple[IntArray, IntArray]:
    """(codes `[K]`, counts `[GROUPS, K]`) of the histogram that a quantile reads."""
    codes, counts = sums.histograms[read.histogram].table()
    return hist.folded(codes, counts) if read.absolute else (codes, counts)


def _denominator(read: Quantile) -> Any:
    """The quantile that a ratio of quantiles is divided by."""
    return replace(read, histogram=read.over, over=None)  # pyright: ignore[reportArgumentType]


def _read(value: float, read: Quantile) -> float:
    return Totals.exp(value) if read.exponent else value


def measure(sums: Sums, metrics: Mapping[str, Metric] = METRICS) -> dict[str, Measurement]:
    """Every metric of the table as a `Measurement`; what the Sums do not hold is there with `value` None and `why`."""
    heavy, effective = heavy_tail(sums), _effective(sums)
    return {key: _measure(sums, m, heavy, effective) for key, m in metrics.items() if key in sums.metrics}


def heavy_tail(sums: Sums) -> bool:
    """Whether the upper tail of the ratios is so heavy that means of them have no interval."""
    if "log_ratio" not in sums.histograms:
        return False
    codes, counts = sums.histograms["log_ratio"].table()
    return is_heavy(hist.bin_values(codes), counts.sum(axis=0).astype(np.float64))


def _measure(sums: Sums, m: Metric, heavy: bool, effective: float) -> Measurement:
    why = _unmeasured(sums, m)
    if why:
        return Measurement(m.key, None, 0, _nonfinite(sums, m), scale=m.scale, why=why)
    if m.reducer in ("max", "min"):
        return _extreme(sums, m)
    if m.reducer == "histogram":
        return _from_histogram(sums, m, effective)
    return _from_sums(sums, m, heavy)


def _nonfinite(sums: Sums, m: Metric) -> int:
    prefix = "extremes:" if m.reducer in ("max", "min") else ""
    return max(
        (sums.totals[prefix + k].nonfinite for k in m.term_keys().values() if prefix + k in sums.totals), default=0
    )


def _unmeasured(sums: Sums, m: Metric) -> str | None:
    """Why a metric has no value: its tokens are not there. None if they are."""
    if m.reducer == "histogram":
        return _REASONS[m.uses] if _no_histogram(sums, m) else None
    prefix = "extremes:" if m.reducer in ("max", "min") else ""
    found = [sums.totals.get(prefix + key) for key in m.term_keys().values()]
    if any(t is None for t in found):
        return _REASONS[m.uses]
    if any(t is not None and t.n == 0 for t in found):
        if any(t is not None and t.nonfinite for t in found):
            return "every term overflowed or was not finite"
        return _REASONS[m.uses]
    return None


def _no_histogram(sums: Sums, m: Metric) -> bool:
    if m.uses == "floor":
        return not all(n in sums.histograms and sums.histograms[n] for n in _STANDARDISED)
    return not any(sums.histograms.values())


_STANDARDISED = ("standardised_gap", "standardised_floor")

_REASONS = {
    "scored": "no token was scored by both sides with finite values",
    "estimator": "no token was drawn by the first side from the distribution it reports",
    "surprisal_a": "the sampler's entropy and varentropy are not known",
    "surprisal_b": "the scorer's entropy and varentropy are not known",
    "exact": "full distributions are not at hand",
    "position": "the gap was not looked at by position",
    "floor": "what rounding alone would do is not known",
}


def _extreme(sums: Sums, m: Metric) -> Measurement:
    total = sums.totals["extremes:" + next(iter(m.term_keys().values()))]
    value = float(m.compute(Totals(sums, m)))
    return Measurement(m.key, value, total.n, total.nonfinite, sums.n_clusters(), scale=m.scale)


def _from_histogram(sums: Sums, m: Metric, effective: float) -> Measurement:
    value = float(m.compute(Totals(sums, m)))
    name = m.quantile.histogram if m.quantile else "log_ratio"
    _, counts = sums.histograms[name].table()
    n = int(counts.sum())
    if math.isnan(value):
        return Measurement(m.key, None, n, scale=m.scale, why="too few different ratios in the upper tail")
    groups = int((counts.sum(axis=1) > 0).sum())
    found = Measurement(m.key, value, n, 0, sums.n_clusters(), effective, scale=m.scale)
    if m.quantile is not None and m.quantile.over is not None:
        return _quantile_ratio(sums, m.quantile, replace(found, scale="log"), groups)
    if m.quantile is not None and groups >= LEAST_GROUPS:
        lower, upper = _woodruff(sums, m.quantile)
        return replace(found, lower=lower, upper=upper)
    return found


def _effective(sums: Sums) -> float:
    """Kish's effective number of clusters, by the tokens of the term that has most of both (by name among equals)."""
    found = [
        (len(rows), sum(n for _, n in rows.values()), k) for k, rows in sums.rows.items() if k.startswith("token:")
    ]
    if not found:
        return 0.0
    sizes = [n for _, n in sums.rows[max(found)[2]].values()]
    return sum(sizes) ** 2 / sum(n * n for n in sizes) if any(sizes) else 0.0


def _woodruff(sums: Sums, read: Quantile) -> tuple[float, float]:
    """Limits of a quantile: those of the share below it (delete one hashed group), read back as quantiles.

    Deleting groups from the quantile itself would give zero error whenever its bin does not move (Woodruff 1952).
    """
    codes, counts = quantile_table(sums, read)
    total = counts.sum(axis=0)
    at = int(np.searchsorted(np.cumsum(total), max(1, math.ceil(read.q * total.sum() - 1e-9))))
    _, error, groups = _share_of_bins(counts, at)
    width = t_quantile(CONFIDENCE, groups - 1) * error
    low, high = (hist.quantile(codes, total, min(max(read.q + s * width, 0.0), 1.0)) for s in (-1, 1))
    return _read(low, read), _read(high, read)


def _share_of_bins(counts: IntArray, n_bins: int) -> tuple[float, float, int]:
    """Of `[GROUPS, K]`: share of values in the first `n_bins`, its error by deleting hashed groups, groups."""
    n, below = (counts[:, :k].sum(axis=1).astype(float) for k in (counts.shape[1], n_bins))
    n, below = n[n > 0], below[n > 0]
    left_out = (below.sum() - below) / (n.sum() - n)
    return float(below.sum() / n.sum()), _jackknife_error(left_out) or 0.0, len(n)


def _quantile_ratio(sums: Sums, read: Quantile, found: Measurement, groups: int) -> Measurement:
    """A ratio of two quantiles of the same tokens. Its error on the log scale: both quantiles' shares below, linearised
    through the density there, and deleted by the same hashed groups of clusters, so that what they share cancels."""
    value = found.value
    assert value is not None
    if value == 0:
        return replace(found, std_error=0.0, lower=0.0, upper=0.0, scale="linear")
    if groups < LEAST_GROUPS or not value > 0:
        return replace(found, scale="log" if value > 0 else "linear")
    over = _influence(sums, _denominator(read))
    top = _influence(sums, read)
    both = (top[0] > 0) & (over[0] > 0)
    error = _jackknife_error((top[1] - over[1])[both])
    if error is None:
        return found
    lower, upper = _limits(value, error, int(both.sum()) - 1, "log")
    return replace(found, std_error=error, lower=lower, upper=upper)


#: Half the width, in standard errors of the share, over which the density at a quantile is read.
_DENSITY_ERRORS = 1.5


def _influence(sums: Sums, read: Quantile) -> tuple[FloatArray, FloatArray]:
    """(`[GROUPS]` values, `[GROUPS]` log of the quantile with each group left out, to first order)."""
    codes, counts = quantile_table(sums, read)
    total, sizes = counts.sum(axis=0), counts.sum(axis=1).astype(float)
    n = total.sum()
    at = int(np.searchsorted(np.cumsum(total), max(1, math.ceil(read.q * n - 1e-9))))
    below = counts[:, : at + 1].sum(axis=1)
    share = below.sum() / n
    with np.errstate(invalid="ignore", divide="ignore"):
        left_out = (below.sum() - below) / (n - sizes)
    width = max(_DENSITY_ERRORS * math.sqrt(read.q * (1 - read.q) / n), 4 / n)
    width = min(width, 0.9 * min(read.q, 1 - read.q))
    low, high = (hist.quantile(codes, total, read.q + s * width) for s in (-1, 1))
    step = max(math.log(high / low), 2 / 256) if low > 0 else math.inf  # a bin is 2^-7 wide at most
    return sizes, (share - left_out) * step / (2 * width)


def quantile_p_value(sums: Sums, read: Quantile, at_most: float) -> float:
    """One-sided p of "the quantile is at most `at_most`": the share of values up to there is at least q."""
    codes, counts = quantile_table(sums, read)
    edge = (math.log(at_most) if at_most > 0 else -math.inf) if read.exponent else at_most
    up_to = int(np.searchsorted(codes, hist.codes(np.array([edge]))[0], side="right"))
    share, error, groups = _share_of_bins(counts, up_to)
    if error == 0:
        return 0.0 if share < read.q else 1.0
    return t_cdf((share - read.q) / error, groups - 1)


def _from_sums(sums: Sums, m: Metric, heavy: bool) -> Measurement:
    keys = list(m.term_keys().values())
    totals = Totals(sums, m)
    value = _value(m, totals)
    rows = sums.rows[keys[0]]
    nonfinite = max(sums.totals[k].nonfinite for k in keys)
    sizes = _sizes(sums, m, rows)
    if not sizes.any():
        return Measurement(m.key, None, 0, nonfinite, 0, scale=m.scale, why="no token of that kind")
    if not math.isfinite(value):
        n = _counted(sums, m)
        return Measurement(m.key, None, n, nonfinite, len(rows), scale=m.scale, why=f"it is {value}: not defined here")
    effective = float(sizes.sum() ** 2 / (sizes**2).sum())
    se, why, scale = None, None, m.scale if value > 0 else "linear"
    if m.ratio_tail and heavy:
        why = f"interval withheld: Pareto k of the ratios is above {WITHHOLD_ABOVE}"
    elif len(rows) > 1:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            left_out = np.asarray(m.compute(totals.without_each(sorted(rows))), dtype=np.float64)
        # where one cluster holds all of a value, nothing is left without it: no error on the log scale
        scale = m.scale if value > 0 and bool((left_out > 0).all()) else "linear"
        se = _jackknife_error(np.log(left_out) if scale == "log" else left_out)
    lower, upper = _limits(value, se, effective - 1, scale)
    clusters = int(np.count_nonzero(sizes))
    return Measurement(m.key, value, _counted(sums, m), nonfinite, clusters, effective, se, lower, upper, scale, why)


def _counted(sums: Sums, m: Metric) -> int:
    """How many elements a metric is over."""
    if m.counted_by is not None:
        return round(to_float(sums.totals[m.term_keys()[m.counted_by]].total))
    return min(sums.totals[k].n for k in m.term_keys().values())


def _sizes(sums: Sums, m: Metric, rows: Mapping[int, tuple[int, int]]) -> FloatArray:
    """`[C]` elements of each cluster."""
    if m.counted_by is not None:
        rows = sums.rows[m.term_keys()[m.counted_by]]
        return np.array([to_float(total) for total, _ in rows.values()], dtype=np.float64)
    return np.array([n for _, n in rows.values()], dtype=np.float64)


def _value(m: Metric, totals: Totals) -> float:
    """The number, NaN where the formula has none for these totals."""
    try:
        return float(m.compute(totals))
    except (OverflowError, ZeroDivisionError):
        return math.nan


def _jackknife_error(left_out: FloatArray) -> float | None:
    """sqrt((C - 1) / C * sum (x_c - mean)^2); None where a left-out value is not finite."""
    c = len(left_out)
    if c < 2 or not np.isfinite(left_out).all():
        return None
    with np.errstate(over="ignore"):
        error = math.sqrt((c - 1) / c * float(((left_out - left_out.mean()) ** 2).sum()))
    return error if math.isfinite(error) else None


def _limits(value: float, se: float | None, df: float, scale: str) -> tuple[float | None, float | None]:
    """One-sided 99% limits, each; on the log scale they multiply."""
    if se is None or not math.isfinite(value) or df <= 0:
        return None, None
    width = t_quantile(CONFIDENCE, df) * se
    if scale == "log":
        return value * math.exp(-min(width, 700)), value * math.exp(min(width, 700))
    return value - width, value + width
