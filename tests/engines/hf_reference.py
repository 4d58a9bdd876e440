"""What the transformers engine is compared with: plain torch, one sequence at a time, and the texts for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import Values

NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
NEUTRAL |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def plain_logits(directory: str | Path, dtype: str = "float32") -> Callable[[np.ndarray], np.ndarray]:
    """`[T, V]` float64 logits of one sequence: the independent reference, no batch, no mask, no padding."""
    from transformers import AutoModelForCausalLM

    torch = importlib.import_module("torch")
    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=getattr(torch, dtype)).eval()

    def run(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor(ids[None], dtype=torch.long)).logits[0].double().numpy()

    return run


def texts(semantics: str, **declared: float) -> Rollouts:
    """Six random sequences of uneven length, of one token one of them; their last halves were drawn."""
    rng = np.random.default_rng(0)
    lengths = np.array([40, 7, 1, 90, 33, 12])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(3, 60, offsets[-1]).astype(np.int32)
    drawn = np.concatenate([np.arange(n) >= n // 2 for n in lengths])
    records = {"logprob_semantics": [semantics] * 6, "prompt_length": (lengths // 2).tolist()}
    records |= {k: [v] * 6 for k, v in (NEUTRAL | declared).items()}
    tokens = {"token_ids": Values(ids), "drawn": Values(drawn)}
    return Rollouts(offsets, tokens, {k: column_values(k, v) for k, v in records.items()})


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def expected(
    rollouts: Rollouts, run: Any, rule: Callable[[np.ndarray, np.ndarray, int, int], np.ndarray]
) -> np.ndarray:
    """`[T, V]` log-probs of token t: `rule(logits, ids before t, prompt length, t)`."""
    out = np.full((rollouts.n_tokens, 512), np.nan)
    for i in range(len(rollouts)):
        at = rollouts.sequence(i)
        ids, n = rollouts.token_ids[at], rollouts.record("prompt_length", i)
        logits = run(ids)
        for t in range(1, len(ids)):
            out[at.start + t] = log_softmax(rule(logits[t - 1].copy(), ids[:t], n, t))
    return out


def chosen(rollouts: Rollouts, logprobs: np.ndarray) -> np.ndarray:
    return logprobs[np.arange(rollouts.n_tokens), rollouts.token_ids]
