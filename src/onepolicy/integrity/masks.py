"""The loss mask against what was drawn: nothing trained, prompt or tool output trained, drawn tokens left out."""

from __future__ import annotations

import numpy as np

from onepolicy.codes import finding
from onepolicy.codes.kind import DRIFT, FAIL, INFO, PASS
from onepolicy.counted import Counted
from onepolicy.integrity.base import Batch, Told
from onepolicy.integrity.places import many, place, places, share, spot_records, spot_tokens
from onepolicy.types import BoolArray, Finding, IntArray

#: Share of records with an empty mask up to which a filter may have done it.
_FILTERED = 0.5


def look(batch: Batch) -> Counted:
    out = Counted()
    mask, rollouts = batch.trained, batch.rollouts
    if mask is None or not rollouts.n_tokens:
        return out
    known = rollouts.tokens["loss_mask"].mask()
    trained, drawn = mask & known, rollouts.drawn
    has = _per_record(batch, known) > 0
    n_trained, n_drawn = _per_record(batch, trained), _per_record(batch, drawn)
    out.count("masks:records", int(has.sum()))
    out.count("masks:trained", int(n_trained.sum()))
    empty = np.flatnonzero(has & (n_trained == 0))
    out.count("masks:empty", len(empty))
    spot_records(out, "masks:empty", batch, empty, {"tokens": rollouts.lengths[empty]})
    wrong = np.flatnonzero(trained & ~drawn)
    if len(wrong):
        _undrawn(out, batch, wrong)
    _left_out(out, batch, known & ~trained & drawn, n_drawn, n_trained)
    return out


def _per_record(batch: Batch, where: BoolArray) -> IntArray:
    upto = np.concatenate([[0], np.cumsum(where, dtype=np.int64)])
    return np.diff(upto[batch.rollouts.offsets])


def _undrawn(out: Counted, batch: Batch, wrong: IntArray) -> None:
    """Trained tokens that nobody drew: in the prompt, or inside the reply (tool output, other turns)."""
    offsets = batch.rollouts.offsets
    record = np.searchsorted(offsets, wrong, side="right") - 1
    in_prompt = wrong - offsets[record] < batch.prompts[record]
    for kind, where in (("prompt", in_prompt), ("reply", ~in_prompt)):
        out.count(f"masks:undrawn:{kind}", int(where.sum()))
        out.count(f"masks:undrawn records:{kind}", len(np.unique(record[where])))
    spot_tokens(out, "masks:undrawn", batch, wrong, {"prompt": in_prompt})


def _left_out(out: Counted, batch: Batch, where: BoolArray, n_drawn: IntArray, n_trained: IntArray) -> None:
    """Drawn tokens outside the mask, of records where `drawn` is more than "all of the reply", so is known."""
    n = _per_record(batch, where)
    told = n_drawn < batch.rollouts.lengths - batch.prompts
    rows = np.flatnonzero(told & (n > 0) & (n_trained > 0))
    out.count("masks:left out", int(n[rows].sum()))
    out.count("masks:left out records", len(rows))
    spot_records(out, "masks:left out", batch, rows, {"tokens": n[rows]})


def judge(total: Counted, told: Told) -> list[Finding]:
    checks = (_empty(total), _undrawn_found(total), _left_out_found(total))
    return [f for f in checks if f is not None]


def _empty(total: Counted) -> Finding | None:
    n, of = total.counts.get("masks:empty", 0), total.counts.get("masks:records", 0)
    if not n:
        return None
    first = total.spots["masks:empty"]
    message = f"the loss mask is empty in {n:,} of {many(of, 'record')}"
    weight = {"severity": FAIL, "outcome": DRIFT} if n == of else {} if n > _FILTERED * of else {"severity": INFO}
    message += ": nothing is trained" if n == of else ""
    evidence = {"empty": n, "records": of, "share": share(n, of), "places": places(first)}
    return finding("nothing-trained", message, place=place(first), evidence=evidence, origin="run", **weight)


def _undrawn_found(total: Counted) -> Finding | None:
    kinds = {k: total.counts.get(f"masks:undrawn:{k}", 0) for k in ("prompt", "reply")}
    n, of = sum(kinds.values()), total.counts.get("masks:trained", 0)
    if not n:
        return None
    first = total.spots["masks:undrawn"]
    words = {"prompt": "in the prompt", "reply": "between drawn tokens or after them"}
    says = ", ".join(f"{v:,} {words[k]}" for k, v in kinds.items() if v)
    message = f"{n:,} of {many(of, 'trained token')} were not drawn by the sampler ({says})"
    evidence = {"undrawn": n, "trained": of, "share": share(n, of), "kinds": kinds, "places": places(first)}
    return finding("undrawn-tokens-trained", message, place=place(first), evidence=evidence, origin="run")


def _left_out_found(total: Counted) -> Finding | None:
    n, rows = total.counts.get("masks:left out", 0), total.counts.get("masks:left out records", 0)
    if not n:
        return None
    first = total.spots["masks:left out"]
    message = f"{many(n, 'drawn token')} in {many(rows, 'record')} are outside of the loss mask"
    evidence = {"tokens": n, "records": rows, "places": places(first)}
    return finding("sampled-not-trained", message, place=place(first), evidence=evidence, origin="run",
                   severity=INFO, outcome=PASS)  # fmt: skip
