"""Log-probs that were cut off at a least or a greatest value: the other side goes on beyond it at these tokens."""

from __future__ import annotations

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.integrity.base import SIDES, Batch, Pair, Side, Told
from onepolicy.integrity.places import many, place, places, spot_tokens
from onepolicy.types import Finding

#: The other side is beyond the value by this (nats), at so many tokens of a record, and at this share of them.
_BEYOND, _TIMES, _MOSTLY = 0.02, 2, 0.9
#: What lies beyond a bound lies there at all distances: their range, as a share of the largest.
_RANGE = 0.25
#: Tokens of the dump at the value; a few are chance where values are rounded.
_LEAST = 4
_ENDS = ("least", "greatest")


def look(batch: Batch) -> Counted:
    out = Counted()
    pair = batch.pair
    if pair is None or not len(pair.a):
        return out
    for side in SIDES:
        x = pair.of(side)
        out.greatest(f"clamped:{side}:greatest", float(x.max()) + 0.0)
        out.greatest(f"clamped:{side}:least", 0.0 - float(x.min()))
        for end in _ENDS:
            _count(out, batch, pair, side, end)
    return out


def _count(out: Counted, batch: Batch, pair: Pair, side: Side, end: str) -> None:
    sign = 1.0 if end == "least" else -1.0
    x, y = sign * pair.of(side), sign * pair.of("b" if side == "a" else "a")
    full = pair.lengths > 0
    least = np.full(len(pair.lengths), np.nan)
    least[full] = np.minimum.reduceat(x, pair.starts[full])
    beyond = x == np.repeat(least, pair.lengths)
    if np.count_nonzero(beyond) < np.count_nonzero(full) + _TIMES - 1:  # each value once
        return
    at_end, beyond = beyond, beyond & (y < x - _BEYOND)
    n, m = pair.per_record(at_end), pair.per_record(beyond)
    rows = (m >= _TIMES) & (m >= _MOSTLY * n) & (n < pair.lengths)
    if not rows.any():
        return
    nearest, furthest = (f.reduceat(z, pair.starts[full]) for f, z in (
        (np.minimum, np.where(beyond, x - y, np.inf)), (np.maximum, np.where(beyond, x - y, 0.0)),
    ))  # fmt: skip
    rows[full] &= furthest - np.minimum(nearest, furthest) >= _RANGE * furthest
    if not rows.any():
        return
    picked = np.flatnonzero(beyond & np.repeat(rows, pair.lengths))
    picked = picked[np.argsort(x[picked], kind="stable")]
    values, first = np.unique(x[picked], return_index=True)
    for value, at in zip(values.tolist(), np.split(picked, first[1:]), strict=True):
        key = f"clamped:{side}:{end}:{float(sign * value)!r}"
        out.count(key, len(at))
        out.greatest(f"{key}:furthest", float((x[at] - y[at]).max()))
        spot_tokens(out, key, batch, pair.at[at], {"value": sign * x[at], "other": sign * y[at]})


def judge(total: Counted, told: Told) -> list[Finding]:
    return [f for side in SIDES for end in _ENDS if (f := _judged(total, told, side, end)) is not None]


def _judged(total: Counted, told: Told, side: Side, end: str) -> Finding | None:
    key = f"clamped:{side}:{end}:"
    counts = {k.removeprefix(key): n for k, n in total.counts.items() if k.startswith(key)}
    if not counts:
        return None
    value = max(sorted(counts), key=lambda k: counts[k])
    ends = total.most[f"clamped:{side}:{end}"] * (-1.0 if end == "least" else 1.0)
    if counts[value] < _LEAST or ends != float(value) or not float(value):
        return None
    first = total.spots[key + value]
    n, furthest = counts[value], total.most[f"{key}{value}:furthest"]
    other = told.name("b" if side == "a" else "a")
    message = (
        f"{told.name(side)}: no log-prob is {'below' if end == 'least' else 'above'} {float(value):g}, and {other} is "
        f"beyond it at {many(n, 'token')} that hold this number, by up to {furthest:.3g} nats"
    )
    evidence = {"side": told.name(side), "end": end, "value": float(value), "tokens": n, "furthest": furthest,
                "places": places(first)}  # fmt: skip
    ruled_out = ("a fill value: the other side would be on both sides of it",)
    return finding("clamped-logprob", message, place=place(first), evidence=evidence, ruled_out=ruled_out, origin="run")
