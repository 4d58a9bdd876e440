"""`Sums`: integers, the only thing that merges. The same bits for any split, order and number of workers.

Totals are integers in units of 2^-61 (`grid.py`); histograms count float bits; cluster rows are totals per cluster id,
merged by id, and beyond `MAX_ROWS` clusters are added into `MAX_ROWS` hash buckets. In JSON integers that may pass 2^53
are decimal strings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from onepolicy.errors import ContentError, MergeError
from onepolicy.histogram import Histogram
from onepolicy.views import Uses

#: Cluster rows kept one by one; more clusters are hashed into this many.
MAX_ROWS = 4096
#: How many worst tokens, worst sequences and places of each state are kept.
WORST_TOKENS, WORST_SEQUENCES, PLACES = 16, 8, 8
FORMAT = 1

Term = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class Quantile:
    """A nearest-rank quantile of one of the Sums' histograms, of |x| if `absolute`, as e^x if `exponent`.

    `over`: divided by the same quantile of that other histogram.
    """

    histogram: Literal["log_ratio", "sequence_log_ratio", "mean_log_ratio", "standardised_gap"]
    q: float
    absolute: bool = False
    exponent: bool = False
    over: Literal["standardised_floor"] | None = None


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, written once: elementwise terms, how they are reduced, and the number that is made of the totals.

    `terms`: name -> `term(xp, x)`, x a `views.Tokens` or `views.Sequences` by `level`. `compute(totals)` is pure and
    works on arrays too, so the jackknife calls it on the totals minus each cluster. `scale`: where its error is
    symmetric (`log` for positive metrics). `ideal`: its value when the two sides are equal. `ratio_tail`: a mean of
    ratios, whose interval is withheld when their tail is too heavy. `quantile`: what a histogram metric reads.
    `counted_by`: the term whose sum is the number of tokens, where it is not all that `uses` names.
    """

    key: str
    level: Literal["token", "sequence"]
    uses: Uses
    terms: Mapping[str, Term]
    compute: Callable[[Any], Any]
    formula: str
    reducer: Literal["sum", "max", "min", "histogram"] = "sum"
    scale: Literal["linear", "log"] = "linear"
    ideal: float | None = 0.0
    unit: str = "nats"
    source: str = ""
    ratio_tail: bool = False
    quantile: Quantile | None = None
    counted_by: str | None = None

    def term_keys(self) -> dict[str, str]:
        """term name -> its key in `Sums.totals`; equal terms of different metrics share one."""
        return {name: f"{self.level}:{self.uses}:{name}" for name in self.terms}


@dataclass(slots=True)
class Total:
    """One term over all its elements: integer sum (grid units), finite and non-finite counts, extremes."""

    total: int = 0
    n: int = 0
    nonfinite: int = 0
    greatest: float | None = None
    least: float | None = None

    def add(self, other: Total) -> None:
        self.total += other.total
        self.n += other.n
        self.nonfinite += other.nonfinite
        self.greatest = _pick(max, self.greatest, other.greatest)
        self.least = _pick(min, self.least, other.least)


def _pick(choose: Callable[[float, float], float], x: float | None, y: float | None) -> float | None:
    return y if x is None else x if y is None else choose(x, y)


Row = tuple[int, int]  # (total in grid units, finite terms) of one cluster


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A token that is worth naming; sorts worst first, ties by record id and position."""

    key: float  # minus the size for worst lists, 0 for states
    record: str
    position: int
    token: int
    a: str  # repr of the value, so that null, NaN and infinities stay apart
    b: str


@dataclass(slots=True)
class Sums:
    """Everything that was added up from one or more `LogprobPairs`. See the module docstring."""

    view: str
    names: tuple[str, str]
    cluster_unit: str
    numeric: str
    metrics: tuple[str, ...]
    counts: dict[str, int] = field(default_factory=dict[str, int])
    totals: dict[str, Total] = field(default_factory=dict[str, Total])
    rows: dict[str, dict[int, Row]] = field(default_factory=dict[str, dict[int, Row]])
    bucketed: bool = False
    histograms: dict[str, Histogram] = field(default_factory=dict[str, Histogram])
    worst: dict[str, list[Place]] = field(default_factory=dict[str, list[Place]])

    def merge(self, other: Sums) -> Sums:
        """A new Sums of both. Errors: `MergeError` where they were not made the same way."""
        return merge([self, other])

    def add(self, part: Sums) -> None:
        """`merge` into this one. Errors: `MergeError`."""
        self._refuse_unlike(part)
        for name, n in part.counts.items():
            self.counts[name] = self.counts.get(name, 0) + n
        for name, total in part.totals.items():
            self.totals.setdefault(name, Total()).add(total)
        for name, histogram in part.histograms.items():
            self.histograms.setdefault(name, Histogram()).add(histogram)
        for name, places in part.worst.items():
            self.worst[name] = keep_worst(name, [*self.worst.get(name, []), *places])
        self._add_rows(part)

    def _add_rows(self, part: Sums) -> None:
        """Cluster rows added by id; both sides in `MAX_ROWS` buckets once there are more clusters than that."""
        bucketed = self.bucketed or part.bucketed or len(self._ids() | part._ids()) > MAX_ROWS
        if bucketed and not self.bucketed:
            self.rows = {term: in_buckets(rows) for term, rows in self.rows.items()}
        theirs = part.rows
        if bucketed and not part.bucketed:
            theirs = {term: in_buckets(rows) for term, rows in theirs.items()}
        for term, rows in theirs.items():
            into = self.rows.setdefault(term, {})
            if not into:
                into.update(rows)
                continue
            for i, row in rows.items():
                was = into.get(i)
                into[i] = row if was is None else (was[0] + row[0], was[1] + row[1])
        self.bucketed = bucketed

    def _ids(self) -> set[int]:
        return {i for rows in self.rows.values() for i in rows}

    def _refuse_unlike(self, other: Sums) -> None:
        for what in ("view", "names", "cluster_unit", "numeric", "metrics"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                raise MergeError(
                    f"sums differ in {what}: {mine!r} and {theirs!r}; only sums made the same way may be added"
                )

    def n_clusters(self) -> int:
        """Clusters with at least one scored token (buckets, once there are more than `MAX_ROWS`)."""
        return max((len(rows) for rows in self.rows.values()), default=0)

    # -- JSON ------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, in one canonical order: equal Sums give equal text."""
        return {
            "format": FORMAT,
            "view": self.view,
            "names": list(self.names),
            "cluster_unit": self.cluster_unit,
            "numeric": self.numeric,
            "metrics": list(self.metrics),
            "counts": dict(sorted(self.counts.items())),
            "totals": {k: _total_dict(v) for k, v in sorted(self.totals.items())},
            "bucketed": self.bucketed,
            "rows": {
                k: {f"{i:016x}": [str(t), n] for i, (t, n) in sorted(rows.items())}
                for k, rows in sorted(self.rows.items())
            },
            "histograms": {k: v.to_dict() for k, v in sorted(self.histograms.items())},
            "worst": {
                k: [[_json_float(p.key), p.record, p.position, p.token, p.a, p.b] for p in v]
                for k, v in sorted(self.worst.items())
            },
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), ensure_ascii=True, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sums:
        """The inverse of `to_dict`. Errors: `ContentError` for anything else."""
        try:
            if data["format"] != FORMAT:
                raise ContentError(f"sums have format {data['format']!r}; this version reads {FORMAT}")
            return cls(
                data["view"],
                (data["names"][0], data["names"][1]),
                data["cluster_unit"],
                data["numeric"],
                tuple(data["metrics"]),
                {str(k): int(v) for k, v in data["counts"].items()},
                {k: _read_total(v) for k, v in data["totals"].items()},
                {k: {int(i, 16): (int(t), int(n)) for i, (t, n) in rows.items()} for k, rows in data["rows"].items()},
                bool(data["bucketed"]),
                {k: Histogram.from_dict(v) for k, v in data["histograms"].items()},
                {k: [Place(float(p[0]), *p[1:]) for p in v] for k, v in data["worst"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as err:
            if isinstance(err, ContentError):
                raise
            raise ContentError(f"these are not saved sums: {type(err).__name__} {err}") from err


def _json_float(x: float) -> float | str:
    """JSON has no infinity: it is text, which `float` reads back."""
    return x if math.isfinite(x) else repr(x)


def _total_dict(t: Total) -> dict[str, Any]:
    hexed = {k: v.hex() for k, v in (("greatest", t.greatest), ("least", t.least)) if v is not None}
    return {"sum": str(t.total), "n": t.n, "nonfinite": t.nonfinite, **hexed}


def _read_total(data: Mapping[str, Any]) -> Total:
    ends = [float.fromhex(data[k]) if k in data else None for k in ("greatest", "least")]
    return Total(int(data["sum"]), int(data["n"]), int(data["nonfinite"]), *ends)


def in_buckets(rows: Mapping[int, Row]) -> dict[int, Row]:
    """Rows added into `MAX_ROWS` buckets by id."""
    out: dict[int, Row] = {}
    for i, (total, n) in rows.items():
        was = out.get(i % MAX_ROWS, (0, 0))
        out[i % MAX_ROWS] = (was[0] + total, was[1] + n)
    return out


def keep_worst(name: str, places: Iterable[Place]) -> list[Place]:
    """The places to keep of one list, in order."""
    limit = {"tokens": WORST_TOKENS, "sequences": WORST_SEQUENCES}.get(name, PLACES)
    return sorted(places)[:limit]


def merge(parts: Iterable[Sums]) -> Sums:
    """All parts as one. Errors: `MergeError`; `ContentError` for no parts at all."""
    out: Sums | None = None
    for part in parts:
        out = out or Sums(part.view, part.names, part.cluster_unit, part.numeric, part.metrics)
        out.add(part)
    if out is None:
        raise ContentError("no sums to merge")
    return out
