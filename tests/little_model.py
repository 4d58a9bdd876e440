"""A little language model in numpy, run as two engines: attention with rope, mlps or experts, a head that varies.

`generate` draws replies one token after the other with a KV cache, as a sampler does; `score` goes over given ids, as a
scorer does. Each `Engine` rounds after its own operations, so that two of them differ as two kernels do, and takes one
changed setting. Weights are seeded: the same numbers on every run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

#: Vocabulary, width, heads.
V, D, HEADS = 256, 64, 4
Array = np.ndarray
#: Logits [B, V] and the ids so far [B, t] -> log-probs [B, V] that are drawn from and reported.
Process = Callable[[Array, Array], Array]


def bf16(x: Array) -> Array:
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def fp8(x: Array) -> Array:
    """e4m3 with one scale a row."""
    scale = np.abs(x).max(axis=-1, keepdims=True) / 448 + 1e-12
    mantissa_at = np.maximum(np.frexp(x / scale)[1], -5) - 4
    return np.round(x / scale / 2.0**mantissa_at) * 2.0**mantissa_at * scale


ROUND: dict[str, Callable[[Array], Array]] = {
    "bfloat16": bf16,
    "float16": lambda x: np.asarray(x, np.float16).astype(np.float32),
    "float32": lambda x: np.asarray(x, np.float32),
}


@dataclass(frozen=True)
class Weights:
    embedding: Array
    layers: tuple[dict[str, Array], ...]
    head: Array
    gate: Array


def weights(seed: int, experts: int = 0, layers: int = 2, width: int = 96) -> Weights:
    rng = np.random.default_rng([seed, 77])
    normal = lambda *shape, by=1.0: (by * rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
    made: list[dict[str, Array]] = []
    for _ in range(layers):
        one = {
            "q": normal(D, D, by=1.6),
            "k": normal(D, D, by=1.6),
            "v": normal(D, D, by=1.5),
            "o": normal(D, D, by=1.2),
        }
        if experts:
            one["router"] = normal(experts, D, by=1.5)
        for e in range(experts or 1):
            one |= {f"up{e}": normal(width, D, by=1.5), f"down{e}": normal(D, width, by=1.6 if experts else 1.2)}
        made.append(one)
    return Weights(normal(V, D, by=np.sqrt(D)), tuple(made), normal(V, D), normal(1, D)[0])


def moved(w: Weights, seed: int, size: float) -> Weights:
    """Weights of another version: each one moved by `size` of its matrix's spread."""
    rng = np.random.default_rng([seed, 99])
    near = lambda x: x + (size * np.std(x) * rng.standard_normal(x.shape)).astype(np.float32)
    return replace(w, layers=tuple({k: near(x) for k, x in one.items()} for one in w.layers), head=near(w.head))


@dataclass(frozen=True)
class Engine:
    """`fused`: rounds fewer intermediate results. `window`: positions that are seen. `rope_from`: where `rope_scale`
    begins. `kv8_from`: from this position on the cache is read in fp8. `router_noise`: added to the router's scores.
    `cap`: of the logits. `padded`: rows of logit 0 behind the vocabulary."""

    dtype: str = "bfloat16"
    fused: bool = False
    theta: float = 1e4
    rope_scale: float = 1.0
    rope_from: int = 0
    window: int = 0
    kv8_from: int | None = None
    router_noise: float = 0.0
    cap: float | None = None
    padded: int = 0
    gain: float = 5.0


@dataclass
class Cache:
    """Keys and values by layer, as many as positions so far."""

    keys: list[list[Array]]
    values: list[list[Array]]
    routes: list[Array] = field(default_factory=list)

    @property
    def position(self) -> int:
        return len(self.keys[0])


def step(w: Weights, e: Engine, cache: Cache, ids: Array) -> Array:
    """One position of every reply: ids [B] -> logits [B, V]."""
    rounded = ROUND[e.dtype]
    soft = (lambda x: x) if e.fused else rounded
    at, size = cache.position, len(ids)
    x = rounded(w.embedding[ids])
    chosen: list[Array] = []
    for number, one in enumerate(w.layers):
        h = soft(_normed(x))
        q, k, v = (_times(h, one[name], e).reshape(size, HEADS, -1) for name in "qkv")
        scale = e.rope_scale if at >= e.rope_from else 1.0
        q, k = (soft(_turned(t, at / scale, e.theta)) for t in (q, k))
        cache.keys[number].append(k)
        cache.values[number].append(v)
        x = rounded(x + _times(rounded(_attention(q, cache, number, e, soft)), one["o"], e))
        h = soft(_normed(x))
        x = rounded(x + rounded(_mixture(h, one, e, chosen, (at, number)) if "router" in one else _mlp(h, one, e, 0)))
    if chosen:
        cache.routes.append(np.stack(chosen, axis=1))
    h = rounded(_normed(x))
    sharp = e.gain * np.exp(1.1 * np.tanh(h.astype(np.float64) @ w.gate))
    z = _times(rounded(h * sharp[:, None]), w.head, e).astype(np.float64)
    z = z if e.cap is None else e.cap * np.tanh(z / e.cap)
    return np.concatenate([z, np.zeros((size, e.padded))], axis=1)


def _normed(x: Array) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)


def _times(x: Array, matrix: Array, e: Engine) -> Array:
    """Another order of adding up for each kernel."""
    rounded, x, matrix = ROUND[e.dtype], x.astype(np.float32), ROUND[e.dtype](matrix)
    half = x.shape[-1] // 2
    return (
        rounded(x @ matrix.T)
        if e.fused
        else rounded(rounded(x[..., :half] @ matrix[:, :half].T) + rounded(x[..., half:] @ matrix[:, half:].T))
    )


def _turned(x: Array, position: float, theta: float) -> Array:
    angle = position * theta ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
    even, odd, out = x[..., 0::2], x[..., 1::2], np.empty(x.shape)
    out[..., 0::2] = even * np.cos(angle) - odd * np.sin(angle)
    out[..., 1::2] = even * np.sin(angle) + odd * np.cos(angle)
    return out


def _attention(q: Array, cache: Cache, layer: int, e: Engine, soft: Callable[[Array], Array]) -> Array:
    first = max(0, cache.position - e.window) if e.window else 0
    keys, values = (np.stack(x[layer][first:], axis=1) for x in (cache.keys, cache.values))
    if e.kv8_from is not None and cache.position > e.kv8_from:
        keys, values = fp8(keys), fp8(values)
    scores = np.einsum("bhd,bthd->bht", q, keys) / np.sqrt(q.shape[-1])
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p = soft(p / p.sum(axis=-1, keepdims=True))
    return np.einsum("bht,bthd->bhd", p, values).reshape(len(q), -1)


def _mlp(h: Array, one: dict[str, Array], e: Engine, expert: int) -> Array:
    up = _times(h, one[f"up{expert}"], e)
    return _times(up / (1 + np.exp(-np.clip(up, -60, 60))), one[f"down{expert}"], e)


def _mixture(h: Array, one: dict[str, Array], e: Engine, chosen: list[Array], at: tuple[int, int]) -> Array:
    """The two best experts of each row; `chosen` gets them."""
    score = _times(h, one["router"], e).astype(np.float64)
    score += e.router_noise * np.random.default_rng(at).standard_normal(score.shape)
    best = np.argsort(-score, axis=1)[:, :2]
    chosen.append(best)
    share = np.exp(np.take_along_axis(score, best, axis=1) - score.max(axis=1, keepdims=True))
    share /= share.sum(axis=1, keepdims=True)
    each = np.stack([_mlp(h, one, e, k) for k in range(score.shape[1])], axis=1)
    return (share[:, :, None] * np.take_along_axis(each, best[:, :, None], axis=1)).sum(axis=1)


# -- the two engines ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What an engine says of replies: `ids`, `logp` [B, T], `logits` [B, T, V], `experts` [B, T, L * 2] (of the token
    before: that is the one which was routed)."""

    ids: Array
    logp: Array
    logits: Array
    experts: Array | None

    @property
    def entropy(self) -> Array:
        logp = log_softmax(self.logits)
        return -(np.exp(logp) * logp).sum(axis=-1)


def log_softmax(z: Array) -> Array:
    top = z.max(axis=-1, keepdims=True)
    return z - top - np.log(np.exp(z - top).sum(axis=-1, keepdims=True))


def prompts(n: int, seed: int, length: int = 8) -> Array:
    return np.random.default_rng([seed, 5]).integers(0, V, (n, length))


def generate(w: Weights, e: Engine, start: Array, n: int, seed: int, process: Process | None = None) -> Told:
    rng = np.random.default_rng([seed, 31])
    process = process or (lambda z, _: log_softmax(z))
    ids = np.zeros((len(start), 0), dtype=np.int64)

    def pick(z: Array) -> tuple[Array, Array]:
        logp = process(z, ids)
        total = np.cumsum(np.exp(logp), axis=1)
        at = np.minimum((total < rng.random(len(z))[:, None] * total[:, -1:]).sum(axis=1), V - 1)
        return at, logp[np.arange(len(z)), at]

    cache = Cache([[] for _ in w.layers], [[] for _ in w.layers])
    for token in start.T:
        z = step(w, e, cache, token)
    logp: list[Array] = []
    logits: list[Array] = []
    for t in range(n):
        token, p = pick(z)
        ids = np.concatenate([ids, token[:, None]], axis=1)
        logp.append(p)
        logits.append(z)
        if t < n - 1:
            z = step(w, e, cache, token)
    return Told(ids, np.stack(logp, axis=1), np.stack(logits, axis=1), _experts(cache, n))


def score(w: Weights, e: Engine, start: Array, ids: Array, temperature: Any = 1.0) -> Told:
    """`temperature`: a number, or one for each reply."""
    cache = Cache([[] for _ in w.layers], [[] for _ in w.layers])
    whole, n = np.concatenate([start, ids], axis=1), ids.shape[1]
    z = np.stack([step(w, e, cache, token) for token in whole.T[:-1]], axis=1)[:, -n:]
    z = z / np.broadcast_to(np.asarray(temperature, dtype=np.float64), len(ids))[:, None, None]
    logp = np.take_along_axis(log_softmax(z), ids[:, :, None], axis=2)[:, :, 0]
    return Told(ids, logp, z, _experts(cache, n))


def _experts(cache: Cache, n: int) -> Array | None:
    if not cache.routes:
        return None
    rows = np.stack(cache.routes, axis=1)[:, -n:]
    return rows.reshape(rows.shape[0], n, -1)
