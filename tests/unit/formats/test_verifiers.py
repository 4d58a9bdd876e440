"""verifiers' rollouts: steps that are joined where they extend each other, and paths through a tree of messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dump_samples import PROMPT, REPLY, SAMPLER, broken, lines, only, read_dump, scored, settled
from dump_samples import verifiers_row as row
from onepolicy.audit import audit, sides_of
from onepolicy.formats.base import RawRecord, TextRecord
from onepolicy.formats.detect import detect

#: A trace and an episode with the same trace, written by `to_record` of verifiers 0.4.0.
TRACES = Path(__file__).parent / "data" / "verifiers_traces.jsonl"


def test_steps_that_extend_each_other_are_one_record(tmp_path: Path) -> None:
    path = lines(tmp_path / "step_3" / "train_rollouts.jsonl", [row()])
    record = only(path)
    assert detect([path]).formats == ("verifiers",)
    assert record.token_ids.tolist() == [*PROMPT, *REPLY, 40, 41, 50, 51] and record.prompt_length == 3
    result = settled([record])
    assert scored(result, "sampler") == [None, None, None, *SAMPLER, None, None, -1.0, -3.0]
    assert result.rollouts is not None
    assert result.rollouts.drawn.tolist() == [False] * 3 + [True] * 4 + [False] * 2 + [True] * 2
    assert result.rollouts.tokens["loss_mask"].values.tolist() == result.rollouts.drawn.tolist()
    facts = {
        k: result.rollouts.record(k, 0) for k in ("record_id", "group_id", "step", "env_id", "reward", "temperature")
    }
    assert facts == {
        "record_id": "t5",
        "group_id": "8",
        "step": 3,
        "env_id": "math",
        "reward": 0.5,
        "temperature": 0.75,
    }
    assert record.columns["advantages"].values[3] == 0.25 and record.place.endswith("jsonl:1, steps 0, 1")


def changed(**tokens: Any) -> dict[str, Any]:
    """The row with other `tokens` of its second step."""
    out = row()
    out["trajectory"][1]["tokens"] |= tokens
    return out


def test_a_step_that_extends_none_is_a_record_of_its_own(tmp_path: Path) -> None:
    """The history was rendered anew: one id of the reply differs."""
    path = lines(tmp_path / "r.jsonl", [changed(prompt_ids=[*PROMPT, 21, 22, 99, 24, 40, 41])])
    _, items = read_dump(path)
    first, second = items
    assert isinstance(first, RawRecord) and isinstance(second, RawRecord)
    assert first.token_ids.tolist() == PROMPT + REPLY
    assert second.token_ids.tolist() == [*PROMPT, 21, 22, 99, 24, 40, 41, 50, 51] and second.prompt_length == 9
    assert [x.facts["record_id"] for x in (first, second)] == ["t5/0", "t5/1"]
    assert first.facts["trajectory_id"] == second.facts["trajectory_id"] and second.facts["turn"] == 1
    assert second.place.endswith("step 1 (extends no step before it)")


def test_the_longest_text_that_a_prompt_begins_with_is_extended(tmp_path: Path) -> None:
    """A side branch between two turns does not break the conversation."""
    whole = row()
    main, last = whole["trajectory"]
    aside = json.loads(json.dumps(main))
    aside["tokens"] |= {"prompt_ids": [70, 71], "prompt_mask": [0, 0]}
    whole["trajectory"] = [main, aside, last]
    _, items = read_dump(lines(tmp_path / "r.jsonl", [whole]))
    ids = [x.token_ids.tolist() for x in items if isinstance(x, RawRecord)]
    assert ids == [[*PROMPT, *REPLY, 40, 41, 50, 51], [70, 71, *REPLY]]
    assert items[0].place.endswith("steps 0, 2")


def test_masked_tokens_are_drawn_if_the_engine_has_a_value_of_them(tmp_path: Path) -> None:
    tokens = {"completion_ids": [50, 51, 52], "completion_mask": [1, 0, 0], "completion_logprobs": [-1.0, -3.0, 0.0]}
    result = settled([only(lines(tmp_path / "r.jsonl", [changed(**tokens)]))])
    assert result.rollouts is not None
    assert result.rollouts.drawn.tolist()[-3:] == [True, True, False]
    assert result.rollouts.tokens["loss_mask"].values.tolist()[-3:] == [True, False, False]
    assert scored(result, "sampler")[-3:] == [-1.0, -3.0, None]


def test_rollouts_and_steps_without_ids_are_text(tmp_path: Path) -> None:
    bare, half = row(), row()
    for step in bare["trajectory"]:
        step["tokens"] = None
    half["trajectory"][1]["tokens"] = None
    _, items = read_dump(lines(tmp_path / "r.jsonl", [bare, half]))
    assert [type(x) for x in items] == [TextRecord, RawRecord, TextRecord]
    assert isinstance(items[0], TextRecord) and items[0].texts["messages"][0]["content"] == "2+2?"
    assert isinstance(items[2], TextRecord) and items[2].why == "step 1 has no token ids"


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ({"completion_logprobs": [-1.0]}, "step 1: 'completion_logprobs': got 1 values, wanted 2, one a completion id"),
        ({"completion_mask": [1]}, "step 1: 'completion_mask': got 1 values, wanted 2"),
        ({"completion_mask": [1, 7]}, "step 1: position 1: got 7, wanted 0 or 1"),
        ({"prompt_ids": None}, "step 1: no 'prompt_ids'"),
        ({"completion_ids": [50, "x"]}, "step 1: 'completion_ids': position 1: got 'x', wanted a token id"),
    ],
)
def test_steps_that_contradict_themselves(tmp_path: Path, tokens: dict[str, Any], says: str) -> None:
    (found,) = broken(lines(tmp_path / "r.jsonl", [changed(**tokens)]))
    assert says in found.why


# the tree of messages


def test_paths_of_a_trace_written_by_verifiers() -> None:
    found, items = read_dump(TRACES)
    result = settled(items)
    assert found.formats == ("verifiers",) and len(items) == 4 and not result.aside
    whole, summary = [x for x in items[:2] if isinstance(x, RawRecord)]
    assert whole.token_ids.tolist() == [1, 2, 11, 12, 9, 21, 22, 31, 32, 9, 23, 24] and whole.prompt_length == 5
    assert scored(result, "sampler", 0) == [*[None] * 5, -0.5, -1.25, None, None, None, -0.125, -2.0]
    assert scored(result, "current", 0) == [*[None] * 5, -0.75, -1.0, None, None, None, -0.25, -2.5]
    assert whole.facts["reward"] == 0.5 and whole.facts["group_id"] == "add-1"  # a score times its weight
    assert summary.token_ids.tolist() == [1, 2, 11, 12, 9, 21, 22, 41, 9, 25]
    assert result.rollouts is not None  # the turn that both paths share is drawn once
    assert result.rollouts.drawn[result.rollouts.sequence(1)].tolist() == [*[False] * 9, True]
    assert scored(result, "sampler", 1)[5:7] == [-0.5, -1.25]


def test_an_episode_tells_of_its_run() -> None:
    record = read_dump(TRACES)[1][2]
    assert isinstance(record, RawRecord)
    told = {k: record.facts[k] for k in ("run_id", "step", "group_id", "env_id", "trajectory_id", "record_id")}
    assert told == {"run_id": "run9", "step": 7, "group_id": "g7", "env_id": "add-env", "trajectory_id": "t1",
                    "record_id": "t1/0"}  # fmt: skip
    assert record.columns["policy_version"].values[5] == 3


def trace(**changed: Any) -> dict[str, Any]:
    return json.loads(TRACES.read_text().splitlines()[0]) | changed


def test_sampling_of_the_calls_where_they_agree(tmp_path: Path) -> None:
    calls = [{"node": 2, "sampling": {"temperature": 1.0}}, {"node": 4, "sampling": {"temperature": 1.0}}]
    calls += [{"node": 6, "sampling": {"temperature": 0.5}}]
    _, items = read_dump(lines(tmp_path / "r.jsonl", [trace(calls=calls)]))
    heats = [x.facts.get("temperature") for x in items if isinstance(x, RawRecord)]
    assert heats == [1.0, None]  # the second path holds calls of both


def test_a_trace_without_ids_is_text(tmp_path: Path) -> None:
    nodes = [{**node, "token_ids": [], "mask": [], **dict.fromkeys(_LISTS)} for node in trace()["nodes"]]
    _, (item,) = read_dump(lines(tmp_path / "r.jsonl", [trace(nodes=nodes)]))
    assert isinstance(item, TextRecord) and item.texts["messages"][0] == {"role": "system", "content": "s"}


_LISTS = ("logprobs", "trainer_logprobs", "entropies", "advantages")


@pytest.mark.parametrize(
    ("k", "node", "says"),
    [
        (2, {"parent": 4}, "node 2: 'parent': got 4, wanted a node before it"),
        (2, {"parent": 2}, "node 2: 'parent': got 2, wanted a node before it"),
        (2, {"logprobs": [-1.0]}, "node 2: 'logprobs': got 1 values, wanted 2, one for each sampled token"),
        (2, {"mask": [True]}, "node 2: 'mask': got 1 values, wanted 3"),
    ],
)
def test_nodes_that_contradict_themselves(tmp_path: Path, k: int, node: dict[str, Any], says: str) -> None:
    row = trace()
    row["nodes"][k] |= node
    (found,) = broken(lines(tmp_path / "r.jsonl", [row]))
    assert says in found.why


def test_an_audit_of_traces_has_both_sides(tmp_path: Path) -> None:
    assert sides_of(detect([TRACES]).shards) == ("sampler", "current")
    codes = {f.code for f in audit([lines(tmp_path / "r.jsonl", [trace(id=f"t{i}") for i in range(3)])]).findings}
    assert not {"missing-logprobs", "length-mismatch", "records-unreadable", "filled-logprob"} & codes
