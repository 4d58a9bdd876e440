"""Engine answers: after the layouts of vLLM 0.32's protocol classes, SGLang's and OpenAI's documentation."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dump_samples import PROMPT, REPLY, SAMPLER, broken, lines, only, read_dump, scored, settled, sglang_answer
from dump_samples import vllm_completion as completion
from onepolicy.formats.base import RawRecord, TextRecord
from onepolicy.formats.engine_parts import routes

NONE = [None] * len(PROMPT)


def npy(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def test_vllm_completion(tmp_path: Path) -> None:
    record = only(lines(tmp_path / "a.jsonl", [completion()]))
    assert scored(settled([record]), "sampler") == [*NONE, *SAMPLER]
    assert record.facts["cached_prefix_length"] == 2 and record.facts["finish_reason"] == "length"
    assert record.claims == {"reply": 4, "prompt": 3}
    assert "logprob_semantics" not in record.facts  # the answer does not tell


def test_answers_written_by_vllm_itself() -> None:
    """`data/vllm_answers.jsonl`: the response classes of vLLM 0.32 with these numbers, each as its JSON."""
    found, items = read_dump(Path(__file__).parent / "data" / "vllm_answers.jsonl")
    result = settled(items)
    assert found.formats == ("engine",) and not result.aside and not result.kept_faults
    assert [scored(result, "sampler", i) for i in range(3)] == [[*NONE, *SAMPLER]] * 3
    generate = items[0]
    assert isinstance(generate, RawRecord) and generate.columns["policy_version"].values.tolist() == [4] * 4
    assert generate.lists["sampling_mask"][0][3].tolist() == [24, 1]


def test_how_it_was_asked_stands_beside_the_answer(tmp_path: Path) -> None:
    request = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "logprobs_mode": "processed_logprobs", "prompt": PROMPT}
    answer = completion(prompt_token_ids=None)
    record = only(lines(tmp_path / "a.jsonl", [{"custom_id": "c7", "request": request, "response": {"body": answer}}]))
    told = {k: record.facts[k] for k in ("temperature", "top_p", "top_k", "logprob_semantics")}
    assert told == {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "logprob_semantics": "processed"}
    assert record.token_ids.tolist() == PROMPT + REPLY and record.prompt_length == 3


def test_ids_spelled_as_tokens(tmp_path: Path) -> None:
    logprobs = {"tokens": [f"token_id:{i}" for i in REPLY], "token_logprobs": SAMPLER}
    record = only(lines(tmp_path / "a.jsonl", [completion(token_ids=None, logprobs=logprobs)]))
    assert record.token_ids.tolist() == PROMPT + REPLY


def test_generate_endpoint(tmp_path: Path) -> None:
    experts = np.arange(6 * 2 * 2).reshape(6, 2, 2).astype(np.uint8)
    choice = {
        "index": 0,
        "token_ids": REPLY,
        "logprobs": {"content": [{"token_id": i, "logprob": lp} for i, lp in zip(REPLY, SAMPLER, strict=True)]},
        "sampling_mask": [[21, 5], [22], [23], [24, 1, 2]],
        "routed_experts": npy(experts),
        "weight_versions": [{"version": "4", "start": 0, "end": 3}, {"version": "5", "start": 3, "end": 4}],
    }
    row = {"request_id": "q", "output_mode": "tokens", "prompt_token_ids": PROMPT, "choices": [choice]}
    record = only(lines(tmp_path / "a.jsonl", [row]))
    result = settled([record])
    assert scored(result, "sampler") == [*NONE, *SAMPLER]
    assert result.rollouts.tokens["policy_version"].values.tolist()[3:] == [4, 4, 4, 5]  # type: ignore[union-attr]
    kept = result.rollouts.lists["sampling_mask"]  # type: ignore[union-attr]
    assert [kept.row(i).tolist() for i in (3, 6)] == [[21, 5], [24, 1, 2]]
    taken = result.rollouts.lists["routed_experts"]  # type: ignore[union-attr]
    assert taken.row(1).tolist() == [0, 1, 2, 3] and taken.row(6).tolist() == [20, 21, 22, 23]


def test_several_choices_are_a_group(tmp_path: Path) -> None:
    row = completion()
    row["choices"] = [row["choices"][0], {**row["choices"][0], "index": 1}]
    _, items = read_dump(lines(tmp_path / "a.jsonl", [row]))
    facts = [x.facts for x in items if isinstance(x, RawRecord)]
    assert [f["record_id"] for f in facts] == ["cmpl-1#0", "cmpl-1#1"] and {f["group_id"] for f in facts} == {"cmpl-1"}
    assert not settled(items).kept_faults  # usage counts all of them


def test_offline_outputs_by_sampled_id(tmp_path: Path) -> None:
    entries = [{str(i): {"logprob": lp}, "999": {"logprob": -0.01}} for i, lp in zip(REPLY, SAMPLER, strict=True)]
    row = {"request_id": "5", "prompt_token_ids": PROMPT, "outputs": [{"token_ids": REPLY, "logprobs": entries}]}
    assert scored(settled([only(lines(tmp_path / "a.jsonl", [row]))]), "sampler") == [*NONE, *SAMPLER]


def test_sglang(tmp_path: Path) -> None:
    record = only(lines(tmp_path / "a.jsonl", [sglang_answer()]))
    assert scored(settled([record]), "sampler") == [*NONE, *SAMPLER] and record.prompt_known
    assert record.facts["finish_reason"] == "stop" and record.facts["cached_prefix_length"] == 1
    assert record.columns["policy_version"].values.tolist() == [12] * 4


def test_sglang_without_the_whole_prompt_keeps_the_reply(tmp_path: Path) -> None:
    record = only(lines(tmp_path / "a.jsonl", [sglang_answer(input_token_logprobs=None)]))
    assert not record.prompt_known and record.token_ids.tolist() == REPLY
    assert scored(settled([record]), "sampler") == [None, *SAMPLER]


def test_sglang_that_contradicts_itself(tmp_path: Path) -> None:
    triples = [[lp, i + 1, None] for lp, i in zip(SAMPLER, REPLY, strict=True)]
    (found,) = broken(lines(tmp_path / "a.jsonl", [sglang_answer(output_token_logprobs=triples)]))
    assert "of other tokens than output_ids: position 0 has 22 and 21" in found.why
    (fault,) = settled(read_dump(lines(tmp_path / "b.jsonl", [sglang_answer(completion_tokens=9)]))[1]).kept_faults
    assert (fault.column, fault.got, fault.wanted) == ("reply", 4, 9)


def test_sglang_log_probs_over_the_kept_tokens(tmp_path: Path) -> None:
    kept = {
        "output_token_sampling_mask": [[21], [22, 3], [23], [24]],
        "output_token_sampling_logprobs": [0, -0.5, 0, 0],
    }
    record = only(lines(tmp_path / "a.jsonl", [sglang_answer(**kept)]))
    result = settled([record])
    assert scored(result, "sampler")[3:] == [0.0, -0.5, 0.0, 0.0] and scored(result, "full")[3:] == SAMPLER
    assert record.facts["logprob_semantics"] == "processed"
    assert record.lists["sampling_mask"][0][1].tolist() == [22, 3]


def test_sglang_experts_as_int32(tmp_path: Path) -> None:
    text = base64.b64encode(np.arange(12, dtype="<i4").tobytes()).decode()
    record = only(lines(tmp_path / "a.jsonl", [sglang_answer(routed_experts=text)]))
    rows, layout = record.lists["routed_experts"]
    assert layout == "next" and [x.tolist() for x in rows[:2]] == [[0, 1], [2, 3]]


def test_openai_chat_has_no_ids(tmp_path: Path) -> None:
    content = [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}]
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "logprobs": {"content": content}}
    row = {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice]}
    _, (item,) = read_dump(lines(tmp_path / "a.jsonl", [row]))
    assert isinstance(item, TextRecord) and "no token ids" in item.why
    assert item.texts == {"reply_text": "Hi", "token_strings": ["Hi"]}


def test_array_in_a_file_and_an_error_among_answers(tmp_path: Path) -> None:
    rows = [completion(), {"error": {"message": "too long"}, "choices": None}, completion()]
    path = tmp_path / "answers.json"
    path.write_text(json.dumps(rows, indent=1))
    _, items = read_dump(path)
    assert [type(x).__name__ for x in items] == ["RawRecord", "BrokenRecord", "RawRecord"]
    assert items[1].place == f"{path}[1]" and "an error, no answer" in items[1].why  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("%%%", "not base64"),
        (npy(np.zeros((6, 2), dtype=np.float32)), "wanted whole numbers"),
        (npy(np.zeros((6, 2), dtype=np.int32))[:-8], "wanted whole numbers"),
        (npy(np.array([[{}]], dtype=object)), "wanted whole numbers"),  # a pickle inside: never loaded
        (base64.b64encode(b"12345").decode(), "no int32 for 6 tokens"),
        (base64.b64encode(b"\x93NUMPY\x01\x00garbage").decode(), "no .npy"),
    ],
)
def test_routes_that_are_none(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        routes(text, 7)
