"""Random conversations: what `assemble` builds is always proven; each random corruption is named, with its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onepolicy.tokens.assemble import assemble
from onepolicy.tokens.spans import Problem, prove_spans
from onepolicy.tokens.suffixes import common_prefix, edits_between
from onepolicy.types import Severity

STOP, NEWLINE, FRESH = 2, 3, 10_000
SEEDS = st.integers(0, 2**32 - 1)


@dataclass
class Talk:
    """Turns of one conversation, and the list that they make."""

    turns: list[dict[str, Any]]
    ids: list[int]
    mask: list[int]
    starts: list[int]

    def span(self, k: int) -> tuple[int, int]:
        return self.starts[k], self.starts[k] + len(self.turns[k]["reply_ids"])

    def problems(self, ids: list[int], mask: list[int], **more: Any) -> tuple[Problem, ...]:
        return prove_spans(self.turns, ids, mask, **more).problems


def talk(rng: np.random.Generator, vocabulary: int = 300, least: int = 1) -> Talk:
    """Templates end turns with a stop token and a newline; small vocabularies repeat themselves a lot."""
    made = Talk([], [], [], [])
    for k in range(int(rng.integers(max(least, 1), 6))):
        asked = [
            1,
            5,
            NEWLINE,
            *rng.integers(20, vocabulary, rng.integers(1, 9)).tolist(),
            STOP,
            NEWLINE,
            1,
            6,
            NEWLINE,
        ]
        made.ids += ([NEWLINE] if k else []) + asked
        reply = [*rng.integers(20, vocabulary, rng.integers(2, 12)).tolist(), STOP]
        logprobs = (-rng.exponential(1, len(reply))).tolist()
        made.turns.append({"prompt_ids": list(made.ids), "reply_ids": reply, "logprobs": logprobs})
        made.starts.append(len(made.ids))
        made.mask += [0] * (len(made.ids) - len(made.mask)) + [1] * len(reply)
        made.ids += reply
    return made


@given(SEEDS, st.sampled_from([25, 300]))
def test_what_is_assembled_is_the_conversation_and_is_proven(seed: int, vocabulary: int) -> None:
    made = talk(np.random.default_rng(seed), vocabulary)
    out = assemble(made.turns)
    assert (out.token_ids, out.loss_mask) == (made.ids, made.mask)
    assert [p.start for p in out.spans] == made.starts
    drawn = [x for x, m in zip(out.logprobs, out.loss_mask, strict=True) if m]
    assert drawn == [x for turn in made.turns for x in turn["logprobs"]]
    assert not [x for x, m in zip(out.logprobs, out.loss_mask, strict=True) if not m and x is not None]
    assert out.proof.ok and not out.proof.findings()
    assert made.problems(made.ids, made.mask) == ()


@given(SEEDS)
def test_the_same_without_prompts_by_what_stands_between(seed: int) -> None:
    made = talk(np.random.default_rng(seed), least=2)
    ends = [made.span(k)[1] for k in range(len(made.turns))]
    between = [made.ids[end:start] for end, start in zip(ends, made.starts[1:], strict=False)]
    bare = [{k: v for k, v in turn.items() if k != "prompt_ids" or turn is made.turns[0]} for turn in made.turns]
    assert assemble(bare, between).token_ids == made.ids
    alone = [{"reply_ids": turn["reply_ids"]} for turn in made.turns]
    assert prove_spans(alone, made.ids, made.mask).ok


@given(SEEDS)
def test_a_history_that_is_rewritten_starts_a_segment_there(seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = talk(rng, least=2)
    k = int(rng.integers(1, len(made.turns)))
    lost = made.starts[k - 1]  # the first sampled id of the turn before is dropped from every later prompt
    for turn in made.turns[k:]:
        turn["prompt_ids"] = turn["prompt_ids"][:lost] + turn["prompt_ids"][lost + 1 :]
    out = assemble(made.turns)
    assert len(out.segments) == 2 and out.proof.ok
    why = out.segments[1].why
    # the id that went may be equal to the one behind it: then the first difference is later
    reply = made.turns[k - 1]["reply_ids"]
    assert why["first_diff"] == lost + common_prefix(reply, reply[1:]) and why["turn"] == k
    assert (why["class"], why["in_reply_of"]) == ("history-rewritten", k - 1)
    assert sum(sum(s.loss_mask) for s in out.segments) == sum(len(t["reply_ids"]) for t in made.turns)
    problems = prove_spans(made.turns, made.ids, made.mask).problems
    assert {p.kind for p in problems} == {"history-rewritten"} and {p.turn for p in problems} == {k}


@given(SEEDS)
def test_a_changed_id_is_found_at_its_place(seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = talk(rng)
    k = int(rng.integers(len(made.turns)))
    start, stop = made.span(k)
    at = int(rng.integers(start, stop))
    ids = [*made.ids[:at], FRESH, *made.ids[at + 1 :]]
    (problem,) = made.problems(ids, made.mask)
    assert (problem.kind, problem.turn, problem.at_turn, problem.at_sequence) == ("changed", k, at - start, at)


@given(SEEDS)
def test_ids_of_the_same_text_are_re_encoded(seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = talk(rng)
    k = int(rng.integers(len(made.turns)))
    start, stop = made.span(k)
    at = int(rng.integers(start, stop - 1))
    names = {i: f"<{i}>" for i in range(400)} | {FRESH: f"<{made.ids[at]}><{made.ids[at + 1]}>"}
    ids = [*made.ids[:at], FRESH, *made.ids[at + 2 :]]
    mask = made.mask[:at] + made.mask[at + 1 :]
    (problem,) = made.problems(ids, mask, names=names)
    assert (problem.kind, problem.turn, problem.at_turn, problem.at_sequence) == ("re-encoded", k, at - start, at)
    assert made.problems(ids, mask)[0].kind == "changed"  # without texts nobody knows


@given(SEEDS)
def test_a_dropped_span_is_missing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = talk(rng)
    k = int(rng.integers(len(made.turns)))
    start, stop = made.span(k)
    problems = made.problems(made.ids[:start] + made.ids[stop:], made.mask[:start] + made.mask[stop:])
    assert [p.turn for p in problems if p.kind in ("missing", "cut")] == [k]
    assert problems[0].at_sequence == start or problems[0].at_turn == 0


@given(SEEDS)
def test_a_cut_span_says_where(seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = talk(rng)
    k = int(rng.integers(len(made.turns)))
    start, stop = made.span(k)
    at = int(rng.integers(start + 1, stop))
    (problem,) = made.problems(made.ids[:at] + made.ids[stop:], made.mask[:at] + made.mask[stop:])
    assert (problem.kind, problem.turn, problem.at_turn) == ("cut", k, at - start)
    assert problem.more["lost"] == stop - at


@given(SEEDS, st.booleans())
def test_a_doubled_span_or_stop_token(seed: int, whole: bool) -> None:
    rng = np.random.default_rng(seed)
    made = talk(rng)
    k = int(rng.integers(len(made.turns)))
    start, stop = made.span(k)
    again = made.ids[start:stop] if whole else [STOP]
    ids = made.ids[:stop] + again + made.ids[stop:]
    problems = made.problems(ids, made.mask[:stop] + [0] * len(again) + made.mask[stop:])
    if k == len(made.turns) - 1:  # what stands behind the last span proves nothing
        assert problems == ()
        return
    assert [(p.kind, p.turn, p.at_sequence) for p in problems] == [("doubled", k, stop)]
    assert problems[0].more["again"] == again


@given(SEEDS)
def test_two_swapped_spans_have_moved(seed: int) -> None:
    """One of the two at least: where that takes fewer edits, the other stays and what was between them goes."""
    rng = np.random.default_rng(seed)
    made = talk(rng, 100_000, least=2)
    i, j = sorted(rng.choice(len(made.turns), 2, replace=False).tolist())
    (a, b), (c, d) = made.span(i), made.span(j)
    ids = made.ids[:a] + made.ids[c:d] + made.ids[b:c] + made.ids[a:b] + made.ids[d:]
    mask = made.mask[:a] + made.mask[c:d] + made.mask[b:c] + made.mask[a:b] + made.mask[d:]
    moved = [p for p in made.problems(ids, mask) if p.kind == "moved"]
    found_at = {i: c + (d - c) - (b - a), j: a}
    assert moved and all(p.more["found_at"] == found_at[p.turn] for p in moved if p.turn is not None)


@given(SEEDS)
def test_a_lost_suffix_and_another_prompt(seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = talk(rng, least=2)
    k = int(rng.integers(len(made.turns) - 1))
    stop = made.span(k)[1]
    (problem,) = made.problems(made.ids[:stop] + made.ids[stop + 1 :], made.mask[:stop] + made.mask[stop + 1 :])
    assert (problem.kind, problem.turn, problem.at_sequence) == ("suffix-missing", k + 1, stop)
    (problem,) = made.problems([FRESH, *made.ids], [0, *made.mask])
    assert (problem.kind, problem.turn, problem.at_sequence) == ("prompt-differs", 0, 0)


@given(SEEDS, st.sampled_from([-2, -1, 1, 2]))
def test_a_moved_mask_says_by_how_much(seed: int, shift: int) -> None:
    made = talk(np.random.default_rng(seed))
    mask = ([0] * shift + made.mask)[: len(made.mask)] if shift > 0 else made.mask[-shift:] + [0] * -shift
    problems = made.problems(made.ids, mask)
    if len(made.turns) == 1 and shift > 0:  # nothing that was not drawn is trained: a hole at the front
        assert [p.kind for p in problems] == ["sampled-not-trained"]
    else:
        assert [(p.kind, p.more["shift"]) for p in problems] == [("mask-shifted", shift)]


@given(SEEDS)
def test_single_mask_errors_are_listed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = talk(rng)
    at = int(rng.integers(len(made.ids)))
    mask = [*made.mask[:at], 1 - made.mask[at], *made.mask[at + 1 :]]
    proof = prove_spans(made.turns, made.ids, mask)
    (problem,) = proof.problems
    wanted = "sampled-not-trained" if made.mask[at] else "trained-not-sampled"
    assert problem.kind == wanted and problem.more["positions"] == [at] and problem.at_sequence == at
    assert proof.findings()[0].severity is (Severity.WARN if made.mask[at] else Severity.FAIL)
    assert None not in proof.places


@settings(max_examples=300)
@given(st.lists(st.integers(0, 3), max_size=14), st.lists(st.integers(0, 3), max_size=14))
def test_edits_are_a_shortest_script_that_makes_b_of_a(a: list[int], b: list[int]) -> None:
    edits = edits_between(a, b).edits
    out, at = list[int](), 0
    for e in edits:
        out += a[at : e.at]
        assert tuple(a[e.at : e.at + len(e.deleted)]) == e.deleted and len(out) == e.at_b
        out, at = [*out, *e.inserted], e.at + len(e.deleted)
    assert out + a[at:] == b
    assert sum(len(e.deleted) + len(e.inserted) for e in edits) == len(a) + len(b) - 2 * longest_common(a, b)
    assert not edits or edits[0].at == common_prefix(a, b)


def longest_common(a: list[int], b: list[int]) -> int:
    """The textbook table: an independent reference."""
    rows = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            rows[i + 1][j + 1] = rows[i][j] + 1 if x == y else max(rows[i][j + 1], rows[i + 1][j])
    return rows[-1][-1]


@pytest.mark.parametrize("size", [20_000])
def test_many_edits_are_one_and_say_so(size: int) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 50_000, size).tolist() for _ in "ab")
    found = edits_between([7, *a, 8], [7, *b, 8])
    assert not found.minimal and len(found.edits) == 1
    assert found.edits[0].at == 1 and found.edits[0].inserted == tuple(b)
