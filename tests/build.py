"""Small rollouts for tests of the core."""

from __future__ import annotations

from typing import Any

import numpy as np

from onepolicy.align import align
from onepolicy.rollouts import Rollouts
from onepolicy.types import LogprobPairs, Scoring, Values


def column(x: Any, valid: Any = None) -> Values:
    return Values(np.asarray(x), None if valid is None else np.asarray(valid, dtype=bool))


def rollouts_of(
    a: np.ndarray,
    b: np.ndarray,
    lengths: list[int] | np.ndarray,
    *,
    groups: list[str] | None = None,
    drawn: np.ndarray | None = None,
    valid_a: np.ndarray | None = None,
    valid_b: np.ndarray | None = None,
    records: dict[str, Values] | None = None,
    entropies: dict[str, np.ndarray] | None = None,
    seed: int = 0,
) -> Rollouts:
    """Rollouts whose sequences have `lengths`; unless told, everything but index 0 is drawn and scored."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    n = int(offsets[-1])
    scored = np.ones(n, dtype=bool)
    scored[offsets[:-1][np.diff(offsets) > 0]] = False
    rng = np.random.default_rng(seed)
    more = {} if groups is None else {"group_id": Values(np.array(groups, dtype=object))}
    e = entropies or {}
    opt = lambda name: Values(e[name]) if name in e else None
    return Rollouts(
        offsets,
        {
            "token_ids": Values(rng.integers(0, 1000, n).astype(np.int32)),
            "drawn": Values(scored.copy() if drawn is None else drawn),
        },
        {**more, **(records or {})},
        {},
        {
            "sampler": Scoring(
                Values(np.asarray(a), scored if valid_a is None else valid_a),
                opt("a_entropy"),
                opt("a_varentropy"),
                dtype="bfloat16",
                scoring_id="a",
            ),
            "old": Scoring(
                Values(np.asarray(b), scored if valid_b is None else valid_b),
                opt("b_entropy"),
                opt("b_varentropy"),
                dtype="bfloat16",
                scoring_id="b",
            ),
        },
    )


def random_rollouts(seed: int = 0, sequences: int = 40, gap: float = 0.05, per_group: int = 2) -> Rollouts:
    """A healthy bf16-like pair: groups of `per_group`, replies of 5 to 60 tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 60, sequences)
    n = int(lengths.sum())
    a = -rng.exponential(1.0, n)
    b = np.minimum(a + rng.normal(-gap * gap / 2, gap, n), 0.0)
    groups = [str(i // per_group) for i in range(sequences)]
    return rollouts_of(a, b, lengths, groups=groups, seed=seed)


def random_pairs(seed: int = 0, **more: Any) -> LogprobPairs:
    return align(random_rollouts(seed, **more))
