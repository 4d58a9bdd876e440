"""Random batches for the tests of corrections: ragged, with garbage in the padding, NaN, infinities and overflow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

GARBAGE = (np.nan, np.inf, -np.inf, 1e30, -9999.0, 0.0)
EXTREME = (31.0, -31.0, 89.5, -95.0, 320.0, -400.0)


@dataclass
class Batch:
    """Padded numpy arrays `[B, T]`, `[B]`."""

    sampler: np.ndarray
    policy: np.ndarray
    mask: np.ndarray
    advantages: np.ndarray
    rewards: np.ndarray
    groups: np.ndarray
    lengths: np.ndarray

    def inputs(self, policy: str = "old", **more: Any) -> dict[str, Any]:
        return {"sampler": self.sampler, policy: self.policy, "mask": self.mask, **more}

    def everything(self, policy: str = "old", **more: Any) -> dict[str, Any]:
        names = ("advantages", "rewards", "groups")
        return self.inputs(policy, **{k: getattr(self, k) for k in names}, **more)


def random_batch(
    seed: int, *, odd: bool = True, dtype: str = "float64", rows: int = 6, columns: int = 12, extreme: bool = True
) -> Batch:
    """`odd`: trained tokens with NaN or an infinity. `extreme`: log ratios that overflow or underflow."""
    rng = np.random.default_rng(seed)
    b, t = int(rng.integers(1, rows + 1)), int(rng.integers(1, columns + 1))
    lengths = rng.integers(0, t + 1, b)
    inside = np.arange(t) < lengths[:, None]
    mask = inside & (rng.random((b, t)) < rng.choice([0.5, 0.9, 1.0]))
    sampler = -rng.exponential(1.0, (b, t))
    scale = rng.choice([1e-3, 0.05, 0.3, 1.0], (b, 1))
    policy = np.minimum(sampler + rng.normal(rng.choice([-0.01, 0.0, 0.02]), scale, (b, t)), 0.0)
    if extreme:
        far = rng.random((b, t)) < 0.04
        shift = rng.choice(EXTREME, (b, t))
        sampler = np.where(far & (shift > 0), sampler - shift, sampler)
        policy = np.where(far & (shift < 0), policy + shift, policy)
    if odd:
        for x in (sampler, policy):
            hit = rng.random((b, t)) < 0.03
            x[hit] = rng.choice([np.nan, -np.inf, np.inf], int(hit.sum()))
    for x in (sampler, policy):
        x[~mask] = rng.choice(GARBAGE, int((~mask).sum()))
    advantages = rng.choice([-1.5, -0.2, 0.0, 0.7], b if rng.random() < 0.7 else (b, t))
    rewards = rng.choice([-1.0, 0.0, 1.0], b)
    groups = rng.integers(-2, 3, b)
    return Batch(sampler.astype(dtype), policy.astype(dtype), mask, advantages, rewards, groups, lengths)


#: How many of `some`'s batches are of random_batch's own size; the others are longer, so that few of them hold much.
SMALL = 12


@cache
def some(n: int, dtype: str = "float64") -> tuple[Batch, ...]:
    """n batches, made once for all corrections; each tenth has nothing that is trained. Not to be written to."""
    large = {"rows": 24, "columns": 16}
    made = [random_batch(seed, dtype=dtype, **({} if seed < SMALL else large)) for seed in range(n)]
    return tuple(replace(b, mask=np.zeros_like(b.mask)) if i % 10 == 9 else b for i, b in enumerate(made))


def packed(batch: Batch) -> dict[str, Any]:
    """The same tokens without padding, `[T]`, and their offsets; advantages per token."""
    inside = np.arange(batch.mask.shape[1]) < batch.lengths[:, None]
    advantages = np.broadcast_to(
        batch.advantages if batch.advantages.ndim == 2 else batch.advantages[:, None], batch.mask.shape
    )
    return {
        "sampler": batch.sampler[inside],
        "old": batch.policy[inside],
        "mask": batch.mask[inside],
        "advantages": advantages[inside],
        "rewards": batch.rewards,
        "groups": batch.groups,
        "offsets": np.concatenate([[0], np.cumsum(batch.lengths)]),
    }


def as_torch(inputs: dict[str, Any]) -> dict[str, Any]:
    """Arrays as tensors."""
    import torch

    return {k: torch.from_numpy(np.array(v)) if isinstance(v, np.ndarray) else v for k, v in inputs.items()}
