"""Measurements: the jackknife against a plain one, effective clusters, what has no interval and says so."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from build import random_pairs, rollouts_of
from onepolicy.align import align
from onepolicy.estimate import measure, quantile_p_value
from onepolicy.metrics import METRICS
from onepolicy.reduce import reduce
from onepolicy.sums import Quantile
from onepolicy.types import LogprobPairs, Measurement


def measured(pairs: LogprobPairs) -> dict[str, Measurement]:
    return measure(reduce(pairs, METRICS.values()))


def of(a: Any, b: Any, lengths: list[int], **more: Any) -> dict[str, Measurement]:
    return measured(align(rollouts_of(np.array(a), np.array(b), lengths, **more)))


def by_cluster(pairs: LogprobPairs) -> dict[str, np.ndarray]:
    out: dict[str, list[np.ndarray]] = {}
    for i, key in enumerate(pairs.cluster_keys):
        at = slice(pairs.offsets[i], pairs.offsets[i + 1])
        out.setdefault(key, []).append(pairs.log_ratio[at][pairs.drawn[at]])
    return {k: np.concatenate(v) for k, v in out.items()}


def plain_error(groups: list[np.ndarray], f: Any) -> float:
    left = np.array([f(np.concatenate(groups[:i] + groups[i + 1 :])) for i in range(len(groups))])
    return math.sqrt((len(left) - 1) * left.var())


@pytest.mark.parametrize(
    ("key", "f"),
    [
        ("log_ratio/mean", lambda d: d.mean()),
        ("ratio_bias/mean", lambda d: np.exp(d).mean() - 1),
        ("kl_sampler_scorer_k3/mean", lambda d: np.log((np.exp(d) - 1 - d).mean())),
        ("log_ratio/rms", lambda d: np.log(np.sqrt((d**2).mean()))),
    ],
)
def test_standard_errors_are_those_of_a_plain_jackknife(key: str, f: Any) -> None:
    pairs = random_pairs(2)
    groups = list(by_cluster(pairs).values())
    m = measured(pairs)[key]
    assert m.std_error == pytest.approx(plain_error(groups, f), rel=1e-6)
    n = np.array([len(g) for g in groups])
    assert m.effective_clusters == pytest.approx(n.sum() ** 2 / (n**2).sum())
    width = stats.t.ppf(0.99, m.effective_clusters - 1) * m.std_error
    wanted = m.value * math.exp(width) if m.scale == "log" else m.value + width
    assert m.upper == pytest.approx(wanted)


def test_sequences_of_one_group_are_one_cluster() -> None:
    rng = np.random.default_rng(0)
    d = np.repeat(rng.normal(0, 0.1, 30), 12)
    a = np.full(len(d), -5.0)
    alone = of(a, a + d, [6] * 60)["log_ratio/mean"]
    together = of(a, a + d, [6] * 60, groups=[str(i // 2) for i in range(60)])["log_ratio/mean"]
    assert (alone.clusters, together.clusters) == (60, 30)
    assert together.std_error > 1.3 * alone.std_error


def test_one_cluster_has_no_interval() -> None:
    m = of([0, -1, -2], [0, -1.1, -2], [3])["abs_log_ratio/mean"]
    assert m.value == pytest.approx(0.05)
    assert (m.std_error, m.lower, m.upper) == (None, None, None)


def test_equal_sides_have_an_interval_of_width_zero() -> None:
    m = of([0, -1] * 30, [0, -1] * 30, [2] * 30)["kl_sampler_scorer_k3/mean"]
    assert (m.value, m.lower, m.upper) == (0.0, 0.0, 0.0)


def test_what_is_missing_is_none_and_says_why() -> None:
    m = of([0, -1] * 30, [0, -1.1] * 30, [2] * 30, drawn=np.zeros(60, dtype=bool))
    assert all(x.value is None and x.why for x in m.values())
    m = of([0, -1] * 30, [0, -1.1] * 30, [2] * 30)
    assert "entropy" in m["surprisal_sampler/z"].why
    assert "distributions" in m["kl_sampler_scorer_exact/mean"].why


@pytest.mark.parametrize("p", [-1.3, -0.3, -0.7])
def test_a_column_that_does_not_vary_has_no_slope_and_no_correlation(p: float) -> None:
    """Only rounding is left of its variance: 1.0 or -1.0 would be noise."""
    m = of([0, p] * 7, [0, p / 2] * 7, [2] * 7)
    for key in ("prob_pearson/r", "logprob_line/slope", "logprob_line/intercept"):
        assert m[key].value is None, key
        assert "not defined" in m[key].why


def test_every_ratio_zero_is_no_crash() -> None:
    m = of([0, -1.0] * 30, [0, -900.0] * 30, [2] * 30)
    assert m["ess_token/share"].value is None
    assert m["ratio/mean"].value == 0.0


def test_limits_of_a_quantile_hold_it_and_shrink() -> None:
    widths = []
    for sequences in (200, 3200):
        m = measured(random_pairs(4, sequences=sequences))["abs_log_ratio/p95"]
        assert m.lower <= m.value <= m.upper
        widths.append(m.upper - m.lower)
    assert widths[1] < widths[0] / 2


def test_p_of_a_quantile_falls_as_the_bound_falls() -> None:
    sums = reduce(random_pairs(4, sequences=400), METRICS.values())
    read = Quantile("log_ratio", 0.95, absolute=True)
    ps = [quantile_p_value(sums, read, bound) for bound in (0.2, 0.1, 0.097, 0.09, 0.0)]
    assert ps == sorted(ps, reverse=True)
    assert ps[0] > 0.99
    assert ps[3] < 0.01
    assert ps[4] == 0.0


def test_p_of_a_quantile_is_uniform_at_the_true_value() -> None:
    """The true 95% point of |d| for sd 0.05 is 0.098; a bound there is rejected at 5% about one time in twenty."""
    true = 0.05 * stats.norm.ppf(0.975)
    rejected = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        d = rng.normal(0, 0.05, 6400)
        a = np.full(6400, -5.0)
        sums = reduce(align(rollouts_of(a, a + d, [40] * 160)), [METRICS["abs_log_ratio/p95"]])
        rejected += quantile_p_value(sums, Quantile("log_ratio", 0.95, absolute=True), true) < 0.05
    assert 2 <= rejected <= 24
