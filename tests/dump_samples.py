"""Small dumps in the layouts of RL frameworks, with numbers that can be checked by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy.formats.base import BrokenRecord, RawRecord, Read, TextRecord
from onepolicy.formats.detect import Detected, detect, format_of
from onepolicy.formats.files import Files
from onepolicy.formats.settle import Settled, settle

PROMPT = [11, 12, 13]
REPLY = [21, 22, 23, 24]
SAMPLER = [-0.5, -1.25, -0.125, -2.0]
OLD = [-0.75, -1.0, -0.25, -2.5]


def lines(path: Path, rows: Sequence[Any]) -> Path:
    """One JSON value a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def whole(values: Sequence[Any], fill: Any) -> list[Any]:
    """Values of the reply as a list over prompt and reply."""
    return [fill] * len(PROMPT) + list(values)


def prime_rl_row(**changed: Any) -> dict[str, Any]:
    """The layout of prime-rl's TokenExporter, schema_version 1."""
    n = len(PROMPT) + len(REPLY)
    return {
        "schema_version": 1,
        "step": 7,
        "export_step": 7,
        "rank": 2,
        "micro_step": 0,
        "micro_sequence_idx": 1,
        "export_sequence_idx": 5,
        "run_id": None,
        "env_name": "math",
        "token_ids": PROMPT + REPLY,
        "position_ids": list(range(n)),
        "loss_mask": whole([True] * 4, False),
        "advantages": whole([0.5] * 4, None),
        "rewards": whole([1.0] * 4, None),
        "inference_logprobs": whole(SAMPLER, 0.0),
        "trainer_logprobs": [-11.0, -3.0, -4.0, *OLD],
        "entropy": [0.5] * n,
        "mismatch_kl": [None] * n,
        **changed,
    }


def nemo_rl_row(padding: int = 2, batched: bool = True, **changed: Any) -> dict[str, Any]:
    """What NeMo-RL's logger writes: a batch of one a line, padded to the longest of the step."""
    n = len(PROMPT) + len(REPLY)
    row = {
        "content": "What is 2? It is 2.",
        "rewards": 1.0,
        "input_lengths": n,
        "token_ids": [*PROMPT, *REPLY, *[0] * padding],
        "token_loss_mask": [*whole([1.0] * 4, 0.0), *[0.0] * padding],
        "sample_loss_mask": 1.0,
        "advantages": [*whole([0.5] * 4, 0.5), *[0.5] * padding],
        "generation_logprobs": [*whole(SAMPLER, 0.0), *[0.0] * padding],
        "prev_logprobs": [0.0, -3.0, -4.0, *OLD, *[0.0] * padding],
        **changed,
    }
    return {**({k: [v] for k, v in row.items()} if batched else row), "idx": 3}


def open_instruct_row(**changed: Any) -> dict[str, Any]:
    return {
        "step": 4,
        "sample_idx": 1,
        "prompt_idx": 9,
        "prompt_tokens": PROMPT,
        "response_tokens": REPLY,
        "reward": 10.0,
        "advantage": -0.5,
        "finish_reason": "stop",
        "dataset": ["gsm8k"],
        "ground_truth": "2",
        "request_info": {"num_calls": 0},
        "logprobs": SAMPLER,
        **changed,
    }


def torchtitan_row(**changed: Any) -> dict[str, Any]:
    """Two turns; the second continues the first, whose last token it drops."""
    first = {
        "turn_id": 0,
        "min_policy_version": 3,
        "max_policy_version": 3,
        "prompt_prefix_len": 0,
        "prompt_delta_token_ids": PROMPT,
        "completion_token_ids": REPLY,
        "completion_loss_mask": [True] * 4,
        "completion_logprobs": SAMPLER,
        "advantage": None,
    }
    second = {
        **first,
        "turn_id": 1,
        "max_policy_version": 5,
        "prompt_prefix_len": 6,
        "prompt_delta_token_ids": [40, 41],
        "completion_token_ids": [50, 51, 52],
        "completion_loss_mask": [True, True, False],
        "completion_logprobs": [-1.0, -2.0, -3.0],
    }
    ids = {"group_id": 8, "rollout_idx": 2}
    return {
        "is_validation": False,
        "group_id": 8,
        "rollout_id": ids,
        "status": "completed",
        "reward": 0.5,
        "advantage": 0.25,
        "turns": [first, second],
        **changed,
    }


def verifiers_row(**changed: Any) -> dict[str, Any]:
    """Two steps after verifiers 0.1's `TrajectoryStep`; the second's prompt begins with all of the first."""

    def step(prompt: list[int], reply: list[int], values: list[float]) -> dict[str, Any]:
        tokens = {
            "prompt_ids": prompt,
            "prompt_mask": [0] * len(prompt),
            "completion_ids": reply,
            "completion_mask": [1] * len(reply),
            "completion_logprobs": values,
            "overlong_prompt": False,
            "is_truncated": False,
        }
        messages = [{"role": "user", "content": "2+2?"}]
        return {
            "prompt": messages,
            "completion": [{"role": "assistant", "content": "4"}],
            "response": None,
            "tokens": tokens,
            "reward": None,
            "advantage": 0.25,
            "is_truncated": False,
            "trajectory_id": "t5",
            "extras": {},
        }

    return {
        "example_id": 8,
        "prompt": [{"role": "user", "content": "2+2?"}],
        "completion": [{"role": "assistant", "content": "4"}],
        "task": "math",
        "reward": 0.5,
        "stop_condition": "max_turns_reached",
        "sampling_args": {"temperature": 0.75, "max_tokens": 64},
        "trajectory": [step(PROMPT, REPLY, SAMPLER), step([*PROMPT, *REPLY, 40, 41], [50, 51], [-1.0, -3.0])],
        **changed,
    }


def vllm_completion(**changed: Any) -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": " four",
        "token_ids": REPLY,
        "prompt_token_ids": PROMPT,
        "finish_reason": "length",
        "logprobs": {"tokens": ["a", "b", "c", "d"], "token_logprobs": SAMPLER},
        **changed,
    }
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
    return {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice], "usage": usage}


def sglang_answer(**changed: Any) -> dict[str, Any]:
    meta = {
        "id": "r1",
        "finish_reason": {"type": "stop", "matched": 24},
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cached_tokens": 1,
        "weight_version": "12",
        "input_token_logprobs": [[None, 11, None], [-3.0, 12, None], [-4.0, 13, None]],
        "output_token_logprobs": [[lp, i, None] for lp, i in zip(SAMPLER, REPLY, strict=True)],
        **changed,
    }
    return {"text": " four", "output_ids": REPLY, "meta_info": meta}


def canonical_row(**changed: Any) -> dict[str, Any]:
    return {
        "record_id": "a",
        "token_ids": PROMPT + REPLY,
        "prompt_length": 3,
        "loss_mask": whole([True] * 4, False),
        "sampler_logprobs": whole(SAMPLER, None),
        "old_logprobs": [None, -3.0, -4.0, *OLD],
        "step": 2,
        "reward": 1.0,
        **changed,
    }


def loose_row(**changed: Any) -> dict[str, Any]:
    return {
        "id": "r",
        "prompt_ids": PROMPT,
        "response_ids": REPLY,
        "rollout_logprobs": SAMPLER,
        "trainer_logprobs": OLD,
        "loss_mask": [1, 1, 1, 1],
        "finish_reason": "stop",
        **changed,
    }


#: format -> (file name, a row of it)
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "prime_rl": ("token_exports/step_7/rank_2.jsonl", prime_rl_row()),
    "nemo_rl": ("train_data_step12.jsonl", nemo_rl_row()),
    "open_instruct": ("run_rollouts_000000.jsonl", open_instruct_row()),
    "torchtitan": ("rollout_samples.jsonl", torchtitan_row()),
    "verifiers": ("rollouts/step_3/train_rollouts.jsonl", verifiers_row()),
    "engine": ("answers.jsonl", vllm_completion()),
    "canonical": ("rollouts.jsonl", canonical_row()),
    "loose": ("mine.jsonl", loose_row()),
    "text": ("12.jsonl", {"input": "2+2?", "output": "4", "gts": "4", "score": 1.0, "step": 12}),
}


def seeded(n: int, seed: int = 0) -> np.ndarray:
    """`[n]` log-probs."""
    return -np.random.default_rng(seed).exponential(0.7, n)


def read_dump(*uris: Any) -> tuple[Detected, list[Read]]:
    """What is detected behind paths, and everything that its formats read."""
    found = detect(uris)
    return found, [item for shard in found.shards for item in format_of(shard.format).read(shard, Files())]


def only(*uris: Any) -> RawRecord:
    """The one record that is there."""
    _, items = read_dump(*uris)
    assert len(items) == 1 and isinstance(items[0], RawRecord), items
    return items[0]


def broken(*uris: Any) -> list[BrokenRecord]:
    """The records that cannot be read."""
    return [item for item in read_dump(*uris)[1] if isinstance(item, BrokenRecord)]


def settled(items: Sequence[Read]) -> Settled:
    """What `settle` makes of them; texts are left out."""
    return settle([item for item in items if not isinstance(item, TextRecord)])


def scored(settled_: Settled, name: str, i: int = 0) -> list[float | None]:
    """Log-probs of one scoring of sequence i, None where null."""
    rollouts = settled_.rollouts
    assert rollouts is not None
    column = rollouts.scorings[name].logprobs
    at = rollouts.sequence(i)
    return [x if ok else None for x, ok in zip(column.values[at].tolist(), column.mask()[at], strict=True)]
