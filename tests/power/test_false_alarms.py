"""1,000 healthy pairs at each preset that fits their dtype: at most 4 false alarms, at most 10% undecided.

Run on simulated pairs whose sides differ in the reduction order alone; the table with misses is `docs/power.md`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "lab"))

import power
from lean_pairs import outcomes, pair_outcomes

pytestmark = pytest.mark.power


@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", power.FITTING)
def test_a_thousand_healthy_pairs(dtype: str) -> None:
    for preset, counts in outcomes(range(1, 1001), dtype).items():
        assert counts.total() == 1000
        assert counts["error"] == 0
        assert counts["drift"] <= 4, (preset, counts)
        assert counts["inconclusive"] <= 100, (preset, counts)


#: dtype -> a drift below its bounds, one near them and one above.
DRIFTS = {"float32": (0.0, 1e-4, 0.02), "float16": (0.0, 0.02, 0.05), "bfloat16": (0.02, 0.15, 0.4)}


@pytest.mark.parametrize("dtype", power.FITTING)
def test_the_outcome_is_that_of_the_whole_comparison(dtype: str) -> None:
    """What is counted here is what `compare` says of the same pair, with every metric measured."""
    seen: set[str] = set()
    for drift in DRIFTS[dtype]:
        for seed in range(1, 5):
            lean = pair_outcomes(seed, dtype, drift)
            assert lean == power.pair_outcomes(seed, dtype, drift), (seed, drift)
            seen |= set(lean.values())
    assert {"pass", "drift"} <= seen


@pytest.mark.parametrize(("dtype", "drift"), [("float32", 0.02), ("float16", 0.05), ("bfloat16", 0.4)])
def test_a_drift_above_the_bound_is_found(dtype: str, drift: float) -> None:
    for preset, counts in outcomes(range(1, 31), dtype, drift).items():
        assert counts["drift"] == 30, (preset, counts)


@pytest.mark.parametrize(("dtype", "drift"), [("bfloat16", 0.02)])
def test_a_drift_far_below_the_bound_is_not_called_one(dtype: str, drift: float) -> None:
    for preset, counts in outcomes(range(1, 31), dtype, drift).items():
        assert counts["drift"] == 0, (preset, counts)
