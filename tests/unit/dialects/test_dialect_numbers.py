"""The accumulator: the same bits for any split, steps apart and pooled, and what is missing said."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from onepolicy.dialects import DIALECTS
from onepolicy.dialects.accumulate import Accumulator
from onepolicy.dialects.view import View
from onepolicy.errors import ContentError, MergeError, UnknownName, UsageError

#: Options that show every key a dialect has, as far as one setting can.
EVERYTHING: dict[str, dict[str, Any]] = {
    "verl": {
        "rollout_is": "token",
        "rollout_is_threshold": "0.9_1.1",
        "rollout_is_batch_normalize": "true",
        "rollout_rs": "token_k1,seq_mean_k3,seq_max_k2,seq_sum_k1",
        "rollout_rs_threshold": "0.9_1.1,0.01,0.1,0.5_2.0",
    },
    "slime": {"mismatch_metrics": "true", "use_opsm": "true", "rs_veto_threshold": "0.9"},
    "miles": {"mismatch_metrics": "true", "use_opsm": "true", "rs_veto_threshold": "0.9"},
    "nemo_rl": {"truncated_importance_sampling_ratio": "1.1", "seq_logprob_error_threshold": "1.2"},
    "skyrl": {
        "tis_ratio_type": "token",
        "sequence_mask_metric": "product",
        "outlier_token_is_threshold_low": "0.8",
        "token_mask_is_threshold_low": "0.9",
        "token_mask_is_threshold_high": "1.1",
    },
    "roll": {"is_weight": "true", "ratio_enabled": "true", "diff_enabled": "true"},
    "ms_swift": {"rollout_importance_sampling_mode": "sequence_truncate"},
}


def view(seed: int, sequences: int = 6) -> View:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, sequences)
    n = int(lengths.sum())
    sampler = -rng.exponential(1.0, n)
    old = np.minimum(sampler + rng.normal(0, 0.1, n), 0.0)
    current = np.minimum(old + rng.normal(0, 0.05, n), 0.0)
    return View(sampler, lengths, old, current, -sampler, rng.choice([-1.0, 1.0], n), 8)


def text(acc: Accumulator) -> str:
    return json.dumps(acc.to_dict(), sort_keys=True)


@pytest.mark.parametrize("name", DIALECTS)
def test_any_split_and_order_gives_the_same_text(name: str) -> None:
    parts = [(view(seed), seed % 2) for seed in range(6)]
    alone = Accumulator(name, EVERYTHING.get(name))
    for v, step in parts:
        alone.add(v, step)
    left, right = Accumulator(name, EVERYTHING.get(name)), Accumulator(name, EVERYTHING.get(name))
    for i in (5, 0, 3):
        right.add(*parts[i])
    for i in (4, 1, 2):
        left.add(*parts[i])
    again = Accumulator.from_dict(json.loads(text(left)))
    again.merge(right)
    assert text(again) == text(alone)
    assert [r.whole for r in again.rows()] == [r.whole for r in alone.rows()]


@pytest.mark.parametrize("name", DIALECTS)
def test_every_key_is_measured_where_every_column_is_there(name: str) -> None:
    acc = Accumulator(name, EVERYTHING.get(name))
    for seed in range(4):
        acc.add(view(seed, 20), 0)
    only_some = {"masked_mismatch_kl/mean", "masked_advantage_positive/mean", "masked_advantage_negative/mean"}
    assert {r.key.name for r in acc.rows() if r.whole is None} <= only_some
    assert {r.why for r in acc.rows()} == {""}


def test_steps_apart_and_pooled() -> None:
    acc = Accumulator("tinker", {"scorer": "old", "precision": "float64"})
    for d, step in ((0.1, 3), (0.4, 12), (0.1, None)):
        acc.add(View(np.full(2, -1.0), np.array([2]), old=np.full(2, -1.0 - d)), step)
    row = next(r for r in acc.rows() if r.key.name == "optim/kl_sample_train_v1")
    assert list(row.steps) == [3, 12, None]
    assert row.steps[12] == pytest.approx(0.4)
    assert row.whole == pytest.approx(0.2)


def test_a_missing_column_is_null_and_said() -> None:
    acc = Accumulator("prime_rl")
    acc.add(replace(view(1), current=None, advantages=None))
    rows = {r.key.name: r for r in acc.rows()}
    assert rows["mismatch_kl/all/mean"].whole is None
    assert rows["mismatch_kl/all/mean"].why == "no current_logprobs"
    assert rows["is_masked/mean"].why == "no current_logprobs, no advantages"
    assert rows["entropy/all/mean"].whole is not None
    acc.add(view(2))
    rows = {r.key.name: r for r in acc.rows()}
    alone = Accumulator("prime_rl")
    alone.add(view(2))
    assert rows["mismatch_kl/all/mean"].whole == alone.numbers()["mismatch_kl/all/mean"]
    assert rows["mismatch_kl/all/mean"].why == "no current_logprobs in 1 of 2 batches"


def test_nothing_selected_is_null_not_zero() -> None:
    acc = Accumulator("trl")
    acc.add(View(np.zeros(0), np.zeros(0, dtype=np.int64), old=np.zeros(0)))
    assert set(acc.numbers().values()) == {None}
    empty = Accumulator("verl")
    assert empty.numbers()["rollout_corr/kl"] is None


def test_nan_and_infinities_are_what_the_framework_makes_of_them() -> None:
    sampler = np.array([-1.0, math.nan, -math.inf, -2.0])
    v = View(sampler, np.array([4]), old=np.array([-1.5, -1.0, -1.0, -2.5]), width=4)
    got = {}
    for name, key in (
        ("verl", "rollout_corr/kl"),
        ("miles", "train/train_rollout_logprob_abs_diff"),
        ("trl", "sampling/sampling_logp_difference/max"),
    ):
        acc = Accumulator(name)
        acc.add(v)
        got[name] = acc.numbers()[key]
    assert math.isnan(got["verl"])
    assert got["miles"] == 0.25  # both count as 0
    assert got["trl"] == math.inf  # the NaN is left out, the infinity is not
    one = Accumulator("verl")
    one.add(View(np.array([-math.inf, -1.0]), np.array([2]), old=np.array([-1.0, -1.0])))
    assert one.numbers()["rollout_corr/kl"] == -math.inf


def test_merge_refuses_other_options_and_dialects() -> None:
    acc = Accumulator("verl", {"rollout_is": "token"})
    with pytest.raises(MergeError, match="options differ"):
        acc.merge(Accumulator("verl"))
    with pytest.raises(MergeError, match=r"verl and trl: their (options|dialect) differ"):
        acc.merge(Accumulator("trl"))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({}, "not saved numbers"),
        ({"format": 9}, "format 9"),
        ({"format": 1, "dialect": "verl", "options": {}, "views": {}, "steps": {"": {"x": ["mean", 1]}}}, "got 'mean'"),
        ({"format": 1, "dialect": "verl", "options": {}, "views": {}, "steps": {"": {"x": ["sum", "a"]}}}, "not saved"),
    ],
)
def test_what_is_no_state_is_refused(data: dict[str, Any], says: str) -> None:
    with pytest.raises(ContentError, match=says):
        Accumulator.from_dict(data)


@pytest.mark.parametrize(
    ("name", "options", "error", "says"),
    [
        ("verll", {}, UnknownName, "did you mean 'verl'"),
        ("verl", {"rollout_is_treshold": "2"}, UnknownName, "did you mean 'rollout_is_threshold'"),
        ("verl", {"rollout_is": "tokens"}, UnknownName, "did you mean 'token'"),
        ("verl", {"rollout_is": "token", "rollout_is_threshold": "high"}, UsageError, "wanted a number above 0"),
        ("verl", {"rollout_rs": "token_k4", "rollout_rs_threshold": "1"}, UnknownName, "did you mean 'token_k"),
        ("verl", {"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"}, UsageError, "one a criterion"),
        ("verl", {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"}, UsageError, "wanted one above 0"),
        ("trl", {"vllm_importance_sampling_clip_max": "much"}, UsageError, "wanted a number"),
        ("trl", {"vllm_importance_sampling_clip_max": "nan"}, UsageError, "wanted a number"),
        ("slime", {"use_tis": "perhaps"}, UsageError, "wanted true or false"),
        ("tinker", {"precision": "bfloat16"}, UnknownName, "float16|float32"),
    ],
)
def test_options_that_cannot_be(name: str, options: dict[str, str], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Accumulator(name, options)


def test_options_of_text_and_of_python_are_the_same() -> None:
    text_options = {"vllm_importance_sampling_clip_max": "none", "vllm_importance_sampling_clip_min": "0.5"}
    typed = {"vllm_importance_sampling_clip_max": None, "vllm_importance_sampling_clip_min": 0.5}
    assert DIALECTS["trl"].resolve(text_options) == DIALECTS["trl"].resolve(typed)


def test_keys_of_a_correction_that_is_off_are_not_there() -> None:
    off, on = (set(Accumulator("verl", o).numbers()) for o in ({}, {"rollout_is": "sequence"}))
    assert "rollout_corr/rollout_is_mean" not in off
    assert "rollout_corr/rollout_is_mean" in on
    assert "rollout_corr/rollout_is_oob_ratio" not in on


@pytest.mark.parametrize("name", DIALECTS)
def test_no_batch_breaks_a_dialect(name: str) -> None:
    """Empty batches, empty sequences, one token, and values of every kind: numbers, NaN, infinities or null."""
    odd = np.array([math.nan, math.inf, -math.inf, 0.0, -1e-300, -745.0, -9999.0, 1e30])
    shapes = [[], [0], [0, 0], [1], [0, 3, 0], [2, 1]]
    for seed, lengths in enumerate(shapes * 3):
        rng, n = np.random.default_rng(seed), sum(lengths)
        pick = lambda: np.where(rng.random(n) < 0.4, rng.choice(odd, n), -rng.exponential(1.0, n))  # noqa: B023
        v = View(pick(), np.array(lengths, dtype=np.int64), pick(), pick(), pick(), pick(), 4)
        acc = Accumulator(name, EVERYTHING.get(name))
        acc.add(v, seed)
        rows = Accumulator.from_dict(json.loads(json.dumps(acc.to_dict(), allow_nan=False))).rows()
        assert all(r.whole is None or isinstance(r.whole, float) for r in rows)
