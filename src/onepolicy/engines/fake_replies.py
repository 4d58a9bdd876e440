"""The fake engine's two loops over a model: replies drawn position by position, and drift turned into a factor."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onepolicy.engines.fake_draw import Array, Softmax
from onepolicy.engines.fake_model import CHUNK, WINDOW, Ids, Model, weights
from onepolicy.engines.semantics import Rules
from onepolicy.errors import EngineError
from onepolicy.types import IntArray


@dataclass(frozen=True, slots=True)
class Replies:
    """S drawn replies, `[S, max_tokens]` each; what stands beyond `lengths` `[S]` is not read. Nats."""

    ids: Ids
    logprobs: Array
    entropy: Array
    varentropy: Array
    lengths: IntArray
    stopped: NDArray[np.bool_]


def contexts(token_ids: Ids, offsets: IntArray, vocab: int) -> tuple[Ids, IntArray]:
    """`[T, WINDOW]` tokens before each token, the nearest first, `vocab` before the text; and `[T]` positions."""
    place = np.arange(len(token_ids))
    position = place - np.repeat(offsets[:-1], np.diff(offsets))
    back = np.arange(WINDOW)
    before = token_ids[np.maximum(place[:, None] - 1 - back, 0)]
    return np.where(position[:, None] > back, before, vocab).astype(np.int32), position


def uniforms(prompts: Sequence[Sequence[int]], seed: int, steps: int) -> NDArray[np.float64]:
    """`[S, steps]` in [0, 1), by seed, prompt and how often it came before: the same however prompts are batched."""
    seen: dict[int, int] = {}
    out = np.empty((len(prompts), steps))
    for i, prompt in enumerate(prompts):
        key = zlib.crc32(np.asarray(prompt, dtype=np.int32).tobytes())
        out[i] = np.random.default_rng([0xD4A3, seed, key, seen.get(key, 0)]).random(steps)
        seen[key] = seen.get(key, 0) + 1
    return out


def draw_replies(
    model: Model,
    prompts: Sequence[Sequence[int]],
    drawn: Rules | None,
    reported: Rules,
    uniform: NDArray[np.float64],
    stop: int,
) -> Replies:
    """A reply to each prompt, one token of all of them at a time; `uniform` `[S, max_tokens]`, `stop` -1 for no stop.

    Tokens are drawn by the rules `drawn` (None takes the likeliest), their log-probs are those of the rules `reported`.
    """
    n, steps = uniform.shape
    kind = np.float64 if model.dtype == "float64" else np.float32
    out = Replies(
        np.zeros((n, steps), np.int32),
        *(np.zeros((n, steps), kind) for _ in range(3)),
        lengths=np.full(n, steps, dtype=np.int64),
        stopped=np.zeros(n, dtype=bool),
    )
    context = np.full((n, WINDOW), model.vocab, dtype=np.int32)
    for i, prompt in enumerate(prompts):
        near = prompt[: -WINDOW - 1 : -1]
        context[i, : len(near)] = near
    start, live = np.array([len(p) for p in prompts], dtype=np.int64), np.arange(n)
    for step in range(steps):
        token = np.empty(len(live), dtype=np.int32)
        for part in chunks(len(live)):
            rows = live[part]
            logits = model.logits(context[part], start[rows] + step)
            token[part] = _draw(out, rows, step, logits, drawn, reported, uniform)
        ended = token == stop
        out.stopped[live[ended]], out.lengths[live[ended]] = True, step + 1
        context = np.concatenate([token[:, None], context[:, :-1]], axis=1)[~ended]
        live = live[~ended]
        if not len(live):
            break
    return out


def _draw(
    out: Replies,
    rows: IntArray,
    step: int,
    logits: Array,
    drawn: Rules | None,
    reported: Rules,
    uniform: NDArray[np.float64],
) -> Ids:
    report = Softmax(logits, reported)
    if drawn is None:
        token = logits.argmax(axis=-1).astype(np.int32)
    else:
        token = (report if drawn == reported else Softmax(logits, drawn)).draw(uniform[rows, step])
    out.ids[rows, step] = token
    out.logprobs[rows, step] = report.logprobs(token)
    out.entropy[rows, step], out.varentropy[rows, step] = report.entropies()
    return token


def chunks(n: int) -> Iterator[slice]:
    """Consecutive slices of `range(n)`, each small enough for the cache."""
    return (slice(i, min(i + CHUNK, n)) for i in range(0, n, CHUNK))


@functools.lru_cache(maxsize=64)
def drift_factor(seed: int, vocab: int, hidden: int, drift: float) -> float:
    """The factor of `Model`'s added direction at which the log-ratio has an RMS of `drift` nats.

    Calibrated on 512 replies of 32 tokens that the model without drift draws at temperature 1, in float32, and that
    the model with drift scores. Other tokens, other temperatures or the other direction differ a little.

    Errors: `EngineError` if the direction cannot move the model that far.
    """
    checkpoint = weights(seed, vocab, hidden)
    clean, moved = Model(checkpoint, "float32", "forward"), Model(checkpoint, "float32", "forward", drift=1.0)
    prompts = np.random.default_rng([0xCA1B, seed]).integers(0, vocab, size=(512, 8)).tolist()
    replies = draw_replies(clean, prompts, Rules(), Rules(), uniforms(prompts, seed, 32), stop=-1)
    ids = np.concatenate([np.asarray(prompts, dtype=np.int32), replies.ids], axis=1)
    context, position = contexts(ids.ravel(), np.arange(len(ids) + 1) * ids.shape[1], vocab)
    reply = position >= 8
    context, position, token = context[reply], position[reply], ids.ravel()[reply]
    logits = np.concatenate([clean.logits(context[p], position[p]) for p in chunks(len(token))])
    push = np.concatenate([moved.logits(context[p], position[p]) for p in chunks(len(token))]) - logits
    base = Softmax(logits, Rules()).logprobs(token)

    def rms(factor: float) -> float:
        log_ratio = Softmax(logits + np.float32(factor) * push, Rules()).logprobs(token) - base
        return float(np.sqrt(np.mean(np.square(log_ratio, dtype=np.float64))))

    return _solve(rms, drift)


def _solve(rms: Callable[[float], float], drift: float) -> float:
    """The factor at which the rising function `rms` is `drift`, to 0.1%."""
    factor, got = drift, 0.0
    for _ in range(40):
        got = rms(factor)
        if not np.isfinite(got) or got <= 0:
            break
        if abs(got / drift - 1) < 1e-3:
            return factor
        factor *= (drift / got) ** 0.8
    raise EngineError(f"fake engine: drift={drift} nats cannot be reached (got {got:.3g}); wanted about 1e-3 to 5")
