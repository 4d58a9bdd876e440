"""The gap changes inside a reply: weights that were updated while it was written, a chunk boundary, a drafted tail."""

from __future__ import annotations

from typing import Any

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import Counted, Spot
from onepolicy.profiles.base import Seen
from onepolicy.rows import Rows
from onepolicy.signatures import position
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.contrast import told

#: max |CUSUM| / (sd sqrt n) that 1 reply in 8,000 passes without a change (Kolmogorov).
CLEAR = 2.2
#: Before and after, the RMS gap differs by this factor at least.
FACTOR = 1.8
#: Replies with a clear change: this share of all, and so many. Text has stretches of its own, so that some pass.
SHARE, FEWEST = 0.05, 4
#: This share of the changes within this many tokens of one place is one place; changes are found to a few tokens.
AT_ONE, WITHIN = 0.6, 3


def look(seen: Seen) -> Counted:
    """Replies whose tokens are of more than one version, and where the version changes first."""
    out = Counted()
    drew = seen.rollouts.tokens.get("policy_version")
    if drew is None or not len(seen):
        return out
    values, known = drew.values[seen.at], drew.mask()[seen.at]
    starts = np.cumsum(seen.counts) - seen.counts
    other = known & (values != values[starts[seen.sequence]])
    at = np.flatnonzero(other & (np.cumsum(other) - _before(other, seen) == 1))
    out.count("replies", int((seen.counts > 0).sum()))
    out.count("mixed", len(at))
    names = sorted((seen.pairs.record_ids[i], int(seen.index[j])) for i, j in zip(seen.sequence[at], at, strict=True))
    out.spot("change", [Spot(record, place) for record, place in names[:16]])
    for place in seen.index[at].tolist():
        out.greatest("last change", place)
        out.greatest("-first change", -place)
    return out


def _before(marks: Any, seen: Seen) -> Any:
    """`[N]` marks before the token's sequence."""
    total = np.cumsum(marks)
    first = np.arange(len(marks)) - seen.index
    return np.where(first > 0, total[np.maximum(first - 1, 0)], 0)


def mixed(e: Evidence) -> Answer:
    """A fact of the record, whatever the gap is."""
    counted, bins = e.extra.get("mixed_versions"), e.profiles.get("span")
    if counted is None or bins is None or not counted.counts.get("replies"):
        return Answer("lacks", "needs policy_version for each token")
    n = counted.counts.get("mixed", 0)
    if not n:
        return Answer("no", "every reply has tokens of one version only")
    first, last = int(-counted.most["-first change"]), int(counted.most["last change"])
    before, after = bins.sd("before"), bins.sd("after")
    place = f"after {first} tokens" if first == last else f"after {first} to {last} tokens"
    message = (
        f"{n} of {counted.counts['replies']} replies hold tokens of more than one weight version; it changes {place}; "
        f"d spreads by {before:.2g} nats before and {after:.2g} after"
    )
    evidence = {
        "replies": n, "change_point": first if first == last else None, "first_change": first, "last_change": last,
        "sd_before": before, "sd_after": after, "tokens_before": bins.n("before"), "tokens_after": bins.n("after"),
        "records": [s.record for s in counted.spots["change"]],
        "positions": [s.position for s in counted.spots["change"]],
    }  # fmt: skip
    more = max(0.0, bins.mean("before") - bins.mean("after")) * bins.n("before")
    whole = e.profiles["position"]
    total = sum(whole.mean(k) * whole.n(k) for k in whole.labels())
    out = finding("mixed-weight-versions", message, evidence=evidence)
    return Answer("fits", "more than one version in a reply", out, min(1.0, more / total) if total else 0.0)


def changes(e: Evidence) -> Answer:
    """Many replies have a clear change of the gap, each at a place of its own."""
    found = _clear(e.rows)
    told_so = _too_few(e, found)
    if told_so is not None:
        return told_so
    if e.extra.get("mixed_versions", Counted()).counts.get("mixed"):
        return Answer("no", "versions in the reply tell where the weights change")
    if position.judge(e).verdict == "fits":
        return Answer("no", "the gap grows all along the reply")
    if _one_place(found) is not None:
        return Answer("no", "the changes stand at one place of the replies")
    falls = float((found["rms_before"] > found["rms_after"]).mean())
    evidence = _evidence(e.rows, found) | {"larger_before": falls}
    where = "before" if falls > 0.5 else "after"
    message = (
        f"in {len(found)} of {len(e.rows)} replies the gap changes at one token, at another place in each; d is "
        f"{evidence['rms_before']:.2g} before and {evidence['rms_after']:.2g} after it, larger {where} it in "
        f"{max(falls, 1 - falls):.0%}"
    )
    rivals = ("weights updated while the reply was written", "a reply that went on on another replica",
              "a prefill that restarted with another cache")  # fmt: skip
    out = told("changes-inside-reply", message, len(found) >= 20, evidence=evidence, rivals=rivals)
    return Answer("fits", "the gap changes inside replies", out, _share(e.rows, found))


def one_place(e: Evidence) -> Answer:
    """The changes stand at one distance from the start, or from the end."""
    found = _clear(e.rows)
    told_so = _too_few(e, found)
    if told_so is not None:
        return told_so
    place = _one_place(found)
    if place is None:
        return Answer("no", "the changes are at different places in different replies")
    side, at, share = place
    evidence = _evidence(e.rows, found) | {"side": side, "change_point": at, "share_there": share}
    message = (
        f"in {len(found)} of {len(e.rows)} replies the gap changes, in {share:.0%} of them about {at} tokens from the "
        f"{side}: d is {evidence['rms_before']:.2g} before and {evidence['rms_after']:.2g} after it"
    )
    start = ("a chunk or block boundary", "a sliding window or rope limit at that length", "a cache of that size")
    rivals = (
        start if side == "start" else ("drafted tokens at the end (speculative decoding)", "a tail that was forced")
    )
    out = told("changes-at-one-place", message, len(found) >= 20, evidence=evidence, rivals=rivals)
    return Answer("fits", "the gap changes at one place of the replies", out, _share(e.rows, found))


def _clear(rows: Rows) -> Rows:
    """The replies with a clear change of the size of the gap."""
    rows = rows[(rows["change_at"] >= 0) & (rows["change"] >= CLEAR)]
    quotient = rows["rms_before"] / np.maximum(rows["rms_after"], 1e-12)
    return rows[np.maximum(quotient, 1 / np.maximum(quotient, 1e-12)) >= FACTOR]


def _too_few(e: Evidence, found: Rows) -> Answer | None:
    long_enough = int((e.rows["change_at"] >= 0).sum())
    if not long_enough:
        return Answer("lacks", "needs replies of at least 16 tokens")
    if len(found) == 0 or len(found) < SHARE * long_enough:
        return Answer("no", f"{len(found)} of {long_enough} replies have a clear change of the gap")
    if len(found) < min(FEWEST, long_enough):
        return Answer("unclear", f"{len(found)} of {long_enough} replies have a clear change of the gap")
    return None


def _one_place(found: Rows) -> tuple[str, int, float] | None:
    """("start" or "end", tokens from there, share of the changes there); None where they are spread."""
    if len(found) < FEWEST or len(np.unique(found["n"])) < 3:
        return None
    best: tuple[str, int, float] | None = None
    for side, at in (("start", found["change_at"]), ("end", found["n"] - found["change_at"])):
        middle = int(np.median(at))
        share = float((np.abs(at - middle) <= max(WITHIN, middle // 16)).mean())
        if share >= AT_ONE and (best is None or share > best[2]):
            best = side, middle, share
    return best


def _evidence(rows: Rows, found: Rows) -> dict[str, Any]:
    at = found["change_at"]
    return {
        "replies": len(found), "of": len(rows), "change_point": int(at[0]) if len(found) == 1 else None,
        "first_change": int(at.min()), "last_change": int(at.max()),
        "rms_before": float(np.median(found["rms_before"])), "rms_after": float(np.median(found["rms_after"])),
    }  # fmt: skip


def _share(rows: Rows, found: Rows) -> float:
    """How much of the whole gap stands on the larger side of the changes, beyond the smaller side's."""
    at, n = found["change_at"], found["n"]
    before = found["rms_before"] > found["rms_after"]
    larger, tokens = np.maximum(found["rms_before"], found["rms_after"]), np.where(before, at, n - at)
    more = ((larger - np.minimum(found["rms_before"], found["rms_after"])) * tokens).sum()
    return float(min(1.0, 0.7 * more / max(rows["abs"].sum(), 1e-12)))


SIGNATURES = (
    Signature("mixed_versions", "mixed-weight-versions", "one reply, more than one version", mixed,
              ("policy_version",), look=look),
    Signature("changes_inside", "changes-inside-reply", "the gap changes inside replies", changes,
              ("replies of 16 tokens",), ("one_place",)),
    Signature("one_place", "changes-at-one-place", "the gap changes at one place of the replies", one_place,
              ("replies of 16 tokens",), ("position", "changes_inside")),
)  # fmt: skip
