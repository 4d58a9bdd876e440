"""A gap that grows along the reply: what acts on positions (rope, windows, position ids) or piles up (KV cache)."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from onepolicy.codes import finding
from onepolicy.codes.kind import OPEN, WARN
from onepolicy.profiles.base import Bins
from onepolicy.signatures import places
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.contrast import SEQUENCES, SURE, needed, told
from onepolicy.types import Finding

#: The last quarter against the first, on the tokens' own scale, and that it still grows from the third quarter on.
GROWTH, STILL = 1.6, 1.12
#: By the third quarter this share of the growth is there; along a line it is two thirds.
ON_THE_WAY = 0.4
#: Rank correlation of the gap with the place, over sixteenths of the replies; 0.8 comes once in 5,000 without a trend.
TREND = 0.8
QUARTERS = tuple(tuple(str(4 * q + k) for k in range(4)) for q in range(4))
#: Settings that act on positions, as fingerprints and configurations name them.
ROPE = ("rope_theta", "rope_type", "factor", "sliding_window")


def judge(e: Evidence) -> Answer:
    answer = _grows(e)
    differs = rope(e)
    if answer.verdict == "fits" or not differs:
        return answer
    said = "; ".join(f"{k}: {x['engine']} against {x['trainer']}" for k, x in differs.items())
    message = f"{said}, though the gap does not grow with the position in this dump ({answer.why})"
    out = finding("rope-differs", message, evidence=differs, severity=WARN, outcome=OPEN)
    return Answer("fits", "the two sides declare other settings of positions", out, 0.0)


def _grows(e: Evidence) -> Answer:
    bins = e.profiles.get("part")
    if bins is None or not all(bins.n(str(k)) for k in range(16)):
        return Answer("lacks", "needs replies of at least 16 tokens")
    quarters = [bins.merged(q, "x") for q in QUARTERS]
    scaled = [q.mean("x", "scaled") for q in quarters]
    growth, trend, z = scaled[3] / max(scaled[0], 1e-12), _trend(bins), _std_errors(quarters)
    against = _against(e, scaled, growth, trend)
    if against:
        return Answer("no", against)
    sequences = min(q.get("x", "sequences") for q in quarters) // 4
    enough = sequences >= SEQUENCES
    # from few sequences it is only described, and the trend over sixteenths speaks for it besides
    if sequences > 1 and z < (needed(sequences) if enough else SURE / 2):
        return Answer("unclear", f"the gap grows {growth:.2g} times along the reply, by {z:.1f} standard errors only")
    evidence: dict[str, Any] = {
        "mean_abs_by_quarter": [q.mean("x") for q in quarters], "grows_with_position": True,
        "growth_on_token_scale": growth, "trend": trend, "std_errors": z if math.isfinite(z) else None,
        "mean_abs_by_position": {k: e.profiles["position"].mean(k) for k in e.profiles["position"].labels()},
    }  # fmt: skip
    return Answer("fits", "the gap grows with the position", _found(e, rope(e), evidence, enough), _share(scaled))


def _against(e: Evidence, scaled: list[float], growth: float, trend: float) -> str:
    """What speaks against a gap that grows all along the replies; empty if nothing does."""
    if growth < GROWTH or trend < TREND:
        return f"the last quarter's gap is {growth:.2g} times the first's at equal probability"
    if scaled[3] < STILL * scaled[2] or scaled[2] - scaled[0] < ON_THE_WAY * (scaled[3] - scaled[0]):
        return "the gap does not grow all along the reply, it changes at one place"
    if places.one_place(e).verdict == "fits":
        return "it changes at one place of the replies, early in long ones and late in short ones"
    if _steady_by_place(e):
        return "at one place in the reply the gap is the same in short and long replies and does not grow"
    return "the gap is at repeated tokens, which grow more frequent along a reply" if _at_repeats(e) else ""


def _found(e: Evidence, differs: dict[str, Any], evidence: dict[str, Any], enough: bool) -> Finding:
    sizes = ", ".join(f"{x:.2g}" for x in evidence["mean_abs_by_quarter"])
    gone = ("rounding alone: it hardly grows along a reply", "a shift in how likely tokens are: held against it")
    if differs:
        said = "; ".join(f"{k}: {x['engine']} against {x['trainer']}" for k, x in differs.items())
        message = f"{said}, and the gap grows with the position: mean |d| by quarter of the reply {sizes}"
        return finding("rope-differs", message, evidence={**differs, **evidence}, ruled_out=gone)
    rivals = ("rope base or scaling that differs", "position ids that count padding or a prefix",
              "a sliding window on one side", "a KV cache that loses precision")  # fmt: skip
    message = f"the gap grows with the position: mean |d| by quarter of the reply {sizes}"
    return told("grows-with-position", message, enough, evidence=evidence, ruled_out=gone, rivals=rivals)


def _trend(bins: Bins) -> float:
    """Spearman's rank correlation of the mean gap with the sixteenth of the reply."""
    x = np.array([bins.mean(str(k), "scaled") for k in range(16)])
    return float(np.corrcoef(np.argsort(np.argsort(x)), np.arange(16))[0, 1])


def _std_errors(quarters: list[Bins]) -> float:
    first, last = quarters[0], quarters[3]
    error = math.hypot(first.std_error("x", "scaled"), last.std_error("x", "scaled"))
    # a quarter has four sixteenths of each sequence, which go together: at worst the error is twice as large
    return (last.mean("x", "scaled") - first.mean("x", "scaled")) / (2 * error) if error > 0 else math.inf


def _share(scaled: list[float]) -> float:
    return max(0.0, 1 - scaled[0] / (sum(scaled) / 4))


def _steady_by_place(e: Evidence) -> bool:
    """Whether the growth along replies is not one along absolute places."""
    bins = e.profiles.get("position")
    labels = [k for k in bins.labels() if bins.n(k) >= 50] if bins is not None else []
    if bins is None or len(labels) < 3:
        return False
    early, late = bins.mean(labels[0], "scaled"), max(bins.mean(k, "scaled") for k in labels[-2:])
    return late < 1.1 * early


def _at_repeats(e: Evidence) -> bool:
    bins = e.profiles.get("repeated")
    if bins is None or bins.n("new") < 50 or bins.n("in the reply") < 50:
        return False
    return bins.mean("new", "scaled") < 0.3 * bins.mean("in the reply", "scaled")


def rope(e: Evidence) -> dict[str, dict[str, Any]]:
    """Settings of positions that both sides declare, and differently: name -> {engine, trainer}."""
    sides = [_settings(e, name) for name in e.names]
    return {
        key: {"engine": sides[0][key], "trainer": sides[1][key]}
        for key in ROPE
        if key in sides[0] and key in sides[1] and sides[0][key] != sides[1][key]
    }


def _settings(e: Evidence, name: str) -> dict[str, Any]:
    """What one side declares, wherever its configuration has it: on top, in rope_scaling or in rope_parameters.

    No scaling is declared as null, or as the type "default"; its factor is 1.
    """
    out: dict[str, Any] = {}
    for what in ("rope_theta", "sliding_window", "rope_scaling", "rope_parameters"):
        values = e.facts.get(f"{name}_{what}", [])
        value = json.loads(values[0]) if len(values) == 1 else None
        if what == "rope_scaling" and values == ["null"]:
            value = {"rope_type": "default"}
        found: dict[str, Any] = value if isinstance(value, dict) else {what: value}
        if "type" in found:
            found = {"rope_type": found["type"], **found}
        out |= {k: v for k, v in found.items() if k in ROPE and v is not None}
    if out.get("rope_type") == "default":
        out["factor"] = 1.0
    return out


SIGNATURE = Signature(
    "position", "grows-with-position", "the gap grows along the reply", judge, needs=("replies of 16 tokens",),
)  # fmt: skip
