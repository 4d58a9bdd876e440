"""`examples/`: each framework's layout comes out as the same numbers; the plain loop is silent, or stopped in time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from loop_examples import EXAMPLES, example

from onepolicy import Halted
from onepolicy.integrations import INTEGRATIONS

#: What depends on the sampler, the scorer and the mask alone.
SHARED = ("tokens", "sequences", "abs_log_ratio/mean", "kl_sampler_scorer_k3/mean", "ratio/max", "ess_sequence/share")


def test_every_layout_gives_the_same_numbers() -> None:
    frameworks = example("frameworks")
    found = {name: frameworks.observed(name) for name in frameworks.EXAMPLES}
    first = found["verl"]
    assert first["tokens"] == 900
    for name, numbers in found.items():
        assert {k: numbers[k] for k in SHARED} == pytest.approx({k: first[k] for k in SHARED}, rel=1e-9), name
        assert numbers["corrected.kept/share"] is not None, name
    assert set(frameworks.EXAMPLES) == set(INTEGRATIONS) - {"trl", "miles"}


def test_every_example_is_tested() -> None:
    assert {x.stem for x in EXAMPLES.glob("*.py")} == {"frameworks", "plain_torch", "trl_grpo"}


@pytest.mark.engines
def test_plain_torch_is_silent_without_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "monitor.jsonl"
    monitor = example("plain_torch").run(steps=10, sinks=(f"jsonl:{path}",))
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][1:]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert all(row["findings"] == [] for row in rows)
    assert all(0.005 < row["numbers"]["abs_log_ratio/mean"] < 0.05 for row in rows)
    assert rows[0]["numbers"]["update.abs_log_ratio/mean"] > 0  # trained on twice: the policy moved
    assert not monitor.warnings


@pytest.mark.engines
def test_plain_torch_is_stopped_within_two_steps() -> None:
    at = 5
    with pytest.raises(Halted) as halted:
        example("plain_torch").run(fault="temperature", at=at)
    assert at <= halted.value.step <= at + 1  # judged one step late: the batch after that is not trained on
    assert {"gap-above-bound", "kl-above-bound"} & {f.code for f in halted.value.findings}
