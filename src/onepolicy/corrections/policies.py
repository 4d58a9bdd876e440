"""The three ways to name the policies of a loss (number 18), and the KL to a reference (number 19). Gradients flow."""

from __future__ import annotations

import math

import numpy as np

from onepolicy.arrays import Array, is_torch
from onepolicy.corrections.ops import ops_of
from onepolicy.errors import ContentError, UnknownName, UsageError


def policy_ratio(*, current: Array, mask: Array, old: Array | None = None, sampler: Array | None = None) -> Array:
    """The ratio of a clipped loss, `[B, T]` or `[T]`, with its gradient; 1 where the mask is false.

    old given: decoupled, exp(current - old); the gap of old to the sampler is corrected by weights. sampler given:
    bypass (old := sampler), exp(current - sampler); the clip then bounds mismatch and staleness together, and no weight
    is to be applied besides. Neither: force on-policy (old := current, detached), value 1 with the gradient of
    log p_current; only right with one update a rollout (NeMo-RL `force_on_policy_ratio`). Values are finite: a log
    ratio is held under what exp can hold; NaN gives 1 without gradient. Errors: `UsageError` for both.
    """
    if old is not None and sampler is not None:
        raise UsageError("policy_ratio: give old= (decoupled) or sampler= (bypass), not both")
    ops = ops_of(current)
    current, mask = ops.floats(current), ops.bools(mask)
    behind = old if sampler is None else sampler
    behind = ops.detach(current) if behind is None else ops.detach(ops.floats(behind))
    return _exp(current, behind, mask)


def _exp(above: Array, below: Array, mask: Array, share: float = 1.0) -> Array:
    """exp(above - below), at most exp(share * limit), where the mask is true and both are finite; else 1."""
    ops = ops_of(above)
    _same_shape(above, below, mask)
    with np.errstate(invalid="ignore"):
        seen = mask & ops.isfinite(above) & ops.isfinite(below)
        d = ops.where(seen, above, 0.0) - ops.where(seen, below, 0.0)
        return ops.exp(ops.clip(d, -math.inf, ops.limit(d) * share))


ESTIMATORS = ("k1", "k2", "k3")


def reference_kl(
    *,
    current: Array,
    reference: Array,
    mask: Array,
    old: Array | None = None,
    sampler: Array | None = None,
    estimator: str = "k3",
    unbiased: bool = True,
) -> Array:
    """The KL term to a reference policy, per token, `[B, T]` or `[T]`, nats, with its gradient; 0 where masked.

    With x = log p_reference - log p_current: k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x. These are estimates of
    KL(current || reference) on tokens that *current* drew; the tokens came from old or the sampler. unbiased: times
    the token's ratio exp(current - old), or exp(current - sampler), never detached, never that of the whole sequence
    (TRL #6586). Source: DeepSeek-V3.2 (arXiv 2512.02556), Eq. 7; TRL `use_bias_correction_kl`, slime
    `--use-unbiased-kl` (old), NeMo-RL `use_on_policy_kl_approximation` (sampler). Add it to the policy loss after the
    correction's weights: they do not belong to it. A token without a finite number on every side gives 0.
    """
    if estimator not in ESTIMATORS:
        raise UnknownName("estimator", estimator, ESTIMATORS)
    if unbiased and (old is None) == (sampler is None):
        raise UsageError("reference_kl: the unbiased form needs exactly one of old= and sampler=; else unbiased=False")
    ops = ops_of(current)
    current, mask = ops.floats(current), ops.bools(mask)
    _same_shape(current, reference, mask)
    behind = old if sampler is None else sampler
    seen = mask & ops.isfinite(current) & ops.isfinite(reference)
    if unbiased:
        assert behind is not None
        seen = seen & ops.isfinite(behind)
    x = ops.where(seen, ops.detach(ops.floats(reference)), 0.0) - ops.where(seen, current, 0.0)
    kl = _estimate(estimator, x)
    return kl * _exp(current, ops.detach(ops.floats(behind)), seen, 0.5) if unbiased else kl


def _estimate(estimator: str, x: Array) -> Array:
    ops = ops_of(x)
    if estimator == "k1":
        return -x
    if estimator == "k2":
        return x * x * 0.5
    x = ops.clip(x, -math.inf, ops.limit(x) / 2)  # the exp is multiplied with a ratio: both must stay finite
    return ops.expm1(x) - x


def _same_shape(*arrays: Array) -> None:
    if len({tuple(x.shape) for x in arrays}) > 1 or len({is_torch(x) for x in arrays}) > 1:
        raise ContentError(f"shapes differ: {', '.join(str(tuple(x.shape)) for x in arrays)}; wanted one, of one kind")
