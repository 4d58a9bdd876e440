"""Where a scoring carries distributions or logits: both sides' chosen log-probs against them, under each candidate.

That identifies a temperature or a soft-cap without doubt, from few tokens: the residual is rounding or it is not.
A temperature is read from log-probs or from logits; a soft-cap only from logits, since log-probs have lost their level.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from onepolicy.counted import Counted
from onepolicy.profiles.base import Seen
from onepolicy.signatures.adding import clipped, keep, read, total
from onepolicy.types import FloatArray

#: Temperatures that are tried, relative to what the distributions mean, then refined between neighbours.
TEMPERATURES = (*(round(0.05 * k, 2) for k in range(4, 41)), 2.5, 3.0, 4.0, 5.0)
#: Soft-caps of released models (Gemma 2 and 3n: 30; Grok-1: 30; others), and what lies between.
CAPS = (5.0, 8.0, 10.0, 12.0, 15.0, 20.0, 25.0, 30.0, 40.0, 50.0, 60.0, 80.0, 100.0)
#: Rows worked on at a time.
ROWS = 256


@dataclass(frozen=True, slots=True)
class Best:
    """A side's best candidate: its value, and the root mean square of what it leaves, nats."""

    value: float
    rms: float


def look(seen: Seen) -> Counted:
    """Sums of squared residuals of both sides under every candidate; empty without distributions."""
    out = Counted()
    found = source(seen)
    if found is None or not len(seen):
        return out
    name, table = found
    out.count(f"source:{name}", len(seen))
    for lo in range(0, len(seen), ROWS):
        rows = slice(lo, min(lo + ROWS, len(seen)))
        _rows(out, np.asarray(table[seen.at[rows]], dtype=np.float64), seen, rows)
    return out


def source(seen: Seen) -> tuple[str, Any] | None:
    """The scoring whose distributions are read: a third one before the two that are compared, the scorer's before the
    sampler's. (name, `[T, V]`)."""
    scorings = seen.rollouts.scorings
    a, b = seen.pairs.names
    for name in [*(k for k in scorings if k not in (a, b)), b, a]:
        if name in scorings and scorings[name].distributions is not None:
            return name, scorings[name].distributions
    return None


def _rows(out: Counted, x: FloatArray, seen: Seen, rows: slice) -> None:
    ids = seen.pairs.token_ids[seen.at[rows]].astype(np.int64)
    told = np.isfinite(x).any(axis=1) & (ids < x.shape[1]) & (ids >= 0)
    x, ids = x[told], ids[told]
    a, b = seen.a[rows][told], seen.b[rows][told]
    level = np.abs(_log_sum(x)) > 1e-3
    out.count("tokens", len(x))
    out.count("logits", int(level.sum()))
    keep(out, dd=clipped(b - a) ** 2)
    _divided(out, x[np.arange(len(ids)), ids] - _log_sum(x), a, b)
    likeliest = x.argmax(axis=1)
    for key, values in _candidates(x):
        if not key.startswith("temperature"):
            out.count(f"greedy:{key}", int((values.argmax(axis=1) == likeliest).sum()))
        fitted = values[np.arange(len(ids)), ids] - _log_sum(values)
        for side, told_by in (("a", a), ("b", b)):
            left = f"{side}:{key}"
            out.sums[left] = out.sums.get(left, 0) + total(clipped(np.nan_to_num(told_by - fitted)) ** 2)


def _divided(out: Counted, plain: FloatArray, a: FloatArray, b: FloatArray) -> None:
    """Log-probs divided by a temperature, as if they were logits: no distribution, and met in the field."""
    for t in TEMPERATURES:
        for side, told_by in (("a", a), ("b", b)):
            left = f"{side}:divided:{t}"
            out.sums[left] = out.sums.get(left, 0) + total(clipped(np.nan_to_num(told_by - plain / t)) ** 2)


def _candidates(x: FloatArray) -> Iterator[tuple[str, FloatArray]]:
    for t in TEMPERATURES:
        yield f"temperature:{t}", x / t
    yield "cap:none", x
    for cap in CAPS:
        bent = np.tanh(np.where(np.isfinite(x), x, -1e9) / cap)
        yield f"cap:{cap}", cap * bent
        # the slip of the field: the logit itself times the tanh, which is even and so keeps no order
        yield f"slip:{cap}", np.where(np.isfinite(x), x, 0.0) * bent


def _log_sum(x: FloatArray) -> FloatArray:
    top = x.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (top + np.log(np.exp(x - top).sum(axis=1, keepdims=True)))[:, 0]


# -- what is read from it ----------------------------------------------------------------------------------------------


def tokens(counted: Counted | None) -> int:
    return 0 if counted is None else counted.counts.get("tokens", 0)


def gap(counted: Counted) -> float:
    """RMS of the gap over the tokens that were fitted."""
    return math.sqrt(max(0.0, read(counted, "dd")) / max(1, tokens(counted)))


def temperature(counted: Counted, side: str, kind: str = "temperature") -> Best:
    """The best temperature, refined by a parabola through its neighbours in 1 / T. `kind` divided: of log-probs."""
    left = [read(counted, f"{side}:{kind}:{t}") for t in TEMPERATURES]
    n, k = max(1, tokens(counted)), int(np.argmin(left))
    if 0 < k < len(left) - 1 and left[k] > 1e-9 * n:
        x = [1 / TEMPERATURES[k + j] for j in (-1, 0, 1)]
        best = _vertex(x, left[k - 1 : k + 2])
        if best is not None:
            return Best(1 / best[0], math.sqrt(max(0.0, min(best[1], left[k])) / n))
    return Best(TEMPERATURES[k], math.sqrt(left[k] / n))


def _vertex(x: list[float], y: list[float]) -> tuple[float, float] | None:
    c, b, a = (float(v) for v in np.polynomial.polynomial.polyfit(np.array(x) - x[1], y, 2))
    return (x[1] - b / (2 * a), c - b * b / (4 * a)) if a > 0 else None


@lru_cache(maxsize=1)
def cap_keys() -> tuple[str, ...]:
    return ("cap:none", *(f"{kind}:{cap}" for cap in CAPS for kind in ("cap", "slip")))


def cap(counted: Counted, side: str) -> tuple[str, float]:
    """(best candidate: `cap:none`, `cap:30.0`, `slip:30.0`; RMS of what it leaves)."""
    left = {key: read(counted, f"{side}:{key}") for key in cap_keys()}
    best = min(left, key=lambda key: left[key])
    if left["cap:none"] <= left[best] * (1 + 1e-6) + 1e-12:
        best = "cap:none"
    return best, math.sqrt(left[best] / max(1, tokens(counted)))


def same_greedy(counted: Counted, key: str) -> bool:
    """Whether that candidate leaves the likeliest token of every row as it is."""
    return counted.counts.get(f"greedy:{key}", 0) == tokens(counted)
