"""Presets and bounds: every shipped one loads and has a source; nonsense is refused in one line."""

from __future__ import annotations

import pytest

from onepolicy.errors import UnknownName, UsageError
from onepolicy.gates import PARTS, PRESETS
from onepolicy.gates.bounds import default_preset, load, parse
from onepolicy.metrics import METRICS

GOOD = """
[[bound]]
metric = "abs_log_ratio/mean"
at_most = 0.1
when = "required"
source = "a test"
date = 2026-11-30
"""


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_says_where_its_bounds_come_from(name: str) -> None:
    preset = load(name)
    assert preset.about
    for bound in preset.bounds:
        assert bound.metric in METRICS
        assert len(bound.source) > 10
        assert bound.date.startswith("20")
    assert any(b.when == "required" for b in preset.bounds)


def test_the_contract_values() -> None:
    at_most = {(p, b.metric): b.at_most for p in PRESETS for b in load(p).bounds}
    assert at_most["bitwise", "abs_log_ratio/max"] == 0
    assert at_most["strict", "kl_sampler_scorer_exact/mean"] == 1e-4
    assert at_most["strict", "abs_log_ratio/max"] == 0.2
    assert at_most["strict", "ratio_bias/mean"] == 0.01
    assert at_most["fp32", "abs_log_ratio/mean"] == 1e-4
    assert at_most["fp32", "abs_log_ratio/max"] == 5e-3
    assert at_most["fp16", "kl_sampler_scorer_k3/mean"] == 2e-4
    assert at_most["fp16", "abs_log_ratio/mean"] == 0.02
    assert at_most["bf16", "kl_sampler_scorer_k3/mean"] == 0.01
    assert at_most["bf16", "abs_log_ratio/mean"] == 0.1
    assert at_most["bf16", "ratio_bias/mean"] == 0.02
    assert all(at_most[p, "surprisal_sampler/excess"] == 0.01 for p in set(PRESETS) - set(PARTS))


def test_the_parts_ask_one_question_each() -> None:
    floor = {b.metric: (b.at_most, b.when) for b in load("floor").bounds}
    assert {m: floor[f"gap_over_floor/{m}"] for m in ("rms", "p50", "p95", "p99.9")} == {
        "rms": (1.25, "required"), "p50": (1.25, "required"), "p95": (1.25, "required"), "p99.9": (1.25, "if_measured"),
    }  # fmt: skip
    assert {when for m, (_, when) in floor.items() if "_from_" in m} == {"alarm"}
    assert [(b.metric, b.at_most) for b in load("function").bounds] == [
        ("abs_log_ratio/mean", 1e-4), ("abs_log_ratio/max", 5e-3),
    ]  # fmt: skip


def test_presets_join() -> None:
    both = load("floor + bf16")
    assert both.name == "floor + bf16"
    assert both.bounds == load("floor").bounds + load("bf16").bounds


@pytest.mark.parametrize(
    ("dtypes", "wanted"),
    [
        (["float32", "float32"], "fp32"),
        (["float16", "float32"], "fp16"),
        (["float16", "bfloat16"], "bf16"),
        (["float64", "float32"], "fp32"),
    ],
)
def test_the_default_is_that_of_the_coarser_dtype(dtypes: list[str], wanted: str) -> None:
    assert default_preset(list(dtypes)) == wanted


def test_no_default_for_what_is_not_declared() -> None:
    with pytest.raises(UsageError, match="--bounds"):
        default_preset(["float32", None])


def test_did_you_mean() -> None:
    with pytest.raises(UnknownName, match="did you mean 'strict'"):
        load("strickt")
    with pytest.raises(UnknownName, match="did you mean 'abs_log_ratio/mean'"):
        parse(GOOD.replace("abs_log_ratio/mean", "abs_log_ratio/meen"), "x")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("0.1", "-0.1", "at_most"),
        ("0.1", "nan", "at_most"),
        ("0.1", "inf", "at_most"),
        ("0.1", "true", "at_most"),
        ("0.1", '"0.1"', "at_most"),
        ('"required"', '"sometimes"', "when"),
        ('source = "a test"', "", "source"),
        ("at_most", "at_mots", "did you mean 'at_most'"),
        ("abs_log_ratio/mean", "kl_k1", "k1 may be negative"),
        ("[[bound]]", "[[bund]]", "no \\[\\[bound"),
        ("[[bound]]", "[[bound]", "not TOML"),
        ("[[bound]]", "[bound]", "list of tables"),
        ("[[bound]]", "bound = 3\n[other]", "list of tables"),
        ("[[bound]]", "bound = [3]\n[other]", "list of tables"),
        ("[[bound]]", "dtpye = 'float32'\n[[bound]]", "did you mean 'dtype'"),
        ('"abs_log_ratio/mean"', "5", "metric is 5, wanted the name"),
        ("at_most", "otherwise = 3\nat_most", "otherwise is 3, wanted the name"),
        ("at_most", 'min_tokens = "many"\nat_most', "min_tokens is 'many', wanted a whole number"),
        ("at_most", "min_tokens = -5\nat_most", "min_tokens is -5, wanted a whole number"),
        ("at_most", 'absolute = "no"\nat_most', "absolute is 'no', wanted true or false"),
    ],
)
def test_nonsense_is_refused(old: str, new: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as err:
        parse(GOOD.replace(old, new), "mine.toml")
    assert "\n" not in str(err.value)
    assert err.value.exit_code == 2


def test_own_bounds_from_a_file(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    assert load(str(path)).bounds[0].at_most == 0.1
    with pytest.raises(UsageError, match="cannot be read"):
        load(str(tmp_path / "none.toml"))


def test_an_alias_names_a_metric() -> None:
    assert parse(GOOD.replace("abs_log_ratio/mean", "kl_k3"), "x").bounds[0].metric == "kl_sampler_scorer_k3/mean"
