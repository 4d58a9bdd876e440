"""Work in shards: each result is handed over as it arrives, so that a later failure loses nothing before it.

The same for every engine, in this process or in a worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.engines.base import Engine, Progress, SamplingParams
from onepolicy.errors import EngineError, UsageError
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import Scoring

MAX_TOKENS, MAX_SEQUENCES = 16_384, 32


def shard_slices(
    lengths: Sequence[int] | NDArray[np.int64], max_tokens: int = MAX_TOKENS, max_sequences: int = MAX_SEQUENCES
) -> list[slice]:
    """Runs of whole sequences within both budgets; a sequence longer than `max_tokens` is a shard of its own."""
    out: list[slice] = []
    start, tokens = 0, 0
    for i, length in enumerate(lengths):
        if i > start and (tokens + length > max_tokens or i - start >= max_sequences):
            out.append(slice(start, i))
            start, tokens = i, 0
        tokens += int(length)
    if len(lengths) > start:
        out.append(slice(start, len(lengths)))
    return out


def score_shards(
    engine: Engine,
    rollouts: Rollouts,
    *,
    distributions: bool = False,
    using: Mapping[str, Any] | None = None,
    max_tokens: int = MAX_TOKENS,
    max_sequences: int = MAX_SEQUENCES,
    progress: Progress | None = None,
) -> Iterator[tuple[slice, Scoring]]:
    """`(sequences, their scoring)` one shard after another, in order.

    Errors: `UsageError` for an engine that does not score; `EngineError` when a shard comes back with another length.
    """
    if not engine.SCORES:
        raise UsageError(f"engine {engine.NAME!r} does not score given tokens; use it as the sampler")
    scoring_id = None
    for at in shard_slices(rollouts.lengths, max_tokens, max_sequences):
        part = rollouts.take(range(at.start, at.stop))
        # engines of others may not know `using` yet
        more = {"using": using} if using else {}
        scoring = engine.score(part, distributions=distributions, **more)
        scoring_id = scoring_id or scoring.scoring_id  # the shards are one scoring
        if len(scoring.logprobs.values) != part.n_tokens:
            got = len(scoring.logprobs.values)
            raise EngineError(f"engine {engine.NAME!r}: got {got} log-probs for {part.n_tokens} tokens")
        yield at, replace(scoring, scoring_id=scoring_id)
        if progress:
            progress(at.stop, len(rollouts))


def sample_shards(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    max_tokens: int = MAX_TOKENS,
    max_sequences: int = MAX_SEQUENCES,
    progress: Progress | None = None,
) -> Iterator[Rollouts]:
    """Rollouts of some prompts after another, in order; replies of one prompt stand together.

    Adds `group_id` (the prompt's number) and `sample_id`. Reply k of all (prompt-major) is drawn with seed
    `params.seed + k`, so the split does not change the draws where the engine's seeds are per reply.

    Errors: `UsageError` for an engine that does not sample.
    """
    if not engine.SAMPLES:
        raise UsageError(f"engine {engine.NAME!r} does not draw tokens; use it as the scorer")
    each, scoring_id = params.samples, None
    costs = [(len(p) + params.max_tokens) * each for p in prompts]
    for at in shard_slices(costs, max_tokens, max(1, max_sequences // each)):
        part = engine.sample(prompts[at], replace(params, seed=params.seed + at.start * each))
        if len(part) != (at.stop - at.start) * each:
            wanted = (at.stop - at.start) * each
            raise EngineError(f"engine {engine.NAME!r}: got {len(part)} replies, wanted {wanted}")
        drawn = part.scorings["sampler"]
        scoring_id = scoring_id or drawn.scoring_id
        part = part.with_scoring("sampler", replace(drawn, scoring_id=scoring_id))
        groups = [str(i) for i in range(at.start, at.stop) for _ in range(each)]
        samples = [str(k) for _ in range(at.start, at.stop) for k in range(each)]
        named = {"group_id": column_values("group_id", groups), "sample_id": column_values("sample_id", samples)}
        yield replace(part, records={**part.records, **named})
        if progress:
            progress(at.stop, len(prompts))
