"""Default bounds on a real healthy pair: vLLM bf16 against transformers bf16, SmolLM2-135M (`lab/floor_study.py`)."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "lab"))

import floor_study

from onepolicy.floor import scale_at, scale_table, smallest_fault
from onepolicy.types import Outcome

pytestmark = pytest.mark.power


@pytest.fixture(scope="module")
def data() -> floor_study.Healthy:
    return floor_study.read()


@pytest.mark.timeout(900)
def test_three_hundred_healthy_draws(data: floor_study.Healthy) -> None:
    """64 prompts, resampled, and one of the recorded replies to each: as many tokens as one check draws."""
    preset = floor_study.default_bounds()
    counts: Counter[str] = Counter()
    for seed in range(300):
        at, cluster = floor_study.resampled(data, np.random.default_rng(seed))
        counts[floor_study.report_of(data, at, cluster, preset).outcome.value] += 1
    assert counts.total() == 300
    assert counts["drift"] == counts["error"] == 0
    assert counts["inconclusive"] <= 6, counts


def test_the_recording_itself_stands_at_one(data: floor_study.Healthy) -> None:
    report = floor_study.report_of(data, np.arange(len(data.prompt)), data.prompt, floor_study.default_bounds())
    m = report.measurements["gap_over_floor/rms"]
    assert m.value == pytest.approx(1.02, abs=0.03)
    assert m.n > 11_000 and m.std_error is not None and m.std_error < 0.015
    assert report.outcome is Outcome.PASS


def test_a_fault_above_what_a_pass_excludes_is_called(data: floor_study.Healthy) -> None:
    """Noise that follows 1 - p, as a fault of the logits does: a small one is let through, a large one is not."""
    preset = floor_study.default_bounds()
    p = np.exp(data.columns["fp32"])
    counts: dict[float, Counter[str]] = {}
    for size in (0.03, 0.12):
        counts[size] = Counter()
        for seed in range(30):
            rng = np.random.default_rng(seed)
            at, cluster = floor_study.resampled(data, rng)
            fault = size * (1 - p[at]) * rng.standard_normal(len(at))
            counts[size][floor_study.report_of(data, at, cluster, preset, fault).outcome.value] += 1
    assert counts[0.03]["drift"] == 0
    assert counts[0.12]["drift"] == 30


def test_the_promise_of_a_pass_holds(data: floor_study.Healthy) -> None:
    """The smallest fault that a pass says it would have seen is called nine times in ten."""
    preset = floor_study.default_bounds()
    kernels = [data.columns[k] for k in floor_study.KERNELS]
    gaps = np.array([x - y for x, y in itertools.combinations(kernels, 2)])
    scale = scale_at(scale_table(data.columns["fp32"], gaps), data.columns["fp32"])
    seen = 0
    for seed in range(40):
        rng = np.random.default_rng(1000 + seed)
        at, cluster = floor_study.resampled(data, rng)
        healthy = floor_study.report_of(data, at, cluster, preset)
        gate = next(g for g in healthy.gates if g.metric == "gap_over_floor/rms")
        assert gate.value is not None and gate.smallest_seen is not None
        # in floors: as many of them as every token's own scale
        size = smallest_fault(gate.smallest_seen, gate.value, 1.0)
        faulty = floor_study.report_of(data, at, cluster, preset, size * scale[at] * rng.standard_normal(len(at)))
        seen += faulty.outcome is Outcome.DRIFT
    assert seen >= 33, seen
