"""The fake engine's model: a small seeded language model in numpy, with distributions like a real one's.

The next token depends on the last `WINDOW` tokens and on the position. Embeddings are mixed by offset, one MLP
block with RMSNorm and SiLU follows, then a head whose gain depends on the context: that makes many tokens almost
certain and some wide open, as in real replies. Weights are bfloat16 values at any dtype, as in real checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.engines.fake_rounding import TILE, Product, round_in_place, round_to

#: How many tokens before a position its distribution depends on.
WINDOW = 4
#: The position is seen modulo this; without it, certain tokens could close a loop and never leave it.
PERIOD = 61
#: Where a fault of late positions begins: as beyond the context that a model was first trained at.
LATE = 256
#: How much of a leaking neighbour's embedding is added.
LEAK = 0.04
#: Log of the head's gain: its middle, and how far the context moves it.
GAIN = (2.1, 1.2)
#: Added to the logit of the last id, which ends a reply: about one token in 200 at temperature 1.
STOP_BIAS = 6.0
#: Rows of one pass: its `[CHUNK, V]` arrays stay in the cache.
CHUNK = 512

Array = NDArray[np.floating]
Ids = NDArray[np.int32]


def weights(seed: int, vocab: int, hidden: int) -> dict[str, NDArray[np.float32]]:
    """The seeded checkpoint, every value a bfloat16. Row `vocab` of the embeddings stands for "before the text"."""
    rng = np.random.default_rng([0xFA4E, seed])
    scale = 0.1 * np.array([1.0, 0.7, 0.5, 0.35])[:, None, None]
    head = rng.normal(size=(hidden, vocab)) / np.sqrt(hidden)
    gate = rng.normal(size=hidden)
    # the token that ends a reply hardly depends on the context: STOP_BIAS alone sets how often it comes
    head[:, -1] *= 0.1
    plain = {
        "embed": scale * rng.normal(size=(WINDOW, vocab + 1, hidden)),
        "position": 0.03 * rng.normal(size=(PERIOD, hidden)),
        "up": rng.normal(size=(hidden, hidden)) * 1.5 / np.sqrt(hidden),
        "down": rng.normal(size=(hidden, hidden)) * 0.15 / np.sqrt(hidden),
        "gate": gate / np.linalg.norm(gate),
        "head": head,
        "lean": rng.normal(size=(hidden, 4)) / np.sqrt(hidden),
        "push": rng.normal(size=(4, vocab)) / 2,
    }
    return {name: round_to(w.astype(np.float32), "bfloat16") for name, w in plain.items()}


@dataclass(frozen=True, slots=True)
class Tampering:
    """What a fault changes inside the forward pass; the defaults change nothing.

    `late`: how far positions from `LATE` on are moved. `cache`: how far each position is moved, times the position.
    `noise`: sd of what is added to the first hidden state, another at each call.
    """

    eps: float = 1e-6
    times: float = 1.0
    plus: float = 0.0
    late: float = 0.0
    cache: float = 0.0
    noise: float = 0.0


class Model:
    """The forward pass at one dtype, reduction order and path. `drift`: factor of the added direction, 0 for none."""

    def __init__(
        self,
        checkpoint: dict[str, NDArray[np.float32]],
        dtype: str,
        order: str,
        drift: float = 0.0,
        tampering: Tampering | None = None,
        path: str = "prefill",
    ) -> None:
        self.dtype = dtype
        self._carrier = np.float64 if dtype == "float64" else np.float32
        w = {name: round_to(v.astype(self._carrier), dtype) for name, v in checkpoint.items()}
        self.vocab = w["head"].shape[1]
        self._embed, self._position = w["embed"], w["position"]
        self._gate, self._lean, self._push = w["gate"], w["lean"], w["push"]
        self._up, self._down, self._head = (Product(w[name], dtype, order, path) for name in ("up", "down", "head"))
        self._drift = self._carrier(drift)
        self._tampering = tampering or Tampering()
        self._random = np.random.default_rng()

    def logits(self, context: Ids, position: NDArray[np.int64], neighbour: Ids | None = None) -> Array:
        """`[N, V]` logits. `context`: `[N, WINDOW]`, nearest token first, `V` before the text. `position`: `[N]`.

        `neighbour`: `[N]`, another sequence's token that leaks into this one's context, -1 where none does.
        """
        n, tiled = len(context), -(-len(context) // TILE) * TILE
        context, position = _tiled(context, tiled), _tiled(position, tiled)
        leaking = None if neighbour is None else _tiled(neighbour, tiled)
        normed, gained = self._hidden(context, position, leaking)
        # the softmax is in float32 on real engines too: what comes after the head is no longer rounded
        z = self._head(gained)
        z[..., -1] += STOP_BIAS
        if self._drift:
            z += self._drift * self.direction(normed)
        if self._tampering.times != 1.0:
            z *= self._carrier(self._tampering.times)
        if self._tampering.plus:
            z += self._carrier(self._tampering.plus)
        return z.reshape(-1, self.vocab)[:n]

    def direction(self, normed: Array) -> Array:
        """`[..., V]`, the smooth, bounded change of the logits that `drift` multiplies."""
        return np.tanh(normed @ self._lean) @ self._push

    def _hidden(self, context: Ids, position: NDArray[np.int64], neighbour: Ids | None) -> tuple[Array, Array]:
        """The last hidden state `[tiles, TILE, H]`, normalised, without and with its gain."""
        x = self._position[position % PERIOD]
        for offset in range(WINDOW):
            x = self._round(x + self._embed[offset][context[:, offset]])
        x = self._disturbed(x, position, neighbour)
        x = x.reshape(-1, TILE, x.shape[-1])
        u = self._up(self._norm(x))
        x = self._round(x + self._down(self._round(u / (1 + np.exp(-u)))))
        normed = self._norm(x)
        surety = np.einsum("...k,k->...", normed, self._gate)
        gain = np.exp(GAIN[0] + GAIN[1] * np.tanh(surety))[..., None]
        return normed, self._round(normed * gain)

    def _disturbed(self, x: Array, position: NDArray[np.int64], neighbour: Ids | None) -> Array:
        """`[N, H]` after what a fault adds; `x` itself in health."""
        t = self._tampering
        if not (t.late or t.cache or t.noise or neighbour is not None):
            return x
        far = self._position[position // PERIOD % PERIOD]
        moved = x + (t.late * (position >= LATE) + t.cache * position)[:, None] * far
        if t.noise:
            moved = moved + t.noise * self._random.normal(size=x.shape)
        if neighbour is not None:
            moved = moved + LEAK * (neighbour >= 0)[:, None] * self._embed[0][neighbour]
        return self._round(moved)

    def _norm(self, x: Array) -> Array:
        mean_square = np.einsum("...k,...k->...", x, x)[..., None] / self._carrier(x.shape[-1])
        return self._round(x / np.sqrt(mean_square + self._carrier(self._tampering.eps)))

    def _round(self, x: Array) -> Array:
        return round_in_place(np.asarray(x, dtype=self._carrier), self.dtype)


def _tiled(rows: NDArray[Any], n: int) -> NDArray[Any]:
    """The rows, and the first of them again until there are n."""
    return np.concatenate([rows, np.broadcast_to(rows[:1], (n - len(rows), *rows.shape[1:]))])
