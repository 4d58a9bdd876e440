"""Columns that are not one value for each token: which, by how many, and what explains it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from onepolicy import schema
from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.formats.base import RawColumn, RawRecord
from onepolicy.formats.settle import Fault, length_of
from onepolicy.integrity.base import Batch, Told
from onepolicy.integrity.explain_length import explain
from onepolicy.integrity.places import place, places, spot
from onepolicy.types import BoolArray, Finding, FloatArray


def look(batch: Batch) -> Counted:
    out = Counted()
    if batch.settled is None:
        return out
    out.count("lengths:records", len(batch.settled.aside) + len(batch.settled.places))
    for raw, faults in batch.settled.aside:
        bad = [f for f in faults if f.kind == "length"]
        if not bad or not isinstance(raw, RawRecord):
            continue
        out.count("lengths:wrong", 1)
        for f in bad:
            note = _explained(raw, f)
            out.count(f"lengths:kind:{f.column}:{note['kind']}", 1)
            out.spot("lengths:first", [spot(f.record_id, f.place, note)])
    return out


def _explained(raw: RawRecord, fault: Fault) -> dict[str, Any]:
    got, wanted = fault.got or 0, fault.wanted or 0
    note: dict[str, Any] = {"column": fault.column, "got": got, "wanted": wanted, "extra": got - wanted}
    col = raw.columns.get(fault.column)
    if col is None or schema.scoring_column(fault.column) is None:
        return note | {"kind": "other column", "explanation": None, "usable": False}
    prompt = raw.prompt_length or 0
    other, trained = _other_side(raw, fault.column, col), _trained(raw, col)
    told = explain(_floats(col), other, wanted, prompt if col.layout == "reply" else 0, trained)
    return note | {"usable": False} | told


def _floats(col: RawColumn) -> FloatArray:
    x = np.array(col.values, dtype=np.float64)
    if col.valid is not None and len(col.valid) == len(x):
        x[~col.valid] = np.nan
    return x


def _other_side(raw: RawRecord, column: str, col: RawColumn) -> FloatArray | None:
    """The values of another scoring whose length is right, for the tokens that `col` speaks of."""
    n, prompt = len(raw.token_ids), raw.prompt_length or 0
    for name, y in raw.columns.items():
        part = schema.scoring_column(name)
        if name == column or part is None or part[1] != "logprobs":
            continue
        if len(y.values) == length_of(y.layout, n, prompt):
            return _window(_floats(y), y, col, n, prompt)
    return None


def _window(x: Any, of: RawColumn, to: RawColumn, n: int, prompt: int) -> Any:
    """Values of the layout of `of` for the tokens of the layout of `to`, NaN where there is none."""
    first = {"whole": 0, "reply": prompt, "next": 1}
    full = np.full(n, np.nan)
    full[first[of.layout] : first[of.layout] + len(x)] = x
    return full[first[to.layout] :]


def _trained(raw: RawRecord, col: RawColumn) -> BoolArray | None:
    mask, n, prompt = raw.columns.get("loss_mask") or raw.columns.get("drawn"), len(raw.token_ids), 0
    prompt = raw.prompt_length or 0
    if mask is None or len(mask.values) != length_of(mask.layout, n, prompt):
        return None
    return _window(_floats(mask), mask, col, n, prompt) == 1


def judge(total: Counted, told: Told) -> list[Finding]:
    n, of = total.counts.get("lengths:wrong", 0), total.counts.get("lengths:records", 0)
    if not n:
        return []
    kinds: dict[str, dict[str, int]] = {}
    for key, count in sorted(total.counts.items()):
        if key.startswith("lengths:kind:"):
            column, kind = key.removeprefix("lengths:kind:").split(":", 1)
            kinds.setdefault(column, {})[kind] = count
    first = total.spots["lengths:first"]
    rows = places(first)
    case = rows[0]
    words = f"{case['column']} has {case['got']:,} for {case['wanted']:,} tokens"
    why = f"; {_why(case)}" if case.get("explanation") else ""
    message = f"{n:,} of {of:,} records have columns of another length than their tokens; the first: {words}{why}"
    evidence = {"wrong": n, "records": of, "share": n / of, "kinds": kinds, "places": rows}
    return [
        finding("logprob-length-mismatch", message, place=place(first), evidence=evidence, origin="run",
                ruled_out=_ruled_out(rows))
    ]  # fmt: skip


def _why(case: dict[str, Any]) -> str:
    words = {"tail": "all but the surplus at the end fit", "head": "all but the surplus at the start fit"}
    return words.get(case["kind"], str(case["explanation"]))


def _ruled_out(rows: list[dict[str, Any]]) -> tuple[str, ...]:
    """Cutting to equal length, where it would have paired other tokens."""
    for row in rows:
        cut = next((v for k, v in row.items() if k.startswith("max_abs_if_cut_to_")), None)
        if cut is not None and not row.get("usable"):
            return (f"cutting the longer list: it would leave gaps of up to {json.dumps(cut)} nats",)
    return ()
