"""Two lists that are said to come from two engines and hold the same numbers to the bit."""

from __future__ import annotations

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.integrity.base import Batch, Told
from onepolicy.integrity.places import many
from onepolicy.types import Finding

#: Share of the telling tokens with equal values, and how many it takes. Values of almost 0 are equal by themselves.
_SAME, _LEAST, _TELLING = 0.99, 16, -1e-3


def look(batch: Batch) -> Counted:
    out = Counted()
    pair = batch.pair
    if pair is not None and len(pair.a):
        telling = pair.b < _TELLING
        out.count("one-source:tokens", int(np.count_nonzero(telling)))
        out.count("one-source:same", int(np.count_nonzero(telling & (pair.gap == 0.0))))
        out.greatest("one-source:greatest", float(pair.a.max()) + 0.0)
        out.greatest("one-source:least, negative", 0.0 - float(pair.a.min()))
    return out


def judge(total: Counted, told: Told) -> list[Finding]:
    n, same = total.counts.get("one-source:tokens", 0), total.counts.get("one-source:same", 0)
    if n < _LEAST or same < _SAME * n or total.most["one-source:greatest"] == -total.most["one-source:least, negative"]:
        return []
    a, b = told.name("a"), told.name("b")
    message = f"{a} and {b} hold the same number at {same:,} of {many(n, 'token')}: a copy, or two engines built alike"
    evidence = {"same": same, "tokens": n, "share": same / n}
    rivals = ("one list copied into both columns", "two engines that agree to the bit by construction")
    return [finding("one-source", message, evidence=evidence, rivals=rivals, origin="run")]
