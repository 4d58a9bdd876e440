"""What engines say of tokens that they were given: of prompts, and of whole texts that are scored again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dump_samples import OLD, PROMPT, REPLY, SAMPLER, broken, lines, only, read_dump, scored, settled, sglang_answer
from dump_samples import vllm_completion as completion
from onepolicy.align import align
from onepolicy.audit import audit, sides_of
from onepolicy.check import compare_rollouts
from onepolicy.convert import convert
from onepolicy.formats.base import RawRecord, TextRecord
from onepolicy.formats.detect import detect
from onepolicy.storage import read as read_file

GIVEN = [None, -3.0, -4.0]
AGAIN = [None, -3.0, -4.0, *OLD]
NONE = [None] * 4
BY_VLLM = Path(__file__).parent / "data" / "vllm_prompts.jsonl"


def entries(ids: list[int], values: list[Any]) -> list[Any]:
    """vLLM's `prompt_logprobs` with one more token a position, the likeliest first."""
    return [None if x is None else {"999": {"logprob": -0.1}, str(i): {"logprob": x, "rank": 2}} for i, x in
            zip(ids, values, strict=True)]  # fmt: skip


def made_by_vllm() -> dict[str, Any]:
    """`data/vllm_prompts.jsonl`: requests, and what vLLM 0.32's server class makes of an engine's output for each."""
    _, items = read_dump(BY_VLLM)
    names = [json.loads(line)["custom_id"] for line in BY_VLLM.read_text().splitlines()]
    return dict(zip(names, items, strict=True))


@pytest.mark.parametrize("name", ["sampled with prompt_logprobs", "echo", "echo, ids as text"])
def test_a_sampled_reply_keeps_its_values_and_the_prompt_has_a_scoring_of_its_own(name: str) -> None:
    record = made_by_vllm()[name]
    assert isinstance(record, RawRecord)
    result = settled([record])
    assert scored(result, "sampler") == [None, None, None, *SAMPLER]
    assert scored(result, "prompt") == [*GIVEN, *NONE]
    assert result.rollouts is not None and result.rollouts.drawn.tolist() == [False] * 3 + [True] * 4
    assert result.rollouts.token_ids.tolist() == PROMPT + REPLY and not result.kept_faults
    assert result.rollouts.scorings["prompt"].semantics == "raw"


@pytest.mark.parametrize(
    "name",
    [
        "scored again, max_tokens 1",
        "scored again, echo, max_tokens 0",
        "scored again, echo, max_tokens 1",
        "scored again, generate",
    ],
)
def test_a_text_that_is_scored_again_is_one_scoring_and_nothing_is_drawn(name: str) -> None:
    record = made_by_vllm()[name]
    result = settled([record])
    assert scored(result, "prompt") == AGAIN and list(record.columns) == ["prompt_logprobs"]
    assert result.rollouts is not None and not result.rollouts.drawn.any() and not result.kept_faults
    assert result.rollouts.token_ids.tolist() == PROMPT + REPLY
    assert record.facts["record_id"] == name and "temperature" not in record.facts


def test_texts_of_an_echo() -> None:
    whole = made_by_vllm()["scored again, echo, max_tokens 1"].texts
    assert (whole["prompt_text"], whole["reply_text"]) == ("<11><12><13><21><22><23><24>", "<7>")
    with_ids = made_by_vllm()["echo"].texts  # vLLM leaves the prompt out of the text then
    assert "prompt_text" not in with_ids and with_ids["reply_text"] == "<21><22><23><24>"
    assert with_ids["token_strings"] == ["<21>", "<22>", "<23>", "<24>"]


def test_offline_outputs_and_entries_that_are_numbers(tmp_path: Path) -> None:
    row = {"request_id": "5", "prompt_token_ids": PROMPT, "prompt_logprobs": [None, {"12": -3.0}, {"13": -4.0}]}
    outputs = [{"token_ids": REPLY, "logprobs": [{str(i): x} for i, x in zip(REPLY, SAMPLER, strict=True)]}]
    result = settled([only(lines(tmp_path / "a.jsonl", [{**row, "outputs": outputs}]))])
    assert scored(result, "prompt") == [*GIVEN, *NONE] and scored(result, "sampler")[3:] == SAMPLER


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([None, {"12": {"logprob": -3.0}}], "'prompt_logprobs': got 2 entries, wanted 3, one for each prompt token"),
        ([None, {"12": {"logprob": -3.0}}, {"14": {"logprob": -1.0}}], "position 2: no value of the prompt's token 13"),
        ([None, -3.0, -4.0], "position 1: got -3.0, wanted {id: {'logprob': ...}}"),
        ("x", "wanted a list"),
    ],
)
def test_prompt_logprobs_of_another_prompt(tmp_path: Path, given: Any, says: str) -> None:
    (found,) = broken(lines(tmp_path / "a.jsonl", [completion(prompt_logprobs=given)]))
    assert says in found.why


def test_without_the_prompts_ids_its_values_have_no_place(tmp_path: Path) -> None:
    row = completion(prompt_token_ids=None, prompt_logprobs=entries(PROMPT, GIVEN))
    record = only(lines(tmp_path / "a.jsonl", [row]))
    assert not record.prompt_known and "prompt_logprobs" not in record.columns
    assert scored(settled([record]), "sampler") == [None, *SAMPLER]


def echo(logprobs: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """After OpenAI's documentation of `echo`: no ids, the prompt in the text."""
    choice = {"index": 0, "text": "ab c", "finish_reason": "length", "logprobs": logprobs}
    return {"id": "c", "object": "text_completion", "choices": [choice], **changed}


def test_an_echo_of_openai_is_cut_by_usage_or_by_the_requests_text(tmp_path: Path) -> None:
    logprobs = {"tokens": ["a", "b", " c"], "token_logprobs": [None, -1.0, -2.0], "text_offset": [0, 1, 2]}
    rows = [echo(logprobs, usage={"prompt_tokens": 2, "completion_tokens": 1})]
    rows += [{"request": {"prompt": "ab", "max_tokens": 9}, "response": echo(logprobs)}]
    _, items = read_dump(lines(tmp_path / "a.jsonl", rows))
    for item in items:
        assert isinstance(item, TextRecord) and "no token ids" in item.why
        assert item.texts == {"prompt_text": "ab", "reply_text": " c", "token_strings": [" c"]}


def test_an_echo_whose_prompt_ends_nowhere(tmp_path: Path) -> None:
    logprobs = {"tokens": ["token_id:11", "token_id:12"], "token_logprobs": [None, -1.0]}
    (found,) = broken(lines(tmp_path / "a.jsonl", [echo(logprobs)]))
    assert "an echoed prompt, and neither prompt_token_ids, usage nor the request tells where it ends" in found.why
    row = completion(logprobs={"tokens": ["x"] * 6, "token_logprobs": [None, *[-1.0] * 5]})
    (found,) = broken(lines(tmp_path / "b.jsonl", [row]))
    assert "got 6 values, wanted 3 of the prompt and 4 of the reply" in found.why


def test_a_reply_whose_first_value_is_null_is_no_echo(tmp_path: Path) -> None:
    logprobs = {"tokens": list("abcd"), "token_logprobs": [None, *SAMPLER[1:]]}
    record = only(lines(tmp_path / "a.jsonl", [completion(logprobs=logprobs)]))
    assert scored(settled([record]), "sampler") == [None, None, None, None, *SAMPLER[1:]]
    assert "prompt_logprobs" not in record.columns


# one token: a reply, or what a scoring has to draw?


def one_token(**changed: Any) -> dict[str, Any]:
    logprobs = {"tokens": ["a"], "token_logprobs": [-0.5]}
    values = {
        "token_ids": [21],
        "logprobs": logprobs,
        "prompt_logprobs": entries(PROMPT, GIVEN),
        "finish_reason": "stop",
    }
    return completion(**(values | changed)) | {"usage": {"prompt_tokens": 3, "completion_tokens": 1}}


@pytest.mark.parametrize(
    ("request_", "changed", "again"),
    [
        ({}, {}, False),  # it ended by itself
        ({}, {"finish_reason": "length"}, True),
        ({"max_tokens": 1}, {}, True),
        ({"max_tokens": 64}, {"finish_reason": "length"}, False),  # the context was full
        ({}, {"logprobs": None}, True),  # one token without a value is no loss
        ({}, {"prompt_logprobs": None, "finish_reason": "length"}, False),  # the prompt has no values
    ],
)
def test_one_token(tmp_path: Path, request_: dict[str, Any], changed: dict[str, Any], again: bool) -> None:
    record = only(lines(tmp_path / "a.jsonl", [{"request": request_, "response": one_token(**changed)}]))
    assert record.token_ids.tolist() == (PROMPT if again else [*PROMPT, 21])
    assert ("sampler_logprobs" in record.columns) is not again


def test_several_short_replies_to_one_prompt_are_replies(tmp_path: Path) -> None:
    row = one_token(finish_reason="length")
    row["choices"] = [row["choices"][0], {**row["choices"][0], "index": 1}]
    _, items = read_dump(lines(tmp_path / "a.jsonl", [row]))
    assert [x.token_ids.tolist() for x in items if isinstance(x, RawRecord)] == [[*PROMPT, 21]] * 2


# SGLang


def test_sglang_prompt_and_reply(tmp_path: Path) -> None:
    result = settled([only(lines(tmp_path / "a.jsonl", [sglang_answer()]))])
    assert scored(result, "prompt") == [*GIVEN, *NONE] and scored(result, "sampler") == [None, None, None, *SAMPLER]
    assert result.rollouts is not None and result.rollouts.scorings["prompt"].semantics is None


def triples(values: list[Any]) -> list[Any]:
    return [[x, i, None] for x, i in zip(values, (PROMPT + REPLY)[-len(values) :], strict=True)]


@pytest.mark.parametrize(
    "answer",
    [
        {"input_token_logprobs": triples(AGAIN), "output_token_logprobs": [], "completion_tokens": 0},
        {"input_token_logprobs": triples(AGAIN), "output_token_logprobs": [[-0.1, 7, None]], "completion_tokens": 1},
    ],
)
def test_sglang_scores_a_text_again(tmp_path: Path, answer: dict[str, Any]) -> None:
    row = sglang_answer(prompt_tokens=7, finish_reason={"type": "length", "length": 1}, **answer)
    row["output_ids"] = [x[1] for x in answer["output_token_logprobs"]]
    record = only(lines(tmp_path / "a.jsonl", [row]))
    assert scored(settled([record]), "prompt") == AGAIN and list(record.columns) == ["prompt_logprobs"]


def test_sglang_from_a_later_start_needs_the_requests_ids(tmp_path: Path) -> None:
    row = sglang_answer(prompt_tokens=7, input_token_logprobs=triples([None, *OLD]), output_token_logprobs=[])
    row["output_ids"] = []
    request = {"input_ids": PROMPT + REPLY, "sampling_params": {"max_new_tokens": 0}}
    record = only(lines(tmp_path / "a.jsonl", [{"request": request, "response": row}]))
    assert scored(settled([record]), "prompt") == [None, None, None, *OLD]
    request["input_ids"] = [*PROMPT, 5, 5, 5, 5]
    (found,) = broken(lines(tmp_path / "b.jsonl", [{"request": request, "response": row}]))
    assert "'input_token_logprobs', position 1: got a value of token 21, but the prompt has 5 there" in found.why


# all the way


def test_a_scoring_of_the_same_tokens_is_compared_with_the_sampled_ones(tmp_path: Path) -> None:
    sampled = lines(tmp_path / "sampled.jsonl", [completion(), completion()])
    again = [{"request": {"max_tokens": 1}, "response": one_token(
        prompt_token_ids=PROMPT + REPLY, prompt_logprobs=entries(PROMPT + REPLY, AGAIN)
    ) | {"usage": {"prompt_tokens": 7, "completion_tokens": 1}}}] * 2  # fmt: skip
    convert([sampled], tmp_path / "a.parquet")
    convert([lines(tmp_path / "again.jsonl", again)], tmp_path / "b.parquet")
    a, b = read_file(tmp_path / "a.parquet"), read_file(tmp_path / "b.parquet")
    pairs = align(a, "sampler", "prompt", other=b)
    gaps = (pairs.b - pairs.a)[pairs.drawn].tolist()
    assert gaps == [y - x for x, y in zip(SAMPLER, OLD, strict=True)] * 2
    assert {f.code for f in compare_rollouts(a, b, ("sampler", "prompt"), bounds="bf16").findings} <= {
        "semantics-undeclared",
        "too-few-clusters",
        "not-covered",
    }


def test_an_audit_does_not_hold_the_prompt_against_the_reply(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [completion(prompt_logprobs=entries(PROMPT, GIVEN)) for _ in range(4)])
    assert sides_of(detect([path]).shards) == ("sampler", None)
    assert "one-side-only" in {f.code for f in audit([path]).findings}
    assert sides_of(detect([path]).shards, (None, "prompt")) == ("sampler", "prompt")  # where it is asked for
