"""Replies whose gap changes at one token, and the one place where most of them do."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onepolicy.rows import Rows
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.contrast import SEQUENCES, Contrast, contrast, needed, told

#: max |CUSUM| / (sd sqrt n) that 1 reply in 8,000 passes without a change (Kolmogorov).
CLEAR = 2.2
#: Before and after, the RMS gap differs by this factor at least.
FACTOR = 1.8
#: Replies with a clear change: this share of all, and so many. Text has stretches of its own, so that some pass.
SHARE, FEWEST = 0.05, 4
#: This share of the changes within this many tokens of one place is one place, and half of them is neither that nor
#: many places; changes are found to a few tokens.
AT_ONE, PARTLY, WITHIN, FEWEST_AT = 0.7, 0.5, 3, 6

#: What begins at one place, counted from the start, and from the end of replies.
FROM_START = ("a chunk or block boundary", "a sliding window or rope limit at that length", "a cache of that size",
              "a turn that begins there, after a history that the two sides see otherwise")  # fmt: skip
FROM_END = ("drafted tokens at the end (speculative decoding)", "a tail that was forced")
#: The side of a place in replies of one length.
EITHER = "start or end"
#: An end's token against those between the ends: so many times their gap on the tokens' own scale, and at least so
#: large; replies have so many tokens between for each.
TIMES, LARGE, AT_LEAST = 3.0, 0.1, 8
#: A gap that leads up to the end is larger already two sixteenths before it.
STEADY = 1.5
AT_ENDS = {
    "first": ("a prompt that ends otherwise (template, whitespace, BOS)", "a prefill that hands over a wrong position"),
    "last": ("a stop token that is scored otherwise or was appended", "a value of another token or of the padding"),
}
#: A gap of less than this is none: d of equal numbers has no change.
LEAST = 1e-9


def one_place(e: Evidence) -> Answer:
    """The changes stand at one distance from the start, or from the end."""
    found = clear(e.rows)
    told_so = too_few(e, found)
    place = None if told_so is not None else common_place(found)
    if place is None:
        other = Answer("no", "the changes are at different places in different replies") if told_so is None else told_so
        return _at_an_end(e) or other
    side, at, share = place
    evidence = evidence_of(e.rows, found) | {"side": side, "change_point": at, "share_there": share}
    where = "the start (replies of one length: it may be the end that counts)" if side == EITHER else f"the {side}"
    message = (
        f"in {len(found)} of {len(e.rows)} replies the gap changes, in {share:.0%} of them about {at} tokens from "
        f"{where}: d is {evidence['rms_before']:.2g} before and {evidence['rms_after']:.2g} after it"
    )
    rivals = (FROM_START if side != "end" else ()) + (FROM_END if side != "start" else ())
    out = told("changes-at-one-place", message, len(found) >= 20, evidence=evidence, rivals=rivals)
    return Answer("fits", "the gap changes at one place of the replies", out, share_of(e.rows, found))


def _at_an_end(e: Evidence) -> Answer | None:
    """Too short for a change of its own: the first or the last token of the replies, or their last few."""
    bins = e.profiles.get("place")
    if bins is None or bins.n("inner") < AT_LEAST * max(bins.n("first"), bins.n("last"), 1):
        return None
    for side, label in (("start", "first"), ("end", "last")):
        if side == "end" and (part := _last_part(e)) is not None:
            return part
        held = contrast(bins, ("inner",), (label,))
        units = _prompts(e.rows) if label == "first" else 0
        if held is None or not _clear(held, units) or held.ratio < TIMES or held.other < LARGE:
            continue
        message = (
            f"the {label} token of the replies has a mean |d| of {held.abs_other:.2g}, those between the ends "
            f"{held.abs_base:.2g}; at equal probability of the tokens that is {held.ratio:.2g} times as much"
        )
        evidence = held.evidence("inner", label) | {"side": side, "change_point": 1}
        enough = (units or held.sequences) >= SEQUENCES
        out = told("changes-at-one-place", message, enough, evidence=evidence, rivals=AT_ENDS[label])
        return Answer("fits", f"the gap is at the {label} token of the replies", out, held.share)
    return None


def _prompts(rows: Rows) -> int:
    """Prompts that the replies were drawn for, by their groups; 0 where not all are recorded."""
    groups = rows["group"][rows["n"] > 0]
    return len(np.unique(groups)) if groups.all() else 0


def _clear(held: Contrast, prompts: int) -> bool:
    """Beyond chance, where replies to one prompt say the same of their first token: it has one context in all of them,
    and often it is one token. 0 `prompts`: replies count one by one."""
    if not prompts:
        return held.clear
    return held.z * math.sqrt(min(1.0, prompts / held.sequences)) >= needed(prompts)


def _last_part(e: Evidence) -> Answer | None:
    """The last sixteenth of the replies, and not its last token alone, has a gap that nothing before leads up to."""
    bins = e.profiles.get("part")
    if bins is None or not all(bins.n(str(k)) for k in range(16)):
        return None
    before = [str(k) for k in range(1, 15)]
    held = contrast(bins, before, ("15",))
    steady = contrast(bins, before[:-2], ("13",))
    if held is None or steady is None or steady.ratio > STEADY:
        return None
    if not held.clear or held.ratio < TIMES or held.other < LARGE:
        return None
    if bins.quantile("15", 0.5) < FACTOR * bins.merged(before, "x").quantile("x", 0.5):
        return None
    message = (
        f"the last sixteenth of the replies has a mean |d| of {held.abs_other:.2g}, what is before it "
        f"{held.abs_base:.2g}, and does not grow up to there"
    )
    evidence = held.evidence("before", "last_sixteenth") | {"side": "end"}
    out = told("changes-at-one-place", message, held.enough, evidence=evidence, rivals=FROM_END)
    return Answer("fits", "the gap is at the end of the replies", out, held.share)


def clear(rows: Rows) -> Rows:
    """The replies with a clear change of the size of the gap."""
    rows = rows[(rows["change_at"] >= 0) & (rows["change"] >= CLEAR)]
    rows = rows[np.maximum(rows["rms_before"], rows["rms_after"]) > LEAST]
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
    """("start", "end" or `EITHER`, tokens from there, share of the changes there); None where they are spread."""
    if len(found) < FEWEST_AT:
        return None
    best: tuple[str, int, float] | None = None
    if len(np.unique(found["n"])) < 3:
        sides = ((EITHER, found["change_at"]),)
    else:
        sides = (("start", found["change_at"]), ("end", found["n"] - found["change_at"]))
    for side, at in sides:
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
