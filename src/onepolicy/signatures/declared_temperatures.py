"""Requests of several temperatures in one dump, and a side that has one for all: the gap goes with the declared value.

A temperature raises every token that is likelier than all others together on the sharper side. Where one side takes
each request's own temperature and the other one of T0 for all, these tokens lie on one side in requests below T0 and
on the other above it. Nothing else that bends logits knows what was declared.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.profiles.base import Seen
from onepolicy.signatures.base import Answer, Evidence
from onepolicy.types import FloatArray

#: Differences below this, nats, are rounding to float32 or printing; values of T that are told apart.
ROUNDING, MOST = 2e-3, 32
#: Likeliest tokens of a temperature that are needed, and their share on one side: all but noise, or about half.
FEWEST, ALL, HALF = 24, 0.9, (0.2, 0.8)


def look(out: Counted, seen: Seen) -> None:
    """Counts of d above and below 0 at likeliest tokens, by declared temperature."""
    col = seen.rollouts.records.get("temperature")
    if col is None or not len(seen):
        return
    declared: FloatArray = np.where(col.mask(), col.values.astype(np.float64), np.nan)[seen.sequence]
    drawn = np.isfinite(declared) & (declared > 0)  # 0 is greedy, which each side reports in its own way
    top = drawn & (np.maximum(seen.a, seen.b) >= math.log(0.5)) & (seen.size > ROUNDING)
    d, declared = seen.d[top], declared[top]
    for value in np.unique(declared)[:MOST].tolist():  # the first of a batch are among the first of all
        here = declared == value
        out.count(f"declared {value!r}:above", int(np.count_nonzero(here & (d > 0))))
        out.count(f"declared {value!r}:lower", int(np.count_nonzero(here & (d < 0))))


def judge(evidence: Evidence, seen: Counted) -> Answer | None:
    """None where one temperature is declared, or the gap does not go with it."""
    shares = _shares(seen)
    kinds = [kind for t in sorted(shares) if (kind := _kind(shares[t])) is not None]
    rises, falls = kinds == sorted(kinds), kinds == sorted(kinds, reverse=True)
    if len(kinds) < len(shares) or len(set(kinds)) < 2 or not (rises or falls):
        return None
    own, other = evidence.names if rises else evidence.names[::-1]
    at = _common(shares)
    higher = ", ".join(f"{shares[t]:.0%} at T = {t:g}" for t in sorted(shares))
    message = (
        f"{own} takes each request's temperature, {other} one of {at} for all: at tokens that are likelier than all "
        f"others together {evidence.names[1]} is higher in {higher}. No other cause goes with the declared value"
    )
    facts = {
        "share_higher_by_temperature": {f"{t:g}": round(s, 4) for t, s in shares.items()},
        "own_temperature": own,
        "one_temperature": {other: at},
        "naive_fix_is_valid": False,
    }
    return Answer("fits", "", finding("temperature-mismatch", message, evidence=facts), 0.5)


def _shares(seen: Counted) -> dict[float, float]:
    """Declared temperature -> share of its likeliest tokens at which the scorer is higher."""
    out: dict[float, float] = {}
    told = {k.removeprefix("declared ").split(":")[0] for k in seen.counts if k.startswith("declared ")}
    for value in sorted(told, key=float)[:MOST]:
        above, lower = (seen.counts[f"declared {value}:{side}"] for side in ("above", "lower"))
        if above + lower >= FEWEST:
            out[float(value)] = above / (above + lower)
    return out


def _kind(share: float) -> int | None:
    """-1: the scorer is lower, 1: it is higher, 0: either; None where it is none of these."""
    if HALF[0] <= share <= HALF[1]:
        return 0
    return 1 if share >= ALL else -1 if share <= 1 - ALL else None


def _common(shares: dict[float, float]) -> str:
    """The temperature at which the two sides agree."""
    same = [t for t, s in shares.items() if _kind(s) == 0]
    if same:
        return f"{sum(same) / len(same):.3g}"
    ordered = sorted(shares)
    low, high = next((x, y) for x, y in itertools.pairwise(ordered) if _kind(shares[x]) != _kind(shares[y]))
    return f"{low:g} to {high:g}"
