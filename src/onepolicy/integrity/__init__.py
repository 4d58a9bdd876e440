"""Integrity of the record, before any number: is what stands in the dump what it says it is?

A check is one module, as `base` describes, and one line in `CHECKS`. Doubled and missing records need all records at
once: `records.duplicate_findings`, `records.missing_findings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

import numpy as np

from onepolicy.codes.kind import WARN
from onepolicy.counted import Counted
from onepolicy.integrity import (
    broken,
    claims,
    clamped,
    exchanged,
    fills,
    finite,
    ids,
    lengths,
    masked,
    masks,
    one_source,
    precision,
    rescaled,
    rounded,
    shifts,
    summed,
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
    "clamped": clamped,  # cut off at a least or a greatest value
    "rescaled": rescaled,  # another base of the logarithm, divided after the softmax
    "summed": summed,  # sums or means of a reply in place of each token's own
    "shifts": shifts,  # one side late or early
    "exchanged": exchanged,  # values of another record's tokens
    "top-token": top_token,  # the likeliest token's value for the sampled one's
    "one-source": one_source,  # both lists the same to the bit
    "precision": precision,  # rounded to bfloat16, float16 or eight bits when stored
    "rounded": rounded,  # to decimals, or to whole numbers
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
    explained = (_left_by_shift, _left_by_exchange, _left_by_clamp_or_sum, _left_by_decimals,
                 _left_by_mask)  # fmt: skip
    return [f for f in found if not any(left(f, found) for left in explained)]


def _left_by_shift(f: Finding, found: Sequence[Finding]) -> bool:
    """The 0.0 that a shift leaves at the end of each list is not a finding of its own, nor is the mask that stays."""
    if f.code == "sampled-not-trained" and f.severity is WARN:
        return any(g.code == "shift-by-one" for g in found)
    if f.code != "filled-logprob" or not set(f.evidence["values"]) <= {"0.0", *_plain(f)}:
        return False
    room = [g.evidence["records"] * abs(g.evidence["best_lag"]) for g in found if "best_lag" in g.evidence]
    return bool(room) and f.evidence["values"].get("0.0", 0) <= max(room)


def _plain(f: Finding) -> set[str]:
    """Values that are no sentinels: a shift sets numbers of one token beside another's."""
    return {v for v in f.evidence["values"] if v == "repeated" or (v[0] == "-" and float(v) > -100)}


def _left_by_exchange(f: Finding, found: Sequence[Finding]) -> bool:
    """Neither is the 0.0 behind a shorter record's values that stand at a longer record's tokens."""
    exchanged = any(g.code == "exchanged-logprobs" for g in found)
    return exchanged and f.code == "filled-logprob" and set(f.evidence["values"]) == {"0.0"}


def _left_by_clamp_or_sum(f: Finding, found: Sequence[Finding]) -> bool:
    """A number that comes again and again is no fill where it is a bound, or a reply's sum."""
    if f.code not in ("filled-logprob", "top-token-stored"):
        return False
    of = [g for g in found if g.evidence.get("side") == f.evidence["side"]]
    named = {f"{g.evidence['value']:g}" for g in of if g.code == "clamped-logprob"}
    named |= {"repeated"} if named else set()
    for g in of:
        if g.code == "sequence-logprob-stored" and g.evidence["what"] in ("sum", "mean"):
            named |= {"repeated", *f.evidence.get("values", ())} if g.evidence["share"] == 1 else {"repeated"}
    return bool(named) and set(f.evidence.get("values", named)) <= named


def _left_by_decimals(f: Finding, found: Sequence[Finding]) -> bool:
    """Whole numbers are on every grid, and some of them look like fills."""
    if f.code not in ("filled-logprob", "stored-as-bf16", "stored-as-fp16", "stored-as-fp8"):
        return False
    whole = [g for g in found if g.code == "stored-rounded" and not g.evidence["decimals"]]
    return any(g.evidence["side"] == f.evidence["side"] for g in whole)


def _left_by_mask(f: Finding, found: Sequence[Finding]) -> bool:
    """The 0.0 at tokens that nobody drew is no fill where the mask is turned round."""
    if f.code != "filled-logprob" or set(f.evidence["values"]) != {"0.0"}:
        return False
    return any(g.code == "undrawn-tokens-trained" and f.evidence["filled"] <= g.evidence["undrawn"] for g in found)
