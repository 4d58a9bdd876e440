"""Intervals of the gap over the floor: the published error against brute force, and against leaving clusters out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from build import rollouts_of
from onepolicy.align import align
from onepolicy.estimate import measure
from onepolicy.floor import Variant, measured
from onepolicy.metrics import METRICS
from onepolicy.reduce import reduce
from onepolicy.types import LogprobPairs, Measurement

KEYS = ("gap_over_floor/rms", "gap_over_floor/p50", "gap_over_floor/p95")
SEQUENCES, TOKENS = 64, 48


def healthy(seed: int, own: float = 0.2) -> LogprobPairs:
    """A sound pair and three kernels of its scorer: errors that share a part, go with the probability and are larger in
    some prompts than in others. `own`: sd of the log of a prompt's factor."""
    rng = np.random.default_rng(seed)
    n = SEQUENCES * TOKENS
    reference = -rng.exponential(1.0, n)
    scale = 0.09 * -np.expm1(reference) + 1e-3
    prompt = np.repeat(np.exp(own * rng.standard_normal(SEQUENCES)), TOKENS)
    shared = 0.3 * rng.standard_normal(n)
    error = lambda: 0.7 * scale * prompt * (shared + rng.standard_normal(n))
    kernels = [Variant(name, reference + error()) for name in ("full", "decode", "eager")]
    groups = [str(i) for i in range(SEQUENCES)]
    pairs = align(rollouts_of(reference + error(), kernels[0].logprobs, [TOKENS] * SEQUENCES, groups=groups))
    _, columns = measured(kernels, reference, pairs.drawn, "bfloat16")
    return replace(pairs, floor=columns, positions=np.arange(n) % TOKENS)


def over_floor(pairs: LogprobPairs) -> dict[str, Measurement]:
    return measure(reduce(pairs, [METRICS[k] for k in KEYS]))


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Measurement]]:
    return [over_floor(healthy(seed)) for seed in range(300)]


@pytest.mark.parametrize("key", KEYS)
def test_the_error_is_the_spread_of_healthy_pairs(key: str, runs) -> None:
    """Brute force: 300 pairs, each with its own draw of tokens, errors and prompts."""
    values = np.log([run[key].value for run in runs])
    errors = np.array([run[key].std_error for run in runs])
    assert math.sqrt(np.mean(errors**2)) == pytest.approx(values.std(ddof=1), rel=0.2)
    assert abs(values.mean()) < 0.05


@pytest.mark.parametrize("key", KEYS)
def test_the_limits_hold_the_true_ratio_as_often_as_they_say(key: str, runs) -> None:
    """Each one-sided limit misses 1% of the time: 3 of 300, and hardly ever more than 10."""
    true = math.exp(np.mean(np.log([run[key].value for run in runs])))
    assert sum(run[key].upper < true for run in runs) <= 10
    assert sum(run[key].lower > true for run in runs) <= 10


def test_the_size_leaves_a_prompt_out_of_gap_and_floor_alike() -> None:
    """The jackknife written out: the log of both RMS without each prompt. What they share cancels in their ratio."""
    pairs = healthy(5, own=0.7)
    on = pairs.drawn & np.isfinite(pairs.floor.scale)
    z2, v2 = (pairs.log_ratio / pairs.floor.scale) ** 2, (pairs.floor.gaps / pairs.floor.scale) ** 2
    prompt = np.repeat(np.arange(SEQUENCES), TOKENS)
    kept = [on & (prompt != s) for s in range(SEQUENCES)]
    gap, floor = (np.array([0.5 * math.log(x[..., keep].mean()) for keep in kept]) for x in (z2, v2))
    error = lambda logs: math.sqrt((SEQUENCES - 1) * np.var(logs))
    m = over_floor(pairs)["gap_over_floor/rms"]
    assert m.value == pytest.approx(math.sqrt(z2[on].mean() / v2[:, on].mean()), rel=1e-12)
    assert m.std_error == pytest.approx(error(gap - floor), rel=1e-9)
    assert m.std_error < 0.5 * math.hypot(error(gap), error(floor))
