"""Records of any spelling, from files of any size and any brokenness."""

from __future__ import annotations

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepolicy import storage
from onepolicy.errors import ContentError, UsageError
from onepolicy.records import from_records
from onepolicy.storage import jsonl
from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.reading import NAMED, RecordStream
from onepolicy.tokens.spellings import SHAPES, SPELLINGS, record_of


def read(*rows: Any) -> list[TokenRecord]:
    return list(RecordStream(rows).records())


def file_of(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("key", ["prompt_ids", "prompt_token_ids", "prompt", "prompts"])
def test_prompt_ids_under_every_name(key: str) -> None:
    assert read({key: [1, 2]})[0].prompt_ids == [1, 2]


@pytest.mark.parametrize(
    "key",
    ["response_ids", "completion_ids", "completion_token_ids", "output_ids", "output_token_ids", "responses", "tokens"],
)
def test_reply_ids_under_every_name(key: str) -> None:
    assert read({key: [1, 2]})[0].reply_ids == [1, 2]


@pytest.mark.parametrize("key", ["response_text", "completion", "output", "response", "text", "reply_text"])
def test_reply_text_under_every_name(key: str) -> None:
    assert read({key: "hi"})[0].reply_text == "hi"


def test_the_shape_of_a_value_tells_what_a_prompt_is() -> None:
    chat = [{"role": "user", "content": "hi"}]
    text, messages, ids = read({"prompt": "hi"}, {"prompt": chat}, {"prompt": [5]})
    assert (text.prompt_text, messages.messages, ids.prompt_ids) == ("hi", chat, [5])
    assert read({"completion": [{"role": "assistant", "content": "ok"}]})[0].reply_text == "ok"
    assert read({"tokens": ["o", "k"]})[0].token_strings == ["o", "k"]


def test_everything_that_a_record_may_say() -> None:
    row = {
        "id": 7,
        "prompt_ids": (1, 2),
        "response_ids": np.array([3, 4]),
        "response_text": "ok",
        "loss_mask": [1, 1],
        "rollout_logprobs": [-0.5, "-inf"],
        "trainer_logprobs": [-0.4, None],
        "finish_reason": {"type": "stop", "matched": 9},
        "stop_token_ids": 9,
        "usage": {"completion_tokens": 2, "cost": 0.1},
        "engine_ids": [1, 2],
        "trainer_ids": [2],
        "turns": [{"prompt_token_ids": [1], "output_ids": [2], "reward": 1}],
        "reward": 0.5,
    }
    (record,) = read(row)
    assert (record.record_id, record.place) == ("7", "record 1")
    assert (record.prompt_ids, record.reply_ids, record.reply_text) == ([1, 2], [3, 4], "ok")
    assert (record.logprobs, record.scorer_logprobs, record.loss_mask) == ([-0.5, "-inf"], [-0.4, None], [1, 1])
    assert (record.finish_reason, record.stop_ids, dict(record.usage)) == ("stop", (9,), {"completion_tokens": 2})
    assert dict(record.sides) == {"engine": [1, 2], "trainer": [2]}
    assert record.turns and (record.turns[0]["prompt_ids"], record.turns[0]["reply_ids"]) == ([1], [2])
    assert record.turns[0]["reward"] == 1
    assert dict(record.extra) == {"reward": 0.5}


def test_the_answer_of_a_completions_server() -> None:
    content = [{"token": "o", "logprob": -0.1, "bytes": [111]}, {"token": "k", "logprob": -0.2, "bytes": [107]}]
    chat, old = read(
        {"logprobs": {"content": content}}, {"logprobs": {"tokens": ["o", "k"], "token_logprobs": [-0.1, -0.2]}}
    )
    for record in (chat, old):
        assert (record.logprobs, record.token_strings) == ([-0.1, -0.2], ["o", "k"])
    assert chat.token_bytes == [[111], [107]]


def test_the_canonical_form_is_prompt_and_reply_in_one() -> None:
    row = {
        "record_id": "a",
        "token_ids": [1, 2, 3, 4],
        "prompt_length": 2,
        "drawn": [0, 0, 1, 1],
        "sampler_logprobs": [None, None, -0.1, -0.2],
        "old_logprobs": [None, None, -0.1, -0.3],
        "loss_mask": [0, 0, 1, 0],
    }
    (record,) = read(row)
    assert (record.prompt_ids, record.reply_ids, record.spans) == ([1, 2], [3, 4], [(2, 4)])
    assert (record.logprobs, record.scorer_logprobs, record.loss_mask) == ([-0.1, -0.2], [-0.1, -0.3], [1, 0])
    (by_flags,) = read({"token_ids": [1, 2, 3], "drawn": [0, 1, 0]})
    assert (by_flags.prompt_ids, by_flags.reply_ids, by_flags.spans) == ([1], [2, 3], [(1, 2)])
    (unknown,) = read({"token_ids": [1, 2, 3]})
    assert (unknown.prompt_ids, unknown.reply_ids) == ([1, 2, 3], None)


def test_a_column_of_another_length_keeps_its_length() -> None:
    (record,) = read({"token_ids": [1, 2, 3, 4], "prompt_length": 2, "sampler_logprobs": [-0.1, -0.2, -0.3]})
    assert record.logprobs == [-0.1, -0.2, -0.3]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_the_canonical_files_give_the_same_records(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"record_id": f"r{k}", "token_ids": [1, 2, 3 + k], "prompt_length": 2, "sampler_logprobs": [None, None, -0.5]}
        | {"finish_reason": "stop", "stop_token_ids": [2, 7], "loss_mask": [0, 0, 1], "prompt_text": "say"}
        for k in range(5)
    ]
    path = tmp_path / f"rollouts{suffix}"
    storage.write(from_records(rows), path)
    records = list(RecordStream(path).records())
    assert [r.record_id for r in records] == [f"r{k}" for k in range(5)]
    assert [(r.prompt_ids, r.reply_ids) for r in records] == [([1, 2], [3 + k]) for k in range(5)]
    first = records[0]
    assert (first.logprobs, first.finish_reason, first.stop_ids) == ([-0.5], "stop", (2, 7))
    assert [bool(x) for x in first.loss_mask or ()] == [True]
    assert first.prompt_text == "say"
    assert str(path) in first.place


def test_rollouts_in_memory() -> None:
    rollouts = from_records([{"token_ids": [1, 2, 3], "prompt_length": 1, "old_logprobs": [None, -1.0, -2.0]}])
    (record,) = RecordStream(rollouts).records()
    assert (record.prompt_ids, record.reply_ids, record.scorer_logprobs) == ([1], [2, 3], [-1.0, -2.0])
    assert record.spans == [(1, 3)]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"id": "x", "response_ids": [1, 2.5]}, r"record 'x': 'response_ids', position 1: got 2.5, wanted an integer"),
        ({"response_ids": [1, "2"]}, r"position 1: got '2'"),
        ({"response_ids": [True]}, r"position 0: got True"),
        ({"response_ids": [1, None]}, r"position 1: got None"),
        ({"response_ids": "12"}, r"'response_ids': got '12', wanted a list of numbers"),
        ({"response_ids": 12}, r"'response_ids': got 12"),
        ({"response_text": ["a"]}, r"'response_text': got \['a'\], wanted a text"),
        ({"response_text": "\ud800"}, r"half of a surrogate pair"),
        ({"token_ids": [1], "prompt_length": 5}, r"'prompt_length': got 5, wanted 0 to 1"),
        ({"token_ids": [1], "drawn": [1, 1]}, r"'drawn': got 2 values, wanted 1"),
        ({"token_strings": ["a", 1]}, r"'token_strings', position 1"),
        ({"turns": [{"prompt_ids": ["a"]}]}, r"'turns', turn 0: 'prompt_ids'"),
        ({"spans": [[1, 2, 3]]}, r"'spans': got"),
        ([1, 2], r"got \[1, 2\], wanted an object"),
        ("text", r"got 'text', wanted an object"),
    ],
)
def test_what_cannot_be_read_is_named(row: Any, said: str) -> None:
    stream = RecordStream([row, {"response_ids": [1]}])
    assert [r.reply_ids for r in stream.records()] == [[1]]
    assert stream.n_skipped == 1
    with pytest.raises(ContentError, match=f"record 1: .*{said}"):
        list(RecordStream([row, {"response_ids": [1]}], strict=True))


def test_nulls_say_nothing() -> None:
    (record,) = read({"prompt": None, "response_ids": None, "text": None, "logprobs": None, "usage": None})
    assert (record.prompt_ids, record.reply_ids, record.reply_text, record.logprobs) == (None, None, None, None)


def test_negative_and_large_ids_are_content_not_form() -> None:
    assert read({"response_ids": [-100, 2**70]})[0].reply_ids == [-100, 2**70]


def test_broken_lines_are_skipped_counted_and_named(tmp_path: Path) -> None:
    good = {"response_ids": [1, 2], "response_text": "x"}
    path = file_of(tmp_path / "rollouts.jsonl", good, '{"response_ids": [1', "", good, "[" * 5000, good, "nonsense")
    stream = RecordStream(path)
    records = list(stream.records())
    assert [r.place for r in records] == [f"{path}:{n}" for n in (1, 4, 6)]
    assert (stream.n_records, stream.n_tokens, stream.n_skipped) == (3, 6, 3)
    assert [place.split(": ")[0] for place in stream.skipped] == [f"{path}:{n}" for n in (2, 5, 7)]
    (finding,) = stream.findings()
    assert (finding.code, finding.evidence["skipped"], finding.place) == ("lines-skipped", 3, f"{path}:2")
    with pytest.raises(ContentError, match=f"{path}:2: not JSON"):
        list(RecordStream(path, strict=True))


def test_only_the_first_places_are_kept() -> None:
    stream = RecordStream([{"response_ids": [None]}] * 50 + [{"response_ids": [1]}])
    assert len(list(stream)) == 1
    assert (stream.n_skipped, len(stream.skipped)) == (50, NAMED)


def test_a_line_that_is_too_long_is_read_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE", 100)
    good = {"response_ids": [1]}
    path = file_of(tmp_path / "rollouts.jsonl", good, {"response_ids": list(range(500))}, good)
    stream = RecordStream(path)
    assert [r.place for r in stream.records()] == [f"{path}:1", f"{path}:3"]
    assert "MiB" in stream.skipped[0]


@pytest.mark.parametrize(
    "source", [[], [{"response_ids": ["a"]}], io.BytesIO(b"\n\n")], ids=["none", "broken", "blank"]
)
def test_nothing_to_read_is_an_error(source: Any) -> None:
    with pytest.raises(ContentError, match=r"none of 1 records can be read|no records"):
        list(RecordStream(source))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        list(RecordStream(tmp_path / "none.jsonl"))
    with pytest.raises(UsageError, match="is a folder"):
        list(RecordStream(tmp_path))


def test_records_without_ids_are_counted() -> None:
    stream = RecordStream([{"text": "hi"}, {"response_ids": [1]}])
    assert len(list(stream.records())) == 2
    assert stream.n_without_ids == 1


def test_chunks_are_bounded_in_tokens_and_in_bytes(tmp_path: Path) -> None:
    rows = [{"response_ids": list(range(40))} for _ in range(10)]
    assert [len(c) for c in RecordStream(rows, max_tokens=100)] == [2] * 5
    assert [len(c) for c in RecordStream([{"response_ids": [1] * 500}, *rows], max_tokens=100)] == [1, *[2] * 5]
    path = file_of(tmp_path / "rollouts.jsonl", *({"response_ids": [1], "junk": "x" * 1000} for _ in range(10)))
    assert [len(c) for c in RecordStream(path, max_bytes=3000)] == [2] * 5


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    row = {"response_ids": list(range(2000)), "rollout_logprobs": [-0.25] * 2000, "text": "x" * 4000}

    def peak(n: int) -> int:
        path = file_of(tmp_path / f"{n}.jsonl", *([row] * n))
        tracemalloc.start()
        for _ in RecordStream(path, max_tokens=20_000):
            pass
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(1)
    assert peak(400) < 1.5 * peak(40)


def test_every_field_of_the_table_has_a_shape() -> None:
    assert {field for fields in SPELLINGS.values() for field in fields} == set(SHAPES)
    fields = set(TokenRecord.__dataclass_fields__)
    assert {f for f in SHAPES if not f.startswith("@")} <= fields


def test_the_first_spelling_that_is_not_null_counts() -> None:
    record = record_of({"prompt_ids": None, "prompt_token_ids": [1], "response_ids": [2], "output_ids": [3]}, "x")
    assert (record.prompt_ids, record.reply_ids) == ([1], [2])
    assert dict(record.extra) == {"output_ids": [3]}


def test_messages_as_json_text_as_our_own_files_have_them() -> None:
    messages = [{"role": "user", "content": "Hi."}]
    for key in ("messages", "prompt_messages"):
        (record,) = RecordStream([{"id": "a", key: json.dumps(messages), "response_ids": [1]}]).records()
        assert record.messages == messages
    for broken in ("Hi.", "{}", "[1]", "[" * 100_000):
        with pytest.raises(ContentError, match="wanted a list of objects, or its JSON text"):
            list(RecordStream([{"id": "a", "prompt_messages": broken}], strict=True))


def test_why_a_record_was_left_out_is_said() -> None:
    stream = RecordStream([{"id": "good", "response_ids": [1]}, {"id": "bad", "response_ids": [1, "x"]}])
    assert [r.record_id for r in stream.records()] == ["good"]
    (found,) = stream.findings()
    assert "the first: record 2: record 'bad': 'response_ids', position 1: got 'x'" in found.message


def test_ids_of_two_sides_are_ids() -> None:
    stream = RecordStream([{"id": "a", "engine_prompt_ids": [1, 2], "trainer_prompt_ids": [1]}])
    (record,) = stream.records()
    assert record.sides == {"engine": [1, 2], "trainer": [1]}
    assert (stream.n_without_ids, stream.n_tokens) == (0, 3)


def test_log_probs_in_the_forms_of_engines() -> None:
    vllm = [{"7": {"logprob": -0.5}, "3": {"logprob": -2.0}}, {"8": {"logprob": -0.25}}]
    chat = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]}
    for given in (vllm, chat, [{"7": -0.5}, {"8": -0.25}], {"token_logprobs": [-0.5, -0.25]}):
        (record,) = RecordStream([{"response_ids": [7, 8], "logprobs": given}]).records()
        assert record.logprobs == [-0.5, -0.25]
    (record,) = RecordStream([{"response_ids": [7, 8], "logprobs": [{"1": -0.5}, {"x": None}]}]).records()
    assert record.logprobs is None


def test_what_ended_a_reply_is_a_stop_id_or_a_stop_string() -> None:
    given: list[dict[str, Any]] = [
        {"finish_reason": {"type": "stop", "matched": 2}},
        {"finish_reason": "stop", "stop_reason": 2},
        {"finish_reason": {"type": "stop", "matched": "</answer>"}},
        {"finish_reason": "stop", "stop_reason": None, "stop_token_ids": [2]},
    ]
    records = list(RecordStream([{"response_ids": [7, 2], **row} for row in given]).records())
    assert [r.stop_ids for r in records] == [(2,), (2,), (), (2,)]
    assert {r.finish_reason for r in records} == {"stop"} and records[2].extra["matched_stop"] == "</answer>"


@pytest.mark.parametrize("values", [["x", -1.0], [-1.0, []], [-1.0, "1"]])
def test_log_probs_that_are_no_numbers(values: list[Any]) -> None:
    with pytest.raises(ContentError, match=r"'logprobs', position \d: got .*, wanted a number or null"):
        list(RecordStream([{"response_ids": [1, 2], "logprobs": values}], strict=True))
    (record,) = RecordStream([{"response_ids": [1, 2], "logprobs": ["-inf", "NaN"]}]).records()
    assert record.logprobs == ["-inf", "NaN"]


def test_a_whole_answer_of_a_server_is_one_record() -> None:
    answer = {
        "id": "chatcmpl-1",
        "prompt_token_ids": [5, 6],
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab"},
                "logprobs": {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]},
                "finish_reason": "stop",
                "stop_reason": 8,
                "token_ids": [7, 8],
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 2, "prompt_tokens_details": None},
    }
    (record,) = RecordStream([answer]).records()
    assert (record.record_id, record.prompt_ids, record.reply_ids) == ("chatcmpl-1", [5, 6], [7, 8])
    assert (record.reply_text, record.logprobs, record.stop_ids) == ("ab", [-0.5, -0.25], (8,))
    assert record.usage == {"prompt_tokens": 2, "completion_tokens": 2}
    assert next(RecordStream([{**answer, "choices": answer["choices"] * 2}]).records()).reply_ids is None


def test_tokens_of_prompt_and_reply_with_the_length_of_the_reply() -> None:
    row = {"tokens": [5, 6, 7, 8, 2], "response_length": 3, "loss_mask": [1, 1, 1], "response": "abc", "prompt": "p"}
    (record,) = RecordStream([{**row, "rollout_log_probs": [-0.1, -0.2, -0.3], "status": "completed"}]).records()
    assert (record.prompt_ids, record.reply_ids, record.finish_reason) == ([5, 6], [7, 8, 2], "completed")
    for length in (9, -1, 5):
        assert next(RecordStream([{**row, "response_length": length}]).records()).reply_ids == [5, 6, 7, 8, 2]


def test_turns_that_alone_have_ids_are_records_of_their_own() -> None:
    turns = [
        {"prompt_token_ids": [5], "completion_token_ids": [7, 2], "completion_logprobs": [-0.1, -0.2]},
        {"prompt_token_ids": [5, 7, 2, 6], "completion_token_ids": [8, 2], "finish_reason": "stop"},
    ]
    records = list(RecordStream([{"id": "a", "turns": turns, "stop_token_ids": [2]}]).records())
    assert [r.record_id for r in records] == ["a, turn 0", "a, turn 1"]
    assert [(r.prompt_ids, r.reply_ids) for r in records] == [([5], [7, 2]), ([5, 7, 2, 6], [8, 2])]
    assert (records[0].logprobs, records[1].finish_reason, records[1].stop_ids) == ([-0.1, -0.2], "stop", (2,))
    whole = [{"id": "a", "turns": turns, "prompt_ids": [5], "response_ids": [7, 2, 6, 8, 2]}]
    assert [r.record_id for r in RecordStream(whole).records()] == ["a"]
