"""Batches for the tests of the monitor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


def batch(
    seed: int = 0, rows: int = 24, tokens: int = 40, gap: float = 0.04, fill: float = np.nan, far: float = 0.0
) -> dict[str, np.ndarray]:
    """Columns by the names of `observe`, numpy float64. `fill` stands where the mask is 0; `far`: share of tokens nats
    off. The first row is empty, the second has one token."""
    rng = np.random.default_rng(seed)
    sampler = -rng.exponential(1.0, (rows, tokens))
    d = gap * rng.standard_normal((rows, tokens)) - gap**2 / 2
    d = np.where(rng.random((rows, tokens)) < far, rng.normal(0, 2, (rows, tokens)), d)
    old = np.minimum(sampler + d, 0.0)
    length = rng.integers(2, tokens + 1, rows)
    length[:2] = (0, 1)
    mask = np.arange(tokens)[None] < length[:, None]
    current = np.minimum(old + 0.15 * rng.standard_normal((rows, tokens)), 0.0)
    out = {"sampler_logprobs": sampler, "old_logprobs": old, "current_logprobs": current}
    out["reference_logprobs"] = np.minimum(old + 0.01 * rng.standard_normal((rows, tokens)), 0.0)
    out = {name: np.where(mask, x, fill) for name, x in out.items()}
    return {
        **out,
        "mask": mask,
        "advantages": rng.standard_normal(rows),
        "policy_version": rng.integers(3, 6, (rows, tokens)),
    }


def healthy(seed: int, rows: int = 32, tokens: int = 64, gap: float = 0.03) -> dict[str, np.ndarray]:
    """Sampler, old and mask alone."""
    made = batch(seed, rows, tokens, gap)
    return {name: made[name] for name in ("sampler_logprobs", "old_logprobs", "mask")}


def weights(made: dict[str, Any], cap: float = 1.05) -> SimpleNamespace:
    """A truncation at `cap` that drops ratios below 0.95, as `onepolicy.corrections` gives it."""
    ratio = np.exp(made["old_logprobs"] - made["sampler_logprobs"])
    keep = made["mask"] & (ratio >= 0.95)
    return SimpleNamespace(weights=np.where(keep, np.minimum(ratio, cap), 0.0), keep=keep)


def torch_of(made: dict[str, Any], dtype: Any = None, device: str = "cpu") -> dict[str, Any]:
    """The same columns as tensors."""
    import torch

    def one(x: Any) -> Any:
        t = torch.tensor(x)
        return (t.to(dtype) if dtype is not None and t.is_floating_point() else t).to(device)

    return {name: one(x) for name, x in made.items()}
