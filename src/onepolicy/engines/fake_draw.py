"""From logits to a distribution: the sampling rules, and what is read off (log-probs, entropy, a draw)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.errors import EngineError

Array = NDArray[np.floating]

_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(frozen=True, slots=True)
class Rules:
    """What is done to the logits before the softmax, in vLLM's order: temperature, min-p, top-k, top-p."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Rules:
        """Errors: `EngineError` for a penalty, or for a value that no engine could sample with."""
        for name, neutral in _PENALTIES.items():
            if given[name] != neutral:
                raise EngineError(f"fake engine: {name}={given[name]} is not implemented; wanted {neutral} (off)")
        rules = cls(float(given["temperature"]), float(given["top_p"]), int(given["top_k"]), float(given["min_p"]))
        if not (0 <= rules.temperature < np.inf and 0 < rules.top_p <= 1 and rules.top_k >= -1 and 0 <= rules.min_p < 1):
            raise EngineError(f"fake engine: {rules}; wanted temperature >= 0, 0 < top_p <= 1, top_k >= -1, 0 <= min_p < 1")
        return rules

    def reported(self, semantics: str) -> Rules:
        """The rules that a log-prob of these semantics has been through.

        Errors: `EngineError` at temperature 0, where only raw log-probs are defined.
        """
        if semantics == "raw":
            return Rules()
        if self.temperature == 0:
            raise EngineError(f"fake engine: temperature 0 has no {semantics} distribution; use logprobs=raw")
        return self if semantics == "processed" else Rules(temperature=self.temperature)

    def hotter(self, factor: float) -> Rules:
        return replace(self, temperature=self.temperature * factor)

    @property
    def truncates(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def apply(self, logits: Array) -> Array:
        """`[N, V]` logits, -inf where a token is not kept. At temperature 0 all but the first largest are dropped."""
        if self.temperature == 0:
            best = np.full_like(logits, -np.inf)
            best[np.arange(len(logits)), logits.argmax(axis=-1)] = 0
            return best
        z = logits if self.temperature == 1 else logits / logits.dtype.type(self.temperature)
        if self.min_p > 0:
            z = np.where(z >= z.max(axis=-1, keepdims=True) + np.log(self.min_p), z, -np.inf).astype(z.dtype)
        if 0 < self.top_k < z.shape[-1]:
            least = np.partition(z, -self.top_k, axis=-1)[:, -self.top_k, None]
            z = np.where(z >= least, z, -np.inf).astype(z.dtype)
        return _nucleus(z, self.top_p) if self.top_p < 1 else z


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
    return np.where(keep, z, -np.inf).astype(z.dtype)


class Softmax:
    """The distribution of `[N, V]` logits, in their own precision (float32 as on real engines, or float64)."""

    def __init__(self, logits: Array, truncated: bool = False) -> None:
        self._shifted = logits - logits.max(axis=-1, keepdims=True)
        self._weight = np.exp(self._shifted)
        self._total = self._weight.sum(axis=-1)
        self._log_total = np.log(self._total)
        self._truncated = truncated

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
