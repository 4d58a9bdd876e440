"""Token ids that the model cannot have: negative, too large for an id, or outside of its vocabulary."""

from __future__ import annotations

import numpy as np

from onepolicy.codes import finding
from onepolicy.codes.kind import PASS, WARN
from onepolicy.counted import Counted, Spot
from onepolicy.formats.base import RawRecord
from onepolicy.formats.settle import Fault
from onepolicy.integrity.base import Batch, Told
from onepolicy.integrity.places import many, place, places, spot, spot_tokens
from onepolicy.types import Finding

_WANTED = f"0 to {2**31 - 1}"


def look(batch: Batch) -> Counted:
    out = Counted()
    ids, known = batch.rollouts.token_ids, batch.rollouts.tokens["token_ids"].mask()
    if known.any():
        out.count("ids:tokens", int(known.sum()))
        out.greatest("ids:largest", float(ids[known].max()))
        size = vocab_size_of(batch)
        if size is not None:
            at = np.flatnonzero(known & (ids >= size))
            out.count("ids:unknown", len(at))
            out.greatest("ids:vocab_size", float(size))
            spot_tokens(out, "ids:unknown", batch, at, {"id": ids[at].astype(np.int64)})
    for raw, faults in batch.settled.aside if batch.settled is not None else ():
        for f in faults:
            if f.kind == "value" and isinstance(raw, RawRecord):
                out.count("ids:impossible", 1)
                out.spot("ids:impossible", [_impossible_id(raw, f)])
    return out


def _impossible_id(raw: RawRecord, fault: Fault) -> Spot:
    """The first id of a record that is none, with its place."""
    ids = raw.token_ids
    if ids.dtype.kind not in "iu":
        return spot(fault.record_id, fault.place, {"column": fault.column, "why": fault.why})
    bad = np.flatnonzero((ids < 0) | (ids >= 2**31))
    at, worst = int(bad[0]), int(ids[bad[0]])
    label = "; labels, not ids, have -100 where nothing is trained" if worst == -100 else ""
    why = f"got {worst} at position {at}, wanted {_WANTED}{label}"
    note = {"column": fault.column, "id": worst, "ids": len(bad), "why": why}
    reply = at - (raw.prompt_length or 0)
    return spot(fault.record_id, fault.place, {"reply_position": reply, **note}, at)


def vocab_size_of(batch: Batch) -> int | None:
    """The model's, told or read from what the scorings say of their engine."""
    if batch.vocab_size is not None:
        return batch.vocab_size
    for scoring in batch.rollouts.scorings.values():
        size = scoring.fingerprint.get("vocab_size")
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    return None


def judge(total: Counted, told: Told) -> list[Finding]:
    return [f for f in (_impossible(total), _unknown(total, told)) if f is not None]


def _impossible(total: Counted) -> Finding | None:
    n, first = total.counts.get("ids:impossible", 0), total.spots.get("ids:impossible", [])
    if not n:
        return None
    holds = "holds" if n == 1 else "hold"
    message = f"{many(n, 'record')} {holds} token ids that are no ids; the first: {places(first)[0]['why']}"
    return finding("unknown-ids", message, place=place(first), evidence={"records": n, "places": places(first)},
                   origin="run")  # fmt: skip


def _unknown(total: Counted, told: Told) -> Finding | None:
    largest, seen = total.most.get("ids:largest"), total.most.get("ids:vocab_size")
    size = told.vocab_size if told.vocab_size is not None else None if seen is None else int(seen)
    if largest is None or size is None or largest < size:
        return None
    n, first = total.counts.get("ids:unknown", 0), total.spots.get("ids:unknown", [])
    padded = told.facts.get("padded_vocab_size")
    inside = isinstance(padded, int) and largest < padded
    counted = many(n, "token id") if n else "token ids"
    message = f"{counted} beyond the vocabulary of {size:,}, the largest {int(largest):,}"
    message += f"; all are rows of the model's padded table of {padded:,}, which no token has" if inside else ""
    evidence = {"unknown": n or None, "tokens": total.counts["ids:tokens"], "largest": int(largest), "vocab_size": size,
                "padded_vocab_size": padded, "places": places(first)}  # fmt: skip
    weight = {"severity": WARN, "outcome": PASS} if inside else {}
    return finding("unknown-ids", message, place=place(first), evidence=evidence, origin="run", **weight)
