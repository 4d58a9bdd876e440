"""Log-probs of one side put at other records' tokens, as a join in the wrong order does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from integrity_dumps import PROMPT, named, with_values
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import Values


def exchanged(rollouts: Rollouts, source: Any, side: str = "old", padding: float | None = 0.0) -> Rollouts:
    """Row i has the values of row `source[i]` of a side, cut to its own length; behind a shorter list stands `padding`
    (None: null)."""
    scoring = rollouts.scorings[side]
    values, valid = scoring.logprobs.values.astype(np.float64), scoring.logprobs.mask().copy()
    out = values.copy()
    places = [np.flatnonzero(rollouts.drawn[at]) + at.start for at in map(rollouts.sequence, range(len(rollouts)))]
    for to, origin in zip(places, (places[int(i)] for i in source), strict=True):
        n = min(len(to), len(origin))
        out[to[:n]], valid[to[:n]] = values[origin[:n]], scoring.logprobs.mask()[origin[:n]]
        out[to[n:]], valid[to[n:]] = padding or 0.0, padding is not None
    return rollouts.with_scoring(side, replace(scoring, logprobs=Values(out, valid)))


def replies(
    sequences: int = 64, lengths: tuple[int, int] = (40, 200), noise: float = 0.02, certain: float = 0.0,
    shared: int = 0, group: int = 0, seed: int = 0,
) -> Rollouts:  # fmt: skip
    """Replies with rounding of their own on both sides. `lengths`: from, up to; `certain`: share of tokens near 0;
    `shared`: tokens with which all replies of a group of `group` records begin."""
    rng = np.random.default_rng([seed, 0xE8])
    n = rng.integers(lengths[0], lengths[1] + 1, sequences)
    offsets = np.concatenate([[0], np.cumsum(n + PROMPT)]).astype(np.int64)
    total = int(offsets[-1])
    a = np.where(rng.random(total) < certain, -1e-3 * rng.random(total), -rng.exponential(0.8, total))
    for i in range(sequences) if group else ():
        first, mine = int(offsets[i - i % group]) + PROMPT, int(offsets[i]) + PROMPT
        a[mine : mine + shared] = a[first : first + shared]
    b = np.minimum(a + noise * rng.standard_normal(total) * (1 - np.exp(a)) ** 0.5, 0.0)
    drawn = np.arange(total) - np.repeat(offsets[:-1], n + PROMPT) >= PROMPT
    records = {"prompt_length": column_values("prompt_length", [PROMPT] * sequences)}
    if group:
        records["group_id"] = column_values("group_id", [f"g{i // group}" for i in range(sequences)])
    ids = Values(rng.integers(0, 1000, total).astype(np.int32))
    out = Rollouts(offsets, {"token_ids": ids, "drawn": Values(drawn)}, records)
    for name, x in (("sampler", a), ("old", b)):
        out = with_values(out, name, x, drawn)
    return named(out)
