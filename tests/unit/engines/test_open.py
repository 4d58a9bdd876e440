"""Engine specs, switches, names, and the shards that all engines share."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from onepolicy.engines import ENGINES
from onepolicy.engines import open as opening
from onepolicy.engines.base import EngineSpec, SamplingParams, options_of
from onepolicy.engines.open import engine_class, open_engine
from onepolicy.engines.shards import sample_shards, score_shards, shard_slices
from onepolicy.errors import EngineError, MissingExtra, UnknownName, UsageError
from onepolicy.rollouts import Rollouts
from onepolicy.types import Values


def test_a_spec_reads_and_writes_itself() -> None:
    spec = EngineSpec.parse("hf:/models/a b?dtype=float32&batch_size=4")
    assert (spec.name, spec.target) == ("hf", "/models/a b")
    assert options_of(engine_class("hf"), spec) | {"dtype": "", "batch_size": 0} == options_of(
        engine_class("hf"), EngineSpec("hf", "x")
    ) | {"dtype": "", "batch_size": 0}
    assert options_of(engine_class("hf"), spec)["batch_size"] == 4
    assert EngineSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tiny", "wanted name:target"),
        (":tiny", "wanted name:target"),
        ("hf:tiny?dtype", "options are key=value"),
        ("hf:tiny?dtype=float32&dtype=float16", "each once"),
        ("hff:tiny", "unknown engine 'hff'; did you mean 'hf'"),
        ("hf:tiny?dtyp=float32", "unknown switch of engine 'hf' 'dtyp'; did you mean 'dtype'"),
        ("hf:tiny?dtype=float31", "did you mean 'float32'"),
        ("hf:tiny?batch_size=many", "'batch_size': got 'many', wanted int"),
        ("vllm:tiny?prefix_caching=maybe", "'prefix_caching': got 'maybe', wanted true or false"),
        ("hf:tinny", "is no directory and no packaged model (tiny, tiny-moe)"),
        ("vllm:tests", "holds no config.json and no *.safetensors"),
        ("vllm:README.md", "is a file; wanted a model directory"),
        ("hf:tiny?batch_size=0", "at least 1"),
        ("recorded:no/such.parquet", "there is no file 'no/such.parquet'"),
    ],
)
def test_a_wrong_spec_is_one_clear_line_and_exit_code_2(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught, open_engine(text):
        pass
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_every_engine_of_the_table_declares_itself_without_its_heavy_packages() -> None:
    for name in ENGINES:
        cls = engine_class(name)
        assert name == cls.NAME
        assert cls.SAMPLES or cls.SCORES
        assert all(switch.meaning for switch in cls.SWITCHES.values())


@pytest.mark.parametrize(
    ("spec", "package"), [("hf:tiny", "torch"), ("hf:tiny", "transformers"), ("vllm:tiny", "vllm")]
)
def test_a_missing_package_is_named_with_its_extra(spec: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    if package == "transformers":
        monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    wanted = f"needs the package '{package}': pip install 'onepolicy[{spec.partition(':')[0]}]'"
    with pytest.raises(MissingExtra) as caught, open_engine(spec, in_process=True):
        pass
    assert wanted in str(caught.value) and caught.value.exit_code == 2


def test_plugins_are_asked_only_for_names_that_the_table_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def entry_points(group: str) -> list[EntryPoint]:
        asked.append(group)
        good = EntryPoint("mine", "onepolicy.engines.fake:FakeEngine", group)
        return [good, EntryPoint("broken", "no_such_module_here:X", group)]

    monkeypatch.setattr(opening, "entry_points", entry_points)
    assert engine_class("fake").NAME == "fake" and asked == []
    assert engine_class("mine").NAME == "fake" and asked == ["onepolicy.engines"]
    with pytest.raises(EngineError, match="plugin no_such_module_here:X cannot be loaded"):
        engine_class("broken")
    with pytest.raises(UnknownName, match="did you mean 'mine'"):
        engine_class("minne")


def test_shards_are_whole_sequences_within_both_budgets() -> None:
    assert shard_slices([3, 3, 3, 9, 1, 1, 1], 6, 2) == [
        slice(0, 2),
        slice(2, 3),
        slice(3, 4),
        slice(4, 6),
        slice(6, 7),
    ]
    assert shard_slices([]) == []
    assert shard_slices([10**6]) == [slice(0, 1)]


def test_scores_do_not_depend_on_the_shards_and_are_one_scoring() -> None:
    done: list[Any] = []
    with open_engine("fake:?seed=2") as engine:
        rollouts = next(sample_shards(engine, [[1], [2, 3], [4]], SamplingParams(max_tokens=5)))
        whole = engine.score(rollouts)
        parts = list(
            score_shards(engine, rollouts, max_sequences=1, progress=lambda done_, of: done.append((done_, of)))
        )
    assert np.array_equal(np.concatenate([s.logprobs.values for _, s in parts]), whole.logprobs.values)
    assert len({s.scoring_id for _, s in parts}) == 1
    assert done == [(1, 3), (2, 3), (3, 3)]


def test_an_engine_is_not_asked_for_what_it_does_not_do() -> None:
    ids = Rollouts(np.array([0, 1]), {"token_ids": Values(np.array([1], dtype=np.int32))})
    with open_engine("callable:math:sqrt") as engine:
        with pytest.raises(UsageError, match="does not draw tokens"):
            next(sample_shards(engine, [[1]], SamplingParams()))
        engine.SCORES = False  # type: ignore[misc]
        with pytest.raises(UsageError, match="does not score given tokens"):
            next(score_shards(engine, ids))
