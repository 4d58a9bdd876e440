"""Values at places that do not count: prompts, tool output, tokens that the loss mask takes out.

0.0 and null are harmless there. NaN, infinities, numbers above 0 and numbers as low as -60 are not: a ratio of them is
0, NaN or infinite before the mask comes, and 0 times that is NaN.
"""

from __future__ import annotations

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.integrity.base import SIDES, Batch, Told
from onepolicy.integrity.places import many, place, places, spot_tokens
from onepolicy.types import BoolArray, Finding, FloatArray

#: No log-prob of a text that was drawn or written is below this (nats), or seldom.
_LOW = -60.0
#: Gap (nats) whose exp no longer fits float32.
_OVERFLOWS = 80.0


def look(batch: Batch) -> Counted:
    out = Counted()
    outside = ~batch.live
    for side, values in batch.side_values.items():
        at = np.flatnonzero(outside & (batch.scored(str(batch.a if side == "a" else batch.b))))
        x = values[at]
        out.count(f"masked:{side}:values", len(x))
        if not len(x):
            continue
        out.count(f"masked:{side}:zero", int((x == 0.0).sum()))
        with np.errstate(invalid="ignore"):
            bad = ~(x <= 0.0) | (x < _LOW)
        for kind, where in _kinds(x).items():
            out.count(f"masked:{side}:{kind}", int(where.sum()))
        spot_tokens(out, f"masked:{side}:first", batch, at[bad], {"value": x[bad]})
    if len(batch.side_values) == 2:
        _overflowing(out, batch, outside)
    return out


def _kinds(x: FloatArray) -> dict[str, BoolArray]:
    with np.errstate(invalid="ignore"):
        return {
            "nan": np.isnan(x),
            "infinite": np.isinf(x),
            "above 0": (x > 0.0) & np.isfinite(x),
            "below -60": (x < _LOW) & np.isfinite(x),
        }


def _overflowing(out: Counted, batch: Batch, outside: BoolArray) -> None:
    with np.errstate(invalid="ignore", over="ignore"):
        gap = batch.side_values["b"] - batch.side_values["a"]
        at = np.flatnonzero(outside & (np.abs(gap) > _OVERFLOWS))
    out.count("masked:overflowing", len(at))
    spot_tokens(out, "masked:overflowing", batch, at, {"log_ratio": gap[at]})


def judge(total: Counted, told: Told) -> list[Finding]:
    kinds: dict[str, dict[str, int]] = {}
    for side in SIDES:
        found = {k: total.counts.get(f"masked:{side}:{k}", 0) for k in ("nan", "infinite", "above 0", "below -60")}
        if any(found.values()):
            kinds[told.name(side)] = {k: n for k, n in found.items() if n}
    if not kinds:
        return []
    n = sum(sum(found.values()) for found in kinds.values())
    of = sum(total.counts.get(f"masked:{side}:values", 0) for side in SIDES)
    says = "; ".join(f"{name} {', '.join(f'{k}: {v:,}' for k, v in found.items())}" for name, found in kinds.items())
    message = f"{n:,} of {many(of, 'value')} at tokens that do not count would do harm if they did ({says})"
    over = total.counts.get("masked:overflowing", 0)
    message += f"; the ratio overflows at {over:,}" if over else ""
    spots = [s for side in SIDES for s in total.spots.get(f"masked:{side}:first", [])]
    evidence = {"values": n, "of": of, "by_side": kinds, "overflowing": over, "places": places(spots)}
    return [finding("values-at-masked-places", message, place=place(spots), evidence=evidence, origin="run")]
