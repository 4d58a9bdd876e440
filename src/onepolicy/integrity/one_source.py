"""Two lists that are said to come from two engines and hold the same numbers to the bit."""

from __future__ import annotations

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.integrity.base import Batch, Pair, Told
from onepolicy.integrity.places import many, place, places, spot_records
from onepolicy.types import BoolArray, Finding, FloatArray

#: Share of the telling tokens with equal values, and how many it takes. Values of almost 0 are equal by themselves.
_SAME, _LEAST, _TELLING = 0.99, 16, -1e-3
#: Share of equal values in the other records up to which 16 equal ones in a row are no chance (0.4^16 is 4e-7).
_ELSEWHERE = 0.4
#: Values of so few decimals, or of 16 bits, are equal where two engines agree to that: it takes every one of them.
_DECIMALS, _STEP = 1e5, 0.05


def look(batch: Batch) -> Counted:
    out = Counted()
    pair = batch.pair
    if pair is not None and len(pair.a):
        telling = pair.b < _TELLING
        out.count("one-source:tokens", int(np.count_nonzero(telling)))
        same = np.flatnonzero(telling & (pair.gap == 0.0))
        out.count("one-source:same", len(same))
        for kind, n in _coarse(pair.a[same]).items():
            out.count(f"one-source:{kind}", n)
        _whole_records(out, batch, pair, telling)
        out.greatest("one-source:greatest", float(pair.a.max()) + 0.0)
        out.greatest("one-source:least, negative", 0.0 - float(pair.a.min()))
    return out


def _coarse(x: FloatArray) -> dict[str, int]:
    """How many values stand on each grid that dumps are rounded to."""
    scaled = x * _DECIMALS
    with np.errstate(over="ignore"):
        single, half = x.astype(np.float32), x.astype(np.float16)
    n = lambda on: int(np.count_nonzero(on))
    return {
        "decimals": n(np.abs(scaled - np.rint(scaled)) < _STEP),  # stored in float32, 5.00001 is 5.0000101
        "fp16": n(half == x),
        "bf16": n((single == x) & ((single.view(np.uint32) & 0xFFFF) == 0)),
    }


def _whole_records(out: Counted, batch: Batch, pair: Pair, telling: BoolArray) -> None:
    """Records whose telling tokens are all equal."""
    n, same = pair.per_record(telling), pair.per_record(telling & (pair.gap == 0.0))
    full = pair.lengths > 0
    first = np.repeat(pair.a[pair.starts[full]], pair.lengths[full])
    rows = np.flatnonzero((n >= _LEAST) & (same == n) & (pair.per_record(pair.a != first) > 0))
    out.count("one-source:compared records", int((n >= _LEAST).sum()))
    if len(rows):
        out.count("one-source:records", len(rows))
        out.count("one-source:tokens of records", int(n[rows].sum()))
        spot_records(out, "one-source:records", batch, rows, {"tokens": n[rows].astype(np.int64)})


def judge(total: Counted, told: Told) -> list[Finding]:
    n, same = total.counts.get("one-source:tokens", 0), total.counts.get("one-source:same", 0)
    if n < _LEAST or total.most["one-source:greatest"] == -total.most["one-source:least, negative"]:
        return []
    if same < _SAME * n:
        return _some(total, told, n, same)
    coarse = max(total.counts.get(f"one-source:{kind}", 0) for kind in ("decimals", "fp16", "bf16"))
    if same < n and coarse >= _SAME * same:
        return []
    a, b = told.name("a"), told.name("b")
    message = f"{a} and {b} hold the same number at {same:,} of {many(n, 'token')}: a copy, or two engines built alike"
    evidence = {"same": same, "tokens": n, "share": same / n}
    rivals = ("one list copied into both columns", "two engines that agree to the bit by construction")
    return [finding("one-source", message, evidence=evidence, rivals=rivals, origin="run")]


def _some(total: Counted, told: Told, n: int, same: int) -> list[Finding]:
    """Some records whose lists are one, among others whose lists differ."""
    records, tokens = (total.counts.get(f"one-source:{k}", 0) for k in ("records", "tokens of records"))
    of = total.counts.get("one-source:compared records", 0)
    if not records or same - tokens > _ELSEWHERE * (n - tokens):
        return []
    first = total.spots["one-source:records"]
    message = (
        f"{told.name('a')} and {told.name('b')} hold the same numbers in {records:,} of {many(of, 'record')}, and "
        f"differ in the others: there one list was copied into both columns"
    )
    evidence = {"same": tokens, "records": records, "of": of, "share": records / of, "places": places(first)}
    return [finding("one-source", message, place=place(first), evidence=evidence, origin="run")]
