"""The simulated pairs of `lab/power.py`, judged by the metrics that their presets ask for and no others.

The outcome is that of the whole comparison, which measures a hundred metrics more: `test_false_alarms.py` holds the two
against each other. Weights and draws are those of the seed, so a pair is the same in both.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.pool import Pool

import power
from onepolicy.align import align
from onepolicy.engines.base import SamplingParams
from onepolicy.engines.open import open_engine
from onepolicy.engines.shards import sample_shards
from onepolicy.gates.bounds import load
from onepolicy.gates.judge import judge
from onepolicy.metrics import METRICS
from onepolicy.reduce import reduce
from onepolicy.rollouts import Rollouts, concat


@functools.cache
def asked(dtype: str) -> tuple[str, ...]:
    """What the presets of a dtype hold against a bound, and what their gates and findings read besides."""
    bounds = [b for preset in power.FITTING[dtype] for b in load(preset).bounds]
    keys = {key for b in bounds for key in (b.metric, b.otherwise) if key}
    return tuple(sorted(keys | {k.replace("/excess", "/z") for k in keys} | {"ratio/pareto_k"}))


def scored_pair(seed: int, dtype: str, drift: float) -> Rollouts:
    order = power.ORDERS[seed % len(power.ORDERS)]
    prompts = [list(range(1 + i, 9 + i)) for i in range(power.CLUSTERS)]
    params = SamplingParams(max_tokens=power.TOKENS, seed=seed)
    with (
        open_engine(f"fake:?seed={seed}&dtype={dtype}") as sampler,
        open_engine(f"fake:?seed={seed}&dtype={dtype}&order={order}&drift={drift}") as scorer,
    ):
        drawn = concat(list(sample_shards(sampler, prompts, params, max_sequences=power.CLUSTERS)))
        return drawn.with_scoring("scorer", scorer.score(drawn))


def pair_outcomes(seed: int, dtype: str, drift: float = 0.0) -> dict[str, str]:
    """Preset -> outcome of one pair, as `power.pair_outcomes`."""
    pairs = align(scored_pair(seed, dtype, drift), "sampler", "scorer")
    sums = reduce(pairs, [METRICS[key] for key in asked(dtype)])
    return {preset: str(judge(sums, load(preset)).outcome) for preset in power.FITTING[dtype]}


@contextmanager
def two_processes() -> Iterator[Pool]:
    """Each with one thread, as `power` asks for."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        yield pool


def outcomes(pool: Pool, seeds: Iterable[int], dtype: str, drift: float = 0.0) -> dict[str, Counter[str]]:
    """Preset -> how often each outcome came, over all seeds."""
    work = functools.partial(pair_outcomes, dtype=dtype, drift=drift)
    counts = {preset: Counter[str]() for preset in power.FITTING[dtype]}
    for row in pool.imap_unordered(work, seeds, chunksize=8):
        for preset, outcome in row.items():
            counts[preset][outcome] += 1
    return counts
