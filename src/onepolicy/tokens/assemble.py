"""The training sequence from sampled spans: replies as they were sampled, the template's own ids between them.

What stands between two turns is the tail of the next turn's prompt behind what is there already; nothing is encoded,
rendered or cut. Where the next prompt does not go on from what was sampled, a new segment starts, and says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onepolicy.errors import ContentError, UsageError
from onepolicy.tokens.base import Tokenizer
from onepolicy.tokens.cells import empty
from onepolicy.tokens.placing import Turn, ids_of
from onepolicy.tokens.spans import Place, SpanProof, prove_spans
from onepolicy.tokens.suffixes import common_prefix, described, edits_between

#: Edits of a broken prefix that a segment's `why` shows.
SHOWN = 4


@dataclass(slots=True)
class Segment:
    """One training sequence, `[N]`. `loss_mask`: 1 on sampled ids. `logprobs`: the sampler's, null elsewhere.

    `spans`: where the turns stand. `why`: what made it begin, {} for the first one: `class`, `turn`, `first_diff`
    (position in the turn's prompt), `edits` from what was sampled to that prompt.
    """

    token_ids: list[int] = field(default_factory=list[int])
    loss_mask: list[int] = field(default_factory=list[int])
    logprobs: list[float | None] = field(default_factory=list["float | None"])
    spans: list[Place] = field(default_factory=list[Place])
    why: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def row(self, record_id: str | None = None) -> dict[str, Any]:
        """As a record of the canonical form (`records.from_records`)."""
        first = self.spans[0].start if self.spans else len(self.token_ids)
        row: dict[str, Any] = {"record_id": record_id, "token_ids": self.token_ids, "prompt_length": first}
        row |= {"drawn": [bool(x) for x in self.loss_mask], "loss_mask": [bool(x) for x in self.loss_mask]}
        return row | {"sampler_logprobs": self.logprobs}


@dataclass(frozen=True, slots=True)
class Assembled:
    """Segments, and the proof that every turn stands in one. The lists of the only segment, where there is one."""

    segments: tuple[Segment, ...]
    proof: SpanProof

    @property
    def token_ids(self) -> list[int]:
        return self._only().token_ids

    @property
    def loss_mask(self) -> list[int]:
        return self._only().loss_mask

    @property
    def logprobs(self) -> list[float | None]:
        return self._only().logprobs

    @property
    def spans(self) -> tuple[Place, ...]:
        """Of every turn, in order."""
        return tuple(place for segment in self.segments for place in segment.spans)

    def _only(self) -> Segment:
        if len(self.segments) == 1:
            return self.segments[0]
        why = self.segments[1].why
        raise UsageError(
            f"the turns make {len(self.segments)} segments: turn {why['turn']} does not go on from what was sampled "
            f"({why['class']}, first at {why['first_diff']}); train on each of .segments"
        )


def assemble(
    turns: Sequence[Turn],
    between: Sequence[Sequence[int]] | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    names: Mapping[int, str] | None = None,
) -> Assembled:
    """The training sequence of a conversation, in as many segments as its prompts make necessary.

    `turns`: each {"prompt_ids", "reply_ids"} and, if known, "logprobs" (one for each reply id). `between`: the ids
    before each turn but the first, for turns that have no `prompt_ids` of their own (what the template and the user
    or tool add, the suffix after the stop token first). `tokenizer`, `names`: for what a segment says of why it began.

    Errors: `ContentError` for ids or log-probs that do not count each other, a turn without a prompt, or a result that
    `prove_spans` does not prove.
    """
    prompts, replies, logprobs = _read(turns, between)
    segments: list[Segment] = []
    for k, (prompt, reply, values) in enumerate(zip(prompts, replies, logprobs, strict=True)):
        so_far = segments[-1].token_ids if segments else []
        if not segments or prompt[: len(so_far)] != so_far:
            segments.append(Segment(why=_why(k, segments, prompt, tokenizer, names)))
        _add(segments[-1], k, len(segments) - 1, prompt, reply, values)
    return _proven(prompts, replies, logprobs, segments)


def _add(
    segment: Segment, k: int, number: int, prompt: list[int], reply: list[int], values: list[float | None]
) -> None:
    tail = prompt[len(segment.token_ids) :]
    start = len(prompt)
    segment.token_ids += [*tail, *reply]
    segment.loss_mask += [0] * len(tail) + [1] * len(reply)
    segment.logprobs += [*([None] * len(tail)), *values]
    segment.spans.append(Place(k, number, start, start + len(reply)))


def _why(
    k: int, segments: list[Segment], prompt: list[int], tokenizer: Tokenizer | None, names: Mapping[int, str] | None
) -> dict[str, Any]:
    """What keeps a prompt from going on from the last segment."""
    if not segments:
        return {}
    last = segments[-1]
    first = common_prefix(prompt, last.token_ids)
    if len(prompt) < len(last.token_ids) and first == len(prompt):
        return {"class": "prompt-shorter", "turn": k, "first_diff": first, "edits": []}
    edits = edits_between(last.token_ids, prompt).edits
    inside = next((p.turn for p in last.spans if p.start <= first < p.stop), None)
    kind = "history-rewritten" if first >= last.spans[0].start else "other-prompt"
    if inside is not None and _same_text(last, inside, prompt, tokenizer):
        kind = "re-encoded"
    shown = [described(e, names) for e in edits[:SHOWN]]
    return {"class": kind, "turn": k, "first_diff": first, "in_reply_of": inside, "edits": shown}


def _same_text(last: Segment, turn: int, prompt: list[int], tokenizer: Tokenizer | None) -> bool:
    """Whether the new prompt begins with the same text up to the end of that turn."""
    if tokenizer is None:
        return False
    place = next(p for p in last.spans if p.turn == turn)
    known = [i for i in (*last.token_ids, *prompt) if not tokenizer.exists(i)]
    return not known and tokenizer.decode([prompt])[0].startswith(tokenizer.decode([last.token_ids[: place.stop]])[0])


# reading and proving


def _read(
    turns: Sequence[Turn], between: Sequence[Sequence[int]] | None
) -> tuple[list[list[int]], list[list[int]], list[list[float | None]]]:
    if not turns:
        raise ContentError("no turns to assemble")
    if between is not None and len(between) != len(turns) - 1:
        raise ContentError(f"between: got {len(between)} lists for {len(turns)} turns, wanted {len(turns) - 1}")
    replies = [_ids(k, turn, "reply_ids") for k, turn in enumerate(turns)]
    return list(_prompts(turns, replies, between)), replies, [_logprobs(k, t, replies[k]) for k, t in enumerate(turns)]


def _prompts(
    turns: Sequence[Turn], replies: list[list[int]], between: Sequence[Sequence[int]] | None
) -> Iterator[list[int]]:
    """The prompt of every turn: its own, or what was there before it and the ids between."""
    so_far: list[int] = []
    for k, turn in enumerate(turns):
        if turn.get("prompt_ids") is not None:
            so_far = _ids(k, turn, "prompt_ids")
        elif k and between is not None:
            so_far = [*so_far, *ids_of(between[k - 1], f"between, before turn {k}")]
        else:
            raise ContentError(f"turn {k}: no 'prompt_ids'; wanted the ids that the sampler had, or 'between'")
        yield so_far
        so_far = [*so_far, *replies[k]]


def _ids(k: int, turn: Turn, name: str) -> list[int]:
    if turn.get(name) is None:
        raise ContentError(f"turn {k}: no {name!r}; wanted the ids that the sampler gave")
    ids = ids_of(turn[name], f"turn {k}: {name!r}")
    if ids and min(ids) < 0:
        raise ContentError(f"turn {k}: {name!r}, position {ids.index(min(ids))}: got {min(ids)}, wanted at least 0")
    return ids


def _logprobs(k: int, turn: Turn, reply: list[int]) -> list[float | None]:
    """One for each reply id, null where there are none; never cut or filled to fit."""
    given: Any = turn.get("logprobs")
    if given is None:
        return [None] * len(reply)
    values = given.tolist() if hasattr(given, "tolist") else list(given)
    if len(values) != len(reply):
        raise ContentError(
            f"turn {k}: got {len(values)} logprobs for {len(reply)} reply ids; take both from one answer of the engine"
        )
    return [None if empty(x) else x for x in values]


def _proven(
    prompts: list[list[int]], replies: list[list[int]], logprobs: list[list[float | None]], segments: list[Segment]
) -> Assembled:
    """With the proof. Errors: `ContentError` if there is none."""
    turns = [{"prompt_ids": p, "reply_ids": r} for p, r in zip(prompts, replies, strict=True)]
    proof = prove_spans(turns, [s.token_ids for s in segments], [s.loss_mask for s in segments])
    if not proof.ok:
        raise ContentError(f"the assembled sequence is not proven: {proof.findings()[0].message}")
    for place in proof.places:
        wanted = None if place is None else segments[place.segment].logprobs[place.start : place.stop]
        if place is None or wanted != logprobs[place.turn]:
            raise ContentError(f"the assembled log-probs are not those of the turns: {place}")
    return Assembled(tuple(segments), proof)
