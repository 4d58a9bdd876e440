"""The loss mask of one record against what was drawn: tool output, template, prompt, padding; holes; a shift by one.

Positions count in prompt and reply together, as `TokenRecord.spans` do. What was drawn is read from the best witness
(`sampled.sampled_runs`); spans of other tokens that a file names (`tool_spans`, `env_spans`, ...) count against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onepolicy.codes import finding
from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.cells import any_empty, empty, finish_of, of_reply, sampler_logprobs
from onepolicy.tokens.others import NOT_SAMPLED, ROLES, other_spans
from onepolicy.tokens.sampled import Sampled, runs_of, sampled_runs
from onepolicy.tokens.stops import FAILS, NOTES, WARNS
from onepolicy.types import BoolArray, Finding

#: Positions that are listed in evidence; all are counted.
LISTED = 32
#: Shifts of a whole mask that are looked for, the likeliest first.
SHIFTS = (-1, 1, -2, 2)


@dataclass(slots=True)
class _Masked:
    """Flags of prompt and reply, `[P + R]`. `known`: the mask says something here."""

    record: TokenRecord
    ids: list[int]
    n_prompt: int
    known: BoolArray
    trained: BoolArray
    drawn: BoolArray
    sampled: Sampled
    kinds: list[tuple[str, int, int]]
    stops: frozenset[int]
    names: Mapping[int, str]

    def found(
        self, code: str, kind: str, where: BoolArray, message: str, more: Mapping[str, Any], **given: Any
    ) -> Finding:
        at = np.flatnonzero(where).tolist()
        evidence: dict[str, Any] = {"class": kind, "count": len(at), "positions": at[:LISTED]}
        evidence |= {
            "reply_positions": [i - self.n_prompt for i in at[:LISTED]],
            "ids": [self.ids[i] for i in at[:LISTED]],
        }
        if self.names:
            evidence["tokens"] = [self.names.get(self.ids[i], str(self.ids[i])) for i in at[:LISTED]]
        evidence |= {"drawn_by": self.sampled.source, **more}
        text = f"{self.record.record_id}: {message}"
        return finding(code, text, place=self.record.place, evidence=evidence, **given)


def check_masks(
    record: TokenRecord,
    *,
    eos: int | None = None,
    stop_ids: Sequence[int] = (),
    pad: int | None = None,
    names: Mapping[int, str] | None = None,
) -> list[Finding]:
    """Where the loss mask is not what was drawn. A mask that does not count the ids is left to `counts`.

    `undrawn-tokens-trained` (evidence: `kinds`, `runs` of kind, start, stop), `span-mask-wrong` (a shift),
    `sampled-not-trained` (a share), `missing-logprobs` (trained, drawn, not scored).
    """
    stops = frozenset((*record.stop_ids, *stop_ids, *(() if eos is None else (eos,))))
    masked = None if _plainly_right(record, stops, pad) else _read(record, stops, pad, names or {})
    if masked is None:
        return []
    nothing = _nothing_trained(masked)
    if nothing is not None:
        return nothing
    shifted = _shifted(masked)
    found = [shifted] if shifted else [*_undrawn(masked), *_holes(masked)]
    return found + list(_unscored(masked))


def _plainly_right(record: TokenRecord, stops: frozenset[int], pad: int | None) -> bool:
    """The common case, without arrays: all of the reply is trained, and all of it was drawn."""
    mask = record.loss_mask
    if mask is None or len(mask) != len(record.reply_ids or ()) or not all(mask):
        return False
    if not record.extra.keys().isdisjoint((*NOT_SAMPLED, *ROLES)) or any_empty(mask):
        return False
    logprobs = sampler_logprobs(record)
    if logprobs is not None and any_empty(logprobs):
        return False
    return sampled_runs(record, stops, pad).runs == [(0, len(mask))]


def _read(record: TokenRecord, stops: frozenset[int], pad: int | None, names: Mapping[int, str]) -> _Masked | None:
    reply, mask = record.reply_ids, record.loss_mask
    if not reply or mask is None or of_reply(mask, record) is None:
        return None
    n_prompt = len(record.prompt_ids or ())
    ids = [*(record.prompt_ids or ()), *reply]
    known, trained = np.zeros(len(ids), dtype=bool), np.zeros(len(ids), dtype=bool)
    known[len(ids) - len(mask) :] = [not empty(x) for x in mask] if any_empty(mask) else True
    trained[len(ids) - len(mask) :] = list(map(bool, mask))
    trained &= known
    sampled = sampled_runs(record, stops, pad)
    drawn = np.zeros(len(ids), dtype=bool)
    for start, stop in sampled.runs:
        drawn[n_prompt + start : n_prompt + stop] = True
    kinds = list(other_spans(record, len(ids)))
    for _, start, stop in kinds:
        drawn[start:stop] = False
    return _Masked(record, ids, n_prompt, known, trained, drawn, sampled, kinds, stops, names)


def _nothing_trained(m: _Masked) -> list[Finding] | None:
    """An empty mask: a filter, or a bug. A reply that ended at a stop token is `check_stops`' to judge."""
    if m.trained.any() or not m.known.any():
        return None
    last = m.sampled.runs[-1][1] - 1 if m.sampled.runs else len(m.ids) - m.n_prompt - 1
    finish = finish_of(m.record)
    if finish not in ("length", "abort") and m.ids[m.n_prompt + last] in m.stops:
        return []
    cut = finish in ("length", "abort")
    text = "no token is trained" + (": the reply was cut, a filter of such replies masks it" if cut else "")
    more = {"share": 1.0, "finish_reason": m.record.finish_reason}
    return [m.found("sampled-not-trained", "nothing-trained", m.drawn, text, more, **(NOTES if cut else WARNS))]


def _shifted(m: _Masked) -> Finding | None:
    """The mask is what was drawn, moved by a constant: told apart from holes by trained tokens that were not drawn."""
    shift = shift_of(m.trained, m.drawn, m.known) if (m.trained & ~m.drawn).any() else None
    return None if shift is None else _shift_found(m, shift)


def shift_of(trained: BoolArray, drawn: BoolArray, known: BoolArray) -> int | None:
    """By how many tokens `drawn` must be moved to be `trained` wherever `known`; None if by none of `SHIFTS`. `[N]`."""
    for shift in SHIFTS:
        moved = np.zeros_like(drawn)
        if shift > 0:
            moved[shift:] = drawn[:-shift]
        else:
            moved[:shift] = drawn[-shift:]
        if np.array_equal(moved & known, trained & known):
            return shift
    return None


def _shift_found(m: _Masked, shift: int) -> Finding:
    wrong, other = m.trained & ~m.drawn, m.drawn & m.known & ~m.trained
    way = f"{abs(shift)} token{'s' * (abs(shift) > 1)} {'late' if shift > 0 else 'early'}"
    text = (
        f"the loss mask is what was drawn, {way} (shift {shift:+d}): {int(wrong.sum())} trained tokens were not drawn"
    )
    more = {"shift": shift, "not_drawn": np.flatnonzero(wrong).tolist()[:LISTED]}
    more |= {"not_trained": np.flatnonzero(other).tolist()[:LISTED], "kinds": _by_kind(m, wrong)[1]}
    if m.sampled.source == "log-probs":
        text, more["rivals"] = f"{text}; or the log-probs are", ["the log-probs are shifted"]
    return m.found("span-mask-wrong", "shifted", wrong | other, text, more)


def _undrawn(m: _Masked) -> Iterator[Finding]:
    """Trained tokens that nobody drew; a stop token that was appended is `check_stops`' to judge."""
    wrong = m.trained & ~m.drawn
    end = m.n_prompt + (m.sampled.runs[-1][1] if m.sampled.runs else 0)
    if m.sampled.runs and end < len(m.ids) and m.ids[end] in m.stops and m.ids[end - 1] not in m.stops:
        wrong[end] = False
    if not wrong.any():
        return
    runs, kinds = _by_kind(m, wrong)
    said = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    text = f"{int(wrong.sum())} tokens inside the loss mask were not sampled ({said}), first at {runs[0][1]}"
    logprobs = sampler_logprobs(m.record)
    if logprobs is not None and all(i >= m.n_prompt and empty(logprobs[i - m.n_prompt]) for i in np.flatnonzero(wrong)):
        text = f"{text}; they have no sampler log-prob"
    more = {"kinds": kinds, "runs": [list(run) for run in runs[:LISTED]], "first": runs[0][1]}
    yield m.found("undrawn-tokens-trained", "+".join(kinds), wrong, text, more, **FAILS)


def _by_kind(m: _Masked, wrong: BoolArray) -> tuple[list[tuple[str, int, int]], dict[str, int]]:
    """Stretches of wrong tokens with what they are, and how many of each."""
    runs: list[tuple[str, int, int]] = []
    for start, stop in runs_of(wrong.tolist()):
        for i in range(start, stop):
            kind = _kind(m, i)
            if runs and runs[-1][0] == kind and runs[-1][2] == i:
                runs[-1] = (kind, runs[-1][1], i + 1)
            else:
                runs.append((kind, i, i + 1))
    kinds: dict[str, int] = {}
    for kind, start, stop in runs:
        kinds[kind] = kinds.get(kind, 0) + stop - start
    return runs, kinds


def _kind(m: _Masked, i: int) -> str:
    named = next((kind for kind, start, stop in m.kinds if start <= i < stop), None)
    if named is not None:
        return named
    if i < m.n_prompt:
        return "prompt"
    end = m.n_prompt + (m.sampled.runs[-1][1] if m.sampled.runs else 0)
    if i < end:
        return "between turns"
    repeated = len(m.ids) > end + 1 or m.ids[end] in m.stops
    return "padding" if repeated and len(set(m.ids[end:])) == 1 else "behind the reply"


def _holes(m: _Masked) -> Iterator[Finding]:
    """Drawn tokens that are not trained; a stop token at the end of a turn is `check_stops`' to judge."""
    holes = m.drawn & m.known & ~m.trained
    runs = [(m.n_prompt + a, m.n_prompt + b) for a, b in m.sampled.runs]
    for _, stop in runs:
        if m.ids[stop - 1] in m.stops and m.trained[:stop].any():
            holes[stop - 1] &= bool(stop > 1 and holes[stop - 2])
    if not holes.any():
        return
    share = float(holes.sum() / max(int((m.drawn & m.known).sum()), 1))
    kind, given = _kind_of_holes(runs, holes)
    text = f"{int(holes.sum())} of the sampled tokens ({share:.1%}) are not trained: {kind.replace('-', ' ')}"
    yield m.found("sampled-not-trained", kind, holes, text, {"share": share}, **given)


def _kind_of_holes(runs: list[tuple[int, int]], holes: BoolArray) -> tuple[str, dict[str, Any]]:
    """Exactly the first, or the last, token of every turn looks like a shift; whole turns look like a choice."""
    at = np.flatnonzero(holes).tolist()
    if at == [start for start, _ in runs]:
        return "first-token-not-trained", WARNS
    if at == [stop - 1 for _, stop in runs]:
        return "last-token-not-trained", WARNS
    whole = [i for start, stop in runs if holes[start:stop].all() for i in range(start, stop)]
    if len(runs) > 1 and at == list(range(*runs[-1])):  # a choice would leave out the first ones
        return "last-turn-not-trained", WARNS
    return ("turns-not-trained" if at == whole else "holes"), NOTES


def _unscored(m: _Masked) -> Iterator[Finding]:
    """Trained and drawn, and without a log-prob."""
    logprobs = sampler_logprobs(m.record)
    if logprobs is None or not any_empty(logprobs):
        return
    missing = np.zeros(len(m.ids), dtype=bool)
    missing[m.n_prompt :] = [empty(x) for x in logprobs]
    missing &= m.drawn & m.trained
    if missing.any():
        first = int(missing.argmax())
        text = f"{int(missing.sum())} sampled tokens that are trained have no sampler log-prob, first at {first}"
        kind = (
            "first-token-without-logprob" if missing.sum() == 1 and first == m.n_prompt else "trained-without-logprob"
        )
        yield m.found("missing-logprobs", kind, missing, text, {"first": first})
