"""Records that cannot be read: counted and named; the rest is audited."""

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
    out.count("broken:records", len(batch.settled.aside) + len(batch.settled.places))
    for _, faults in batch.settled.aside:
        bad = [f for f in faults if f.kind == "broken"]
        if bad:
            out.count("broken:unreadable", 1)
            out.spot("broken:first", [spot(bad[0].record_id, bad[0].place, {"why": bad[0].why})])
    return out


def judge(total: Counted, told: Told) -> list[Finding]:
    n, of = total.counts.get("broken:unreadable", 0), total.counts.get("broken:records", 0)
    if not n:
        return []
    first = total.spots["broken:first"]
    why = places(first)[0]["why"]
    message = f"{n:,} of {of:,} records cannot be read; the first: {why}"
    evidence = {"unreadable": n, "records": of, "share": n / of, "places": places(first)}
    return [finding("records-unreadable", message, place=place(first), evidence=evidence, origin="run")]
