"""1,000 healthy pairs at each preset that fits their dtype: at most 4 false alarms, at most 10% undecided.

Run on simulated pairs whose sides differ in the reduction order alone; the table with misses is `docs/power.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "lab"))

from lean_pairs import outcomes, pair_outcomes, two_processes

import power

pytestmark = pytest.mark.power


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with two_processes() as running:
        yield running


@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", power.FITTING)
def test_a_thousand_healthy_pairs(pool: Pool, dtype: str) -> None:
    for preset, counts in outcomes(pool, range(1, 1001), dtype).items():
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
def test_a_drift_above_the_bound_is_found(pool: Pool, dtype: str, drift: float) -> None:
    for preset, counts in outcomes(pool, range(1, 31), dtype, drift).items():
        assert counts["drift"] == 30, (preset, counts)


@pytest.mark.parametrize(("dtype", "drift"), [("bfloat16", 0.02)])
def test_a_drift_far_below_the_bound_is_not_called_one(pool: Pool, dtype: str, drift: float) -> None:
    for preset, counts in outcomes(pool, range(1, 31), dtype, drift).items():
        assert counts["drift"] == 0, (preset, counts)
