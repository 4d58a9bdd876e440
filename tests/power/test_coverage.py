"""The one-sided 99% limits miss at most 2% at 20 or more effective clusters of mildly uneven size.

The table for worse cases is `docs/coverage.md`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "lab"))

import coverage

pytestmark = pytest.mark.power


@pytest.mark.parametrize("clusters", [22, 40])
def test_limits_miss_at_most_2_percent(clusters: int) -> None:
    for key, (above, below) in coverage.misses("mild", clusters, 2000).items():
        assert above <= 0.02, (key, above)
        assert below <= 0.02, (key, below)


def test_prompts_that_differ_much_do_miss_more() -> None:
    """The simulation can tell a bad interval from a good one: few clusters, one of which may carry most of the gap."""
    above = coverage.misses("mild", 22, 400, effect=0.45)["kl_sampler_scorer_k3/mean"][0]
    assert above > 0.04
