"""The KL to the reference, as runs report it: three estimators, plain and under the weights that are in use.

d = log p_reference - log p_policy at tokens of the policy. `dialects.definitions` has those of sampler and scorer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onepolicy.counted import Counted
from onepolicy.rollouts import Rollouts
from onepolicy.signatures.adding import keep, read
from onepolicy.types import BoolArray, FloatArray

#: Weights of k3 in front of the penalty -> what they are.
WEIGHTS: dict[str, str] = {
    "plain": "",
    "token": ", each term times its token's current / old (unbiased)",
    "geometric": ", each term times its sequence's geometric current / old (a slip)",
    "product": ", each term times its sequence's whole current / old (a slip)",
}
ESTIMATORS: dict[str, str] = {"k1": "-d (k1)", "k2": "d^2 / 2 (k2)", "k3": "e^d - 1 - d (k3)"}
MEANS: dict[str, str] = {"tokens": "mean over tokens", "sequences": "mean over sequences of their token means"}


@dataclass(frozen=True, slots=True)
class ReferenceKL:
    """One definition and its value. `policy`: current or old; `mask`: trained or drawn."""

    policy: str
    estimator: str
    weight: str
    mask: str
    mean: str
    value: float

    @property
    def says(self) -> str:
        what = f"{ESTIMATORS[self.estimator]} of {self.policy} to the reference{WEIGHTS[self.weight]}"
        return f"{what}; {MEANS[self.mean]} ({self.mask})"


def count(rollouts: Rollouts) -> Counted:
    """Sums of every definition over the trained and the drawn tokens; it merges over batches."""
    out = Counted()
    with np.errstate(over="ignore", invalid="ignore"):
        for policy in ("current", "old"):
            if policy in rollouts.scorings and "reference" in rollouts.scorings:
                for name, x in _terms(rollouts, policy):
                    for mask, inside in _masks(rollouts).items():
                        _add(out, f"{policy}:{name}:{mask}", x, inside & np.isfinite(x), rollouts)
    return out


def _masks(rollouts: Rollouts) -> dict[str, BoolArray]:
    drawn, trained = rollouts.drawn, rollouts.trained
    return {"trained": drawn if trained is None else drawn & trained, "drawn": drawn}


def _values(rollouts: Rollouts, name: str) -> FloatArray:
    col = rollouts.scorings[name].logprobs
    return np.where(col.mask(), col.values.astype(np.float64), np.nan)


def _terms(rollouts: Rollouts, policy: str) -> Iterator[tuple[str, FloatArray]]:
    """`[T]` each, NaN where a value is missing, by "estimator:weight"."""
    p = _values(rollouts, policy)
    d = _values(rollouts, "reference") - p
    k3: FloatArray = np.expm1(d) - d
    yield "k1:plain", -d
    yield "k2:plain", 0.5 * d * d
    yield "k3:plain", k3
    if policy == "current" and "old" in rollouts.scorings:
        for name, log in _weights(rollouts, p - _values(rollouts, "old")):
            yield f"k3:{name}", np.exp(log) * k3


def _weights(rollouts: Rollouts, step: FloatArray) -> Iterator[tuple[str, FloatArray]]:
    """The logs of the weights `[T]`. `step`: log current - log old."""
    sequence = np.repeat(np.arange(len(rollouts)), rollouts.lengths)
    use = np.isfinite(step) & _masks(rollouts)["trained"]
    total = np.bincount(sequence[use], step[use], len(rollouts))
    n = np.maximum(np.bincount(sequence[use], minlength=len(rollouts)), 1)
    yield "token", step
    yield "geometric", np.asarray(total / n, dtype=np.float64)[sequence]
    yield "product", np.asarray(total, dtype=np.float64)[sequence]


def _add(out: Counted, name: str, x: FloatArray, inside: BoolArray, rollouts: Rollouts) -> None:
    sequence = np.repeat(np.arange(len(rollouts)), rollouts.lengths)[inside]
    counts = np.bincount(sequence, minlength=len(rollouts))
    means = np.bincount(sequence, x[inside], len(rollouts)) / np.maximum(counts, 1)
    out.count(f"{name}:tokens", int(counts.sum()))
    out.count(f"{name}:sequences", int((counts > 0).sum()))
    keep(out, **{f"{name}:tokens": x[inside], f"{name}:sequences": means})


def values(counted: Counted) -> list[ReferenceKL]:
    """Everything that was counted, the plain definitions first."""
    out: list[ReferenceKL] = []
    for name, n in counted.counts.items():
        policy, estimator, weight, mask, mean = name.split(":")
        if n:
            out.append(ReferenceKL(policy, estimator, weight, mask, mean, read(counted, name) / n))
    return sorted(out, key=lambda v: (list(WEIGHTS).index(v.weight), v.mask != "trained", v.mean != "tokens", v.policy))
