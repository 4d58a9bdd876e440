"""A side that stores a number of the whole reply at each of its tokens: their sum, their mean, or the sum so far."""

from __future__ import annotations

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import SPOTS, Counted
from onepolicy.integrity.base import SIDES, Batch, Pair, Side, Told
from onepolicy.integrity.places import place, places, spot_records
from onepolicy.integrity.shift_inside import TELLING, near
from onepolicy.types import BoolArray, Finding, FloatArray

#: A record is looked at when its mean gap (nats, each counted up to 1) is above this, and has so many tokens.
_APART, _LEAST = 0.1, 4
#: Spread (nats) of the other side's values: equal ones have equal means.
_SPREAD = 0.1
#: How close (nats, and share of its size) the number is to the other side's sum or mean.
_CLOSE, _OF_SIZE = 0.01, 0.02
#: Values that tell a running sum, and the share of them whose step fits.
_TELLING, _FITS = 6, 0.9
#: Share of the records that were looked at; and of those with one number, that have the reply's sum or mean.
_SHARE, _OF_ALIKE = 0.02, 0.8
_SAYS = {
    "sum": "the sum of the reply's log-probs stands at each of its tokens",
    "mean": "the mean of the reply's log-probs stands at each of its tokens",
    "so far": "each value is the sum of the reply's log-probs up to that token",
    "to come": "each value is the sum of the reply's log-probs from that token on",
}


def look(batch: Batch) -> Counted:
    out = Counted()
    pair = batch.pair
    if pair is None or not len(pair.a):
        return out
    out.count("summed:records", int((pair.lengths >= _LEAST).sum()))
    apart = pair.per_record(np.minimum(pair.gap, 1.0)) > _APART * pair.lengths
    rows = np.flatnonzero(apart & (pair.lengths >= _LEAST))
    if not len(rows):
        return out
    pair = pair.take(rows)
    for side in SIDES:
        alike = _alike(pair, side)
        left = np.ones(len(rows), dtype=bool)
        out.count(f"summed:{side}:alike", int(alike.sum()))
        for kind, fits in (*_constant(pair, side, alike).items(), *_running(pair, side).items()):
            found = np.flatnonzero(left & fits)
            left = left & ~fits
            if len(found):
                out.count(f"summed:{side}:{kind}", len(found))
                out.count(f"summed:{side}:{kind}:tokens", int(pair.lengths[found].sum()))
                spot_records(out, f"summed:{side}:{kind}", batch, rows[found], {"what": [kind] * len(found)})
    return out


def _first(pair: Pair, x: FloatArray) -> FloatArray:
    """`[S]` the first value of each record, 0 without any."""
    return np.where(pair.lengths > 0, x[np.minimum(pair.starts, len(x) - 1)], 0.0)


def _alike(pair: Pair, side: Side) -> BoolArray:
    """`[S]` records with one number at all their tokens."""
    x = pair.of(side)
    return pair.per_record(x == np.repeat(_first(pair, x), pair.lengths)) == pair.lengths


def _constant(pair: Pair, side: Side, alike: BoolArray) -> dict[str, BoolArray]:
    """`[S]` records with one number that is the other side's sum, or mean."""
    y, first = pair.of("b" if side == "a" else "a"), _first(pair, pair.of(side))
    n = np.maximum(pair.lengths, 1)
    total = pair.per_record(y)
    varied = pair.per_record(np.square(y)) / n - (total / n) ** 2 > _SPREAD**2
    close = lambda value: np.abs(first - value) <= _CLOSE + _OF_SIZE * np.abs(value)
    return {"sum": alike & varied & close(total), "mean": alike & varied & close(total / n)}


def _running(pair: Pair, side: Side) -> dict[str, BoolArray]:
    """`[S]` records whose values rise or fall from token to token by the other side's log-prob."""
    x, y = pair.of(side), pair.of("b" if side == "a" else "a")
    step, same = np.diff(x), np.diff(pair.at) == 1
    record = np.repeat(np.arange(len(pair.lengths)), pair.lengths)
    same &= np.diff(record) == 0
    return {
        "so far": _steps(pair, np.append(0.0, step), y, np.append(False, same)),
        "to come": _steps(pair, np.append(-step, 0.0), y, np.append(same, False)),
    }


def _steps(pair: Pair, step: FloatArray, y: FloatArray, known: BoolArray) -> BoolArray:
    """`[S]` records where the steps are the log-probs: none of them up, the telling ones equal."""
    telling = known & (y < TELLING)
    n = pair.per_record(telling)
    fit = pair.per_record(telling & near(y, step))
    up = pair.per_record(known & (step > 0.05))
    return (n >= _TELLING) & (fit >= _FITS * n) & (up <= (1 - _FITS) * pair.lengths)


def judge(total: Counted, told: Told) -> list[Finding]:
    return [f for side in SIDES if (f := _judged(total, told, side)) is not None]


def _judged(total: Counted, told: Told, side: Side) -> Finding | None:
    found = {kind: n for kind in _SAYS if (n := total.counts.get(f"summed:{side}:{kind}", 0))}
    if found.get("sum", 0) + found.get("mean", 0) < _OF_ALIKE * total.counts.get(f"summed:{side}:alike", 0):
        found = {k: n for k, n in found.items() if k not in ("sum", "mean")}  # another number, now and then their mean
    n, of = sum(found.values()), total.counts.get("summed:records", 0)
    if not n or n < _SHARE * of:
        return None
    kind = max(found, key=lambda k: found[k])
    first = sorted(spot for k in found for spot in total.spots[f"summed:{side}:{k}"])[:SPOTS]
    tokens = sum(total.counts[f"summed:{side}:{k}:tokens"] for k in found)
    other = told.name("b" if side == "a" else "a")
    message = f"{told.name(side)}: {_SAYS[kind]} (by those of {other}), in {n:,} of {of:,} records"
    evidence = {"side": told.name(side), "what": kind, "records": n, "of": of, "share": n / of, "tokens": tokens,
                "by_kind": found, "places": places(first)}  # fmt: skip
    ruled_out = ("a fill value: one would not follow the other side's log-probs",)
    return finding("sequence-logprob-stored", message, place=place(first), evidence=evidence, ruled_out=ruled_out,
                   origin="run")  # fmt: skip
