"""Records that contradict their own counts: a stated length that is not the length of what is there."""

from __future__ import annotations

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.integrity.base import Batch, Told
from onepolicy.integrity.places import place, places, spot
from onepolicy.types import Finding


def look(batch: Batch) -> Counted:
    out = Counted()
    if batch.settled is None:
        return out
    faults = [f for _, found in batch.settled.aside for f in found] + list(batch.settled.kept_faults)
    out.count("claims:records", len(batch.settled.aside) + len(batch.settled.places))
    for f in faults:
        if f.kind == "claim":
            out.count(f"claims:{f.column}", 1)
            note = {"count": f.column, "claimed": f.wanted, "found": f.got}
            out.spot("claims:first", [spot(f.record_id, f.place, note)])
    return out


def judge(total: Counted, told: Told) -> list[Finding]:
    first = total.spots.get("claims:first", [])
    if not first:
        return []
    of = total.counts["claims:records"]
    kinds = {k.split(":", 1)[1]: n for k, n in sorted(total.counts.items()) if k != "claims:records"}
    case = places(first)[0]
    says = ", ".join(f"{what}: {n:,} of {of:,} records" for what, n in kinds.items())
    message = (
        f"records state counts that are not theirs ({says}); the first says {case['claimed']} for "
        f"{case['count']} and holds {case['found']}"
    )
    evidence = {"counts": kinds, "records": of, "places": places(first)}
    return [finding("record-contradicts-itself", message, place=place(first), evidence=evidence, origin="run")]
