"""Every metric against an independent reference: scipy, numpy written another way, or numbers worked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy import special, stats
from scipy.spatial.distance import jensenshannon

from build import random_rollouts, rollouts_of
from onepolicy.align import align
from onepolicy.estimate import measure
from onepolicy.metrics import METRICS
from onepolicy.metrics.floor import BUCKETS
from onepolicy.metrics.tail import pareto_k
from onepolicy.reduce import reduce
from onepolicy.rollouts import Rollouts
from onepolicy.types import FloorColumns, LogprobPairs, Values

V = 17
#: Where each stretch of positions ends.
END = dict(zip(BUCKETS, [*BUCKETS[1:], math.inf], strict=True))


def full_rollouts(seed: int = 3) -> Rollouts:
    """Two softmax engines with full distributions, entropies, and ids drawn from the first."""
    rng = np.random.default_rng(seed)
    base = random_rollouts(seed, sequences=24)
    n = base.n_tokens
    logits = rng.normal(0, 2.5, (n, V))
    la, lb = special.log_softmax(logits, axis=1), special.log_softmax(logits + rng.normal(0, 0.1, (n, V)), axis=1)
    ids = np.array([rng.choice(V, p=np.exp(row)) for row in la])
    scorings = {
        name: replace(
            base.scorings[name],
            logprobs=Values(lp[np.arange(n), ids], base.drawn),
            entropy=Values(stats.entropy(np.exp(lp), axis=1)),
            varentropy=Values((np.exp(lp) * lp**2).sum(1) - (np.exp(lp) * lp).sum(1) ** 2),
            distributions=lp,
        )
        for name, lp in (("sampler", la), ("old", lb))
    }
    return replace(base, tokens={**base.tokens, "token_ids": Values(ids.astype(np.int32))}, scorings=scorings)


def pairs_of(rollouts: Rollouts) -> LogprobPairs:
    """Aligned, with places of all sizes, a floor of three pairs of variants, and holes in all of it."""
    pairs = align(rollouts)
    rng = np.random.default_rng(8)
    n = len(pairs.token_ids)
    scale = np.where(rng.random(n) < 0.05, np.nan, rng.uniform(0.02, 0.3, n))
    gaps = rng.normal(0, 0.1, (3, n))
    gaps[rng.random((3, n)) < 0.1] = np.nan
    positions = np.exp(rng.uniform(0, math.log(300_000), n)).astype(np.int64)
    return replace(pairs, floor=FloorColumns(scale, gaps, rng.random(n) > 0.1, "a table"), positions=positions)


class Sample:
    """The same data as plain arrays, for the references."""

    def __init__(self, rollouts: Rollouts) -> None:
        pairs = pairs_of(rollouts)
        on, floor = rollouts.drawn & np.isfinite(pairs.floor.scale), pairs.floor
        self.position = pairs.positions[rollouts.drawn]
        self.z = (pairs.log_ratio / floor.scale)[on & floor.counted]
        self.z_position = pairs.positions[on & floor.counted]
        known = np.isfinite(floor.gaps) & on & floor.counted  # over the same tokens
        self.v, self.v_position = (floor.gaps / floor.scale)[known], np.tile(pairs.positions, (3, 1))[known]
        s, o, m = rollouts.scorings["sampler"], rollouts.scorings["old"], rollouts.drawn
        self.a, self.b = s.logprobs.values[m], o.logprobs.values[m]
        self.d, self.p, self.q = self.b - self.a, np.exp(self.a), np.exp(self.b)
        self.r = self.q / self.p
        seq = [rollouts.sequence(i) for i in range(len(rollouts))]
        self.seqs = [(o.logprobs.values[x] - s.logprobs.values[x])[m[x]] for x in seq]
        self.sa = [s.logprobs.values[x][m[x]] for x in seq]
        self.sb = [o.logprobs.values[x][m[x]] for x in seq]
        self.T = np.array([len(x) for x in self.seqs])
        self.D = np.array([math.fsum(x) for x in self.seqs])
        self.pa, self.pb = np.exp(s.distributions[m]), np.exp(o.distributions[m])
        self.surprise = {}
        for name, scoring, lp in (("sampler", s, self.a), ("scorer", o, self.b)):
            self.surprise[name] = (-lp - scoring.entropy.values[m], scoring.varentropy.values[m])


def fit(x: np.ndarray, y: np.ndarray):
    return stats.linregress(x, y)


def per_sequence(f: Callable[[np.ndarray], float]) -> Callable[[Sample], float]:
    return lambda s: float(np.mean([f(x) for x in s.seqs]))


def spread(s: Sample) -> float:
    mu = s.D.sum() / s.T.sum()
    return float(((s.D - mu * s.T) ** 2).sum() / s.T.sum())


def inside(positions: np.ndarray, low: int) -> np.ndarray:
    return (positions >= low) & (positions < END[low])


def rms(x: np.ndarray) -> float:
    return math.sqrt(math.fsum(x * x) / len(x))


def quantile(x: np.ndarray, q: float) -> float:
    return float(np.quantile(x, q, method="inverted_cdf"))


REFERENCES: dict[str, Callable[[Sample], float]] = {
    "abs_log_ratio/mean": lambda s: np.linalg.norm(s.d, 1) / len(s.d),
    "abs_log_ratio/max": lambda s: np.linalg.norm(s.d, np.inf),
    "abs_log_ratio/p50": lambda s: quantile(abs(s.d), 0.5),
    "abs_log_ratio/p95": lambda s: quantile(abs(s.d), 0.95),
    "abs_log_ratio/p99": lambda s: quantile(abs(s.d), 0.99),
    "abs_log_ratio/p99.9": lambda s: quantile(abs(s.d), 0.999),
    "log_ratio/rms": lambda s: np.linalg.norm(s.d) / math.sqrt(len(s.d)),
    "log_ratio/mean": lambda s: math.fsum(s.d) / len(s.d),
    "bit_equal/share": lambda s: sum(x == y for x, y in zip(s.a, s.b, strict=True)) / len(s.a),
    "prob_abs_diff/mean": lambda s: np.abs(s.q - s.p).mean(),
    "prob_abs_diff/max": lambda s: np.abs(s.q - s.p).max(),
    "prob_diff/mean": lambda s: s.q.mean() - s.p.mean(),
    "prob_pearson/r": lambda s: np.corrcoef(s.p, s.q)[0, 1],
    "logprob_line/slope": lambda s: fit(s.a, s.b).slope,
    "logprob_line/intercept": lambda s: fit(s.a, s.b).intercept,
    "extreme_share/1.1": lambda s: np.mean((s.r > 1.1) | (s.r < 1 / 1.1)),
    "extreme_share/1.2": lambda s: np.mean((s.r > 1.2) | (s.r < 1 / 1.2)),
    "extreme_share/2": lambda s: np.mean((s.r > 2) | (s.r < 0.5)),
    "extreme_share/10": lambda s: np.mean((s.r > 10) | (s.r < 0.1)),
    "outside_clip/share": lambda s: np.mean((s.r > 1.2) | (s.r < 0.8)),
    "catastrophic_token/share": lambda s: np.mean((s.r > 1e4) | (s.r < 1e-4)),
    "kl_sampler_scorer_k1/mean": lambda s: np.mean(s.a - s.b),
    "kl_sampler_scorer_k2/mean": lambda s: np.mean((s.a - s.b) ** 2) / 2,
    "kl_sampler_scorer_k3/mean": lambda s: np.mean(s.r - 1 - np.log(s.r)),
    "kl_sampler_scorer_k1/sequence_mean": per_sequence(lambda d: -d.mean()),
    "kl_sampler_scorer_k2/sequence_mean": per_sequence(lambda d: (d**2).mean() / 2),
    "kl_sampler_scorer_k3/sequence_mean": per_sequence(lambda d: (np.exp(d) - 1 - d).mean()),
    "kl_scorer_sampler_weighted/mean": lambda s: np.mean(1 - s.r + s.r * np.log(s.r)),
    "js_sampled/mean": lambda s: 0.5 * np.mean(np.log(2 / (1 + s.r)) + s.r * np.log(2 * s.r / (1 + s.r))),
    "tv_sampled/mean": lambda s: np.mean(np.where(s.r < 1, 1 - s.r, 0)),
    "kl_sampler_scorer_exact/mean": lambda s: special.rel_entr(s.pa, s.pb).sum(1).mean(),
    "kl_scorer_sampler_exact/mean": lambda s: stats.entropy(s.pb, s.pa, axis=1).mean(),
    "js_exact/mean": lambda s: np.mean(jensenshannon(s.pa, s.pb, axis=1) ** 2),
    "tv_exact/mean": lambda s: np.mean(np.abs(s.pa - s.pb).sum(1)) / 2,
    "ratio/mean": lambda s: s.r.mean(),
    "ratio_bias/mean": lambda s: s.r.mean() - 1,
    "ratio/std": lambda s: s.r.std(),
    "ratio/max": lambda s: s.r.max(),
    "ratio/min": lambda s: s.r.min(),
    "chi2_token/mean": lambda s: (s.r**2).mean() - 1,
    "ess_token/share": lambda s: s.r.sum() ** 2 / (len(s.r) * (s.r**2).sum()),
    "mult_prob_error/mean": lambda s: np.exp(np.abs(s.d)).mean(),
    "mult_prob_error/sequence_max": lambda s: max(np.exp(np.abs(x)).mean() for x in s.seqs),
    "sequence_log_ratio/mean": lambda s: s.D.mean(),
    **{
        f"sequence_log_ratio/{n}": (lambda s, q=q: quantile(s.D, q))
        for n, q in (("p5", 0.05), ("p50", 0.5), ("p95", 0.95))
    },
    **{
        f"geometric_ratio/{n}": (lambda s, q=q: math.exp(quantile(s.D / s.T, q)))
        for n, q in (("p5", 0.05), ("p50", 0.5), ("p95", 0.95))
    },
    "geometric_ratio/mean": lambda s: np.mean([stats.gmean(np.exp(x)) for x in s.seqs]),
    "chi2_sequence_product/mean": lambda s: np.mean([np.prod(np.exp(x)) ** 2 for x in s.seqs]) - 1,
    "chi2_sequence_geometric/mean": lambda s: np.mean([stats.gmean(np.exp(x)) ** 2 for x in s.seqs]) - 1,
    "ess_sequence/share": lambda s: np.exp(s.D).sum() ** 2 / (len(s.D) * np.exp(2 * s.D).sum()),
    "ppl_sampler/mean": lambda s: np.mean([1 / stats.gmean(np.exp(x)) for x in s.sa]),
    "ppl_scorer/mean": lambda s: np.mean([1 / stats.gmean(np.exp(x)) for x in s.sb]),
    "log_ppl_diff/mean": lambda s: np.mean([x.mean() - y.mean() for x, y in zip(s.sa, s.sb, strict=True)]),
    "ppl_ratio/mean": lambda s: np.mean([np.exp(x.mean() - y.mean()) for x, y in zip(s.sa, s.sb, strict=True)]),
    "catastrophic_sequence/share": lambda s: np.mean(np.abs(s.D) > math.log(1e4)),
    "length_scaling/variance_per_token": spread,
    **{
        f"surprisal_{side}/z": (lambda s, side=side: s.surprise[side][0].sum() / math.sqrt(s.surprise[side][1].sum()))
        for side in ("sampler", "scorer")
    },
    **{f"surprisal_{side}/excess": (lambda s, side=side: s.surprise[side][0].mean()) for side in ("sampler", "scorer")},
    "ratio/pareto_k": lambda s: psis_k(s.r),
    "gap_over_floor/rms": lambda s: rms(s.z) / rms(s.v),
    **{
        f"gap_over_floor/{n}": (lambda s, q=q: quantile(abs(s.z), q) / quantile(abs(s.v), q))
        for n, q in (("p50", 0.5), ("p95", 0.95), ("p99.9", 0.999))
    },
    **{
        f"gap_over_floor_from_{low}/rms": (
            lambda s, low=low: rms(s.z[inside(s.z_position, low)]) / rms(s.v[inside(s.v_position, low)])
        )
        for low in BUCKETS
    },
    **{f"log_ratio_from_{low}/rms": (lambda s, low=low: rms(s.d[inside(s.position, low)])) for low in BUCKETS},
}


def psis_k(ratios: np.ndarray) -> float:
    """An independent fit: maximum likelihood of a generalised Pareto, then the published prior of ten at 0.5."""
    m = max(math.ceil(0.05 * len(ratios)), 50)
    ordered = np.sort(ratios)
    tail = ordered[-m:] - ordered[-m - 1]
    k, _, _ = stats.genpareto.fit(tail / tail.mean(), floc=0)
    return (k * m + 5) / (m + 10)


@pytest.fixture(scope="module")
def measured():
    rollouts = full_rollouts()
    return measure(reduce(pairs_of(rollouts), METRICS.values())), Sample(rollouts)


def test_every_metric_has_a_reference() -> None:
    assert set(REFERENCES) == set(METRICS)


@pytest.mark.parametrize("key", METRICS)
def test_against_the_reference(key: str, measured) -> None:
    measurements, sample = measured
    got, wanted = measurements[key].value, float(REFERENCES[key](sample))
    if key == "ratio/pareto_k":  # another estimator of the same shape
        assert got == pytest.approx(wanted, abs=0.12)
    elif (read := METRICS[key].quantile) is not None:  # float-bit bins, of both where it is a ratio
        assert got == pytest.approx(wanted, rel=0.008 if read.over else 0.004, abs=1e-12)
    else:
        assert got == pytest.approx(wanted, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "key", [k for k, m in METRICS.items() if m.ideal is not None and not k.startswith("surprisal")]
)
def test_no_difference_gives_the_ideal_value(key: str) -> None:
    rollouts = full_rollouts()
    twin = replace(
        rollouts.scorings["sampler"],
        logprobs=Values(rollouts.scorings["sampler"].logprobs.values.copy(), rollouts.drawn),
        scoring_id="twin",
    )
    m = measure(reduce(pairs_of(rollouts.with_scoring("old", twin)), METRICS.values()))[key]
    assert m.value == pytest.approx(METRICS[key].ideal, abs=1e-12)


@pytest.mark.parametrize("shift", [0.0, 100.0, -3.5])
def test_logits_plus_a_constant_change_nothing(shift: float) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, (200, V))
    ids = rng.integers(0, V, 200)
    a = special.log_softmax(logits, axis=1)[np.arange(200), ids]
    b = special.log_softmax(logits + shift, axis=1)[np.arange(200), ids]
    m = measure(reduce(align(rollouts_of(a, b, [50] * 4)), METRICS.values()))
    assert m["abs_log_ratio/max"].value < 1e-12


def test_logits_times_two_change_much() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 3, (200, V))
    ids = rng.integers(0, V, 200)
    a, b = (special.log_softmax(x, axis=1)[np.arange(200), ids] for x in (logits, 2 * logits))
    m = measure(reduce(align(rollouts_of(a, b, [50] * 4)), METRICS.values()))
    assert m["logprob_line/slope"].value > 1.7


def one_token(a: float, b: float):
    return measure(reduce(align(rollouts_of(np.array([0.0, a]), np.array([0.0, b]), [2])), METRICS.values()))


def test_k3_by_hand_in_both_directions() -> None:
    """NeMo-RL's example: -5 against -15 is 9 one way and 22,015 the other."""
    assert one_token(-5.0, -15.0)["kl_sampler_scorer_k3/mean"].value == pytest.approx(math.exp(-10) - 1 + 10)
    assert one_token(-15.0, -5.0)["kl_sampler_scorer_k3/mean"].value == pytest.approx(math.exp(10) - 11)
    assert math.exp(10) - 11 == pytest.approx(22015.47, abs=0.01)
    assert one_token(-5.0, -15.0)["kl_scorer_sampler_weighted/mean"].value == pytest.approx(1 - 11 * math.exp(-10))


@pytest.mark.parametrize("d", [5e-6, 1e-8, -1e-8])
def test_k3_does_not_cancel(d: float) -> None:
    """`ratio - 1 - log_ratio` gives 6.8e-9 in float32 at 5e-6, and a negative number in float64 at 1e-8."""
    b = -1.0 + d
    exact = (b + 1.0) ** 2 / 2
    assert one_token(-1.0, b)["kl_sampler_scorer_k3/mean"].value == pytest.approx(exact, rel=1e-4)


def test_far_apart_nothing_overflows_into_nan() -> None:
    m = one_token(-1.0, -801.0)
    assert m["kl_sampler_scorer_k3/mean"].value == pytest.approx(799.0)
    assert m["kl_scorer_sampler_weighted/mean"].value == pytest.approx(1.0)
    assert m["js_sampled/mean"].value == pytest.approx(math.log(2) / 2)
    up = one_token(-801.0, -1.0)
    assert up["kl_sampler_scorer_k3/mean"].value is None
    assert up["abs_log_ratio/max"].value == 800.0


@pytest.mark.parametrize("k", [0.2, 0.5, 0.9])
def test_pareto_k_of_a_known_tail(k: float) -> None:
    rng = np.random.default_rng(5)
    d = np.sort(np.log1p(stats.genpareto.rvs(k, size=40_000, random_state=rng)))
    assert pareto_k(d, np.ones(len(d))) == pytest.approx(k, abs=0.07)


def test_pareto_k_of_many_tokens_needs_no_more_memory() -> None:
    """Binned values are fitted with their counts: ten thousand times the tokens, the same shape, at once."""
    rng = np.random.default_rng(6)
    codes, counts = np.unique(np.round(stats.genpareto.rvs(0.5, size=40_000, random_state=rng), 2), return_counts=True)
    few, many = (pareto_k(np.log1p(codes), counts * float(times)) for times in (1, 10_000))
    assert many == pytest.approx(few, abs=0.01)


def test_gaussian_noise_of_0_1_and_0_5() -> None:
    """k3 of mean-zero noise: exp(s^2 / 2) - 1 = 0.0050 and 0.133, within its interval."""
    for sd in (0.1, 0.5):
        rng = np.random.default_rng(7)
        a = -5 - rng.exponential(1, 20_000)
        rollouts = rollouts_of(a, a + rng.normal(0, sd, 20_000), [100] * 200)
        m = measure(reduce(align(rollouts), METRICS.values()))["kl_sampler_scorer_k3/mean"]
        assert m.lower < math.exp(sd * sd / 2) - 1 < m.upper
