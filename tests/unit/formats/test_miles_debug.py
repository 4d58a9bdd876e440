"""miles: comparator files written by its own lines (`make frameworks`), the dashboard after its documentation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from dump_samples import PROMPT, REPLY, SAMPLER, broken, only, read_dump, scored, settled
from framework_code import cut
from onepolicy.formats.base import RawRecord

WORKER = "miles/utils/debug_utils/run_megatron/worker/output.py"


@pytest.fixture
def save() -> Any:
    """miles' own writer, of the rank that is asked for."""

    def write(rank: int, folder: Path, logits: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> None:
        one = SimpleNamespace(size=1)
        space = cut(
            *("miles_rl", WORKER),
            *("compute_and_save_output_info", "_compute_output_info", "_compute_logprob_entries", "_get_rank"),
            json=json,
            Path=Path,
            dist=SimpleNamespace(is_initialized=lambda: True, get_rank=lambda: rank),
            get_parallel_state=lambda: SimpleNamespace(tp=one, cp=one, pp=one),
        )
        space["compute_and_save_output_info"](logits=logits, labels=labels, position_ids=positions, output_dir=folder)

    return write


LABELS = torch.tensor([[12, 3, 4, 5, -100]])


def logits(seed: int) -> torch.Tensor:
    return torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(seed))


def expected(seed: int) -> list[float]:
    lp = torch.log_softmax(logits(seed), -1)[0]
    return [lp[i, LABELS[0, i]].item() for i in range(4)]


def test_ranks_of_a_folder_are_joined(tmp_path: Path, save: Any) -> None:
    x, at = logits(0), torch.arange(5)[None]
    save(0, tmp_path, x[:, :3], LABELS[:, :3], at[:, :3])
    save(1, tmp_path, x[:, 3:], LABELS[:, 3:], at[:, 3:])
    record = only(tmp_path)
    assert record.token_ids.tolist() == [12, 3, 4, 5] and not record.prompt_known
    values = scored(settled([record]), "old")
    assert values[0] is None and values[1:] == pytest.approx(expected(0), abs=1e-6)
    assert not settled([record]).rollouts.drawn.any()  # type: ignore[union-attr]


def test_baseline_and_target_are_one_comparison(tmp_path: Path, save: Any) -> None:
    at = torch.arange(5)[None]
    save(0, tmp_path / "baseline", logits(0), LABELS, at)
    save(0, tmp_path / "target", logits(1), LABELS, at)
    result = settled([only(tmp_path)])
    assert scored(result, "reference")[1:] == pytest.approx(expected(0), abs=1e-6)
    assert scored(result, "old")[1:] == pytest.approx(expected(1), abs=1e-6)


def test_ranks_that_contradict_each_other_or_cannot_be_read(tmp_path: Path, save: Any) -> None:
    at = torch.arange(5)[None]
    save(0, tmp_path, logits(0), LABELS, at)
    save(1, tmp_path, logits(0), torch.where(LABELS > 0, LABELS + 1, LABELS), at)
    whole = (tmp_path / "rank_0.json").read_text()
    (tmp_path / "rank_2.json").write_text(whole[: len(whole) // 2])
    first, second = broken(tmp_path)
    assert first.place == f"{tmp_path}/rank_1.json" and "ranks have the labels 12 and 13" in first.why
    assert second.place == f"{tmp_path}/rank_2.json" and "truncated or still being written" in second.why
    assert sum(isinstance(x, RawRecord) for x in read_dump(tmp_path)[1]) == 1


def test_dashboard(tmp_path: Path) -> None:
    table = {
        "sample_index": [4, 5],
        "response_length": [4, 4],
        "total_length": [7, 9],
        "tokens": [PROMPT + REPLY] * 2,
        "loss_mask": [[1, 1, 1, 0]] * 2,
        "rollout_log_probs": pa.array([np.array(SAMPLER, dtype=np.float32)] * 2),
    }
    pq.write_table(pa.table(table), tmp_path / "rollout_3.parquet")
    _, items = read_dump(tmp_path)
    result = settled(items)
    assert scored(result, "sampler") == [None] * 3 + SAMPLER
    assert [(f.column, f.got, f.wanted) for f in result.kept_faults] == [("token_ids", 7, 9), ("prompt", 3, 5)]
    assert items[1].place.endswith("rollout_3.parquet[1]") and items[0].facts["step"] == 3  # type: ignore[union-attr]
