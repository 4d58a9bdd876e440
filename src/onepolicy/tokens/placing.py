"""Turns as sampled, and where their replies stand: in one sequence or in one of several segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onepolicy.errors import ContentError
from onepolicy.tokens.suffixes import common_prefix
from onepolicy.values import quoted

Turn = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a turn's reply stands: `sequences[segment][start:stop]`."""

    turn: int
    segment: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as sampled. `at_turn`: first differing position in the turn's reply (in its prompt, for
    prompts and history); `at_sequence`: in the sequence. `turn` None: of the whole sequence.
    """

    kind: str
    turn: int | None
    segment: int
    at_turn: int | None
    at_sequence: int | None
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])


# reading


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """One turn. `prompt` None: not known."""

    prompt: list[int] | None
    reply: list[int]


def turn_of(k: int, turn: Turn) -> SampledTurn:
    if turn.get("reply_ids") is None:
        raise ContentError(f"turn {k}: no 'reply_ids'; wanted the ids that the sampler gave")
    prompt = turn.get("prompt_ids")
    reply = ids_of(turn["reply_ids"], f"turn {k}: 'reply_ids'")
    return SampledTurn(None if prompt is None else ids_of(prompt, f"turn {k}: 'prompt_ids'"), reply)


def ids_of(given: Any, what: str) -> list[int]:
    """A list of ids. Errors: `ContentError` with position, got and wanted."""
    ids: Any = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(ids, list | tuple):
        raise ContentError(f"{what}: got {quoted(given)}, wanted a list of token ids")
    if not set(map(type, ids)) <= {int}:
        at = next(i for i, x in enumerate(ids) if type(x) is not int)
        raise ContentError(f"{what}, position {at}: got {quoted(ids[at])}, wanted an integer token id")
    return list(ids)


def segments_of(sequence_ids: Any, mask: Any) -> tuple[list[list[int]], list[Any]]:
    given = sequence_ids.tolist() if hasattr(sequence_ids, "tolist") else list(sequence_ids)
    several = bool(given) and not isinstance(given[0], int | float | str) and hasattr(given[0], "__len__")
    sequences = [ids_of(one, f"sequence {s}") for s, one in enumerate(given if several else [given])]
    masks = [None] * len(sequences) if mask is None else list(mask) if several else [mask]
    if len(masks) != len(sequences):
        raise ContentError(f"got {len(masks)} loss masks for {len(sequences)} sequences, wanted one for each")
    return sequences, masks


# placing


@dataclass(slots=True)
class Placed:
    """`places`: proven ones; `segment_of`: where each turn belongs, proven or not."""

    places: list[Place | None]
    segment_of: list[int]


def placed_turns(turns: list[SampledTurn], sequences: list[list[int]], masks: list[Any]) -> Placed:
    placed = Placed([], [])
    used: set[tuple[int, int]] = set()
    cursors = [0] * len(sequences)
    for k, turn in enumerate(turns):
        if turn.prompt is not None:
            place = _exact(k, turn, sequences, masks, used)
        else:
            place = _next(k, turn, sequences, masks, cursors)
        placed.places.append(place)
        placed.segment_of.append(place.segment if place else _likeliest(turn, sequences, placed.segment_of))
        if place is not None:
            used.add((place.segment, place.start))
            cursors[place.segment] = max(cursors[place.segment], place.stop)
    return placed


def _exact(
    k: int, turn: SampledTurn, sequences: list[list[int]], masks: list[Any], used: set[tuple[int, int]]
) -> Place | None:
    """After exactly its own prompt; of several such segments, one in which it is trained."""
    start = len(turn.prompt or ())
    stop = start + len(turn.reply)
    found = [
        Place(k, s, start, stop)
        for s, ids in enumerate(sequences)
        if (s, start) not in used and ids[start:stop] == turn.reply and ids[:start] == turn.prompt
    ]
    trained = [p for p in found if masks[p.segment] is not None and any(masks[p.segment][start:stop])]
    return next(iter(trained or found), None)


def _next(k: int, turn: SampledTurn, sequences: list[list[int]], masks: list[Any], cursors: list[int]) -> Place | None:
    """The first place behind the turns before it; a short reply stands in many, so one that is trained comes first."""
    size = len(turn.reply)
    first: Place | None = None
    for segment, ids in enumerate(sequences):
        start = find(turn.reply, ids, cursors[segment])
        while start is not None:
            here = Place(k, segment, start, start + size)
            if masks[segment] is None or all(masks[segment][start : start + size]):
                return here
            first = first or here
            start = find(turn.reply, ids, start + 1)
    return first


def _likeliest(turn: SampledTurn, sequences: list[list[int]], before: list[int]) -> int:
    """The segment that begins most like the turn; the last one used, of equals."""
    wanted = [*(turn.prompt or ()), *turn.reply]
    last = before[-1] if before else 0
    return max(range(len(sequences)), key=lambda s: (common_prefix(wanted, sequences[s]), s == last, -s))


def find(part: Sequence[int], ids: list[int], start: int = 0) -> int | None:
    """The first place of a contiguous part at or behind `start`."""
    n, at = len(part), start
    while n and at + n <= len(ids):
        try:
            at = ids.index(part[0], at, len(ids) - n + 1)
        except ValueError:
            return None
        if ids[at : at + n] == part:
            return at
        at += 1
    return start if not n and start <= len(ids) else None
