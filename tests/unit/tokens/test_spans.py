"""Sampled spans in a training sequence: proven, or said where not, and of which kind. And edits after a stop token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onepolicy import models
from onepolicy.errors import ContentError
from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.open import open_tokenizer
from onepolicy.tokens.placing import Place, find
from onepolicy.tokens.spans import CODES_OF, SpanProof, check_turns, prove_spans
from onepolicy.tokens.suffixes import check_suffixes, edits_between
from onepolicy.types import Severity

STOP = 2
P0 = [1, 10, 3, 20, 21, STOP, 3, 1, 11, 3]
R0 = [30, 31, 32, STOP]
TOOL = [3, 1, 12, 3, 40, STOP, 3, 1, 11, 3]
R1 = [33, 34, STOP]
TURNS: list[dict[str, Any]] = [
    {"prompt_ids": P0, "reply_ids": R0},
    {"prompt_ids": P0 + R0 + TOOL, "reply_ids": R1},
]
IDS = P0 + R0 + TOOL + R1
MASK = [0] * 10 + [1] * 4 + [0] * 10 + [1] * 3
PLACES = (Place(0, 0, 10, 14), Place(1, 0, 24, 27))
BARE = [{"reply_ids": R0}, {"reply_ids": R1}]


def kinds(proof: SpanProof) -> list[tuple[str, int | None, int | None, int | None]]:
    """(class, turn, position in the turn, in the sequence) of each problem."""
    return [(p.kind, p.turn, p.at_turn, p.at_sequence) for p in proof.problems]


class Letters:
    """A tokenizer of which ids below 100 are letters, and 100 + i is the two letters from i on."""

    def exists(self, token_id: int) -> bool:
        return 0 <= token_id < 200

    def decode(self, ids: Any, *, skip_special: bool = False) -> list[str]:
        return ["".join(chr(i) if i < 100 else chr(i - 100) + chr(i - 99) for i in one) for one in ids]


@pytest.mark.parametrize("turns", [TURNS, BARE, [TURNS[0], BARE[1]]])
@pytest.mark.parametrize("mask", [MASK, None, [None] * 27])
def test_every_turn_stands_where_it_was_sampled(turns: Any, mask: Any) -> None:
    proof = prove_spans(turns, IDS, mask)
    assert proof.ok and proof.places == PLACES and proof.findings() == []
    assert prove_spans(turns, [*IDS, 3, 99], None).ok  # what the template puts behind the last span
    assert prove_spans(turns, np.array(IDS), None if mask is None else np.array(MASK)).ok


def test_a_turn_may_stand_in_a_segment_of_its_own() -> None:
    first = P0 + R0
    proof = prove_spans(TURNS, [first, IDS], [[0] * 10 + [1] * 4, [0] * 24 + [1] * 3])
    assert proof.ok and proof.places == (Place(0, 0, 10, 14), Place(1, 1, 24, 27))
    proof = prove_spans(TURNS, [IDS, first], [[0] * 24 + [1] * 3, [0] * 10 + [1] * 4])
    assert proof.ok and proof.places == (Place(0, 1, 10, 14), Place(1, 0, 24, 27))
    # the later segment trains on the earlier span again
    proof = prove_spans(TURNS, [first, IDS], [[0] * 10 + [1] * 4, MASK])
    assert [p.kind for p in proof.problems] == ["trained-not-sampled"]
    assert proof.problems[0].more["positions"] == [10, 11, 12, 13] and proof.problems[0].segment == 1


def test_a_short_reply_is_looked_for_where_it_is_trained() -> None:
    short = [{"reply_ids": [STOP]}, {"reply_ids": R1}]
    ids, mask = [*P0, STOP, *TOOL, *R1], [0] * 10 + [1] + [0] * 10 + [1] * 3
    assert prove_spans(short, ids, mask).ok and prove_spans(short, ids, mask).places[0] == Place(0, 0, 10, 11)
    assert prove_spans(short, ids).places[0] == Place(0, 0, 5, 6)  # nothing tells them apart
    assert not prove_spans(short, ids, [0] * 24).ok


def test_one_sequence_holds_a_sample_once() -> None:
    same = [TURNS[0], dict(TURNS[0])]
    assert kinds(prove_spans(same, P0 + R0)) == [("missing", 1, 0, None)]
    assert prove_spans(same, [P0 + R0, P0 + R0]).ok


@pytest.mark.parametrize(
    ("ids", "wanted"),
    [
        ([*P0, 30, 99, 32, STOP, *TOOL, *R1], ("changed", 0, 1, 11)),
        (P0 + R0 + TOOL + [33, 98, STOP], ("changed", 1, 1, 25)),
        (P0 + R0 + TOOL + [77, 78, 79], ("changed", 1, 0, 24)),
        (P0 + TOOL + R1, ("missing", 0, 0, 10)),
        (P0 + R0 + TOOL, ("missing", 1, 0, 24)),
        (P0 + R0[:2] + TOOL + R1, ("cut", 0, 2, 12)),
        (P0 + R0[1:] + TOOL + R1, ("cut", 0, 0, 10)),
        (IDS[:-1], ("cut", 1, 2, 26)),
        (P0 + R0 + R0 + TOOL + R1, ("doubled", 0, 4, 14)),
        (P0 + R0 + [STOP] + TOOL + R1, ("doubled", 0, 4, 14)),
        (P0 + R0 + TOOL[1:] + R1, ("suffix-missing", 1, 14, 14)),
        (P0 + R0 + TOOL[:4] + [41] + TOOL[5:] + R1, ("prompt-differs", 1, 18, 18)),
        ([*P0, *R0, 3, *TOOL, *R1], ("suffix-not-sampled", 1, 15, 15)),
        ([*P0, *R0, *range(50, 60), *TOOL, *R1], ("prompt-differs", 1, 14, 14)),
        ([0, *IDS], ("prompt-differs", 0, 0, 0)),
        (IDS[1:], ("prompt-differs", 0, 0, 0)),
    ],
)
def test_each_kind_of_fault_with_its_place(ids: list[int], wanted: tuple[Any, ...]) -> None:
    proof = prove_spans(TURNS, ids)
    assert kinds(proof) == [wanted]
    (found,) = proof.findings("r", "file:1")
    assert found.code == CODES_OF[wanted[0]] and found.severity is Severity.FAIL and found.place == "file:1"
    assert {k: found.evidence[k] for k in ("class", "turn", "at_turn", "at_sequence", "segment")} == {
        "class": wanted[0],
        "turn": wanted[1],
        "at_turn": wanted[2],
        "at_sequence": wanted[3],
        "segment": 0,
    }
    other = 1 - (wanted[1] or 0)
    if wanted[0] in ("changed", "missing", "cut"):  # one fault is one finding: the other turn still stands
        assert proof.places[other] is not None and proof.places[1 - other] is None


def test_what_is_shown_of_a_change() -> None:
    (problem,) = prove_spans(TURNS, [*P0, 30, 99, 32, STOP, *TOOL, *R1]).problems
    assert problem.more["expected"] == R0 and problem.more["got"] == [30, 99, 32, STOP]
    assert problem.more["edits"][0] == {
        "op": "replace",
        "at_rollout_index": 1,
        "at_rendered_index": 1,
        "ids": [99],
        "deleted": [31],
    }
    (problem,) = prove_spans(TURNS, P0 + R0[1:] + TOOL + R1).problems
    assert (problem.more["side"], problem.more["lost"]) == ("left", 1)


def test_ids_of_the_same_text() -> None:
    ids = [*P0, 130, 32, STOP, *TOOL, *R1]
    (problem,) = prove_spans(TURNS, ids, tokenizer=Letters()).problems  # pyright: ignore[reportArgumentType]
    assert (problem.kind, problem.turn, problem.at_turn, problem.at_sequence) == ("re-encoded", 0, 0, 10)
    names = {30: "a", 31: "b", 130: "ab", 32: "c", STOP: "$"}
    assert prove_spans(TURNS, ids, names=names).problems[0].kind == "re-encoded"
    assert prove_spans(TURNS, ids, names={**names, 130: "xx"}).problems[0].kind == "changed"
    assert prove_spans(TURNS, ids).problems[0].kind == "changed"


def test_ids_that_a_real_tokenizer_encodes_otherwise() -> None:
    tokenizer = open_tokenizer(str(models.path("tiny")))
    (canonical,) = tokenizer.encode([" the the end"])
    sampled = [i for one in tokenizer.encode([" t", "he the end"]) for i in one]
    assert sampled != canonical and tokenizer.decode([sampled]) == tokenizer.decode([canonical])
    turns = [{"prompt_ids": [1, 2], "reply_ids": sampled}]
    (problem,) = prove_spans(turns, [1, 2, *canonical, 3], tokenizer=tokenizer).problems
    assert (problem.kind, problem.at_turn, problem.at_sequence) == ("re-encoded", 0, 2)
    assert prove_spans(turns, [1, 2, *canonical[:-1]], tokenizer=tokenizer).problems[0].kind != "re-encoded"


def test_swapped_spans_have_moved() -> None:
    proof = prove_spans(TURNS, P0 + R1 + TOOL + R0)
    assert kinds(proof) == [("moved", 0, 0, 10), ("moved", 1, 0, 23)]
    assert [p.more["found_at"] for p in proof.problems] == [23, 10]
    moved = kinds(prove_spans(BARE, P0 + R1 + TOOL + R0))
    assert moved == [("moved", 1, 0, 10)]  # without prompts the first turn may stand anywhere


def test_a_turn_sampled_after_another_history() -> None:
    rewritten = {"prompt_ids": P0 + R0[1:] + TOOL, "reply_ids": R1}
    proof = prove_spans([TURNS[0], rewritten], IDS, MASK)
    assert kinds(proof) == [("history-rewritten", 1, 10, 10)]
    assert proof.findings()[0].code == "history-rewritten-by-template"
    assert proof.places == PLACES  # the ids stand there, after what the sampler never saw


@pytest.mark.parametrize("shift", [-2, -1, 1, 2])
def test_a_mask_that_is_moved(shift: int) -> None:
    mask = np.zeros(27, dtype=int)
    mask[max(shift, 0) : 27 + min(shift, 0)] = MASK[max(-shift, 0) : 27 - max(shift, 0)]
    (problem,) = prove_spans(TURNS, IDS, mask.tolist()).problems
    assert problem.kind == "mask-shifted" and problem.more["shift"] == shift


def test_mask_errors_by_position() -> None:
    mask = list(MASK)
    mask[18] = 1
    mask[26] = 0
    proof = prove_spans(TURNS, IDS, mask)
    assert kinds(proof) == [("trained-not-sampled", None, None, 18), ("sampled-not-trained", 1, 2, 26)]
    assert [f.severity for f in proof.findings()] == [Severity.FAIL, Severity.WARN]
    assert {f.code for f in proof.findings()} == {"span-mask-wrong"}
    assert kinds(prove_spans(TURNS, IDS, MASK[:-1])) == [("mask-count", None, None, None)]
    assert prove_spans(TURNS, IDS, [*MASK[:26], None]).ok


def test_a_changed_span_is_not_judged_by_its_mask_as_well() -> None:
    ids = [*P0, 30, 99, 32, STOP, *TOOL, *R1]
    assert kinds(prove_spans(TURNS, ids, MASK)) == [("changed", 0, 1, 11)]
    mask = [*MASK[:18], 1, *MASK[19:]]
    assert [p.kind for p in prove_spans(TURNS, ids, mask).problems] == ["changed", "trained-not-sampled"]


def test_a_record_with_turns() -> None:
    more = {"prompt_ids": P0, "reply_ids": IDS[10:]}
    assert check_turns(TokenRecord("r", turns=TURNS, loss_mask=MASK[10:], **more)) == []
    assert check_turns(TokenRecord("r", turns=TURNS, loss_mask=MASK, **more)) == []
    assert check_turns(TokenRecord("r", turns=TURNS, loss_mask=[1], **more)) == []  # `counts` says it
    assert check_turns(TokenRecord("r", **more)) == [] and check_turns(TokenRecord("r", turns=TURNS)) == []
    (found,) = check_turns(TokenRecord("r", "file:1", turns=TURNS, loss_mask=[1] * 17, **more))
    assert found.evidence["count"] == 10 and found.place == "file:1" and found.message.startswith("r: tokens outside")


@pytest.mark.parametrize(
    ("turns", "ids", "mask", "message"),
    [
        ([{"prompt_ids": [1]}], [1], None, "turn 0: no 'reply_ids'"),
        ([{"reply_ids": [1, "2"]}], [1], None, "turn 0: 'reply_ids', position 1: got '2', wanted an integer"),
        ([{"reply_ids": "12"}], [1], None, "turn 0: 'reply_ids': got '12', wanted a list"),
        ([{"reply_ids": [1]}], [1, True], None, "sequence 0, position 1"),
        ([{"reply_ids": [1]}], [[1], [1.5]], None, "sequence 1, position 0"),
        ([{"reply_ids": [1]}], [[1], [1]], [[1]], "got 1 loss masks for 2 sequences"),
    ],
)
def test_what_are_no_ids(turns: Any, ids: Any, mask: Any, message: str) -> None:
    with pytest.raises(ContentError, match=message):
        prove_spans(turns, ids, mask)


def test_empty_lists() -> None:
    assert prove_spans([], []).ok and prove_spans([{"prompt_ids": [], "reply_ids": []}], []).ok
    assert kinds(prove_spans(TURNS[:1], [])) == [("missing", 0, 0, 0)]
    assert find([], [1], 1) == 1 and find([2, 3], [2, 2, 3]) == 1 and find([3], [2]) is None


# edits after a stop token


def suffixes(rollout: list[int], rendered: list[int], **more: Any) -> list[tuple[str, str]]:
    found = check_suffixes(rollout, rendered, **{"stop_ids": (STOP,), "spans": [(10, 14), (24, 27)], **more})
    return [(f.code, f.evidence["class"]) for f in found]


def test_suffixes_after_a_stop_token() -> None:
    suffix = "suffix-after-stop-missing"
    assert suffixes(IDS, IDS) == [] and suffixes(IDS, [*IDS, 3]) == []
    without = P0 + R0 + TOOL[1:] + R1
    assert suffixes(without, IDS, spans=[(10, 14), (23, 26)]) == [(suffix, "suffix-missing")]
    assert suffixes(without, IDS, spans=()) == [(suffix, "suffix-missing")]
    assert suffixes(without, IDS, spans=[(10, 14), (23, 26)], stop_ids=()) == [(suffix, "suffix-missing")]
    assert suffixes(IDS, without) == [(suffix, "suffix-extra")]
    assert suffixes(IDS, P0 + R0 + [9] + TOOL[1:] + R1) == [(suffix, "suffix-differs")]
    trimmed = P0 + R0[:-1] + TOOL[1:] + R1
    assert suffixes(trimmed, IDS, spans=[(10, 13), (22, 25)]) == [(suffix, "stop-and-suffix-missing")]


def test_other_edits_are_not_called_suffixes() -> None:
    assert suffixes(IDS, [*P0, 30, 99, 32, STOP, *TOOL, *R1]) == [("sampled-span-changed", "span-changed")]
    assert suffixes(IDS, [0, *IDS]) == [("prompt-ids-differ", "prompt")]
    tool = [*TOOL[:4], 41, *TOOL[5:]]
    assert suffixes(IDS, P0 + R0 + tool + R1) == [("prompt-ids-differ", "between-turns")]
    both = suffixes(P0 + R0 + TOOL[1:] + R1, [0, *IDS], spans=[(10, 14), (23, 26)])
    assert both == [("prompt-ids-differ", "prompt"), ("suffix-after-stop-missing", "suffix-missing")]


def test_an_insertion_stands_at_its_last_place() -> None:
    (edit,) = edits_between([2, 3, 5], [2, 3, 3, 5]).edits
    assert (edit.op, edit.at, edit.inserted) == ("insert", 2, (3,))
    (edit,) = edits_between([1, 2, 1, 2, 9], [1, 2, 9]).edits
    assert (edit.op, edit.at, edit.deleted) == ("delete", 2, (1, 2))
    assert edits_between([], []).edits == () and edits_between([], [1]).edits[0].op == "insert"
