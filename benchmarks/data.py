"""Synthetic rollouts of the size of a training step: ragged, grouped, a healthy bf16 gap."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring, Values

PROMPT = 128


def rollouts(tokens: int, seed: int = 0) -> Rollouts:
    """About `tokens` tokens: prompts of 128, replies of 200 to 1,800, groups of 8; two float32 log-probs."""
    rng = np.random.default_rng(seed)
    n = max(8, tokens // 1128)
    lengths = rng.integers(200, 1800, n) + PROMPT
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    position = np.arange(total) - np.repeat(offsets[:-1], lengths)
    drawn = position >= PROMPT
    sampler = -rng.exponential(0.9, total).astype(np.float32)
    old = np.minimum(sampler + rng.normal(0, 0.05, total).astype(np.float32), 0)
    ids = np.minimum(rng.zipf(1.3, total), 49_151).astype(np.int32)
    group = np.array([str(i // 8) for i in range(n)], dtype=object)
    return Rollouts(
        offsets,
        {"token_ids": Values(ids), "drawn": Values(drawn), "loss_mask": Values(drawn.copy())},
        {"group_id": Values(group)},
        {},
        {"sampler": Scoring(Values(sampler, drawn)), "old": Scoring(Values(old, drawn))},
    )


def median_seconds(work: Callable[[], object], runs: int = 5) -> float:
    """Median wall time of `runs` calls after one that is not counted."""
    work()
    times: list[float] = []
    for _ in range(runs):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)
