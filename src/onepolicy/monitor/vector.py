"""The fixed-length float64 vector that one rank adds up over a step, and how the vectors of all ranks become one.

Three parts, one literal table each: sums (added), greatest values (the largest wins), and what a rank says of itself
(kept apart). Least values are greatest ones with the sign turned. A rank that saw nothing, or failed, joins with zeros
and a flag.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from onepolicy.metrics import METRICS
from onepolicy.sums import Metric
from onepolicy.types import FloatArray

#: Terms that hold e^d or e^logprob: taken over tokens with |d| below this, so that nothing overflows a float64 square.
EXPONENT_LIMIT = 350.0
_EXPONENTIAL = ("k3", "k3_reverse", "js", "tv", "ratio_minus_one", "ratio_minus_one_squared", "mult_prob_error")
_EXPONENTIAL += ("p", "q", "pp", "qq", "pq", "prob_abs_diff", "prob_diff")

#: Every metric that sums and extremes can give.
LOOP: dict[str, Metric] = {
    key: m
    for key, m in METRICS.items()
    if m.reducer in ("sum", "max", "min") and m.uses in ("scored", "estimator") and m.counted_by is None
}

#: Lower edges, as probabilities, of the buckets of the sampler's probability; the first bucket starts at 0.
BUCKET_EDGES = (0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
BUCKETS = len(BUCKET_EDGES) + 1
#: Bins of |d|: float32 bits down to two of the mantissa, from 2^-28 up to 2^4; what lies outside is in the end bins.
BIN_SHIFT, BIN_LOWEST, BINS = 21, (127 - 28) * 4, 128


def bin_edges() -> FloatArray:
    """`[BINS + 1]` edges of the bins of |d|, nats. The first bin holds 0 too, the last is open."""
    codes = (np.arange(BINS + 1, dtype=np.uint32) + np.uint32(BIN_LOWEST)) << np.uint32(BIN_SHIFT)
    return codes.view(np.float32).astype(np.float64)


def bin_middles() -> FloatArray:
    """`[BINS]` the |d| that stands for a bin: the harmonic midpoint of its edges."""
    edges = bin_edges()
    return 2 * edges[:-1] * edges[1:] / (edges[:-1] + edges[1:])


def term_key(metric: Metric, term: str) -> str:
    """The slot of a metric's term: level, the tokens it runs on, its name."""
    on = "finite" if metric.level == "token" and term in _EXPONENTIAL else "scored"
    return f"{metric.level}:{on}:{term}"


#: What is counted: tokens under the mask and what state they are in, per side.
STATES = ("null", "neg_inf", "pos_inf", "positive", "placeholder")
COUNTS = (
    *("tokens", "scored", "finite", "rows", "rows_scored", "over_two"),
    *(f"{state}_{side}" for state in STATES for side in ("sampler", "old")),
)
#: Moments of a log-ratio that a pair of policies gets besides the main one: see `PAIRS`.
MOMENTS = ("n", "abs", "log_ratio", "squared", "k3", "ratio_minus_one", "ratio_minus_one_squared", "outside_clip")
#: lag0, stale: sampler and old, by policy version; update: old and current; current: sampler and current; reference:
#: old and reference. The two that start with `zero` are those of the very first batch.
PAIRS = ("lag0", "stale", "update", "current", "reference", "zero_update", "zero_reference")
VERSIONS = ("known", "lag", "rows_mixed", "ahead")
UPDATES = ("equal", "observes", "uncorrected")
SIGNS = ("positive", "negative")
CLIPS = ("n", "clipped", "wrongly_clipped", "wrongly_passed")
CORRECTED = ("n", "weight", "weight_squared", "kept", "lowered", "raised", "nonfinite", "rows_emptied")
#: Token terms whose per-row sums give a standard error, rows being the clusters.
ROWED = {
    "abs_log_ratio": "token:scored:abs_log_ratio",
    "k3": "token:finite:k3",
    "ratio_minus_one": "token:finite:ratio_minus_one",
    "mult_prob_error": "token:finite:mult_prob_error",
    "over_two": "over_two",
}


def _terms(level: str) -> list[str]:
    summed = (m for m in LOOP.values() if m.reducer == "sum" and m.level == level)
    return sorted({term_key(m, term) for m in summed for term in m.terms})


TOKEN_TERMS = _terms("token")
SEQUENCE_TERMS = _terms("sequence")

SUMS: tuple[str, ...] = (
    *COUNTS,
    *TOKEN_TERMS,
    *(f"{part}:{key}" for key in SEQUENCE_TERMS for part in ("sum", "n")),
    *(f"rows:{part}:{name}" for name in ROWED for part in ("squares", "by_tokens")),
    "rows:tokens_squared",
    *(f"{pair}:{moment}" for pair in PAIRS for moment in MOMENTS),
    *(f"versions:{name}" for name in VERSIONS),
    *(f"updates:{name}" for name in UPDATES),
    *(f"clip:{name}:{sign}" for name in CLIPS for sign in SIGNS),
    *(f"corrected:{name}" for name in CORRECTED),
    *(f"bin:{b}:{k}" for b in range(BUCKETS) for k in range(BINS)),
)
GREATEST: tuple[str, ...] = (
    "abs_log_ratio",
    "log_ratio",
    "minus_log_ratio",
    "prob_abs_diff",
    "mult_prob_error_of_sequence",
    "lag",
    "newest_version",
    "weight",
    "change",
    "minus_change",
)
#: What a rank says of itself. `fault`: 0, else 1 + the place in `FAULTS` of the last one; `recheck`: see `every`.
OWN: tuple[str, ...] = ("step", "observes", "faults", "fault", "version", "recheck", "sink_failures")

SLOT: dict[str, int] = {name: i for i, name in enumerate(SUMS)}
SLOT |= {f"greatest:{name}": len(SUMS) + i for i, name in enumerate(GREATEST)}
SLOT |= {f"own:{name}": len(SUMS) + len(GREATEST) + i for i, name in enumerate(OWN)}
LENGTH = len(SLOT)
GREATEST_AT = slice(len(SUMS), len(SUMS) + len(GREATEST))
OWN_AT = slice(len(SUMS) + len(GREATEST), LENGTH)
BINS_AT = slice(SLOT["bin:0:0"], SLOT["bin:0:0"] + BUCKETS * BINS)


def span(prefix: str) -> slice:
    """The slots whose names start so; they lie side by side."""
    places = [i for name, i in SLOT.items() if name.startswith(prefix)]
    return slice(places[0], places[-1] + 1)


class Merged:
    """The vectors of all ranks as one: `[world, LENGTH]` merged in rank order, so that every rank has the same bits."""

    def __init__(self, rows: FloatArray) -> None:
        self.rows = rows
        self.total = np.zeros(LENGTH)
        for row in rows:
            self.total[: len(SUMS)] += row[: len(SUMS)]
        seen = rows[rows[:, SLOT["tokens"]] > 0]
        self.total[GREATEST_AT] = seen[:, GREATEST_AT].max(axis=0) if len(seen) else math.nan

    def __getitem__(self, name: str) -> float:
        return float(self.total[SLOT[name]])

    def greatest(self, name: str) -> float:
        """NaN where no rank saw a token."""
        return float(self.total[SLOT[f"greatest:{name}"]])

    def own(self, name: str) -> list[float]:
        """What every rank says of itself, in rank order."""
        return [float(x) for x in self.rows[:, SLOT[f"own:{name}"]]]

    @property
    def bins(self) -> FloatArray:
        """`[BUCKETS, BINS]` scored tokens by the sampler's probability and |d|."""
        return self.total[BINS_AT].reshape(BUCKETS, BINS)

    def ratio(self, numerator: str, denominator: str) -> float:
        """NaN where nothing was counted."""
        below = self[denominator]
        return self[numerator] / below if below else math.nan

    def relative_error(self, name: str) -> float:
        """Standard error of a token mean over its size, rows as clusters (ratio estimator, R / (R - 1)); 1 for fewer
        than two rows, more for few: an error from three rows is itself known badly."""
        rows, tokens, total = self["rows_scored"], self["scored"], self[ROWED[name]]
        if rows < 2 or total == 0 or not math.isfinite(total):
            return 1.0 if rows else math.inf
        mean = total / tokens
        squares = self[f"rows:squares:{name}"] - 2 * mean * self[f"rows:by_tokens:{name}"]
        squares += mean * mean * self["rows:tokens_squared"]
        return math.sqrt(max(squares, 0.0) * rows / (rows - 1)) / abs(total) * math.sqrt(1 + 8 / rows)


def empty() -> FloatArray:
    """A vector of a rank that saw nothing."""
    return np.zeros(LENGTH)


def own(values: Mapping[str, float]) -> list[float]:
    """The last part of the vector, in its order."""
    return [float(values.get(name, 0.0)) for name in OWN]
