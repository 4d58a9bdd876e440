"""prime-rl, NeMo-RL, open-instruct and torchtitan: rows after their documented layouts, numbers by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dump_samples import (
    OLD,
    PROMPT,
    REPLY,
    SAMPLER,
    broken,
    lines,
    nemo_rl_row,
    only,
    open_instruct_row,
    prime_rl_row,
    read_dump,
    scored,
    settled,
    torchtitan_row,
)
from onepolicy.formats.base import BrokenRecord, RawRecord, TextRecord

NONE = [None] * len(PROMPT)


def test_prime_rl_scores_the_current_policy(tmp_path: Path) -> None:
    record = only(lines(tmp_path / "rank_2.jsonl", [prime_rl_row()]))
    result = settled([record])
    assert scored(result, "sampler") == [*NONE, *SAMPLER]  # 0.0 where nothing was sampled is a filler
    assert scored(result, "current") == [None, -3.0, -4.0, *OLD]
    assert "old" not in result.rollouts.scorings  # type: ignore[union-attr]
    assert result.rollouts.drawn.tolist() == [False] * 3 + [True] * 4  # type: ignore[union-attr]
    assert record.facts == {
        "record_id": "step_7/rank_2/5",
        "run_id": None,
        "step": 7,
        "env_id": "math",
        "reward": 1.0,
    }


def test_prime_rl_null_is_kept_and_a_masked_token_that_was_drawn_too(tmp_path: Path) -> None:
    row = prime_rl_row(
        inference_logprobs=[0.0, 0.0, 0.0, -0.5, None, -0.125, 0.0], loss_mask=[False] * 3 + [True, True, False, False]
    )
    result = settled([only(lines(tmp_path / "rank_0.jsonl", [row]))])
    assert scored(result, "sampler") == [*NONE, -0.5, None, -0.125, None]
    assert result.rollouts.drawn.tolist() == [False] * 3 + [True, True, True, False]  # type: ignore[union-attr]


def test_prime_rl_sequences_packed_into_one_record_are_taken_apart(tmp_path: Path) -> None:
    row = prime_rl_row(position_ids=[0, 1, 2, 3, 0, 1, 2])
    _, items = read_dump(lines(tmp_path / "rank_0.jsonl", [row]))
    assert [len(x.token_ids) for x in items if isinstance(x, RawRecord)] == [4, 3]
    assert [x.facts["record_id"] for x in items if isinstance(x, RawRecord)] == [
        "step_7/rank_2/5/0",
        "step_7/rank_2/5/1",
    ]
    assert scored(settled(items), "current", 1) == [None, *OLD[2:]]  # the value at a seam is of no sequence


def test_prime_rl_of_a_newer_schema_is_not_guessed_at(tmp_path: Path) -> None:
    (found,) = broken(lines(tmp_path / "rank_0.jsonl", [prime_rl_row(schema_version=2)]))
    assert found.place.endswith("rank_0.jsonl:1") and "'schema_version': got 2, wanted 1" in found.why


@pytest.mark.parametrize("batched", [True, False])
def test_nemo_rl(tmp_path: Path, batched: bool) -> None:
    record = only(lines(tmp_path / "train_data_step12.jsonl", [nemo_rl_row(batched=batched)]))
    result = settled([record])
    assert record.token_ids.tolist() == PROMPT + REPLY  # padding is cut by input_lengths
    assert scored(result, "sampler") == [*NONE, *SAMPLER]
    assert scored(result, "old") == [None, -3.0, -4.0, *OLD]  # index 0 is not used
    assert record.facts["step"] == 12 and record.facts["padding_length"] == 2 and record.facts["reward"] == 1.0
    assert record.facts["record_id"] == "step_12/3" and not result.kept_faults


def test_nemo_rl_mask_is_of_tokens_and_sample(tmp_path: Path) -> None:
    record = only(lines(tmp_path / "train_data_step1.jsonl", [nemo_rl_row(sample_loss_mask=0.0)]))
    assert not record.columns["loss_mask"].values.any()
    assert record.columns["drawn"].values.tolist() == [False] * 3 + [True] * 4


def test_nemo_rl_batch_of_two_in_a_line(tmp_path: Path) -> None:
    one, two = nemo_rl_row(batched=False), nemo_rl_row(batched=False, rewards=0.0)
    row = {key: [one[key], two[key]] for key in one}
    _, items = read_dump(lines(tmp_path / "train_data_step1.jsonl", [row]))
    assert [x.facts["reward"] for x in items if isinstance(x, RawRecord)] == [1.0, 0.0]
    assert [x.place[-3:] for x in items] == ["[0]", "[1]"]


def test_nemo_rl_that_contradicts_its_own_length_is_told(tmp_path: Path) -> None:
    result = settled(read_dump(lines(tmp_path / "train_data_step1.jsonl", [nemo_rl_row(input_lengths=12)]))[1])
    (fault,) = result.kept_faults
    assert (fault.kind, fault.column, fault.got, fault.wanted) == ("claim", "token_ids", 9, 12)


def test_nemo_rl_without_ids_is_text(tmp_path: Path) -> None:
    row = {k: v for k, v in nemo_rl_row().items() if k != "token_ids"}
    _, (item,) = read_dump(lines(tmp_path / "train_data_step1.jsonl", [row]))
    assert isinstance(item, TextRecord) and "no token_ids" in item.why


def test_open_instruct_has_the_sampler_only(tmp_path: Path) -> None:
    record = only(lines(tmp_path / "x_rollouts_000000.jsonl", [open_instruct_row()]))
    result = settled([record])
    assert scored(result, "sampler") == [*NONE, *SAMPLER] and set(record.columns) == {"sampler_logprobs", "advantages"}
    assert record.facts["group_id"] == "4/9" and record.facts["record_id"] == "step_4/9/1"
    assert record.facts["env_id"] == "gsm8k" and record.facts["finish_reason"] == "stop"
    assert record.columns["advantages"].values.tolist() == [-0.5] * 4


def test_open_instruct_one_log_prob_too_many_is_a_length_fault(tmp_path: Path) -> None:
    row = open_instruct_row(logprobs=[*SAMPLER, -0.0003])
    ((_, faults),) = settled(read_dump(lines(tmp_path / "a_rollouts_0.jsonl", [row]))[1]).aside
    assert [(f.kind, f.column, f.got, f.wanted) for f in faults] == [("length", "sampler_logprobs", 5, 4)]


def test_torchtitan_turns_are_rebuilt(tmp_path: Path) -> None:
    _, items = read_dump(lines(tmp_path / "rollout_samples.jsonl", [torchtitan_row()]))
    first, second = (x for x in items if isinstance(x, RawRecord))
    assert first.token_ids.tolist() == PROMPT + REPLY
    assert second.token_ids.tolist() == [*PROMPT, *REPLY[:3], 40, 41, 50, 51, 52] and second.prompt_length == 8
    assert first.columns["policy_version"].values.tolist() == [3, 3, 3, 3]
    versions = second.columns["policy_version"]
    assert versions.values[[0, 2]].tolist() == [3, 5] and versions.valid.tolist() == [True, False, True]  # type: ignore[union-attr]
    assert [x.facts["turn"] for x in (first, second)] == [0, 1]
    assert first.facts["trajectory_id"] == second.facts["trajectory_id"] == "8/2"
    assert second.columns["loss_mask"].values.tolist() == [True, True, False]
    assert settled(items).rollouts.n_tokens == 18  # type: ignore[union-attr]


def test_torchtitan_without_tensors_is_text(tmp_path: Path) -> None:
    turn = {"turn_id": 0, "min_policy_version": 1, "max_policy_version": 1, "completion_message": {"content": "x"}}
    _, (item,) = read_dump(lines(tmp_path / "rollout_samples.jsonl", [torchtitan_row(turns=[turn])]))
    assert isinstance(item, TextRecord) and "log_tensors" in item.why


def test_torchtitan_a_broken_turn_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    row = torchtitan_row()
    turns = [row["turns"][0], {**row["turns"][1], "prompt_prefix_len": 99}, row["turns"][1]]
    _, items = read_dump(lines(tmp_path / "rollout_samples.jsonl", [torchtitan_row(turns=turns)]))
    assert isinstance(items[1], BrokenRecord) and "but the turn before has 7 tokens" in items[1].why
    assert isinstance(items[2], RawRecord) and not items[2].prompt_known  # its beginning is not known any more


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("prime", prime_rl_row(token_ids="abc"), "'token_ids': got 'abc', wanted a list"),
    ("prime", prime_rl_row(token_ids=[1, 2.5]), "'token_ids': position 1: got 2.5, wanted a token id"),
    ("prime", prime_rl_row(token_ids=[1, True]), "position 1: got True, wanted a token id"),
    ("prime", prime_rl_row(token_ids=[1, 1 << 70]), "position 1: got 1"),
    ("prime", prime_rl_row(inference_logprobs=[{}, 1]), "'inference_logprobs': got {}, wanted a number"),
    ("prime", prime_rl_row(loss_mask=[2] * 7), "'loss_mask': position 0: got 2, wanted 0 or 1"),
    ("prime", prime_rl_row(loss_mask=["1"] * 7), "'loss_mask': position 0: got '1', wanted 0 or 1"),
    ("prime", prime_rl_row(step="seven"), "'step': got 'seven', wanted a whole number"),
    ("prime", prime_rl_row(env_name=[1]), "'env_name': got [1], wanted text"),
    ("prime", prime_rl_row(env_name="\ud800"), "half of a surrogate pair"),
    ("nemo", nemo_rl_row(rewards="high"), "'rewards': got 'high', wanted a number"),
    ("nemo", nemo_rl_row(input_lengths=1.5), "'input_lengths': got 1.5, wanted a whole number"),
    ("open", open_instruct_row(response_tokens=None), "no 'response_tokens'"),
    ("open", open_instruct_row(dataset={"a": 1}), "'dataset': got"),
]


@pytest.mark.parametrize(("name", "row", "says"), WRONG)
def test_wrong_types_are_named(tmp_path: Path, name: str, row: dict[str, Any], says: str) -> None:
    good = {"prime": prime_rl_row, "nemo": nemo_rl_row, "open": open_instruct_row}[name]()
    path = lines(tmp_path / "train_data_step3.jsonl", [good, row, good])
    (found,) = broken(path)
    assert found.place == f"{path}:2" and says in found.why, found
    assert len(read_dump(path)[1]) == 3
