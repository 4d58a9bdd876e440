"""Replies whose gap changes at one token, and the one place where most of them do."""

from __future__ import annotations

from typing import Any

import numpy as np

from onepolicy.rows import Rows
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.contrast import told

#: max |CUSUM| / (sd sqrt n) that 1 reply in 8,000 passes without a change (Kolmogorov).
CLEAR = 2.2
#: Before and after, the RMS gap differs by this factor at least.
FACTOR = 1.8
#: Replies with a clear change: this share of all, and so many. Text has stretches of its own, so that some pass.
SHARE, FEWEST = 0.05, 4
#: This share of the changes within this many tokens of one place is one place, and half of them is neither that nor
#: many places; changes are found to a few tokens.
AT_ONE, PARTLY, WITHIN, FEWEST_AT = 0.7, 0.5, 3, 6


def one_place(e: Evidence) -> Answer:
    """The changes stand at one distance from the start, or from the end."""
    found = clear(e.rows)
    told_so = too_few(e, found)
    if told_so is not None:
        return told_so
    place = common_place(found)
    if place is None:
        return Answer("no", "the changes are at different places in different replies")
    side, at, share = place
    evidence = evidence_of(e.rows, found) | {"side": side, "change_point": at, "share_there": share}
    message = (
        f"in {len(found)} of {len(e.rows)} replies the gap changes, in {share:.0%} of them about {at} tokens from the "
        f"{side}: d is {evidence['rms_before']:.2g} before and {evidence['rms_after']:.2g} after it"
    )
    start = ("a chunk or block boundary", "a sliding window or rope limit at that length", "a cache of that size")
    rivals = (
        start if side == "start" else ("drafted tokens at the end (speculative decoding)", "a tail that was forced")
    )
    out = told("changes-at-one-place", message, len(found) >= 20, evidence=evidence, rivals=rivals)
    return Answer("fits", "the gap changes at one place of the replies", out, share_of(e.rows, found))


def clear(rows: Rows) -> Rows:
    """The replies with a clear change of the size of the gap."""
    rows = rows[(rows["change_at"] >= 0) & (rows["change"] >= CLEAR)]
    quotient = rows["rms_before"] / np.maximum(rows["rms_after"], 1e-12)
    return rows[np.maximum(quotient, 1 / np.maximum(quotient, 1e-12)) >= FACTOR]


def too_few(e: Evidence, found: Rows) -> Answer | None:
    long_enough = int((e.rows["change_at"] >= 0).sum())
    if not long_enough:
        return Answer("lacks", "needs replies of at least 16 tokens")
    if len(found) == 0 or len(found) < SHARE * long_enough:
        return Answer("no", f"{len(found)} of {long_enough} replies have a clear change of the gap")
    if len(found) < min(FEWEST, long_enough):
        return Answer("unclear", f"{len(found)} of {long_enough} replies have a clear change of the gap")
    return None


def common_place(found: Rows, least: float = AT_ONE) -> tuple[str, int, float] | None:
    """("start" or "end", tokens from there, share of the changes there); None where they are spread."""
    if len(found) < FEWEST_AT or len(np.unique(found["n"])) < 3:
        return None
    best: tuple[str, int, float] | None = None
    for side, at in (("start", found["change_at"]), ("end", found["n"] - found["change_at"])):
        middle = int(np.median(at))
        share = float((np.abs(at - middle) <= max(WITHIN, middle // 16)).mean())
        if share >= least and (best is None or share > best[2]):
            best = side, middle, share
    return best


def evidence_of(rows: Rows, found: Rows) -> dict[str, Any]:
    at = found["change_at"]
    return {
        "replies": len(found), "of": len(rows), "change_point": int(at[0]) if len(found) == 1 else None,
        "first_change": int(at.min()), "last_change": int(at.max()),
        "rms_before": float(np.median(found["rms_before"])), "rms_after": float(np.median(found["rms_after"])),
    }  # fmt: skip


def share_of(rows: Rows, found: Rows) -> float:
    """How much of the whole gap stands on the larger side of the changes, beyond the smaller side's."""
    at, n = found["change_at"], found["n"]
    before = found["rms_before"] > found["rms_after"]
    larger, tokens = np.maximum(found["rms_before"], found["rms_after"]), np.where(before, at, n - at)
    more = ((larger - np.minimum(found["rms_before"], found["rms_after"])) * tokens).sum()
    return float(min(1.0, 0.7 * more / max(rows["abs"].sum(), 1e-12)))


SIGNATURE = Signature(
    "one_place", "changes-at-one-place", "the gap changes at one place of the replies", one_place,
    ("replies of 16 tokens",), ("changes_inside",),
)  # fmt: skip
