"""Dumps for tests of the audit: sequences with everything that profiles and replays look at, split over files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from build import rollouts_of
from onepolicy.audit import Choices, sides_of, surveyed
from onepolicy.auditing import Work
from onepolicy.formats.detect import detect
from onepolicy.rollouts import Rollouts
from onepolicy.storage import write
from onepolicy.types import Values


def sample(n: int = 60, seed: int = 0) -> Rollouts:
    """Groups of four, three steps, versions, rewards, advantages: everything that profiles and replays look at."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 120, n)
    total = int(lengths.sum())
    a = -rng.exponential(0.6, total)
    b = -np.abs(a + rng.standard_t(3, total) * 0.1 * (1 - np.exp(a)))
    steps = np.repeat(np.arange(3), -(-n // 3))[:n]
    records = {
        "step": Values(steps.astype(np.int64)),
        "reward": Values(rng.choice([0.0, 1.0], n)),
        "scorer_version": Values(steps.astype(np.int64)),
        "turn": Values((np.arange(n) % 2).astype(np.int32)),
    }
    out = rollouts_of(a, b, lengths, groups=[f"g{i // 4}" for i in range(n)], records=records, seed=seed)
    tokens = dict(out.tokens)
    tokens["policy_version"] = Values(np.repeat(np.maximum(steps - 1, 0), lengths).astype(np.int64))
    tokens["advantages"] = Values(np.repeat(rng.normal(size=n), lengths))
    return Rollouts(out.offsets, tokens, out.records, out.lists, out.scorings)


def bits(folder: Path, work: Work | None = None, **choices: Any) -> str:
    """Everything that the survey of a folder added up, as JSON text."""
    shards = detect([str(folder)]).shards
    work = work or Work(sides_of(shards), dialect=("verl", {"rollout_is": "token"}))
    survey, unreadable = surveyed(shards, work, Choices(**choices))
    assert not unreadable and survey.sums is not None
    counts = {k: v for k, v in survey.dump.counts.items() if k != "files"}
    text = json.dumps(
        {
            "sums": survey.sums.to_dict(),
            "profiles": {k: v.to_dict() for k, v in sorted(survey.profiles.items())},
            "checks": {k: v.to_dict() for k, v in sorted(survey.checks.items())},
            "extra": {k: v.to_dict() for k, v in sorted(survey.extra.items())},
            "replays": survey.replays.totals.to_dict(),
            "groups": sorted(survey.replays.groups.items()),
            "numbers": _without_views(survey.numbers or {}),
            "facts": survey.fact_values(),
            "dump": counts,
        },
        sort_keys=True,
    )
    return without_names(text)


def without_names(text: str) -> str:
    """A place names the file that it is in, which is of the split."""
    return re.sub(r"[\w/.-]*(part-\d+\.parquet|all\.jsonl)(:\d+)?", "FILE", text)


def _without_views(numbers: dict[str, Any]) -> dict[str, Any]:
    """How many batches there were is of the split."""
    return {k: v for k, v in numbers.items() if k != "views"}


def split(rollouts: Rollouts, parts: int, folder: Path, order: np.ndarray | None = None) -> Path:
    folder.mkdir()
    rows = np.arange(len(rollouts)) if order is None else order
    for k in range(parts):
        write(rollouts.take(rows[k::parts]), folder / f"part-{k}.parquet")
    return folder
