"""Integrity of the record, before any number: is what stands in the dump what it says it is?

A check is one module, as `base` describes, and one line in `CHECKS`. Doubled and missing records need all records at
once: `records.duplicate_findings`, `records.missing_findings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

import numpy as np

from onepolicy.counted import Counted
from onepolicy.integrity import (
    broken,
    claims,
    fills,
    finite,
    ids,
    lengths,
    masked,
    masks,
    one_source,
    precision,
    shifts,
    top_token,
    uniform,
)
from onepolicy.integrity.base import Batch, Told
from onepolicy.types import Finding

#: key -> module with `look(batch)` and `judge(total, told)`; judged in this order.
CHECKS: dict[str, ModuleType] = {
    "broken": broken,  # records that cannot be read
    "claims": claims,  # counts that a record states of itself
    "lengths": lengths,  # one value for each token
    "ids": ids,  # negative, too large, outside of the vocabulary
    "finite": finite,  # null, NaN, infinite, above 0
    "uniform": uniform,  # -log V at every token
    "fills": fills,  # 0.0, 1.0, -100, -9999, -1e9, one number again and again
    "shifts": shifts,  # one side late or early
    "top-token": top_token,  # the likeliest token's value for the sampled one's
    "one-source": one_source,  # both lists the same to the bit
    "precision": precision,  # rounded to bfloat16 or float16 when stored
    "masked": masked,  # values at places that do not count
    "masks": masks,  # the loss mask against what was drawn
}


def look_all(batch: Batch) -> dict[str, Counted]:
    """What each check counts of one batch."""
    with np.errstate(over="ignore", invalid="ignore"):  # 1e308 and infinities are what is looked for
        return {key: check.look(batch) for key, check in CHECKS.items()}


def judge_all(totals: Mapping[str, Counted], told: Told) -> list[Finding]:
    """The findings of every check, from totals of the whole dump."""
    found = [f for key, check in CHECKS.items() if key in totals for f in check.judge(totals[key], told)]
    return [f for f in found if not _left_by_shift(f, found)]


def _left_by_shift(f: Finding, found: Sequence[Finding]) -> bool:
    """The 0.0 that a shift leaves at the end of each list is not a finding of its own."""
    if f.code != "filled-logprob" or set(f.evidence["values"]) != {"0.0"}:
        return False
    room = [g.evidence["records"] * abs(g.evidence["best_lag"]) for g in found if "best_lag" in g.evidence]
    return bool(room) and f.evidence["filled"] <= max(room)
