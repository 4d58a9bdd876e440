"""Why a sampled span is not proven: what differs first, and which kind of fault leaves that trace.

Turns whose prompts extend each other are one expected list of ids. Its smallest edits to the sequence are read by the
piece in which they stand: the first prompt, what lies between turns, a sampled span.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onepolicy.tokens.base import Tokenizer
from onepolicy.tokens.placing import Place, Placed, Problem, SampledTurn, find
from onepolicy.tokens.suffixes import Edit, common_prefix, described, edits_between
from onepolicy.types import BoolArray

#: Edits up to which a span's own script is smallest.
IN_A_SPAN = 256
#: Ids that a template puts behind a stop token at most.
LONGEST_SUFFIX = 8
#: Ids shown on each side of a first difference.
AROUND = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """`ids[start:stop]` of the expected list: `prompt` (of the first turn), `between` (before the turn), `span`."""

    kind: str
    turn: int
    start: int
    stop: int


@dataclass(slots=True)
class Chain:
    """Turns of one segment of which each prompt goes on from the one before. `branch`: where it leaves the chain
    before it in the same segment, None for the first.
    """

    segment: int
    ids: list[int]
    pieces: list[Piece]
    branch: int | None = None

    def add(self, k: int, turn: SampledTurn) -> None:
        prompt = turn.prompt or []
        kind, start = ("between" if self.pieces else "prompt"), len(self.ids)
        self.pieces += [
            Piece(kind, k, start, len(prompt)),
            Piece("span", k, len(prompt), len(prompt) + len(turn.reply)),
        ]
        self.ids = [*prompt, *turn.reply]


@dataclass(slots=True)
class Diagnosis:
    """Places, regions that cannot be judged (of changed spans), and problems; filled by `explain`."""

    turns: list[SampledTurn]
    sequences: list[list[int]]
    placed: Placed
    tokenizer: Tokenizer | None
    names: Mapping[int, str]
    problems: list[Problem] = field(default_factory=list[Problem])
    #: of spans that stand changed: not judged by the mask
    regions: list[Place] = field(default_factory=list[Place])

    @property
    def places(self) -> list[Place | None]:
        return self.placed.places

    def explain(self) -> None:
        for chain in self._chains():
            if any(self.places[p.turn] is None for p in chain.pieces):
                _Reading(self, chain).explain()
        for k, turn in enumerate(self.turns):
            if turn.prompt is None and self.places[k] is None:
                self._explain_lost(k)

    def _chains(self) -> list[Chain]:
        chains: list[Chain] = []
        for segment in range(len(self.sequences)):
            last: Chain | None = None
            for k, turn in enumerate(self.turns):
                if self.placed.segment_of[k] != segment or turn.prompt is None:
                    continue
                if last is None or turn.prompt[: len(last.ids)] != last.ids:
                    branch = None if last is None else common_prefix(turn.prompt, last.ids)
                    last = Chain(segment, [], [], branch)
                    chains.append(last)
                last.add(k, turn)
        return chains

    def _explain_lost(self, k: int) -> None:
        """A turn without a prompt that stands nowhere behind the turns before it."""
        turn, segment = self.turns[k], self.placed.segment_of[k]
        for s, ids in enumerate(self.sequences):
            at = find(turn.reply, ids)
            if at is not None and self.turn_at(s, at) is None:
                self.regions.append(Place(k, s, at, at + len(turn.reply)))
                self.problems.append(Problem("moved", k, s, 0, at, {"found_at": at}))
                return
        ids, low = self.sequences[segment], self._end_before(k, segment)
        start = max(
            range(low, len(ids)), key=lambda at: common_prefix(turn.reply, ids[at : at + len(turn.reply)]), default=low
        )
        same = common_prefix(turn.reply, ids[start : start + len(turn.reply)])
        if not same:
            self.problems.append(Problem("missing", k, segment, 0, None, {"after": low}))
            return
        stop = min(start + len(turn.reply), len(ids))
        self.lost(k, segment, start, stop, [])

    def _end_before(self, k: int, segment: int) -> int:
        return max((p.stop for p in self.places[:k] if p is not None and p.segment == segment), default=0)

    def lost(self, k: int, segment: int, start: int, stop: int, edits: Sequence[Edit]) -> None:
        """A span that stands changed in `sequences[segment][start:stop]`."""
        reply, got = self.turns[k].reply, self.sequences[segment][start:stop]
        found = edits_between(reply, got, IN_A_SPAN).edits
        kind, more = _kind(found, len(reply), len(got))
        if kind == "changed" and self.same_text(reply, segment, start, stop, edits):
            kind = "re-encoded"
        first = found[0].at if found else len(reply)
        shown = {
            "expected": reply[max(first - AROUND, 0) : first + AROUND],
            "got": got[max(first - AROUND, 0) : first + AROUND],
        }
        shown |= {"edits": [described(e, self.names) for e in found[:AROUND]], "lengths": [len(reply), len(got)]}
        self.regions.append(Place(k, segment, start, stop))
        self.problems.append(Problem(kind, k, segment, first, start + first, {**shown, **more}))

    def same_text(self, reply: list[int], segment: int, start: int, stop: int, edits: Sequence[Edit]) -> bool:
        """Whether the region, give or take what was inserted at its edges, spells what was sampled."""
        text = self._text(reply)
        before = [0, *(len(e.inserted) for e in edits if e.at_b + len(e.inserted) == start)]
        after = [0, *(len(e.inserted) for e in edits if e.at_b == stop)]
        ids = self.sequences[segment]
        return text is not None and any(self._text(ids[start - a : stop + b]) == text for a in before for b in after)

    def _text(self, ids: list[int]) -> str | None:
        if self.tokenizer is not None and all(map(self.tokenizer.exists, ids)):
            return self.tokenizer.decode([ids])[0]
        return "".join(self.names[i] for i in ids) if ids and all(i in self.names for i in ids) else None

    # for the masks

    def sampled_flags(self, segment: int) -> tuple[BoolArray, BoolArray]:
        """`[N]`: stands in a span; can be judged (a changed span cannot)."""
        n = len(self.sequences[segment])
        sampled, judged = np.zeros(n, dtype=bool), np.ones(n, dtype=bool)
        for place in self.places:
            if place is not None and place.segment == segment:
                sampled[place.start : place.stop] = True
        for region in self.regions:
            if region.segment == segment:
                judged[region.start : region.stop] = False
        return sampled, judged | sampled

    def turn_at(self, segment: int, at: int) -> Place | None:
        """The place that covers a position."""
        found = (p for p in (*self.places, *self.regions) if p is not None and p.segment == segment)
        return next((p for p in found if p.start <= at < p.stop), None)


def _kind(edits: Sequence[Edit], wanted: int, got: int) -> tuple[str, dict[str, Any]]:
    """What was sampled against what stands in its place."""
    if not got:
        return "missing", {}
    if len(edits) == 1 and edits[0].op == "delete":
        edit = edits[0]
        left, right = edit.at == 0, edit.at + len(edit.deleted) == wanted
        return "cut", {"side": "left" if left else "right" if right else "inside", "lost": len(edit.deleted)}
    return "changed", {}


@dataclass(slots=True)
class _Reading:
    """One chain against its sequence."""

    diagnosis: Diagnosis
    chain: Chain
    edits: list[Edit] = field(default_factory=list[Edit])
    minimal: bool = True
    #: edits that are explained by a span
    spent: list[Edit] = field(default_factory=list[Edit])
    moved: list[Place] = field(default_factory=list[Place])

    @property
    def ids(self) -> list[int]:
        return self.diagnosis.sequences[self.chain.segment]

    def explain(self) -> None:
        found = edits_between(self.chain.ids, self.ids)
        self.edits, self.minimal = list(found.edits), found.minimal
        spans = [p for p in self.chain.pieces if p.kind == "span"]
        for piece in spans:
            self._place(piece)
        for piece in spans:
            if self.diagnosis.places[piece.turn] is None:
                self._explain_span(piece)
        for piece in spans:
            self._find_doubled(piece)
        for piece in self.chain.pieces:
            self._explain_prompt(piece)

    def region(self, piece: Piece) -> tuple[int, int]:
        """Where a changed span stands; where nothing could be aligned, as far behind its prompt as it should."""
        if self.minimal:
            return self.low(piece.start), self.high(piece.stop)
        return min(piece.start, len(self.ids)), min(piece.stop, len(self.ids))

    # where a boundary of the expected list stands in the sequence

    def low(self, x: int) -> int:
        """Of the id that begins at x: behind whatever is inserted there."""
        shift = 0
        for e in self.edits:
            if e.at < x < e.at + len(e.deleted):
                return e.at_b
            if e.at + len(e.deleted) <= x and (e.at < x or e.op == "insert"):
                shift = e.at_b + len(e.inserted) - e.at - len(e.deleted)
        return x + shift

    def high(self, x: int) -> int:
        """Of the id that ends at x: before whatever is inserted there."""
        shift = 0
        for e in self.edits:
            if e.at < x < e.at + len(e.deleted):
                return e.at_b + len(e.inserted)
            if e.at < x:
                shift = e.at_b + len(e.inserted) - e.at - len(e.deleted)
        return x + shift

    def touching(self, piece: Piece) -> list[Edit]:
        """Edits that change ids of the piece, or stand strictly inside it."""
        return [
            e
            for e in self.edits
            if (
                e.at < piece.stop and e.at + len(e.deleted) > piece.start
                if e.deleted
                else piece.start < e.at < piece.stop
            )
        ]

    # spans

    def _place(self, piece: Piece) -> None:
        """Unchanged in the sequence, although the proof by prefix failed somewhere before it."""
        if self.diagnosis.places[piece.turn] is not None:
            return
        reply, size = self.chain.ids[piece.start : piece.stop], piece.stop - piece.start
        for start in (self.low(piece.start), self.high(piece.stop) - size):
            free = self.diagnosis.turn_at(self.chain.segment, start) is None
            if start >= 0 and free and self.ids[start : start + size] == reply:
                self.diagnosis.places[piece.turn] = Place(piece.turn, self.chain.segment, start, start + size)
                self.spent += self.touching(piece)
                return

    def _explain_span(self, piece: Piece) -> None:
        touching, diagnosis, segment = self.touching(piece), self.diagnosis, self.chain.segment
        self.spent += touching
        reply = self.chain.ids[piece.start : piece.stop]
        gone = sum(min(e.at + len(e.deleted), piece.stop) - max(e.at, piece.start) for e in touching if e.deleted)
        at = self._elsewhere(reply) if 2 * gone > len(reply) else None
        if at is not None:
            here = self.low(piece.start)
            self.moved.append(Place(piece.turn, segment, at, at + len(reply)))
            diagnosis.regions.append(self.moved[-1])
            diagnosis.problems.append(
                Problem("moved", piece.turn, segment, 0, here, {"found_at": at, "moved_by": at - here})
            )
        elif not touching:  # all of it is there, but another turn has that place
            diagnosis.problems.append(Problem("missing", piece.turn, segment, 0, None, {"taken": True}))
        else:
            start, stop = self.region(piece)
            near = [e for e in self.edits if e.op == "insert" and e.at in (piece.start, piece.stop)]
            diagnosis.lost(piece.turn, segment, start, max(start, stop), near)

    def _elsewhere(self, reply: list[int]) -> int | None:
        """Where the reply stands as a whole among ids that the expected list does not have at that place."""
        at = find(reply, self.ids)
        while at is not None:
            stop = at + len(reply)
            new = sum(max(0, min(e.at_b + len(e.inserted), stop) - max(e.at_b, at)) for e in self.edits)
            if 2 * new >= len(reply) and self.diagnosis.turn_at(self.chain.segment, at) is None:
                return at
            at = find(reply, self.ids, at + 1)
        return None

    def _find_doubled(self, piece: Piece) -> None:
        """Ids inserted behind a span that repeat the span, or its end."""
        place = self.diagnosis.places[piece.turn]
        if place is None or place.start == place.stop:
            return
        for e in self.edits:
            size = len(e.inserted)
            behind = piece.stop <= e.at <= piece.stop + size
            again = self.ids[place.stop : place.stop + size] == self.ids[place.stop - size : place.stop]
            if e.op == "insert" and e not in self.spent and behind and size <= place.stop - place.start and again:
                self.spent.append(e)
                more = {
                    "again": list(self.ids[place.stop : place.stop + size]),
                    "whole": size == place.stop - place.start,
                }
                self.diagnosis.regions.append(Place(piece.turn, place.segment, place.stop, place.stop + size))
                self.diagnosis.problems.append(
                    Problem("doubled", piece.turn, place.segment, place.stop - place.start, place.stop, more)
                )

    # prompts

    def _explain_prompt(self, piece: Piece) -> None:
        """Edits in a prompt, or between two turns; what was inserted where a span went is that span's."""
        if piece.kind == "span":
            return
        edits = [e for e in self.edits if e not in self.spent and self._belongs(e, piece) and not self._is_moved(e)]
        if not edits:
            return
        self.spent += edits
        first = edits[0]
        kind = self._kind_of_prompt(piece, edits)
        more: dict[str, Any] = {"edits": [described(e, self.diagnosis.names) for e in edits[:AROUND]]}
        more |= {"between": [piece.turn - 1, piece.turn] if piece.kind == "between" else None}
        self.diagnosis.problems.append(Problem(kind, piece.turn, self.chain.segment, first.at, first.at_b, more))

    def _belongs(self, e: Edit, piece: Piece) -> bool:
        return piece.start <= e.at < piece.stop or (e.op == "insert" and e.at == piece.stop)

    def _is_moved(self, e: Edit) -> bool:
        return bool(e.inserted) and any(p.start < e.at_b + len(e.inserted) and e.at_b < p.stop for p in self.moved)

    def _kind_of_prompt(self, piece: Piece, edits: list[Edit]) -> str:
        first = edits[0]
        if piece.kind == "between" and len(edits) == 1 and self._is_suffix(piece, first):
            return "suffix-missing" if first.deleted else "suffix-not-sampled"
        branch = self.chain.branch
        return "history-rewritten" if branch is not None and first.at >= branch else "prompt-differs"

    def _is_suffix(self, piece: Piece, e: Edit) -> bool:
        """A few ids that went, or came, right behind the span; an edit slides over ids that repeat it."""
        ids, gap = list(e.deleted or e.inserted), self.chain.ids[piece.start : e.at]
        right_behind = [*gap, *ids][len(ids) :] == gap
        short = len(ids) <= LONGEST_SUFFIX and len(ids) < piece.stop - piece.start
        return e.op != "replace" and short and right_behind
