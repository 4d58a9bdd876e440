"""One `Metric` entry, written once, gives the same Sums as JSON text however the data is cut, ordered or laid out."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from build import random_rollouts, rollouts_of
from onepolicy.align import align
from onepolicy.errors import MergeError
from onepolicy.estimate import measure
from onepolicy.metrics import METRICS
from onepolicy.reduce import reduce
from onepolicy.rollouts import Rollouts
from onepolicy.sums import MAX_ROWS, Metric, Sums, merge
from onepolicy.types import Scoring, Values

ODD = np.array([np.nan, np.inf, -np.inf, -1e300, -1.7e308, 1.7e308, -5e-324, -2000.0, 0.5, -0.0])


def hard_rollouts(seed: int = 0, sequences: int = 60) -> Rollouts:
    """Groups, plus NaN, infinities, huge and tiny values, nulls, and two equal sequences."""
    rng = np.random.default_rng(seed)
    base = random_rollouts(seed, sequences=sequences, per_group=3)
    a, b = (base.scorings[k].logprobs.values.copy() for k in ("sampler", "old"))
    for x in (a, b):
        at = rng.choice(len(x), 40, replace=False)
        x[at] = rng.choice(ODD, 40)
    valid = base.drawn & (rng.random(len(a)) > 0.05)
    rollouts = replace(
        base,
        scorings={
            "sampler": Scoring(Values(a, base.drawn), scoring_id="a"),
            "old": Scoring(Values(b, valid), scoring_id="b"),
        },
    )
    return rollouts.take([*range(sequences), 3, 3])


def total(rollouts: Rollouts, metrics: object = METRICS) -> str:
    return reduce(align(rollouts), metrics.values()).to_json()


def shards(rollouts: Rollouts, n: int, rng: np.random.Generator) -> list[Rollouts]:
    """n files in any order, of records in any order; groups are split between them."""
    order = rng.permutation(len(rollouts))
    parts = [rollouts.take(order[i::n]) for i in range(n)]
    return [parts[i] for i in rng.permutation(n)]


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("seed", range(5))
def test_shards_in_any_order(n: int, seed: int) -> None:
    rollouts = hard_rollouts(seed)
    parts = shards(rollouts, n, np.random.default_rng(seed))
    assert merge(reduce(align(p), METRICS.values()) for p in parts).to_json() == total(rollouts)


def _work(part: Rollouts) -> str:
    return total(part)


def test_two_processes() -> None:
    rollouts = hard_rollouts(2)
    parts = shards(rollouts, 2, np.random.default_rng(1))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        texts = pool.map(_work, parts)
    import json

    assert merge(Sums.from_dict(json.loads(t)) for t in texts).to_json() == total(rollouts)


@pytest.mark.parametrize("layout", ["sliced", "strided", "reversed"])
def test_memory_layouts(layout: str) -> None:
    rollouts = hard_rollouts(3)

    def laid(x: np.ndarray) -> np.ndarray:
        if layout == "sliced":
            return np.concatenate([[7.0], x, [7.0]])[1:-1]
        if layout == "strided":
            return np.repeat(x, 3)[::3]
        return x[::-1].copy()[::-1]

    scorings = {
        k: replace(v, logprobs=Values(laid(v.logprobs.values), v.logprobs.valid)) for k, v in rollouts.scorings.items()
    }
    assert total(replace(rollouts, scorings=scorings)) == total(rollouts)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 6))
def test_any_split_merges_to_the_same_bits(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, 12)
    size = int(lengths.sum())
    a = -rng.exponential(1.0, size) * 10.0 ** rng.integers(-8, 5, size)
    b = a + rng.normal(0, 1, size) * 10.0 ** rng.integers(-12, 3, size)
    rollouts = rollouts_of(a, b, lengths, groups=[str(g) for g in rng.integers(0, 4, 12)], seed=seed)
    parts = [rollouts.take(p) for p in np.array_split(rng.permutation(12), n)]
    assert merge(reduce(align(p), METRICS.values()) for p in parts).to_json() == total(rollouts)


def test_more_clusters_than_rows() -> None:
    """Beyond the limit clusters are hashed into buckets, the same ones for any split."""
    rng = np.random.default_rng(0)
    n = MAX_ROWS + 50
    a = -rng.exponential(1.0, 3 * n)
    rollouts = rollouts_of(a, a + rng.normal(0, 0.1, 3 * n), [3] * n, groups=[str(i) for i in range(n)])
    whole = reduce(align(rollouts), METRICS.values())
    assert whole.bucketed
    assert whole.n_clusters() <= MAX_ROWS
    parts = [reduce(align(rollouts.take(rows)), METRICS.values()) for rows in np.array_split(np.arange(n), 3)]
    assert not parts[0].bucketed
    assert merge(parts).to_json() == whole.to_json()
    assert merge([merge(parts[:2]), parts[2]]).to_json() == merge([parts[0], merge(parts[1:])]).to_json()


def test_these_tests_can_fail() -> None:
    """A term that is not a function of its token alone breaks the equality above."""
    broken = Metric(
        "broken",
        "token",
        "scored",
        {"cumulative": lambda xp, x: np.cumsum(x.log_ratio)},
        lambda t: 0.0,
        "not elementwise",
    )
    rollouts = random_rollouts(1)
    parts = shards(rollouts, 2, np.random.default_rng(0))
    merged = merge(reduce(align(p), [broken]) for p in parts)
    assert merged.to_json() != total(rollouts, {"broken": broken})


def test_json_round_trip_is_lossless() -> None:
    import json

    sums = reduce(align(hard_rollouts(4)), METRICS.values())
    again = Sums.from_dict(json.loads(sums.to_json()))
    assert again.to_json() == sums.to_json()
    assert measure(again) == measure(sums)


@pytest.mark.parametrize(
    "change", [{"view": "loss"}, {"cluster_unit": "sequence"}, {"names": ("x", "y")}, {"numeric": "?"}]
)
def test_sums_made_otherwise_refuse_to_merge(change: dict[str, object]) -> None:
    sums = reduce(align(random_rollouts()), METRICS.values())
    with pytest.raises(MergeError, match=next(iter(change))):
        sums.merge(replace(sums, **change))
