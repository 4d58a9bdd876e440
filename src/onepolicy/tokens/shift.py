"""Log-probs of both sides that are equally long and stand one token apart: the values tell.

Two engines agree to a few hundredths of a nat at the same token and differ by about one nat at others, so a column
that was moved by one shows at once. `lag` is about columns that are not equally long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.codes import finding
from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.lag import FITS
from onepolicy.types import Finding

Array = NDArray[np.float64]
#: Values on both sides that it takes, and how many times nearer the moved column must be.
LEAST, NEARER = 8, 4.0
LAGS = (1, -1)


def check_shift(record: TokenRecord) -> list[Finding]:
    """`counts-disagree` for a record whose trainer's log-probs fit the sampler's only when they are moved by one.

    Evidence: `best_lag` (trainer's token i + lag is the sampler's token i), mean |difference| (nats) and correlation at
    each lag, `max_abs_after_shift`.
    """
    ours, theirs = record.logprobs, record.scorer_logprobs
    if ours is None or theirs is None or len(ours) != len(theirs) or len(ours) < LEAST:
        return []
    a, b = _floats(ours), _floats(theirs)
    here = _gap(a, b, 0)
    if here is None or here[0] <= FITS:
        return []
    moved = {lag: gap for lag in LAGS if (gap := _gap(a, b, lag)) is not None}
    lag = min(moved, key=lambda k: moved[k][0], default=0)
    if not lag or moved[lag][0] > FITS or NEARER * moved[lag][0] > here[0]:
        return []
    return [_found(record, lag, {0: here, **moved})]


def _floats(values: Sequence[Any]) -> Array:
    return np.array([x if isinstance(x, int | float) else np.nan for x in values], dtype=np.float64)


def _gap(a: Array, b: Array, lag: int) -> tuple[float, float, float] | None:
    """(mean |difference|, largest, correlation) of a[i] and b[i + lag]; None where too few values are finite."""
    x, y = (a[: len(a) - lag], b[lag:]) if lag >= 0 else (a[-lag:], b[:lag])
    good = np.isfinite(x) & np.isfinite(y)
    if good.sum() < LEAST - 1:
        return None
    x, y = x[good], y[good]
    gaps = np.abs(x - y)
    with np.errstate(invalid="ignore", divide="ignore"):
        corr = float(np.corrcoef(x, y)[0, 1])
    return float(gaps.mean()), float(gaps.max()), corr


def _found(record: TokenRecord, lag: int, gaps: dict[int, tuple[float, float, float]]) -> Finding:
    way = "late" if lag > 0 else "early"
    text = (
        f"{record.record_id}: the trainer's log-probs stand one token {way} against the sampler's: mean |difference| "
        f"{gaps[lag][0]:.3g} nats when they are moved, {gaps[0][0]:.3g} as they stand"
    )
    evidence = {
        "class": f"one token {way}",
        "best_lag": lag,
        "mean_abs": {f"lag{k:+d}" if k else "lag0": gap[0] for k, gap in gaps.items()},
        "corr": {f"lag{k:+d}" if k else "lag0": None if np.isnan(gap[2]) else gap[2] for k, gap in gaps.items()},
        "max_abs_after_shift": gaps[lag][1],
        "usable": False,
    }
    advice = "Take log_softmax(logits[:-1]) at token_ids[1:]: the logits at a position are those of the next token."
    return finding("counts-disagree", text, place=record.place, evidence=evidence, advice=advice)
