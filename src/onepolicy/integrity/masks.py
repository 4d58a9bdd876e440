"""The loss mask against what was drawn: nothing trained, prompt or tool output trained, drawn tokens left out."""

from __future__ import annotations

from typing import Any

import numpy as np

from onepolicy.codes import finding
from onepolicy.codes.kind import DRIFT, FAIL, INFO, PASS, WARN
from onepolicy.counted import Counted, Spot
from onepolicy.integrity.base import Batch, Told
from onepolicy.integrity.places import many, place, places, share, spot_records, spot_tokens
from onepolicy.types import BoolArray, Finding, IntArray

#: Share of records with an empty mask up to which a filter may have done it.
_FILTERED = 0.5
#: Tokens of one id with 0.0 on both sides that are padding; share of the tokens outside of the mask that were drawn.
_PADS, _DREW = 3, 0.8
#: Share of the records that begin alike.
_ALIKE = 0.9
#: Share of the drawn tokens outside of the mask that stand at the ends of replies; a filter by tokens takes out others.
_ENDS = 0.3


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
    if batch.a is not None:
        _ends(out, batch, trained, known & ~trained & drawn & _has_value(batch))
        _turned_round(out, batch, trained, known & ~trained & rollouts.drawn)
    if len(batch.side_values) == 2:
        _padding(out, batch, trained)
    return out


def _has_value(batch: Batch) -> BoolArray:
    """`[T]` a log-prob of the sampler that is no placeholder: it drew the token."""
    values = batch.side_values["a"]
    return np.isfinite(values) & (values != 0.0)


def _ends(out: Counted, batch: Batch, trained: BoolArray, left: BoolArray) -> None:
    """Replies whose first drawn token, or the stop token that ended them, is left out alone. `left` `[T]`: drawn and
    not trained."""
    at = np.flatnonzero(batch.rollouts.drawn)
    if not len(at):
        return
    record = np.searchsorted(batch.rollouts.offsets, at, side="right") - 1
    edge = np.append(np.diff(record) != 0, True)
    first, last = at[np.append(True, edge[:-1])], at[edge]
    rows = record[edge]
    several = first < last
    late = several & left[first] & trained[np.minimum(first + 1, len(trained) - 1)]
    stopped = several & _stopped(batch)[rows]
    early = stopped & left[last] & trained[last - 1]
    out.count("masks:left with a value", int((left & _touched(batch, trained)).sum()))
    out.count("masks:begins late", int(late.sum()))
    out.count("masks:has a first", int((several & (trained[first] | late)).sum()))
    spot_tokens(out, "masks:begins late", batch, first[late], {})
    out.count("masks:stop left out", int(early.sum()))
    out.count("masks:stopped", int((stopped & (trained[last] | early)).sum()))
    spot_tokens(out, "masks:stop left out", batch, last[early], {"id": batch.rollouts.token_ids[last[early]]})


def _touched(batch: Batch, trained: BoolArray) -> BoolArray:
    """`[T]` tokens of records that are trained at all."""
    return (_per_record(batch, trained) > 0)[batch.sequence_of()]


def _stopped(batch: Batch) -> BoolArray:
    """`[S]` replies that a stop token is said to have ended."""
    col = batch.rollouts.records.get("finish_reason")
    if col is None:
        return np.zeros(len(batch.rollouts), dtype=bool)
    return np.array([v == "stop" for v in col.values.tolist()], dtype=bool) & col.mask()


def _turned_round(out: Counted, batch: Batch, trained: BoolArray, left: BoolArray) -> None:
    """Records that train on tokens without a value of the sampler alone, and leave out those that have one."""
    has = _has_value(batch)
    n, empty = _per_record(batch, trained), _per_record(batch, trained & ~has)
    rest, drew = _per_record(batch, left), _per_record(batch, left & has)
    rows = np.flatnonzero((n > 1) & (empty == n) & (drew > 1) & (drew > _DREW * rest))
    out.count("masks:turned round", len(rows))
    out.count("masks:turned round tokens", int(n[rows].sum()))
    spot_records(out, "masks:turned round", batch, rows, {"trained": n[rows], "drawn": drew[rows]})


def _padding(out: Counted, batch: Batch, trained: BoolArray) -> None:
    """Trained tokens of one id at the end of a reply, with 0.0 on both sides."""
    a, b = batch.side_values["a"], batch.side_values["b"]
    ids, offsets = batch.rollouts.token_ids, batch.rollouts.offsets
    pad = trained & (a == 0.0) & (b == 0.0)
    if not pad.any():
        return
    rows = np.flatnonzero(_per_record(batch, pad) >= _PADS)
    tails: list[int] = []
    for s in rows.tolist():
        here = slice(int(offsets[s]), int(offsets[s + 1]))
        other = np.flatnonzero(~pad[here] | (ids[here] != ids[here.stop - 1]))
        begins = here.start + (int(other[-1]) + 1 if len(other) else 0)
        tails += range(begins, here.stop) if here.stop - begins >= _PADS else []
    out.count("masks:padding", len(tails))
    spot_tokens(out, "masks:padding", batch, np.array(tails, dtype=np.int64), {"id": ids[tails]})


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
    checks = (
        _empty(total), _turned_round_found(total), _padding_found(total), _undrawn_found(total),
        _stop_found(total, told), _late_found(total), _left_out_found(total),
    )  # fmt: skip
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
    words = {"prompt": "in the prompt", "reply": "between drawn tokens or after them"}
    says = ", ".join(f"{v:,} {words[k]}" for k, v in kinds.items() if v)
    message = f"{n:,} of {many(of, 'trained token')} were not drawn by the sampler ({says})"
    evidence = {"undrawn": n, "trained": of, "share": share(n, of), "kinds": kinds}
    return _trained_on(message, evidence, total.spots["masks:undrawn"])


def _trained_on(message: str, evidence: dict[str, Any], first: list[Spot]) -> Finding:
    """Tokens that nobody drew are trained on."""
    evidence = {**evidence, "places": places(first)}
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


def _turned_round_found(total: Counted) -> Finding | None:
    n, of = total.counts.get("masks:turned round", 0), total.counts.get("masks:records", 0)
    if not n:
        return None
    message = (
        f"the loss mask is turned round in {n:,} of {many(of, 'record')}: it trains tokens that have no log-prob of "
        "the sampler, and leaves out those that it drew"
    )
    tokens = total.counts["masks:turned round tokens"]
    evidence = {"records": n, "of": of, "share": share(n, of), "undrawn": tokens}
    return _trained_on(message, evidence, total.spots["masks:turned round"])


def _padding_found(total: Counted) -> Finding | None:
    n, of = total.counts.get("masks:padding", 0), total.counts.get("masks:trained", 0)
    if not n:
        return None
    message = (
        f"{n:,} of {many(of, 'trained token')} are padding: one id to the end of the reply, with 0.0 for a log-prob on "
        "both sides"
    )
    evidence = {"undrawn": n, "trained": of, "share": share(n, of), "kinds": {"padding": n}}
    return _trained_on(message, evidence, total.spots["masks:padding"])


def _filtered(total: Counted) -> bool:
    """Most of what is left out stands elsewhere than at the ends: something takes out tokens, here and there an end."""
    ends = total.counts.get("masks:begins late", 0) + total.counts.get("masks:stop left out", 0)
    return ends < _ENDS * total.counts.get("masks:left with a value", 0)


def _stop_found(total: Counted, told: Told) -> Finding | None:
    """With a tokenizer the token checks tell it, by the stop ids."""
    n, of = total.counts.get("masks:stop left out", 0), total.counts.get("masks:stopped", 0)
    if not n or told.vocab_size is not None or _filtered(total):
        return None
    first = total.spots["masks:stop left out"]
    message = (
        f"the last token that was drawn is outside of the loss mask in {n:,} of {many(of, 'reply', 'replies')} that a "
        "stop token ended, and the one before it is inside"
    )
    evidence = {"replies": n, "of": of, "share": share(n, of), "places": places(first)}
    return finding("stop-token-not-trained", message, place=place(first), evidence=evidence, origin="run")


def _late_found(total: Counted) -> Finding | None:
    """The same slip in (nearly) every record: a mask that is one off, no filter."""
    n, of = total.counts.get("masks:begins late", 0), total.counts.get("masks:has a first", 0)
    if not n or n < _ALIKE * of or _filtered(total):
        return None
    first = total.spots["masks:begins late"]
    message = f"the loss mask begins one token late in {n:,} of {many(of, 'reply', 'replies')}: the first was drawn too"
    evidence = {"replies": n, "of": of, "share": share(n, of), "places": places(first)}
    advice = "Shift the mask with the labels it belongs to, once: value i of both is about token i."
    return finding("sampled-not-trained", message, place=place(first), evidence=evidence, origin="run", severity=WARN,
                   outcome=PASS, advice=advice)  # fmt: skip
