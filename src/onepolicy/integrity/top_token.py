"""The likeliest token's log-prob stored where the sampled token's belongs.

Where the other side says that the sampled token was the likeliest, both agree; where it was not, the stored value is
far higher, never lower, and still a probability that fits beside the sampled token's. Temperature, truncation, other
weights and fill values each break one of these. Without enough tokens of both kinds nothing is said.
"""

from __future__ import annotations

import math

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.grid import to_float
from onepolicy.integrity.base import SIDES, Batch, Pair, Side, Told, total_of
from onepolicy.integrity.places import many, place, places, spot_tokens
from onepolicy.types import Finding, IntArray

#: Above this (nats) a token is the likeliest for sure; below the other, it seldom is.
_SURELY, _SELDOM = math.log(0.5), math.log(0.2)
#: Below this a value was hardly sampled: a fill, or another fault.
_LEAST_REAL = -40.0
#: How close values agree, how far a stored one must lie above, and the room that rounding has beside a sum of 1.
_AGREES, _ABOVE, _ROOM = 0.1, 0.3, 1.02
#: Tokens of each kind, and shares of them.
_LEAST, _MOSTLY, _HARDLY, _OFTEN = 16, 0.95, 0.02, 0.5
#: With fewer tokens none may speak against it: at least so many of each kind, this share of the unlikely ones above.
_FEWEST, _ALL_BUT = 8, 0.75
#: At unlikely tokens, how far above the stored values are on average (nats): a truncation of flat distributions moves
#: them by less. And their spread (nats): a bound or a fill has none.
_BY, _SPREAD = 1.0, 0.1
#: Of tokens between, where the sampled one is the likeliest more often than not, this share lies above too.
_SOME, _OF_MIDDLE = 3, 0.08
#: Correlation of the two sides at the unlikely tokens above which one only stretches the other.
_FOLLOWS = 0.7


def look(batch: Batch) -> Counted:
    out = Counted()
    pair = batch.pair
    if pair is None or not len(pair.a):
        return out
    for side in SIDES:
        _side(out, batch, pair, side)
    return out


def _side(out: Counted, batch: Batch, pair: Pair, side: Side) -> None:
    x, y = pair.of(side), pair.of("b" if side == "a" else "a")
    key, d = f"top:{side}:", x - y
    n = lambda mask: int(np.count_nonzero(mask))
    over, seldom, sure = d > _ABOVE, y < _SELDOM, y > _SURELY
    low, above = seldom & (y > _LEAST_REAL), n(over & ~seldom & ~sure)
    out.count(key + "low", n(low))
    out.count(key + "below", n(low & (d < -_ABOVE)))
    out.count(key + "middle", len(y) - n(seldom) - n(sure))
    out.count(key + "middle above", above)
    out.count(key + "sure", n(sure))
    out.count(key + "agree", n(sure & (pair.gap < _AGREES)))
    over &= low
    out.count(key + "above", n(over))
    if not over.any():
        return
    record = np.repeat(np.arange(len(pair.lengths)), pair.lengths)
    often = np.bincount(record[over], minlength=len(pair.lengths)) >= _SOME
    if often.any():
        _look_closer(out, batch, pair, side, np.flatnonzero(low & often[record]))


def _look_closer(out: Counted, batch: Batch, pair: Pair, side: Side, low: IntArray) -> None:
    """The unlikely tokens `low` of records where this side is above at some."""
    key = f"top:{side}:"
    x, y = pair.of(side)[low], pair.of("b" if side == "a" else "a")[low]
    u, above = np.maximum(x, _LEAST_REAL), x - y > _ABOVE
    with np.errstate(over="ignore"):
        out.count(key + "too much", int((above & (np.exp(u) + np.exp(y) > _ROOM)).sum()))
    out.count(key + "closer", len(low))
    for part, terms in (("u", u), ("v", y), ("uu", u * u), ("vv", y * y), ("uv", u * y)):
        out.sums[key + part] = out.sums.get(key + part, 0) + total_of(terms)
    spot_tokens(out, key + "first", batch, pair.at[low[above]], {"value": x[above], "other": y[above]})


def judge(total: Counted, told: Told) -> list[Finding]:
    return [f for side in SIDES if (f := _judged(total, told, side)) is not None]


def _judged(total: Counted, told: Told, side: Side) -> Finding | None:
    n = {k: total.counts.get(f"top:{side}:{k}", 0) for k in ("low", "above", "below", "too much", "sure", "agree")}
    middle, middle_above = (total.counts.get(f"top:{side}:{k}", 0) for k in ("middle", "middle above"))
    spread, correlation, by = _shape(total, side)
    if n["low"] < 2 * _LEAST or n["sure"] < _LEAST:
        if not _few_fit(n):
            return None
    elif not _fit(n) or middle_above < max(_SOME, _OF_MIDDLE * middle):
        return None  # single low tokens of the other side are outliers
    if by < _BY or spread < _SPREAD or abs(correlation) > _FOLLOWS:
        return None
    first = total.spots.get(f"top:{side}:first", [])
    name, other = told.name(side), told.name("b" if side == "a" else "a")
    message = (
        f"{name} agrees with {other} at {n['agree']:,} of {many(n['sure'], 'token')} that were the likeliest, and lies "
        f"above it at {n['above']:,} of {n['low']:,} unlikely ones, below at {n['below']:,}"
    )
    evidence = {"side": name, **{k.replace(" ", "_"): v for k, v in n.items()}, "places": places(first)}
    ruled_out = ("fill values: they leave no room for the sampled token's probability",
                 "temperature or truncation: they move likely tokens too", "noise: it goes both ways")  # fmt: skip
    return finding("top-token-stored", message, place=place(first), evidence=evidence, ruled_out=ruled_out,
                   origin="run")  # fmt: skip


def _fit(n: dict[str, int]) -> bool:
    if n["agree"] < _MOSTLY * n["sure"] or n["above"] < _OFTEN * n["low"]:
        return False
    return n["below"] <= _HARDLY * n["low"] and n["too much"] <= _HARDLY * n["above"]


def _few_fit(n: dict[str, int]) -> bool:
    enough = n["low"] >= _FEWEST and n["sure"] >= _FEWEST and n["above"] >= _ALL_BUT * n["low"]
    return enough and n["agree"] == n["sure"] and not n["below"] and not n["too much"]


def _shape(total: Counted, side: Side) -> tuple[float, float, float]:
    """At the unlikely tokens: spread of the stored values, their correlation with the other side's, and how much they
    are above (nats, on average)."""
    n = total.counts.get(f"top:{side}:closer", 0)
    if not n:
        return 0.0, 1.0, 0.0
    u, v, uu, vv, uv = (to_float(total.sums[f"top:{side}:{part}"]) / n for part in ("u", "v", "uu", "vv", "uv"))
    spread = (uu - u * u) * (vv - v * v)
    correlation = (uv - u * v) / math.sqrt(spread) if spread > 1e-12 else 0.0
    return math.sqrt(max(0.0, uu - u * u)), correlation, u - v
