"""Stop tokens and masks of a whole batch: one pass over the columns finds the sequences that need to be explained.

A sequence is in order if its mask is exactly what was drawn, every trained token has a log-prob, and its last drawn
token is a stop id just when its finish reason says so. Only the others become records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from onepolicy.rollouts import Rollouts
from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.cells import FINISH
from onepolicy.tokens.masks import check_masks
from onepolicy.tokens.reading import records_of
from onepolicy.tokens.stops import check_stops
from onepolicy.types import BoolArray, Finding, IntArray


def check_rollouts(
    rollouts: Rollouts,
    *,
    eos: int | None = None,
    stop_ids: Sequence[int] = (),
    pad: int | None = None,
    names: Mapping[int, str] | None = None,
) -> list[Finding]:
    """What `check_stops` and `check_masks` find in a batch, in the order of its sequences."""
    stops = mask_suspects(rollouts) | stop_suspects(rollouts, eos=eos, stop_ids=stop_ids)
    found: list[Finding] = []
    for record in whole_records(rollouts, np.flatnonzero(stops)):
        found += check_stops(record, eos=eos, stop_ids=stop_ids, pad=pad, names=names)
        found += check_masks(record, eos=eos, stop_ids=stop_ids, pad=pad, names=names)
    return found


def whole_records(rollouts: Rollouts, rows: IntArray) -> Iterator[TokenRecord]:
    """The sequences at `rows` as records, with the mask of the prompt too."""
    part = rollouts.take(rows)
    mask = part.tokens.get("loss_mask")
    names = rollouts.record_ids()
    for i, record in enumerate(records_of(part)):
        at = part.sequence(i)
        marks = None
        if mask is not None:
            marks = [x if ok else None for x, ok in zip(mask.values[at].tolist(), mask.mask()[at], strict=True)]
        row = int(rows[i])
        yield replace(record, record_id=names[row], place=f"record {row + 1}", loss_mask=marks)


def mask_suspects(rollouts: Rollouts) -> BoolArray:
    """`[S]`: the mask is not exactly what was drawn, or a trained token has no log-prob; False without a mask."""
    column = rollouts.tokens.get("loss_mask")
    if column is None or not rollouts.n_tokens:
        return np.zeros(len(rollouts), dtype=bool)
    known = column.mask()
    trained, drawn = column.values.astype(bool) & known, rollouts.drawn
    odd = known & (trained != drawn)
    if "sampler" in rollouts.scorings:
        scored = rollouts.scorings["sampler"].logprobs
        odd |= trained & ~(scored.mask() & ~np.isnan(scored.values))
    return _any(odd, rollouts)


def stop_suspects(rollouts: Rollouts, *, eos: int | None = None, stop_ids: Sequence[int] = ()) -> BoolArray:
    """`[S]`: the way a reply ended is not plainly in order, or cannot be known."""
    ids, drawn, lists = rollouts.token_ids, rollouts.drawn, rollouts.lists.get("stop_token_ids")
    own: NDArray[np.int32] = np.zeros(0, dtype=np.int32) if lists is None else np.unique(lists.values)
    known = {*stop_ids, *own.tolist(), *(() if eos is None else (eos,))}
    has_reply = _any(drawn, rollouts)
    if not known or (lists is not None and len({tuple(lists.row(i)) for i in range(len(rollouts))}) > 1):
        return has_reply
    is_stop = np.isin(ids, sorted(known)) & drawn
    last = _last_drawn(rollouts)
    ends = np.zeros(len(rollouts), dtype=bool)
    ends[has_reply] = is_stop[last[has_reply]]
    by_stop, by_length = _finished(rollouts)
    inside = is_stop.copy()
    inside[last[has_reply]] = False
    odd = has_reply & ~np.where(ends, by_stop, by_length) | _any(inside, rollouts)
    if eos is not None:
        odd[has_reply] |= ends[has_reply] & (ids[last[has_reply]] != eos)
    return odd | _stop_behind(rollouts, known, last, has_reply)


def _any(flags: BoolArray, rollouts: Rollouts) -> BoolArray:
    """`[S]`: whether any token of the sequence is flagged."""
    of = np.repeat(np.arange(len(rollouts)), rollouts.lengths)
    return np.bincount(of[flags], minlength=len(rollouts)) > 0


def _last_drawn(rollouts: Rollouts) -> IntArray:
    """`[S]` flat index of the last drawn token, -1 where there is none."""
    last = np.full(len(rollouts), -1, dtype=np.int64)
    at = np.flatnonzero(rollouts.drawn)
    last[np.searchsorted(rollouts.offsets, at, side="right") - 1] = at
    return last


def _finished(rollouts: Rollouts) -> tuple[BoolArray, BoolArray]:
    """`[S]` each: the finish reason says stop; says that the reply was cut."""
    words = [str(rollouts.record("finish_reason", i) or "").strip().lower() for i in range(len(rollouts))]
    kinds = [FINISH.get(word) for word in words]
    stop, cut = ([kind in wanted for kind in kinds] for wanted in (("stop",), ("length", "abort")))
    return np.array(stop, dtype=bool), np.array(cut, dtype=bool)


def _stop_behind(rollouts: Rollouts, known: set[int], last: IntArray, has_reply: BoolArray) -> BoolArray:
    """`[S]`: a stop id that was not drawn stands right behind the last drawn token."""
    behind = last + 1
    inside = has_reply & (behind < rollouts.offsets[1:])
    out = np.zeros(len(rollouts), dtype=bool)
    out[inside] = np.isin(rollouts.token_ids[behind[inside]], sorted(known))
    return out
