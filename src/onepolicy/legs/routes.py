"""Mixture models: how often the two engines choose other experts, against how often the scorer's own kernels do.

A token's log-prob comes from the position before it, so it is compared where the experts of that position are the same
on both sides; where they are not, the gap is a flip and not rounding.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.codes import finding
from onepolicy.engines.base import EngineSpec
from onepolicy.engines.model_files import model_directory
from onepolicy.errors import OnepolicyError
from onepolicy.estimate import LEAST_CLUSTERS
from onepolicy.intervals import CONFIDENCE, t_quantile
from onepolicy.rollouts import Rollouts
from onepolicy.types import BoolArray, Finding, FloatArray, LegResult, Outcome, Question, Ran

#: Flips between the engines, over flips between the scorer's own kernels: above this they are not rounding alone.
BOUND = 1.5
FACTOR = "mixture models: other experts between the engines, against between the scorer's own kernels"
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def is_mixture(spec: EngineSpec) -> bool:
    """Whether a spec's model directory is a mixture of experts."""
    if spec.name.rpartition(":")[2] not in ("hf", "vllm"):
        return False
    try:
        config = json.loads((model_directory(spec.target, spec.name) / "config.json").read_text(encoding="utf-8"))
    except (OnepolicyError, OSError, ValueError):
        return False
    found = {**config, **(config.get("text_config") or {})}
    return any(isinstance(found.get(k), int) and found[k] > 1 for k in _EXPERTS)


def behind(routes: NDArray[Any] | None, rollouts: Rollouts) -> NDArray[Any] | None:
    """`[T, L * K]`: for each token the experts of the position that predicts it; -1 at the start of a sequence."""
    if routes is None:
        return None
    out = np.full_like(routes, -1)
    out[1:] = routes[:-1]
    out[rollouts.offsets[:-1][rollouts.lengths > 0]] = -1
    return out


def flips(x: NDArray[Any], y: NDArray[Any], on: BoolArray) -> BoolArray:
    """`[T]`: some layer chose other experts; False where one side is not known."""
    known = ((x >= 0) & (y >= 0)).all(axis=-1)
    return on & known & (x != y).any(axis=-1)


def routes_result(
    rollouts: Rollouts, sampler: NDArray[Any] | None, variants: Mapping[str, NDArray[Any]], why: str
) -> tuple[LegResult, list[Finding]]:
    """The leg and its findings. `sampler`: its experts; `variants`: the scorer's by kernel, the one in use first."""
    none = LegResult("routes", Question.ROUNDING, FACTOR, "", "", Ran.NOT, why)
    if sampler is None or len(variants) < 2:
        return none, []
    on, clusters = rollouts.drawn, _clusters(rollouts)
    names = list(variants)
    between = flips(sampler, variants[names[0]], on)
    own = [(x, y, flips(variants[x], variants[y], on)) for i, x in enumerate(names) for y in names[i + 1 :]]
    ratio, low, high = _ratio(between, [f for *_, f in own], on, clusters)
    n = int(on.sum())
    facts: dict[str, Any] = {
        "tokens": n,
        "flipped": float(between.sum() / n),
        "own": {f"{x} and {y}": float(f.sum() / n) for x, y, f in own},
        "ratio": ratio,
        "lower": low,
        "upper": high,
        "bound": BOUND,
    }
    drift = low is not None and low > BOUND
    outcome = Outcome.DRIFT if drift else Outcome.PASS if high is not None and high <= BOUND else Outcome.INCONCLUSIVE
    result = LegResult(
        "routes", Question.ROUNDING, FACTOR, "the sampler's prefill", names[0], Ran.DONE, "", outcome, facts=facts
    )
    if not drift:
        return result, []
    message = (
        f"{facts['flipped']:.1%} of {n:,} tokens were predicted with other experts on the two sides, "
        f"{ratio:.2f} times as many as between the scorer's own kernels, bound {BOUND:g}"
    )
    return result, [finding("routes-differ", message, origin="run", evidence=facts)]


def _clusters(rollouts: Rollouts) -> NDArray[np.int64]:
    """`[T]` number of each token's cluster."""
    index: dict[str, int] = {}
    of_sequence = np.array([index.setdefault(k, len(index)) for k in rollouts.clusters()[1]])
    return np.repeat(of_sequence, rollouts.lengths)


def _ratio(
    between: BoolArray, own: Sequence[BoolArray], on: BoolArray, clusters: NDArray[np.int64]
) -> tuple[float | None, float | None, float | None]:
    """Flips between the engines over the mean of the own ones, with one-sided 99% limits (paired cluster jackknife)."""
    a = np.bincount(clusters[on], between[on])
    b = np.bincount(clusters[on], np.mean([f[on] for f in own], axis=0))
    if not a.sum() or not b.sum():
        return (0.0, None, 0.0) if not a.sum() and b.sum() else (None, None, None)
    ratio = float(a.sum() / b.sum())
    if np.count_nonzero(np.bincount(clusters[on])) < LEAST_CLUSTERS:
        return ratio, None, None
    with np.errstate(divide="ignore", invalid="ignore"):
        left: FloatArray = np.log((a.sum() - a) / (b.sum() - b))
    if not np.isfinite(left).all():
        return ratio, None, None
    n = len(left)
    width = t_quantile(CONFIDENCE, n - 1) * math.sqrt((n - 1) / n * float(((left - left.mean()) ** 2).sum()))
    return ratio, ratio * math.exp(-width), ratio * math.exp(width)
