"""However a dump is split, ordered and worked on, the audit adds up the same integers."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from audit_dumps import bits, sample, split, without_names
from onepolicy import pool
from onepolicy.audit import Choices, audit
from onepolicy.report.json import to_json
from onepolicy.rollouts import Rollouts, concat
from onepolicy.storage import write
from onepolicy.survey import Survey, survey_of
from onepolicy.types import Values


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rollouts, str]:
    rollouts = sample()
    folder = split(rollouts, 1, tmp_path_factory.mktemp("whole") / "dump")
    return rollouts, bits(folder, workers=1)


@pytest.mark.parametrize("parts", [2, 7])
def test_groups_split_between_shards_give_the_same_bits(whole: tuple[Rollouts, str], tmp_path: Path, parts: int):
    assert bits(split(whole[0], parts, tmp_path / "dump"), workers=1) == whole[1]


def test_records_that_one_side_says_nothing_of_give_the_same_bits_with_and_without_its_column(tmp_path: Path):
    """In one file their values are null; in a file of their own the column is not there at all."""
    rollouts = sample()
    silent = np.arange(len(rollouts)) % 3 == 1
    old = rollouts.scorings["old"]
    valid = old.logprobs.mask() & ~np.repeat(silent, rollouts.lengths)
    nulls = replace(old, logprobs=Values(old.logprobs.values, valid))
    together = replace(rollouts, scorings={**rollouts.scorings, "old": nulls})
    alone = rollouts.take(np.flatnonzero(silent))
    alone = replace(alone, scorings={"sampler": alone.scorings["sampler"]})
    for name, parts in (("one", [together]), ("two", [together.take(np.flatnonzero(~silent)), alone])):
        (tmp_path / name).mkdir()
        for i, part in enumerate(parts):
            write(part, tmp_path / name / f"{i}.parquet")
    one, two = (json.loads(bits(tmp_path / name, workers=1)) for name in ("one", "two"))
    assert one["sums"]["counts"]["b_null"] == 0 and one["dump"]["records with both sides"] == 40
    assert one == two


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
    cut = [_without_files(json.loads(without_names(t))) for t in texts]
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


def test_a_batch_that_was_added_stays_as_it_was():
    parts = [survey_of(sample(20, seed), ("sampler", "old")) for seed in (0, 1)]
    before = [part.sums.to_json() for part in parts if part.sums is not None]
    totals = []
    for _ in range(2):
        total = Survey(("sampler", "old"))
        for part in parts:
            total.add(part)
        assert total.sums is not None
        totals.append(total.sums.to_json())
    assert totals[0] == totals[1]
    assert [part.sums.to_json() for part in parts if part.sums is not None] == before
