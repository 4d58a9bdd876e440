"""Every correction against its formula written a second time: scalar Python, token by token, math.fsum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from correction_batches import Batch, random_batch
from onepolicy import corrections
from onepolicy.corrections import CORRECTIONS

SEEDS = range(800)
INF = math.inf


class Row:
    """One sequence as lists: only trained tokens with a finite log ratio are seen."""

    def __init__(self, batch: Batch, i: int) -> None:
        self.T = batch.mask.shape[1]
        advantages = batch.advantages[i]
        self.A = [float(advantages)] * self.T if np.ndim(advantages) == 0 else [float(x) for x in advantages]
        self.a, self.b = [float(x) for x in batch.sampler[i]], [float(x) for x in batch.policy[i]]
        self.trained = [bool(x) for x in batch.mask[i]]
        self.seen = [t for t in range(self.T) if self.trained[t] and math.isfinite(self.b[t] - self.a[t])]
        self.d = {t: self.b[t] - self.a[t] for t in self.seen}
        self.D = math.fsum(self.d.values())
        self.mean = self.D / max(1, len(self.seen))


def exp(x: float) -> float:
    return math.exp(min(x, 709.78))


def raw(row: Row, t: int, kind: str) -> float:
    at = {"token": row.d[t], "sequence": min(row.D, 708.78), "geometric": row.mean}
    return 1.0 if kind == "one" else exp(at[kind])


def bernoulli(p: float, q: float) -> float:
    p, q = (min(max(x, 1e-6), 1 - 1e-6) for x in (p, q))
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def p_of(row: Row, t: int) -> tuple[float, float]:
    return math.exp(row.a[t]), math.exp(row.b[t])


def mean_of(row: Row, f: Any) -> float:
    values = [f(t) for t in row.seen]
    return INF if INF in values else math.fsum(values) / max(1, len(values))


def grow(x: float) -> float:
    return math.exp(x) if x < 709.78 else INF


def k3(d: float) -> float:
    return math.expm1(d) - d if d < 709.78 else INF


def clamp(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


#: name -> (options, f(row, t, options) -> (weight, kept))
TOKEN: dict[str, list[tuple[dict[str, Any], Any]]] = {
    "truncate": [
        ({}, lambda r, t: (min(exp(r.d[t]), 2.0), True)),
        ({"cap": 5.0, "floor": 0.5}, lambda r, t: (clamp(exp(r.d[t]), 0.5, 5.0), True)),
        ({"cap": None}, lambda r, t: (exp(r.d[t]), True)),
    ],
    "sequence_truncate": [
        ({}, lambda r, t: (min(exp(r.D), 2.0), True)),
        ({"cap": 3.0, "floor": 0.1}, lambda r, t: (clamp(exp(r.D), 0.1, 3.0), True)),
    ],
    "geometric_truncate": [({}, lambda r, t: (min(exp(r.mean), 2.0), True))],
    "icepop": [
        ({}, lambda r, t: (exp(r.d[t]), True) if 0.5 <= exp(r.d[t]) <= 5.0 else (0.0, False)),
        ({"low": None, "high": 1.1}, lambda r, t: (exp(r.d[t]), True) if exp(r.d[t]) <= 1.1 else (0.0, False)),
    ],
    "token_mask": [
        ({}, lambda r, t: (1.0, 0.5 <= exp(r.d[t]) <= 2.0)),
        ({"low": 0.9, "weight": "token"}, lambda r, t: (exp(r.d[t]), 0.9 <= exp(r.d[t]) <= 2.0)),
    ],
    "sequence_reject": [
        ({}, lambda r, t: (raw(r, t, "sequence"), exp(r.D) <= 3.0)),
        ({"low": 0.5, "high": 2.0, "weight": "one"}, lambda r, t: (1.0, 0.5 <= exp(r.D) <= 2.0)),
    ],
    "geometric_reject": [
        ({}, lambda r, t: (1.0, 0.999 <= exp(r.mean) <= 1.001)),
        ({"low": 0.9, "high": 1.1, "weight": "token"}, lambda r, t: (exp(r.d[t]), 0.9 <= exp(r.mean) <= 1.1)),
        ({"low": 0.9, "high": None, "weight": "geometric"}, lambda r, t: (exp(r.mean), exp(r.mean) >= 0.9)),
    ],
    "divergence_reject": [
        ({}, lambda r, t: (1.0, mean_of(r, lambda u: k3(r.d[u])) <= 0.01)),
        (
            {"estimator": "k2", "over": "sum", "at_most": 0.3},
            lambda r, t: (1.0, math.fsum(x * x / 2 for x in r.d.values()) <= 0.3),
        ),
        (
            {"estimator": "k3", "over": "max", "at_most": 0.2, "weight": "token"},
            lambda r, t: (exp(r.d[t]), max(k3(x) for x in r.d.values()) <= 0.2),
        ),
        (
            {"estimator": "k3_reversed", "at_most": 0.1},
            lambda r, t: (1.0, mean_of(r, lambda u: k3(-r.d[u])) <= 0.1),
        ),
        (
            {"estimator": "tv", "at_most": 0.05},
            lambda r, t: (1.0, mean_of(r, lambda u: abs(p_of(r, u)[1] - p_of(r, u)[0])) <= 0.05),
        ),
        (
            {"estimator": "binary_kl", "at_most": 0.02},
            lambda r, t: (1.0, mean_of(r, lambda u: bernoulli(*p_of(r, u))) <= 0.02),
        ),
    ],
    "divergence_mask": [
        ({"at_most": 0.02}, lambda r, t: (1.0, k3(r.d[t]) <= 0.02)),
        ({"at_most": 0.02, "estimator": "k2"}, lambda r, t: (1.0, r.d[t] ** 2 / 2 <= 0.02)),
    ],
    "veto": [
        ({}, lambda r, t: (1.0, all(exp(x) >= 1e-4 for x in r.d.values()))),
        ({"low": 0.5, "high": 1.5}, lambda r, t: (1.0, all(0.5 <= exp(x) <= 1.5 for x in r.d.values()))),
    ],
    "error_reject": [
        ({}, lambda r, t: (1.0, mean_of(r, lambda u: grow(abs(r.d[u]))) <= 2.0)),
        ({"at_most": 1.05}, lambda r, t: (1.0, mean_of(r, lambda u: grow(abs(r.d[u]))) <= 1.05)),
    ],
    "off_policy_reject": [
        ({}, lambda r, t: (1.0, not (r.A[t] < 0 and -r.mean > 1e-4))),
        ({"delta": 0.1, "weight": "token"}, lambda r, t: (exp(r.d[t]), not (r.A[t] < 0 and -r.mean > 0.1))),
    ],
    "tv_mask": [
        ({}, lambda r, t: (1.0, tv_kept(r, t, 0.2, 0.2))),
        (
            {"up": 0.05, "down": 0.02, "weight": "token"},
            lambda r, t: (exp(r.d[t]), tv_kept(r, t, 0.05, 0.02)),
        ),
        (
            {"up": 0.1, "down": 0.1, "directed": False},
            lambda r, t: (1.0, abs(p_of(r, t)[1] - p_of(r, t)[0]) <= 0.1),
        ),
    ],
    "binary_kl_mask": [
        ({}, lambda r, t: (1.0, kl_kept(r, t, 0.05, 0.05))),
        ({"up": 0.01, "down": 0.3}, lambda r, t: (1.0, kl_kept(r, t, 0.01, 0.3))),
    ],
    "vaco_mask": [
        (
            {"at_most": 0.1},
            lambda r, t: (
                1.0,
                not (mean_of(r, lambda u: abs(k3(r.d[u]) + r.d[u])) > 0.1 and r.A[t] * r.d[t] > 0),
            ),
        )
    ],
    "kpop": [
        (
            {},
            lambda r, t: (
                exp(r.d[t]),
                max(bernoulli(*p_of(r, t)), bernoulli(*reversed(p_of(r, t)))) <= 0.1,
            ),
        ),
        (
            {"at_most": 0.005, "weight": "one"},
            lambda r, t: (1.0, max(bernoulli(*p_of(r, t)), bernoulli(*reversed(p_of(r, t)))) <= 0.005),
        ),
    ],
}


def tv_kept(r: Row, t: int, up: float, down: float) -> bool:
    p, q = p_of(r, t)
    return q - p <= up if r.A[t] > 0 else q - p >= -down


def kl_kept(r: Row, t: int, up: float, down: float) -> bool:
    p, q = p_of(r, t)
    size = bernoulli(p, q)
    return not (size > up and q > p) if r.A[t] > 0 else not (size > down and q < p)


CASES = [(name, options, f) for name, rows in TOKEN.items() for options, f in rows]
OTHER_TESTS = {"segment_truncate", "m2po", "normalise"}


def call(name: str, batch: Batch, **options: Any) -> corrections.Correction:
    policy = "current" if name == "off_policy_reject" else "old"
    return CORRECTIONS[name](**batch.inputs(policy, advantages=batch.advantages), effects=False, **options)


def expected(batch: Batch, f: Any) -> tuple[np.ndarray, np.ndarray]:
    weights, keep = np.zeros(batch.mask.shape), np.zeros(batch.mask.shape, dtype=bool)
    for i in range(len(batch.mask)):
        row = Row(batch, i)
        for t in row.seen:
            weight, kept = f(row, t)
            weights[i, t], keep[i, t] = weight * kept, kept
    return weights, keep


def same(c: corrections.Correction, weights: np.ndarray, keep: np.ndarray, what: Any) -> None:
    np.testing.assert_array_equal(c.keep, keep, err_msg=str(what))
    np.testing.assert_allclose(c.weights, weights, rtol=1e-10, atol=0, err_msg=str(what))
    assert np.isfinite(c.weights).all()


def test_every_correction_is_tested() -> None:
    assert set(TOKEN) | OTHER_TESTS == set(CORRECTIONS)


@pytest.mark.parametrize(("name", "options", "f"), CASES, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(CASES)])
def test_weights_and_keep(name: str, options: dict[str, Any], f: Any) -> None:
    dropped = kept = 0
    for seed in SEEDS:
        batch = random_batch(seed)
        c = call(name, batch, **options)
        weights, keep = expected(batch, f)
        same(c, weights, keep, (name, options, seed))
        assert c.denominator == max(1, batch.mask.sum())
        kept += int(keep.sum())
        dropped += int((batch.mask & ~keep).sum())
    assert kept > 300 and dropped > 200, "the batches must reach both sides"


def test_segments() -> None:
    """A run of trained tokens is a segment; the mean is over those of it that have a ratio."""
    for seed in SEEDS:
        batch = random_batch(seed)
        weights = np.zeros(batch.mask.shape)
        for i in range(len(batch.mask)):
            row = Row(batch, i)
            for t in row.seen:
                start, end = t, t
                while start > 0 and row.trained[start - 1]:
                    start -= 1
                while end + 1 < row.T and row.trained[end + 1]:
                    end += 1
                d = [row.d[u] for u in range(start, end + 1) if u in row.d]
                weights[i, t] = min(exp(math.fsum(d) / len(d)), 1.2)
        same(call("segment_truncate", batch), weights, weights > 0, seed)


@pytest.mark.parametrize("most", [0.04, 0.5, 0.0])
def test_m2po(most: float) -> None:
    """Take the tokens away one by one, the largest d^2 first, until the mean of the rest is small enough."""
    for seed in SEEDS:
        batch = random_batch(seed)
        rows = [Row(batch, i) for i in range(len(batch.mask))]
        left = sorted(((r.d[t] ** 2, i, t) for i, r in enumerate(rows) for t in r.seen), reverse=True)
        while left and math.fsum(x for x, _, _ in left) / len(left) > most:
            left.pop(0)
        keep = np.zeros(batch.mask.shape, dtype=bool)
        for _, i, t in left:
            keep[i, t] = True
        same(call("m2po", batch, at_most=most), keep * 1.0, keep, seed)


def test_m2po_drops_equal_values_together() -> None:
    a = np.zeros((1, 4))
    c = corrections.m2po(sampler=a, old=np.array([[0.5, 0.1, -0.5, 0.5]]), mask=a == 0, at_most=0.1)
    assert c.keep.tolist() == [[False, True, False, False]]


@pytest.mark.parametrize("per", ["token", "sequence"])
@pytest.mark.parametrize("over", ["trained", "kept"])
def test_self_normalised_weights(per: str, over: str) -> None:
    """After IcePop, so that trained and kept differ."""
    run = corrections.compose(corrections.icepop, (corrections.normalise, {"per": per, "over": over}))
    for seed in SEEDS:
        batch = random_batch(seed)
        weights, keep = expected(batch, TOKEN["icepop"][0][1])
        counted = keep if over == "kept" else expected(batch, lambda r, t: (1.0, True))[1]
        if per == "token":
            sums, counts = math.fsum(weights.ravel()), int(counted.sum())
        else:
            rows = [i for i in range(len(keep)) if counted[i].any()]
            sums, counts = math.fsum(math.fsum(weights[i]) / counted[i].sum() for i in rows), len(rows)
        mean = sums / max(1, counts)
        c = run(**batch.inputs(), effects=False)
        same(c, weights / (mean if mean > 1e-8 else 1.0), keep, (seed, per, over))


def test_normalise_alone_is_self_normalised_importance_sampling() -> None:
    """sum(w l) / sum(w), whatever the denominator counts."""
    for seed in range(500):
        batch = random_batch(seed, extreme=False, odd=False)
        if not batch.mask.any():
            continue
        loss = np.random.default_rng(seed).normal(size=batch.mask.shape)
        c = corrections.normalise(**batch.inputs())
        ratio = np.exp(batch.policy[batch.mask] - batch.sampler[batch.mask])
        wanted = (ratio * loss[batch.mask]).sum() / ratio.sum()
        assert c.loss(loss) == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("kind", ["all", "kept"])
def test_loss_and_denominators(kind: str) -> None:
    for seed in range(1000):
        batch = random_batch(seed)
        loss = np.random.default_rng(seed).normal(size=batch.mask.shape)
        c = corrections.icepop(**batch.inputs(), denominator=kind)
        weights, keep = expected(batch, TOKEN["icepop"][0][1])
        counted = batch.mask if kind == "all" else keep
        token = math.fsum((weights * loss).ravel()) / max(1, counted.sum())
        rows = [math.fsum(weights[i] * loss[i]) / counted[i].sum() for i in range(len(keep)) if counted[i].any()]
        assert c.loss(loss) == pytest.approx(token, rel=1e-10, abs=1e-14)
        assert (c.weights * c.keep * loss).sum() / c.denominator == pytest.approx(token, rel=1e-10, abs=1e-14)
        assert c.loss(loss, per="sequence") == pytest.approx(math.fsum(rows) / max(1, len(rows)), rel=1e-10, abs=1e-14)
        hole = np.where(c.keep, loss, np.nan)
        assert c.loss(hole) == c.loss(loss)


@pytest.mark.parametrize("sees", ["kept", "all"])
def test_compositions_in_their_order(sees: str) -> None:
    """Token mask, then a geometric rejection over what is left (or over everything), then capped weights."""
    run = corrections.compose(
        (corrections.token_mask, {"low": 0.8, "high": 1.25}),
        (corrections.geometric_reject, {"low": 0.99, "high": 1.01}),
        (corrections.truncate, {"cap": 1.1}),
        sees=sees,
    )
    differs = 0
    for seed in SEEDS:
        batch = random_batch(seed)
        weights, keep = np.zeros(batch.mask.shape), np.zeros(batch.mask.shape, dtype=bool)
        for i in range(len(keep)):
            row = Row(batch, i)
            inside = [t for t in row.seen if 0.8 <= exp(row.d[t]) <= 1.25]
            asked = inside if sees == "kept" else row.seen
            mean = math.fsum(row.d[t] for t in asked) / max(1, len(asked))
            for t in inside:
                keep[i, t] = 0.99 <= exp(mean) <= 1.01
                weights[i, t] = min(exp(row.d[t]), 1.1) * keep[i, t]
            differs += len(inside) != len(row.seen)
        same(run(**batch.inputs(), effects=False), weights, keep, (seed, sees))
    assert differs > 100


def test_reference_kl_and_its_ratio() -> None:
    for seed in range(1000):
        batch = random_batch(seed, odd=False, extreme=False)
        rng = np.random.default_rng(seed)
        reference = np.where(batch.mask, batch.policy + rng.normal(0, 0.5, batch.mask.shape), np.nan)
        for estimator in ("k1", "k2", "k3"):
            for unbiased in (True, False):
                got = corrections.reference_kl(
                    current=batch.policy,
                    reference=reference,
                    mask=batch.mask,
                    old=batch.sampler,
                    estimator=estimator,
                    unbiased=unbiased,
                )
                for i, t in np.ndindex(batch.mask.shape):
                    wanted = 0.0
                    if batch.mask[i, t]:
                        x = reference[i, t] - batch.policy[i, t]
                        wanted = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[estimator]
                        wanted *= math.exp(batch.policy[i, t] - batch.sampler[i, t]) if unbiased else 1.0
                    assert got[i, t] == pytest.approx(wanted, rel=1e-9, abs=1e-12)
