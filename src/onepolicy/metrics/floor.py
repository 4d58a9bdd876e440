"""The gap against the rounding that is predicted for it, and the gap by position.

z = d / scale, the standardised gap: `scale` is the RMS gap that rounding alone makes at a token of this kind, from the
trusted side's variants (`floor.py`). A ratio of 1 is rounding; the variants' own z stands in the denominator, over the
same tokens, so one cluster left out is left out of both (the paired jackknife).
"""

from __future__ import annotations

from typing import Any

from onepolicy.sums import Metric, Quantile, Term
from onepolicy.views import Within, log_ratio_squared

#: Lower edges of the position buckets: powers of two, the first ones together.
BUCKETS = (0, *(2**k for k in range(4, 18)))


def _ratio(t: Any) -> Any:
    """sqrt(mean z^2 of the gap / mean z^2 of the variants' pairs)."""
    gap = t.divide(t.sum("gap_z2"), t.sum("gap_n"))
    return t.divide(gap, t.divide(t.sum("floor_z2"), t.sum("floor_n"))) ** 0.5


_TERMS = ("gap_z2", "gap_n", "floor_z2", "floor_n")


def _column(name: str) -> Any:
    return lambda xp, x: getattr(x, name)


#: What a bucket adds up: one function each for all buckets.
_COLUMNS = {name: _column(name) for name in _TERMS}


def _one(xp: Any, x: Any) -> Any:
    """1 at every token that has a position."""
    return xp.indicator(x.position >= 0)


def _within(term: Term, low: int) -> Within:
    return Within(term, low, None if low == BUCKETS[-1] else BUCKETS[BUCKETS.index(low) + 1])


def _renamed(names: tuple[str, ...], low: int, compute: Any) -> Any:
    """`compute` on the totals of one bucket: its terms have the bucket in their names."""
    return lambda t: compute(_Bucket(t, low))


class _Bucket:
    """The totals of one position bucket under the plain terms' names."""

    def __init__(self, totals: Any, low: int) -> None:
        self._totals, self._low = totals, low
        self.divide = totals.divide

    def sum(self, term: str) -> Any:
        return self._totals.sum(f"{term}_from_{self._low}")


def _ratio_from(low: int) -> Metric:
    return Metric(
        f"gap_over_floor_from_{low}/rms",
        "token",
        "floor",
        {f"{name}_from_{low}": _within(_COLUMNS[name], low) for name in _TERMS},
        _renamed(_TERMS, low, _ratio),
        f"gap_over_floor/rms over positions {_span(low)}",
        scale="log",
        ideal=None,
        unit="floors",
        source="ours",
        counted_by=f"gap_n_from_{low}",
    )


def _span(low: int) -> str:
    return f"{low} and above" if low == BUCKETS[-1] else f"{low} to {BUCKETS[BUCKETS.index(low) + 1] - 1}"


def _rms_from(low: int) -> Metric:
    squared, counted = f"d2_from_{low}", f"n_from_{low}"
    return Metric(
        f"log_ratio_from_{low}/rms",
        "token",
        "position",
        {
            squared: _within(log_ratio_squared, low),
            counted: _within(_one, low),
        },
        lambda t: t.divide(t.sum(squared), t.sum(counted)) ** 0.5,
        f"sqrt(mean(d^2)) over positions {_span(low)}",
        scale="log",
        counted_by=counted,
    )


def _quantile(q: float, name: str) -> Metric:
    read = Quantile("standardised_gap", q, absolute=True, over="standardised_floor")
    return Metric(
        f"gap_over_floor/{name}",
        "token",
        "floor",
        {},
        lambda t: t.quantile(read),
        f"{name} of |z| of the gap / {name} of |z| of the variants' pairs",
        reducer="histogram",
        scale="log",
        ideal=None,
        unit="floors",
        source="ours",
        quantile=read,
    )


METRICS = [
    Metric(
        "gap_over_floor/rms",
        "token",
        "floor",
        _COLUMNS,
        _ratio,
        "sqrt(mean((d / scale)^2) / mean over the variants' pairs of (their d / scale)^2)",
        scale="log",
        ideal=None,
        unit="floors",
        source="ours",
        counted_by="gap_n",
    ),
    *(_quantile(q, n) for q, n in ((0.5, "p50"), (0.95, "p95"), (0.999, "p99.9"))),
    *(_ratio_from(low) for low in BUCKETS),
    *(_rms_from(low) for low in BUCKETS),
]
