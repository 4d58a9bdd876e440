"""However a dump is split, ordered and worked on, the audit adds up the same integers."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from build import rollouts_of

from onepolicy import pool
from onepolicy.audit import Choices, audit, sides_of, surveyed
from onepolicy.auditing import Work
from onepolicy.formats.detect import detect
from onepolicy.report.json import to_json
from onepolicy.rollouts import Rollouts, concat
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
            "pairs": {k: v.to_dict() for k, v in survey.pairs.items()},
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
    return _without_names(text)


def _without_names(text: str) -> str:
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rollouts, str]:
    rollouts = sample()
    folder = split(rollouts, 1, tmp_path_factory.mktemp("whole") / "dump")
    return rollouts, bits(folder, workers=1)


@pytest.mark.parametrize("parts", [2, 7])
def test_groups_split_between_shards_give_the_same_bits(whole: tuple[Rollouts, str], tmp_path: Path, parts: int):
    assert bits(split(whole[0], parts, tmp_path / "dump"), workers=1) == whole[1]


def test_permuted_records_give_the_same_bits(whole: tuple[Rollouts, str], tmp_path: Path):
    order = np.random.default_rng(1).permutation(len(whole[0]))
    assert bits(split(whole[0], 3, tmp_path / "dump", order), workers=1) == whole[1]


def test_two_workers_give_the_same_bits(whole: tuple[Rollouts, str], tmp_path: Path):
    assert bits(split(whole[0], 4, tmp_path / "dump"), workers=2) == whole[1]


def test_json_lines_give_the_same_sums_as_parquet(whole: tuple[Rollouts, str], tmp_path: Path):
    (tmp_path / "dump").mkdir()
    write(whole[0], tmp_path / "dump" / "all.jsonl")
    lines, columns = json.loads(bits(tmp_path / "dump", workers=1)), json.loads(whole[1])
    for key in ("broken", "claims", "lengths"):  # of raw records, which whole columns of Parquet do not have
        lines["checks"].pop(key), columns["checks"].pop(key)
    assert lines == columns


def test_a_changed_value_changes_the_bits(whole: tuple[Rollouts, str], tmp_path: Path):
    other = concat([sample(60, seed=1)])
    assert bits(split(other, 1, tmp_path / "dump"), workers=1) != whole[1]


def test_the_report_is_the_same_for_any_split(whole: tuple[Rollouts, str], tmp_path: Path):
    """Standard errors, findings and tables too; only the names of files differ."""
    one, many = split(whole[0], 1, tmp_path / "one"), split(whole[0], 5, tmp_path / "many")
    texts = [to_json(audit([d], Choices(workers=1))) for d in (one, many)]
    cut = [_without_files(json.loads(_without_names(t))) for t in texts]
    assert cut[0] == cut[1]
    assert any(f"{1}" for f in cut[0]["measurements"] if cut[0]["measurements"][f]["std_error"])


def _without_files(report: dict[str, Any]) -> dict[str, Any]:
    audit_context = report["context"]["audit"]
    for key in ("uris", "formats"):
        audit_context.pop(key)
    audit_context["counts"].pop("files")
    return report


def _killed_once(item: int, mark: str) -> int:
    """Dies by SIGKILL the first time that item 2 is worked on."""
    if item == 2 and not os.path.exists(mark):
        Path(mark).write_text("died")
        os.kill(os.getpid(), signal.SIGKILL)
    return item * item


def test_a_worker_that_is_killed_loses_nothing(tmp_path: Path):
    mark = str(tmp_path / "mark")
    got = dict(pool.over(_killed_once, [(i, mark) for i in range(6)], 2))
    assert got == {i: i * i for i in range(6)}
    assert os.path.exists(mark)


@pytest.mark.parametrize("workers", [1, 2])
def test_answers_are_named_by_item(workers: int):
    assert dict(pool.over(abs, [(-1,), (-2,), (-3,)], workers)) == {0: 1, 1: 2, 2: 3}
