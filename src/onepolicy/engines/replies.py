"""From what an engine drew to `Rollouts` in the column contract, alike for every engine that samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onepolicy.engines.base import SamplingParams
from onepolicy.errors import EngineError
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import Lists, Scoring, Values

_PARAMS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class Reply:
    """One drawn reply: ids of the prompt, drawn ids (a drawn stop token included) and their log-probs in nats."""

    prompt: Sequence[int]
    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None
    cached: int | None = None


def rollouts_of(
    replies: Sequence[Reply],
    params: SamplingParams,
    *,
    semantics: str,
    dtype: str,
    stop_ids: Sequence[int],
    fingerprint: Mapping[str, Any],
    scoring_id: str,
) -> Rollouts:
    """Prompt and reply of each, with the scoring `sampler` (null on the prompt) and everything that is declared.

    Errors: `EngineError` for an engine that gave another number of log-probs than of ids.
    """
    for i, r in enumerate(replies):
        if len(r.ids) != len(r.logprobs):
            raise EngineError(f"reply {i}: the engine gave {len(r.logprobs)} log-probs for {len(r.ids)} drawn tokens")
    lengths = [len(r.prompt) + len(r.ids) for r in replies]
    drawn = _flat([np.repeat([False, True], [len(r.prompt), len(r.ids)]) for r in replies], np.bool_)
    values = np.zeros(len(drawn), dtype=np.float32)
    values[drawn] = _flat([np.asarray(r.logprobs, dtype=np.float32) for r in replies], np.float32)
    records: dict[str, Sequence[Any]] = {
        "prompt_length": [len(r.prompt) for r in replies],
        "finish_reason": [r.finish_reason for r in replies],
        "cached_prefix_length": [r.cached for r in replies],
        "logprob_semantics": [semantics] * len(replies),
        **{name: [getattr(params, name)] * len(replies) for name in _PARAMS},
    }
    known = {k: v for k, v in records.items() if any(x is not None for x in v)}
    return Rollouts(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        {
            "token_ids": Values(_flat([np.asarray([*r.prompt, *r.ids]) for r in replies], np.int32)),
            "drawn": Values(drawn),
        },
        {k: column_values(k, v) for k, v in known.items()},
        {"stop_token_ids": _same_row(stop_ids, len(replies))},
        {"sampler": Scoring(Values(values, drawn), None, None, None, semantics, dtype, fingerprint, scoring_id)},
    )


def _flat(parts: list[np.ndarray[Any, Any]], dtype: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


def _same_row(ids: Sequence[int], n: int) -> Lists:
    return Lists(np.tile(np.asarray(ids, dtype=np.int32), n), np.arange(n + 1, dtype=np.int64) * len(ids))
