"""Token in, token out: each sampled span stands in the training sequence, unchanged, at its place, with the right mask.

A turn is what the sampler had and gave: {"prompt_ids", "reply_ids"}. It is proven where the sequence begins with its
prompt and goes on with its reply. What is not proven is told apart in `span_faults`. Turns and segments count from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onepolicy.codes import finding
from onepolicy.tokens.base import Tokenizer, TokenRecord
from onepolicy.tokens.cells import empty
from onepolicy.tokens.masks import shift_of
from onepolicy.tokens.placing import Place, Problem, Turn, placed_turns, segments_of, turn_of
from onepolicy.tokens.span_faults import Diagnosis
from onepolicy.types import BoolArray, Finding, Outcome, Severity

#: Positions that are listed in evidence; all are counted.
LISTED = 32

#: class of a problem -> the code that stands for it.
CODES_OF: dict[str, str] = {
    "re-encoded": "sampled-span-changed",
    "changed": "sampled-span-changed",
    "missing": "sampled-span-changed",
    "moved": "sampled-span-changed",
    "cut": "sampled-span-changed",
    "doubled": "sampled-span-changed",
    "prompt-differs": "prompt-ids-differ",
    "history-rewritten": "history-rewritten-by-template",
    "suffix-missing": "suffix-after-stop-missing",
    "suffix-not-sampled": "suffix-after-stop-missing",
    "mask-shifted": "span-mask-wrong",
    "trained-not-sampled": "span-mask-wrong",
    "sampled-not-trained": "span-mask-wrong",
    "mask-count": "counts-disagree",
}
#: Problems of the mask.
MASKS = frozenset({"mask-shifted", "trained-not-sampled", "sampled-not-trained", "mask-count"})
_TEXTS: dict[str, str] = {
    "re-encoded": "the sampled span is the same text under other ids",
    "changed": "the sampled span has other ids",
    "missing": "the sampled span is missing",
    "moved": "the sampled span stands elsewhere",
    "cut": "the sampled span is cut",
    "doubled": "the sampled span, or its end, stands twice",
    "prompt-differs": "the sequence has other ids before the span than the sampler had",
    "history-rewritten": "the turn was sampled after a history that this sequence does not have",
    "suffix-missing": "ids that the sampler saw behind the stop token are missing",
    "suffix-not-sampled": "the sequence has ids behind the stop token that the sampler did not see",
    "mask-shifted": "the loss mask is moved against the spans",
    "trained-not-sampled": "tokens outside of every sampled span are trained",
    "sampled-not-trained": "sampled tokens are not trained",
    "mask-count": "the loss mask does not count the sequence",
}


@dataclass(frozen=True, slots=True)
class SpanProof:
    """`places`: of each turn, None where its reply does not stand unchanged. `ok`: nothing is wrong at all."""

    places: tuple[Place | None, ...]
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def spans(self) -> list[tuple[int, int]] | None:
        """`[start, stop)` of every turn in its sequence; None unless all of them stand there."""
        found = [place for place in self.places if place is not None]
        return [(p.start, p.stop) for p in found] if len(found) == len(self.places) else None

    @property
    def mask_is_judged(self) -> bool:
        """Whether a problem is the mask's."""
        return any(problem.kind in MASKS for problem in self.problems)

    def findings(self, record_id: str = "", place: str = "") -> list[Finding]:
        """One for each problem. Sampled tokens that are not trained warn; everything else fails."""
        return [_finding(problem, record_id, place) for problem in self.problems]


def _finding(problem: Problem, record_id: str, place: str) -> Finding:
    evidence = {
        "class": problem.kind,
        "turn": problem.turn,
        "segment": problem.segment,
        "at_turn": problem.at_turn,
        "at_sequence": problem.at_sequence,
        **problem.more,
    }
    less = problem.kind == "sampled-not-trained"
    weight: dict[str, Any] = {"severity": Severity.WARN, "outcome": Outcome.PASS} if less else {}
    message = f"{f'{record_id}: ' if record_id else ''}{_said(problem)}"
    return finding(CODES_OF[problem.kind], message, place=place, evidence=evidence, **weight)


def _said(problem: Problem) -> str:
    who = "" if problem.turn is None else f"turn {problem.turn}: "
    where = [] if problem.at_turn is None else [f"position {problem.at_turn} of the turn"]
    where += [] if problem.at_sequence is None else [f"position {problem.at_sequence} of sequence {problem.segment}"]
    return f"{who}{_TEXTS[problem.kind]}{', first at ' if where else ''}{', '.join(where)}"


def prove_spans(
    turns: Sequence[Turn],
    sequence_ids: Sequence[int] | Sequence[Sequence[int]],
    mask: Sequence[Any] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    names: Mapping[int, str] | None = None,
) -> SpanProof:
    """Where each turn's reply stands in the training sequence, and everything that is not as it was sampled.

    `sequence_ids`: one sequence, or a list of them (segments); a turn must stand in one. `mask`: of the same shape,
    null where not known. A turn without `prompt_ids` must stand in order, wherever. `tokenizer`, or `names` (texts of
    ids): tells ids that spell the same text from other text.

    Errors: `ContentError` for a turn without ids, or ids that are no integers.
    """
    sequences, masks = segments_of(sequence_ids, mask)
    sampled = [turn_of(k, turn) for k, turn in enumerate(turns)]
    placed = placed_turns(sampled, sequences, masks)
    diagnosis = Diagnosis(sampled, sequences, placed, tokenizer, names or {})
    if any(place is None for place in placed.places):
        diagnosis.explain()
    problems = [*diagnosis.problems]
    for segment, marks in enumerate(masks):
        problems += _mask_problems(segment, sequences[segment], marks, diagnosis)
    return SpanProof(tuple(diagnosis.places), tuple(problems))


def check_turns(
    record: TokenRecord, *, tokenizer: Tokenizer | None = None, names: Mapping[int, str] | None = None
) -> list[Finding]:
    """`prove_spans` for a record with turns: they must stand in its prompt and reply, under its loss mask."""
    proof = prove_turns(record, tokenizer=tokenizer, names=names)
    return [] if proof is None else proof.findings(record.record_id, record.place)


def prove_turns(
    record: TokenRecord, *, tokenizer: Tokenizer | None = None, names: Mapping[int, str] | None = None
) -> SpanProof | None:
    """The proof of a record's turns; None for a record without."""
    turns = [turn for turn in record.turns or () if turn.get("reply_ids") is not None]
    if not turns or not record.reply_ids:
        return None
    ids = [*(record.prompt_ids or ()), *record.reply_ids]
    mask = record.loss_mask
    if mask is not None and len(mask) == len(record.reply_ids):
        mask = [*([None] * len(record.prompt_ids or ())), *mask]
    mask = None if mask is None or len(mask) != len(ids) else mask  # a mask that counts nothing: see `counts`
    return prove_spans(turns, ids, mask, tokenizer=tokenizer, names=names)


# masks


def _mask_problems(segment: int, ids: list[int], marks: Any, diagnosis: Diagnosis) -> list[Problem]:
    if marks is None:
        return []
    marks = marks.tolist() if hasattr(marks, "tolist") else list(marks)
    if len(marks) != len(ids):
        return [Problem("mask-count", None, segment, None, None, {"mask": len(marks), "ids": len(ids)})]
    sampled, judged = diagnosis.sampled_flags(segment)
    judged = judged & np.array([not empty(x) for x in marks], dtype=bool)
    trained = np.array([not empty(x) and bool(x) for x in marks], dtype=bool)
    wrong, left = judged & trained & ~sampled, judged & sampled & ~trained
    shift = shift_of(trained, sampled, judged) if wrong.any() else None
    if shift is not None:
        return [_mask_problem("mask-shifted", segment, wrong | left, diagnosis, {"shift": shift})]
    pairs = (("trained-not-sampled", wrong), ("sampled-not-trained", left))
    return [_mask_problem(kind, segment, flags, diagnosis, {}) for kind, flags in pairs if flags.any()]


def _mask_problem(kind: str, segment: int, flags: BoolArray, diagnosis: Diagnosis, more: Mapping[str, Any]) -> Problem:
    at = np.flatnonzero(flags).tolist()
    owner = diagnosis.turn_at(segment, at[0])
    in_turn = None if owner is None else at[0] - owner.start
    turn = None if owner is None else owner.turn
    listed = {"count": len(at), "positions": at[:LISTED], "ids": [diagnosis.sequences[segment][i] for i in at[:LISTED]]}
    return Problem(kind, turn, segment, in_turn, at[0], {**listed, **more})
