"""A scorer that lives elsewhere: the suite's texts are exported, scored there, and the two files are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onepolicy.engines.fake import FakeEngine
from onepolicy.storage import read, write
from onepolicy.suite import fixed_rollouts, load
from onepolicy.types import Values


def scored(path: Path, order: str, fault: str = "none", name: str = "old") -> Path:
    """What a trainer would return: the exported texts with its log-probs."""
    engine = FakeEngine("", dtype="float32", order=order, fault=fault)
    rollouts, _ = fixed_rollouts(load("default"), engine, 600)
    write(rollouts.with_scoring(name, engine.score(rollouts)), path)
    return path


@pytest.mark.parametrize(("fault", "code", "outcome"), [("none", 0, "pass"), ("logits_times_two", 1, "drift")])
def test_two_recorded_scorings_of_fixed_texts(tmp_path: Path, cli: Any, fault: str, code: int, outcome: str) -> None:
    a, b = scored(tmp_path / "a.parquet", "forward"), scored(tmp_path / "b.parquet", "pairwise", fault)
    assert not read(a).drawn.any()
    ran = cli("check", f"recorded:{a}?side=old", "--scorer", f"recorded:{b}?side=old", "--json")
    assert ran.code == code, ran.err
    report = json.loads(ran.out)
    assert report["outcome"] == outcome
    assert report["sums"]["view"] == "fixed"
    assert "not-repeatable" not in ran.out


def test_an_engine_against_a_file_of_fixed_texts(tmp_path: Path, cli: Any) -> None:
    a = scored(tmp_path / "a.parquet", "forward", name="sampler")
    ran = cli("check", str(a), "--scorer", "fake:?dtype=float32&order=pairwise", "--json")
    assert ran.code == 0, ran.out[-2000:]
    report = json.loads(ran.out)
    assert "float32, where bounds are absolute" in report["floor"]["why"]
    legs = {x["key"]: x["outcome"] for x in report["legs"] if x["ran"] == "run"}
    assert legs["scorer-path"] == "pass" and legs["scorer-packing"] == "pass"
    assert isinstance(read(a).tokens["token_ids"], Values)
