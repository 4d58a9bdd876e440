"""Two lists of log-probs of one reply that are not equally long: where the extra values stand.

The values themselves tell: two engines agree to a few hundredths of a nat at the same token, and differ by about one
nat at others. A value too many at the end, at the front, or inside (there two tokens became one id, or one became two)
is told by the shift, the *lag*, at which each id fits. Nothing is ever cut: the answer is an explanation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.codes import finding
from onepolicy.tokens.base import TokenRecord
from onepolicy.types import Finding

Array = NDArray[np.float64]
#: Mean |difference| (nats) up to which two lists are of the same tokens.
FITS = 0.15
#: What a place at which the lag changes must save (nats) before it is believed; and leaving out an id there, which
#: is believed sooner, because a value too many inside mostly comes of two tokens that became one.
STEP, LEFT_OUT = 0.5, 0.1
#: How much better (nats, over all ids) a place inside must fit than an end before it is told.
MARGIN = 1.0
#: More extra values than this are not searched for.
MOST_EXTRA = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Ids `[start, stop)` fit the longer list at `lag` places further on."""

    start: int
    stop: int
    lag: int
    max_abs: float
    mean_abs: float


@dataclass(frozen=True, slots=True)
class Lag:
    """`kind`: `tail`, `head`, `inside` or `none` (nothing fits). `max_abs_if_cut`: what cutting to equal length gives.

    `merged`: (id, values of the longer list that stand for it); `inserted`: (id, extra values before it).
    """

    extra: int
    kind: str
    pieces: tuple[Piece, ...]
    merged: tuple[tuple[int, int], ...]
    inserted: tuple[tuple[int, int], ...]
    max_abs_if_cut: float
    rivals: tuple[str, ...] = ()


def find_lag(longer: Sequence[Any], shorter: Sequence[Any]) -> Lag | None:
    """How the shorter list fits into the longer one; None where the lists are too short or too unlike in length.

    Values may be null or texts (`"-inf"`): those fit anywhere.
    """
    a, b = _floats(longer), _floats(shorter)
    extra = len(a) - len(b)
    if not 1 <= extra <= MOST_EXTRA or len(b) < 2:
        return None
    gaps = _gaps(a, b, extra)
    lags = _simpler(gaps, _path(gaps))
    moved = [k for k, lag in enumerate(lags) if lag < 0]
    pieces = _pieces(gaps, lags)
    compared = sum(p.stop - p.start for p in pieces)
    fit = sum(p.mean_abs * (p.stop - p.start) for p in pieces) / max(1, compared)
    kind = "none" if fit > FITS or not compared else _kind(pieces, moved, extra)
    return Lag(extra, kind, pieces, *_changes(pieces, moved), float(gaps[0].max()), _rivals(gaps, kind))


def _floats(values: Sequence[Any]) -> Array:
    def number(x: Any) -> float:
        try:
            return float(x)
        except (TypeError, ValueError):
            return np.nan

    return np.array([number(x) for x in values], dtype=np.float64)


def _gaps(a: Array, b: Array, extra: int) -> Array:
    """`[extra + 1, n]` |difference| at each lag; 0 where either has no finite value."""
    with np.errstate(invalid="ignore"):
        gaps = np.stack([np.abs(a[lag : lag + len(b)] - b) for lag in range(extra + 1)])
    return np.where(np.isfinite(gaps), gaps, 0.0)


def _path(gaps: Array) -> list[int]:
    """The lag of each id, never falling, that makes the sum of gaps least; -1 for an id that is left out where the lag
    rises. Each rise costs `STEP`, at either end as well, and leaving out an id costs `LEFT_OUT` more."""
    n_lags, n = gaps.shape
    rise = np.where(np.tri(n_lags, k=-1, dtype=bool), STEP, np.inf)  # [to, from]
    best = np.where(np.arange(n_lags) == 0, 0.0, STEP)
    back: list[tuple[NDArray[Any], NDArray[Any]]] = []
    for k in range(n):
        over = best[None, :] + rise
        source, left_out = over.argmin(1), over.min(1) + LEFT_OUT
        insert = over.min(1) + gaps[:, k]
        stay = best + gaps[:, k]
        choice = np.argmin(np.stack([stay, insert, left_out]), axis=0)
        back.append((choice, source))
        best = np.choose(choice, [stay, insert, left_out])
    best = best + np.where(np.arange(n_lags) == n_lags - 1, 0.0, STEP)
    return _traced(back, int(best.argmin()))


def _traced(back: list[tuple[NDArray[Any], NDArray[Any]]], lag: int) -> list[int]:
    lags: list[int] = []
    for choice, source in reversed(back):
        lags.append(-1 if choice[lag] == 2 else lag)
        lag = lag if choice[lag] == 0 else int(source[lag])
    return lags[::-1]


def _simpler(gaps: Array, lags: list[int]) -> list[int]:
    """One lag for all ids, an end's, where that fits and nothing inside fits clearly better."""
    inside = sum(float(gaps[lag, k]) for k, lag in enumerate(lags) if lag >= 0)
    end = int(gaps[[0, -1]].sum(1).argmin()) * (len(gaps) - 1)
    fits = gaps[end].mean() <= FITS and gaps[end].sum() - inside < MARGIN
    return [end] * len(lags) if fits else lags


def _pieces(gaps: Array, lags: list[int]) -> tuple[Piece, ...]:
    out: list[Piece] = []
    start = 0
    for k in range(1, len(lags) + 1):
        if k < len(lags) and lags[k] == lags[start]:
            continue
        if (lag := lags[start]) >= 0:
            part = gaps[lag, start:k]
            out.append(Piece(start, k, lag, float(part.max()), float(part.mean())))
        start = k
    return tuple(out)


def _kind(pieces: tuple[Piece, ...], moved: list[int], extra: int) -> str:
    if len(pieces) == 1 and not moved:
        return {0: "tail", extra: "head"}.get(pieces[0].lag, "both ends")
    return "inside"


def _changes(pieces: tuple[Piece, ...], moved: list[int]) -> tuple[Any, Any]:
    """Where the lag rises: over ids that are left out, or between two ids."""
    merged: list[tuple[int, int]] = []
    inserted: list[tuple[int, int]] = []
    for before, after in pairwise(pieces):
        rise = after.lag - before.lag
        out = [k for k in moved if before.stop <= k < after.start]
        if out:
            merged.append((out[0], rise + len(out)))
        else:
            inserted.append((after.start, rise))
    return tuple(merged), tuple(inserted)


def _rivals(gaps: Array, kind: str) -> tuple[str, ...]:
    """Ends whose loss would fit as well: of few or constant values nothing can be told."""
    ends = {"tail": float(gaps[0].mean()), "head": float(gaps[-1].mean())}
    return tuple(end for end, mean in ends.items() if mean <= FITS and end != kind)


def in_words(lag: Lag, sampler_is_longer: bool = True) -> str:
    """What happened to the ids, in one line."""
    if lag.kind == "inside" and lag.merged:
        where, n = lag.merged[0]
        number = {2: "two", 3: "three"}.get(n, str(n))
        if sampler_is_longer:
            return f"ids were re-encoded: {number} sampled tokens became id {where}"
        return f"ids were re-encoded: sampled token {where} became {number} ids"
    if lag.kind == "inside":
        where, n = lag.inserted[0]
        return f"{n} more before id {where}" if sampler_is_longer else f"{n} missing before id {where}"
    return "no shift fits: these are log-probs of other tokens" if lag.kind == "none" else lag.kind


def lag_findings(record: TokenRecord) -> list[Finding]:
    """`counts-disagree` for a record whose two sides' log-probs are not equally many, explained by their values.

    One of them must count the reply's ids. Evidence: `extra` (of the sampler's), `kind`, `explanation`, `pieces` (ids
    and the lag at which they fit, nats), `max_abs_if_cut`, `usable` False where ids were encoded again.
    """
    ours, theirs, ids = record.logprobs, record.scorer_logprobs, record.reply_ids
    if ours is None or theirs is None or ids is None or len(ours) == len(theirs):
        return []
    longer, shorter = (ours, theirs) if len(ours) > len(theirs) else (theirs, ours)
    found = find_lag(longer, shorter)
    if found is None or len(ids) not in (len(ours), len(theirs)):
        return []
    words = in_words(found, longer is ours)
    text = f"{record.record_id}: {len(ours)} log-probs of the sampler, {len(theirs)} of the trainer, {len(ids)} ids"
    evidence = {"extra": len(ours) - len(theirs), "explanation": words, **evidence_of(found)}
    return [finding("counts-disagree", f"{text}: {words}", place=_place(record, found), evidence=evidence)]


def evidence_of(lag: Lag) -> dict[str, Any]:
    """JSON-able. Cutting to equal length is never an answer, so what it would give is said."""
    pieces = [
        {"from_id": p.start, "to_id": p.stop, "lag": p.lag, "max_abs": p.max_abs, "mean_abs": p.mean_abs}
        for p in lag.pieces
    ]
    usable = {"usable": False} if lag.kind in ("inside", "none") else {}
    return {
        "kind": lag.kind,
        "pieces": pieces,
        "merged": [{"id": k, "values": n} for k, n in lag.merged],
        "inserted": [{"before_id": k, "values": n} for k, n in lag.inserted],
        "max_abs_if_cut": lag.max_abs_if_cut,
        "rivals": list(lag.rivals),
        **usable,
    }


def _place(record: TokenRecord, lag: Lag) -> str:
    changes = [k for k, _ in (*lag.merged, *lag.inserted)]
    at = f", position {min(changes)}" if changes else ""
    return f"record {record.record_id}, reply{at}"
