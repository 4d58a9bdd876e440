"""A real engine process is killed half way: what was measured is saved, the drift already found is kept."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onepolicy import storage
from onepolicy.check import check_file
from onepolicy.engines.base import SamplingParams
from onepolicy.errors import EngineDied
from onepolicy.record import record_rollouts
from onepolicy.rollouts import Rollouts
from onepolicy.types import Outcome, Report, Scoring, Values

pytestmark = pytest.mark.engines


#: Engines of the whole session: other tests ask them after these.
OTHERS: set[int] = set()


@pytest.fixture(scope="module", autouse=True)
def _others() -> None:
    OTHERS.update(workers())


def workers() -> list[int]:
    """Process ids of our children that are engine workers, begun by these tests."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    found = [int(p) for p in children if b"worker_main" in Path(f"/proc/{p}/cmdline").read_bytes()]
    return [p for p in found if p not in OTHERS]


def kill(_done: int = 0, _of: int = 0) -> None:
    for pid in workers():
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def drifting(tmp_path_factory) -> Path:
    """96 short texts (three shards) whose recorded log-probs are all too low by half a nat."""
    rng = np.random.default_rng(0)
    n, length = 96, 40
    ids = rng.integers(5, 500, n * length).astype(np.int32)
    drawn = np.tile(np.arange(length) > 4, n)
    values = np.full(n * length, -9.0, dtype=np.float32)
    rollouts = Rollouts(
        np.arange(n + 1, dtype=np.int64) * length,
        {"token_ids": Values(ids), "drawn": Values(drawn)},
        {"logprob_semantics": Values(np.array(["raw"] * n, dtype=object))},
        {},
        {"sampler": Scoring(Values(values, drawn), dtype="bfloat16", semantics="raw", scoring_id="made")},
    )
    path = tmp_path_factory.mktemp("killed") / "rollouts.parquet"
    storage.write(rollouts, path)
    return path


@pytest.fixture(scope="module")
def killed(drifting: Path) -> Report:
    report = check_file(drifting, "hf:tiny", progress=kill)
    assert workers() == []
    return report


def test_sigkill_of_the_scorer(killed: Report) -> None:
    report = killed
    assert report.outcome is Outcome.ERROR
    assert report.outcome.exit_code == 4
    found = {f.code: f for f in report.findings}
    assert "SIGKILL" in found["engine-died"].message
    assert "32 of 96 sequences" in found["engine-died"].message
    assert "gap-above-bound" in found  # the drift of the part that was scored
    saved = storage.read(report.context["scores"])
    assert len(saved) == 96
    assert int(saved.scorings["scorer"].logprobs.mask().sum()) == 32 * 39


def test_the_saved_part_overwrites_nothing(drifting: Path, killed: Report) -> None:
    first = killed.context["scores"]
    second = check_file(drifting, "hf:tiny", progress=kill).context["scores"]
    assert first != second
    assert Path(first).exists()
    assert Path(second).exists()


def test_without_the_kill_it_is_no_error(drifting: Path) -> None:
    report = check_file(drifting, "hf:tiny")
    assert report.outcome is Outcome.DRIFT
    assert not {"engine-died", "engine-failed"} & {f.code for f in report.findings}


def test_sigkill_of_the_sampler_keeps_the_replies(tmp_path: Path) -> None:
    partial = tmp_path / "partial.parquet"
    params = SamplingParams(max_tokens=8)
    with pytest.raises(EngineDied, match=r"32 replies drawn before are saved in .*partial\.parquet"):
        record_rollouts("hf:tiny", params=params, progress=kill, partial=partial)
    kept = storage.read(partial)
    assert len(kept) == 32
    assert kept.drawn.sum() > 32
    assert replace(kept).scorings["sampler"].logprobs.mask().sum() == kept.drawn.sum()
