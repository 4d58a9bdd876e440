"""From logits to a distribution in numpy: the declared rules, and what is read off (log-probs, entropy, a draw)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.engines.semantics import Rules
from onepolicy.errors import EngineError

Array = NDArray[np.floating]


def require_supported(rules: Rules) -> Rules:
    """The rules themselves. Errors: `EngineError` for penalties, and for values that nothing can be drawn with."""
    if rules.penalised:
        raise EngineError(f"fake engine: penalties are not implemented; got {rules}, wanted 1, 0 and 0 (off)")
    if not (0 < rules.temperature < np.inf and 0 < rules.top_p <= 1 and 0 <= rules.min_p < 1):
        raise EngineError(f"fake engine: got {rules}, wanted temperature >= 0, 0 < top_p <= 1, 0 <= min_p < 1")
    return rules


def process(logits: Array, rules: Rules) -> Array:
    """`[N, V]` logits after temperature, min_p, top_k and top_p, -inf where a token is not kept.

    Ties at the k-th place are all kept.
    """
    z = logits if rules.temperature == 1 else logits / logits.dtype.type(rules.temperature)
    if rules.min_p > 0:
        z = _keep(z, z >= z.max(axis=-1, keepdims=True) + np.log(rules.min_p))
    if 0 < rules.top_k < z.shape[-1]:
        z = _keep(z, z >= np.partition(z, -rules.top_k, axis=-1)[:, -rules.top_k, None])
    return _nucleus(z, rules.top_p) if rules.top_p < 1 else z


def _keep(z: Array, kept: NDArray[np.bool_]) -> Array:
    return np.where(kept, z, z.dtype.type(-np.inf))


def _nucleus(z: Array, mass: float) -> Array:
    """Keeps the likeliest tokens up to and with the one that reaches `mass`."""
    order = np.argsort(-z, axis=-1, kind="stable")
    ranked = np.exp(np.take_along_axis(z, order, axis=-1) - z.max(axis=-1, keepdims=True))
    before = np.cumsum(ranked, axis=-1) - ranked
    kept = before < mass * ranked.sum(axis=-1, keepdims=True)
    # the likeliest token stays whatever rounding says
    kept[:, 0] = True
    keep = np.zeros_like(kept)
    np.put_along_axis(keep, order, kept, axis=-1)
    return _keep(z, keep)


class Softmax:
    """The distribution of `[N, V]` logits by the rules, in their precision (float32 as on real engines, or float64)."""

    def __init__(self, logits: Array, rules: Rules) -> None:
        logits = process(logits, rules)
        self._shifted = logits - logits.max(axis=-1, keepdims=True)
        self._weight = np.exp(self._shifted)
        self._total = self._weight.sum(axis=-1)
        self._log_total = np.log(self._total)
        self._truncated = rules.truncated

    def logprobs(self, ids: NDArray[Any]) -> Array:
        """`[N]` log-probs of one id a row, nats."""
        return self._shifted[np.arange(len(ids)), ids] - self._log_total

    def all_logprobs(self) -> Array:
        """`[N, V]` log-probs, nats, float64."""
        return self._shifted.astype(np.float64) - self._log_total[:, None]

    def entropies(self) -> tuple[Array, Array]:
        """`[N]` entropy (nats) and `[N]` varentropy (nats squared): mean and variance of the surprisal."""
        # a dropped token has weight 0; any finite number stands for its -inf
        s = np.maximum(self._shifted, -1e3) if self._truncated else self._shifted
        part = self._weight * s
        mean = part.sum(axis=-1) / self._total
        square = np.einsum("nv,nv->n", part, s) / self._total
        return np.maximum(self._log_total - mean, 0), np.maximum(square - mean * mean, 0)

    def draw(self, uniform: NDArray[np.float64]) -> NDArray[np.int32]:
        """`[N]` ids: the inverse of the cumulative distribution at `uniform` in [0, 1)."""
        n, vocab = self._weight.shape
        width = max(1, int(np.sqrt(vocab)))
        # a sum over blocks first: a running sum over the whole vocabulary costs more than the forward pass
        edges = np.arange(0, vocab, width)
        blocks = np.cumsum(np.add.reduceat(self._weight, edges, axis=-1), axis=-1, dtype=np.float64)
        point = uniform * blocks[:, -1]
        block = np.minimum((blocks <= point[:, None]).sum(axis=-1), len(edges) - 1)
        point -= np.where(block > 0, np.take_along_axis(blocks, np.maximum(block - 1, 0)[:, None], axis=-1)[:, 0], 0)
        columns = edges[block][:, None] + np.arange(width)
        inside = np.where(columns < vocab, np.take_along_axis(self._weight, np.minimum(columns, vocab - 1), axis=-1), 0)
        above = np.cumsum(inside, axis=-1, dtype=np.float64) > point[:, None]
        # rounding may leave the point just past a block: then its last token that has any weight
        last = width - 1 - np.argmax((inside > 0)[:, ::-1], axis=-1)
        at = np.where(above.any(axis=-1), np.argmax(above, axis=-1), last)
        return columns[np.arange(n), at].astype(np.int32)
