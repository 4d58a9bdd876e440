"""Divergences of single tokens, by name. d = log q - log p; p, q: the token's probability, sampler's and policy's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onepolicy.arrays import Array
from onepolicy.corrections.ratio import Ratio

#: Probabilities are kept this far from 0 and 1 in binary divergences, as OpenRLHF and prime-rl do.
EDGE = 1e-6


def k2(ratio: Ratio) -> Array:
    """d^2 / 2."""
    return ratio.log_ratio * ratio.log_ratio * 0.5


def k3(ratio: Ratio) -> Array:
    """e^d - 1 - d: the estimate of KL(sampler || policy) on the sampler's tokens."""
    return ratio.ops.expm1(ratio.log_ratio) - ratio.log_ratio


def k3_reversed(ratio: Ratio) -> Array:
    """e^-d - 1 + d: AReaL's k3; on the sampler's tokens it estimates nothing, and one token can dominate."""
    return ratio.ops.expm1(-ratio.log_ratio) + ratio.log_ratio


def multiplicative(ratio: Ratio) -> Array:
    """e^|d|, at least 1: NeMo-RL's multiplicative probability error."""
    return ratio.ops.exp(ratio.ops.abs(ratio.log_ratio))


def tv(ratio: Ratio) -> Array:
    """|q - p|: the total variation of two events, this token or another."""
    p, q = ratio.probabilities()
    return ratio.ops.abs(q - p)


def kl_binary(ratio: Ratio) -> Array:
    """KL(p || q) of two events, this token or another."""
    return binary_kl(ratio.ops, *ratio.probabilities())


def binary_kl(ops: Any, p: Array, q: Array) -> Array:
    """KL of Bernoulli(p) from Bernoulli(q), elementwise, nats; p and q clamped to [1e-6, 1 - 1e-6]."""
    p, q = (ops.clip(x, EDGE, 1 - EDGE) for x in (p, q))
    return p * ops.log(p / q) + (1 - p) * ops.log((1 - p) / (1 - q))


DIVERGENCES: dict[str, Callable[[Ratio], Array]] = {
    "k2": k2,
    "k3": k3,
    "k3_reversed": k3_reversed,
    "multiplicative": multiplicative,
    "tv": tv,
    "binary_kl": kl_binary,
}
