"""One prompt as two sides read it: each kind of difference by its name and place, on either side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.errors import ContentError
from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.open import open_tokenizer
from onepolicy.tokens.pair import compare_prompts
from onepolicy.types import Finding, Severity

BOS, EOS, PAD = 1, 2, 3
TEXT = list(range(10, 30))
OPENING = [90, 91, 92]  # a generation prompt


def judged(engine: list[int], trainer: list[int], **known: Any) -> list[Finding]:
    known = {"bos": BOS, "eos": EOS, **known}
    return compare_prompts([{"id": "p", "engine_ids": engine, "trainer_ids": trainer}], **known)


def one(engine: list[int], trainer: list[int], **known: Any) -> Finding:
    (found,) = judged(engine, trainer, **known)
    return found


#: kind of difference -> long side, short side, code, evidence.
KINDS: dict[str, tuple[list[int], list[int], str, dict[str, Any]]] = {
    "BOS missing": ([BOS, *TEXT], TEXT, "prompt-ids-differ", {"kind": "bos-missing", "offset": 1, "first_diff": 0}),
    "BOS twice": ([BOS, BOS, *TEXT], [BOS, *TEXT], "double-bos", {"offset": 1, "equal_after_dropping": True}),
    "BOS twice against none": ([BOS, BOS, *TEXT], TEXT, "double-bos", {"offset": 2, "equal_after_dropping": True}),
    "BOS three times": ([BOS, BOS, BOS, *TEXT], [BOS, *TEXT], "double-bos", {"offset": 2, "positions": [1, 2]}),
    "BOS inside": (
        [BOS, *TEXT[:8], BOS, *TEXT[8:]],
        [BOS, *TEXT],
        "double-bos",
        {"positions": [9], "equal_after_dropping": True},
    ),
    "EOS appended": (
        [BOS, *TEXT, EOS],
        [BOS, *TEXT],
        "prompt-ids-differ",
        {"kind": "eos-appended", "first_diff": 21, "missing_ids": [EOS]},
    ),
    "cut on the left": ([BOS, *TEXT], TEXT[5:], "prompt-cut", {"cut": "left", "missing": 5, "kept": 15}),
    "cut on the left, BOS kept": ([BOS, *TEXT], [BOS, *TEXT[5:]], "prompt-cut", {"cut": "left", "missing": 5}),
    "cut on the right": ([BOS, *TEXT], [BOS, *TEXT[:-5]], "prompt-cut", {"cut": "right", "missing": 5, "kept": 16}),
    "a block missing at the start": (
        [BOS, 10, 77, 78, 79, *TEXT],
        [BOS, *TEXT],
        "prompt-ids-differ",
        {"kind": "block-missing", "missing": 4},
    ),
    "a block missing inside": (
        [BOS, *TEXT[:6], 77, 78, *TEXT[6:]],
        [BOS, *TEXT],
        "prompt-ids-differ",
        {"kind": "block-missing", "missing_ids": [77, 78], "first_diff": 7},
    ),
    "nothing on one side": ([BOS, *TEXT], [], "prompt-ids-differ", {"kind": "empty"}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("swapped", [False, True])
def test_each_kind_on_either_side(kind: str, swapped: bool) -> None:
    long, short, code, evidence = KINDS[kind]
    found = one(short, long) if swapped else one(long, short)
    assert (found.code, found.severity) == (code, Severity.FAIL)
    assert {key: found.evidence[key] for key in evidence} == evidence
    assert "prompt p" in found.place
    names = ("trainer", "engine") if swapped else ("engine", "trainer")
    of_long = code == "double-bos"
    assert found.evidence["side"] == names[0 if of_long else 1] or kind == "EOS appended"
    assert found.evidence["lengths"] == {names[0]: len(long), names[1]: len(short)}


def test_eos_appended_names_the_side_that_appends() -> None:
    assert one([*TEXT], [*TEXT, EOS]).evidence["side"] == "trainer"
    assert one([*TEXT, EOS, EOS], TEXT).evidence["side"] == "engine"


def test_other_ids_have_a_place() -> None:
    other = [*TEXT[:4], 99, *TEXT[5:]]
    found = one(TEXT, other)
    assert (found.code, found.evidence["kind"], found.evidence["first_diff"]) == ("prompt-ids-differ", "other", 4)
    assert found.evidence["around"] == {"engine": TEXT[:9], "trainer": other[:9]}
    assert found.place == "prompt p, token 4"


def test_bos_twice_and_other_ids_are_two_findings() -> None:
    found = judged([BOS, BOS, *TEXT], [BOS, *TEXT[:-1], 99])
    assert [f.code for f in found] == ["double-bos", "prompt-ids-differ"]
    assert found[0].evidence["equal_after_dropping"] is False


def test_bos_twice_on_both_sides_and_other_ids() -> None:
    found = judged([BOS, BOS, *TEXT], [BOS, BOS, *TEXT[:-1], 99])
    assert [(f.code, f.severity.value) for f in found] == [("double-bos", "warn"), ("prompt-ids-differ", "fail")]


@pytest.mark.parametrize(
    "ids", [TEXT, [BOS, *TEXT], [BOS, *TEXT, EOS], [BOS, *TEXT, EOS, BOS, *TEXT], [*TEXT, BOS, *TEXT], []]
)
def test_the_same_ids_are_no_finding_also_where_texts_are_packed(ids: list[int]) -> None:
    assert judged(ids, ids) == []


@pytest.mark.parametrize(("ids", "at"), [([BOS, BOS, *TEXT], 1), ([BOS, *TEXT, EOS, BOS, BOS, *TEXT], 23)])
def test_bos_twice_in_a_row_on_both_sides_warns(ids: list[int], at: int) -> None:
    found = one(ids, ids)
    assert (found.code, found.severity) == ("double-bos", Severity.WARN)
    assert found.evidence["positions"] == [at]


def test_a_model_without_bos_has_none_to_double() -> None:
    pair = {"id": "q", "bos_token_id": None, "engine_ids": [BOS, BOS, *TEXT], "trainer_ids": [BOS, BOS, *TEXT]}
    assert compare_prompts([pair], BOS) == []
    assert judged([0, 0, *TEXT], [0, 0, *TEXT], bos=None) == []
    assert one([0, 0, *TEXT], [0, *TEXT], bos=None).code != "double-bos"


def test_a_pair_may_have_its_own_bos() -> None:
    pair = {"id": "q", "bos_token_id": 7, "engine_ids": [7, 7, *TEXT], "trainer_ids": [7, *TEXT]}
    assert [f.code for f in compare_prompts([pair], BOS)] == ["double-bos"]


def test_padding_at_the_left_is_no_difference() -> None:
    assert judged([BOS, *TEXT], [PAD, PAD, PAD, BOS, *TEXT], pad=PAD) == []
    assert one([BOS, *TEXT], [PAD, PAD, BOS, *TEXT]).code != "double-bos"


def test_bos_that_is_the_padding_too_has_a_rival() -> None:
    found = one([BOS, BOS, BOS, BOS, *TEXT], [BOS, *TEXT], pad=BOS)
    assert found.rivals == ("left padding with the same id",)
    assert judged([BOS] * 5 + TEXT, [BOS] * 5 + TEXT, pad=BOS) == []


# the generation prompt


def test_a_generation_prompt_that_is_known() -> None:
    found = one([BOS, *TEXT, *OPENING], [BOS, *TEXT], generation_prompt=OPENING)
    assert (found.code, found.severity) == ("generation-prompt-differs", Severity.FAIL)
    assert found.evidence["side"] == "trainer"
    assert found.rivals == ()


def test_the_end_of_a_generation_prompt() -> None:
    """`<think>` that one side's template opens and the other's does not."""
    found = one([BOS, *TEXT, *OPENING], [BOS, *TEXT, *OPENING[:1]], generation_prompt=OPENING)
    assert (found.code, found.evidence["missing"]) == ("generation-prompt-differs", 2)


def test_a_tail_that_several_prompts_lack_is_no_cut() -> None:
    pairs = [
        {"id": i, "engine_ids": [BOS, *TEXT[:n], *OPENING], "trainer_ids": [BOS, *TEXT[:n]]}
        for i, n in ((0, 5), (1, 9))
    ]
    found = compare_prompts(pairs, BOS, eos=EOS)
    assert [f.code for f in found] == ["generation-prompt-differs"] * 2
    assert found[0].rivals == ("the prompt is cut on the right",)


def test_one_prompt_sampled_often_and_cut_is_a_cut() -> None:
    pairs = [{"id": i, "engine_ids": [BOS, *TEXT], "trainer_ids": [BOS, *TEXT[:-3]]} for i in range(8)]
    assert {f.code for f in compare_prompts(pairs, BOS)} == {"prompt-cut"}


def test_prompts_may_be_a_long_stream() -> None:
    pairs = (
        {"id": i, "engine_ids": [BOS, 100 + i, *OPENING], "trainer_ids": [BOS, 100 + i][: 1 + i % 2 * 2]}
        for i in range(3000)
    )
    found = compare_prompts(pairs, BOS, generation_prompt=OPENING)
    assert len(found) == 3000
    assert {f.code for f in found} == {"generation-prompt-differs", "prompt-ids-differ"}


def test_one_prompt_that_lacks_a_short_tail_is_a_cut_with_a_rival() -> None:
    found = one([BOS, *TEXT, *OPENING], [BOS, *TEXT])
    assert (found.code, found.rivals) == ("prompt-cut", ("the generation prompt is missing",))


def test_prompts_cut_to_one_length_stay_cuts() -> None:
    pairs = [
        {"id": i, "engine_ids": ids, "trainer_ids": ids[:8]}
        for i, ids in enumerate(([BOS, *TEXT], [BOS, *reversed(TEXT)], [BOS, *TEXT, *TEXT]))
    ]
    assert [f.code for f in compare_prompts(pairs, BOS)] == ["prompt-cut"] * 3


def test_one_id_more_may_be_eos_where_eos_is_not_known() -> None:
    found = one([*TEXT, EOS], TEXT, eos=None)
    assert "EOS is appended on the other side" in found.rivals


# forms


def test_token_records_and_numpy_ids() -> None:
    sides = {"engine": np.array([BOS, BOS, *TEXT]), "trainer": np.array([BOS, *TEXT])}
    record = TokenRecord("r7", sides=sides)  # type: ignore[arg-type]
    (found,) = compare_prompts([record], BOS)
    assert found.place == "prompt r7, engine, token 1"


def test_a_tokenizer_shows_tokens_and_knows_its_eos() -> None:
    tiny = open_tokenizer("tiny")
    ids = tiny.encode(["<|im_start|>user\nhi<|im_end|>"])[0]
    eos = tiny.special_ids()["eos"]
    assert eos is not None
    (found,) = compare_prompts([{"engine_ids": ids, "trainer_ids": [*ids, eos]}], tokenizer=tiny)
    assert found.evidence["kind"] == "eos-appended"
    assert found.evidence["texts"]["trainer"][-1] == "<|endoftext|>"


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        ({"id": 1, "engine_ids": [1]}, "prompt 1: trainer_ids: got NoneType, wanted a list of token ids"),
        ({"id": 1, "engine_ids": "12", "trainer_ids": [1]}, "engine_ids: got str"),
        ({"id": 1, "engine_ids": [1, -5], "trainer_ids": [1]}, r"engine_ids\[1\]: got -5"),
        ({"id": 1, "engine_ids": [1, 2.0], "trainer_ids": [1]}, r"engine_ids\[1\]: got 2.0"),
        ({"id": 1, "engine_ids": [True], "trainer_ids": [1]}, "got True"),
        ({"id": 1, "engine_ids": [1], "trainer_ids": [1], "bos_token_id": "<s>"}, "bos_token_id: got '<s>'"),
    ],
)
def test_what_is_no_pair_is_refused_in_one_line(pair: dict[str, Any], says: str) -> None:
    with pytest.raises(ContentError, match=says) as caught:
        compare_prompts([pair], BOS)
    assert "\n" not in str(caught.value)


# properties

IDS = st.lists(st.integers(0, 6), max_size=12)


@given(IDS, IDS, st.none() | st.integers(0, 6))
def test_a_difference_is_always_a_failure_and_equality_never(a: list[int], b: list[int], bos: int | None) -> None:
    found = judged(a, b, bos=bos)
    assert any(f.severity is Severity.FAIL for f in found) == (a != b)
    if bos is None:
        assert all(f.code != "double-bos" for f in found)


@given(IDS, IDS)
def test_the_sides_are_treated_alike(a: list[int], b: list[int]) -> None:
    there, back = judged(a, b), judged(b, a)
    assert [(f.code, f.severity, f.evidence.get("kind")) for f in there] == [
        (f.code, f.severity, f.evidence.get("kind")) for f in back
    ]


def test_special_tokens_in_front_of_one_side_are_no_cut():
    tiny = open_tokenizer("tiny")
    eos = tiny.special_ids()["eos"]
    found = one([eos, *TEXT], TEXT, bos=None, eos=None, tokenizer=tiny)
    assert (found.code, found.evidence["kind"], found.evidence["missing_ids"]) == (
        "prompt-ids-differ",
        "special-in-front",
        [eos],
    )
    assert one([50, *TEXT], TEXT, bos=None, eos=None, tokenizer=tiny).code == "prompt-cut"
