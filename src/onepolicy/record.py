"""Record: a sampler draws replies to prompts; ids, log-probs and everything that is declared are kept."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy.engines.base import Engine, Progress, SamplingParams
from onepolicy.engines.open import open_engine
from onepolicy.engines.shards import sample_shards
from onepolicy.errors import EngineError, UsageError
from onepolicy.rollouts import Rollouts, column_values, concat
from onepolicy.suite import Prompt, own_prompts
from onepolicy.types import Values


def record_rollouts(
    sampler: str,
    *,
    prompts: Sequence[Prompt] | None = None,
    params: SamplingParams | None = None,
    progress: Progress | None = None,
    partial: str | Path | None = None,
) -> Rollouts:
    """Rollouts of `params.samples` replies to each prompt (the 64 own ones by default), drawn by `sampler`.

    `partial`: where to save what was drawn if the engine dies half way.
    Errors: what the engine raises; an `EngineError` then says where the replies so far were saved.
    """
    params = params or SamplingParams()
    chosen = list(own_prompts() if prompts is None else prompts)
    if not chosen:
        raise UsageError("no prompts to draw from")
    with open_engine(sampler) as engine:
        return draw(engine, chosen, params, progress=progress, partial=partial)


def draw(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    ids: list[list[int]] | None = None,
    progress: Progress | None = None,
    partial: str | Path | None = None,
) -> Rollouts:
    """`record_rollouts` with an engine that runs already. `ids`: the prompts' token ids, where they are known."""
    parts: list[Rollouts] = []
    fingerprint = engine.fingerprint()
    ids = _encoded(engine, prompts) if ids is None else ids
    try:
        for part in sample_shards(engine, ids, params, progress=progress):
            parts.append(part)
    except EngineError as err:
        if not parts or partial is None:
            raise
        drawn = _finished(parts, prompts, fingerprint)
        raise type(err)(f"{err}; {len(drawn)} replies drawn before are saved in {_save(drawn, partial)}") from err
    return _finished(parts, prompts, fingerprint)


def _encoded(engine: Engine, prompts: Sequence[Prompt]) -> list[list[int]]:
    ids = engine.encode(list(prompts))
    empty = [i for i, prompt in enumerate(ids) if not prompt]
    if empty:
        raise UsageError(f"prompt {empty[0]} has no tokens; a reply needs at least one token before it")
    return ids


def _finished(parts: Sequence[Rollouts], prompts: Sequence[Prompt], fingerprint: Mapping[str, Any]) -> Rollouts:
    """All parts as one batch with names: records of one recording share a run id, which no other has."""
    rollouts = concat(parts)
    run = secrets.token_hex(4)
    groups = [int(rollouts.record("group_id", i)) for i in range(len(rollouts))]
    samples = [str(rollouts.record("sample_id", i)) for i in range(len(rollouts))]
    texts = [p if isinstance(p, str) else None for p in (prompts[g] for g in groups)]
    chats = [None if isinstance(p, str) else json.dumps(p, ensure_ascii=False) for p in (prompts[g] for g in groups)]
    named = {
        "record_id": [f"{run}-{g}-{s}" for g, s in zip(groups, samples, strict=True)],
        "run_id": [run] * len(groups),
        "prompt_text": texts,
        "prompt_messages": chats,
    }
    columns = {k: column_values(k, v) for k, v in named.items() if any(x is not None for x in v)}
    scoring = replace(rollouts.scorings["sampler"], fingerprint=fingerprint, scoring_id=f"record-{run}")
    drawn = rollouts.drawn
    return replace(
        rollouts,
        records={**rollouts.records, **columns},
        tokens={**rollouts.tokens, "loss_mask": Values(np.array(drawn))},
        scorings={**rollouts.scorings, "sampler": scoring},
    )


def _save(rollouts: Rollouts, path: str | Path) -> Path:
    from onepolicy.storage import write

    free = free_path(path)
    write(rollouts, free)
    return free


def free_path(path: str | Path) -> Path:
    """`path`, or with `-2`, `-3`, ... before its suffix if that is taken: nothing is overwritten."""
    path = Path(path)
    for i in range(1, 10_000):
        candidate = path if i == 1 else path.with_name(f"{path.stem}-{i}{path.suffix}")
        if not candidate.exists():
            return candidate
    raise UsageError(f"no free name beside {path}")
