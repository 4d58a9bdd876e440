"""The gap changes inside a reply: weights that were updated while it was written, a chunk boundary, a drafted tail."""

from __future__ import annotations

from typing import Any

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import Counted, Spot
from onepolicy.profiles.base import Seen
from onepolicy.signatures import places, position
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.contrast import SEQUENCES, told


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
    found = places.clear(e.rows)
    told_so = places.too_few(e, found)
    if told_so is not None:
        return told_so
    if e.extra.get("mixed_versions", Counted()).counts.get("mixed"):
        return Answer("no", "versions in the reply tell where the weights change")
    if position.judge(e).verdict == "fits":
        return Answer("no", "the gap grows all along the reply")
    if places.common_place(found) is not None:
        return Answer("no", "the changes stand at one place of the replies")
    falls = float((found["rms_before"] > found["rms_after"]).mean())
    evidence = places.evidence_of(e.rows, found) | {"larger_before": falls}
    where = "before" if falls > 0.5 else "after"
    few, partly = len(found) < places.FEWEST_AT, places.common_place(found, places.PARTLY)
    at = ", at another place in each"
    if few:
        at = f" ({', '.join(f'after {k}' for k in found['change_at'].tolist())})"
    elif partly is not None:
        at = f", in {partly[2]:.0%} of them about {partly[1]} tokens from the {partly[0].split()[0]}"
    message = (
        f"in {len(found)} of {len(e.rows)} replies the gap changes at one token{at}; d is "
        f"{evidence['rms_before']:.2g} before and {evidence['rms_after']:.2g} after it, larger {where} it in "
        f"{max(falls, 1 - falls):.0%}"
    )
    rivals = ("weights updated while the reply was written", "a reply that went on on another replica",
              "a prefill that restarted with another cache")  # fmt: skip
    if few or partly is not None:  # whether the place is one and the same is not told
        rivals += places.FROM_START
    # where half of them stand at one place it may be that place after all: described, and not decided
    sure = len(found) >= SEQUENCES and partly is None
    out = told("changes-inside-reply", message, sure, evidence=evidence, rivals=rivals)
    return Answer("fits", "the gap changes inside replies", out, places.share_of(e.rows, found))


SIGNATURES = (
    Signature("mixed_versions", "mixed-weight-versions", "one reply, more than one version", mixed,
              ("policy_version",), look=look),
    Signature("changes_inside", "changes-inside-reply", "the gap changes inside replies", changes,
              ("replies of 16 tokens",), ("one_place",)),
    places.SIGNATURE,
)  # fmt: skip
