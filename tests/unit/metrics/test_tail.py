"""A tail withholds the intervals of ratio means by its shape and its weight together."""

from __future__ import annotations

import numpy as np
import pytest

from onepolicy.align import align
from onepolicy.estimate import heavy_tail, measure
from onepolicy.gates.bounds import load
from onepolicy.gates.judge import judge
from onepolicy.metrics import METRICS
from onepolicy.metrics.tail import TAIL_HOLDS, is_heavy, pareto_k, tail_share
from onepolicy.records import from_records
from onepolicy.reduce import reduce
from onepolicy.sums import Sums
from onepolicy.types import FloatArray


def truncated(rng: np.random.Generator, clusters: int = 30, length: int = 48) -> FloatArray:
    """`[clusters, length]` log-ratios of a scorer that ignores a nucleus. Four tokens in five are at the kept mass, 0.8
    to 0.98; the others were nearly certain, and what they kept is nearly 1. One in a hundred is rounded up by some
    per cent: beside the nearly certain ones a heavy tail, but no ratio is far above 1."""
    shape = clusters, length
    certain = -rng.exponential(0.001, shape)
    d = np.where(rng.random(shape) < 0.2, certain, np.log(rng.uniform(0.8, 0.98, shape)))
    return np.where(rng.random(shape) < 0.01, np.abs(0.03 * rng.standard_normal(shape)), d)


def sums_of(d: FloatArray) -> Sums:
    rows = [
        {
            "token_ids": [i] * (len(x) + 1),
            "prompt_length": 1,
            "sampler_logprobs": [None, *[-8.0] * len(x)],
            "old_logprobs": [None, *(-8.0 + x)],
        }
        for i, x in enumerate(d)
    ]
    return reduce(align(from_records(rows)), METRICS.values())


def sorted_with_counts(d: FloatArray) -> tuple[FloatArray, FloatArray]:
    return np.sort(d.ravel()), np.ones(d.size)


def test_a_heavy_shape_without_weight_withholds_nothing() -> None:
    d = truncated(np.random.default_rng(3))
    values = sorted_with_counts(d)
    assert pareto_k(*values) > 0.7
    assert tail_share(*values) < TAIL_HOLDS
    assert not is_heavy(*values)
    sums = sums_of(d)
    assert not heavy_tail(sums)
    bias = measure(sums)["ratio_bias/mean"]
    assert bias.lower is not None and bias.upper is not None and bias.upper < -0.02
    report = judge(sums, load("bf16"))
    assert "ratio-biased" in {f.code for f in report.findings}
    assert "heavy-ratio-tail" not in {f.code for f in report.findings}


def test_the_same_shape_with_weight_does() -> None:
    d = truncated(np.random.default_rng(3))
    d[0, :3] = np.log([8.0, 10.0, 12.0])
    assert is_heavy(*sorted_with_counts(d))
    bias = measure(sums_of(d))["ratio_bias/mean"]
    assert bias.lower is None and "Pareto" in (bias.why or "")


@pytest.mark.parametrize(("degrees", "heavy"), [(1.0, True), (1e6, False)])
def test_noise_around_one_is_judged_by_its_shape(degrees: float, heavy: bool) -> None:
    """Where the shape is heavy, so is the weight: a third of the variance at least."""
    values = sorted_with_counts(0.07 * np.random.default_rng(0).standard_t(degrees, (20, 200)))
    assert (pareto_k(*values) > 0.7) is heavy
    assert is_heavy(*values) is heavy


def test_a_heavy_shape_of_noise_always_has_weight() -> None:
    rng = np.random.default_rng(1)
    draws = [sorted_with_counts(0.07 * rng.standard_t(2, 1500)) for _ in range(60)]
    heavy = [tail_share(*x) for x in draws if pareto_k(*x) > 0.7]
    assert len(heavy) > 15
    assert min(heavy) > 4 * TAIL_HOLDS


def test_what_overflows_is_heavy() -> None:
    d = np.random.default_rng(0).pareto(1.0, 4000) * 10
    assert is_heavy(*sorted_with_counts(d))


def test_the_interval_of_a_truncated_mean_covers_the_truth() -> None:
    """Each of its one-sided 99% limits is missed in 1% of the draws; 6 of 150 would be too many (p < 0.001)."""
    rng = np.random.default_rng(11)
    truth = np.exp(truncated(rng, 2000, 200)).mean() - 1
    found = [measure(sums_of(truncated(rng)))["ratio_bias/mean"] for _ in range(150)]
    limits = [(m.lower, m.upper) for m in found if m.lower is not None and m.upper is not None]
    assert len(limits) == len(found)
    assert sum(lower > truth for lower, _ in limits) < 6
    assert sum(upper < truth for _, upper in limits) < 6
