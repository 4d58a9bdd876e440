"""Values that were rounded to decimals, or to whole numbers, when they were stored: one side's are, the other's not."""

from __future__ import annotations

import numpy as np

from onepolicy.codes import finding
from onepolicy.codes.kind import DRIFT, FAIL
from onepolicy.counted import Counted
from onepolicy.integrity.base import SIDES, Batch, Side, Told
from onepolicy.integrity.places import many
from onepolicy.types import Finding

#: Decimals -> tokens that it takes; finer ones move a log-prob by less than 0.001 nats.
_LEAST = {0: 12, 1: 32, 2: 64}
#: Share of a side's values with so few decimals, and share of the other side's that may have as few.
_ON_GRID, _OTHER = 0.99, 0.5
#: Values other than 0 that it takes.
_NOT_ZERO = 4


def look(batch: Batch) -> Counted:
    out = Counted()
    if batch.pair is None or not len(batch.pair.a):
        return out
    out.count("rounded:tokens", len(batch.pair.a))
    for side in SIDES:
        x = batch.pair.of(side)
        out.count(f"rounded:{side}:not zero", int(np.count_nonzero(x)))
        out.greatest(f"rounded:{side}:greatest", float(x.max()) + 0.0)
        out.greatest(f"rounded:{side}:least, negative", 0.0 - float(x.min()))
        for digits in _LEAST:
            scaled = x * 10.0**digits
            on = np.abs(scaled - np.rint(scaled)) <= 1e-6  # stored in float32, 0.1 is 0.10000000149
            out.count(f"rounded:{side}:{digits}", int(np.count_nonzero(on)))
    return out


def judge(total: Counted, told: Told) -> list[Finding]:
    return [f for side in SIDES if (f := _judged(total, told, side)) is not None]


def _judged(total: Counted, told: Told, side: Side) -> Finding | None:
    n, key = total.counts.get("rounded:tokens", 0), f"rounded:{side}:"
    other = f"rounded:{'b' if side == 'a' else 'a'}:"
    on = {digits: total.counts.get(f"{key}{digits}", 0) for digits in _LEAST}
    enough = lambda d: n >= _LEAST[d] and on[d] >= _ON_GRID * n and total.counts[f"{other}{d}"] < _OTHER * n
    digits = next((d for d in _LEAST if enough(d)), None)
    if digits is None or total.counts[key + "not zero"] < _NOT_ZERO:
        return None
    if total.most[key + "greatest"] == -total.most[key + "least, negative"]:
        return None
    against = told.name("b" if side == "a" else "a")
    half = 0.5 * 10.0**-digits
    what = "whole numbers" if digits == 0 else f"numbers of {many(digits, 'decimal')}"
    message = f"{told.name(side)}: {on[digits]:,} of {many(n, 'log-prob')} are {what}, unlike those of {against}; "
    message += "what stood behind the point is lost" if digits == 0 else f"storing them so moved each by up to {half:g}"
    evidence = {"side": told.name(side), "decimals": digits, "tokens": n, "share": on[digits] / n,
                "largest_rounding": half, "share_of_the_other": total.counts[f"{other}{digits}"] / n}  # fmt: skip
    advice = "Make the tensor that takes the log-probs with a float dtype: they were cast to the integers of token ids."
    weight = {"severity": FAIL, "outcome": DRIFT, "advice": advice} if digits == 0 else {}
    return finding("stored-rounded", message, evidence=evidence, origin="run", **weight)
