"""Presets: the ones whose origin pip does not install against numbers worked by hand, and the data itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from onepolicy import corrections
from onepolicy.corrections.frameworks import FILES, tables
from onepolicy.errors import UnknownName, UsageError

#: Two replies. Ratios are powers of two and the like, so products and means can be worked by hand.
#: reply 1: ratios 4, 1/2, 1, 1/2 (product 1, geometric mean 1, mean |r - 1| = (3 + .5 + 0 + .5) / 4 = 1)
#: reply 2: ratios 1.25, 1.25, (masked), 1.25 (product 1.953125, geometric mean 1.25, mean |r - 1| = .25)
RATIOS = np.array([[4.0, 0.5, 1.0, 0.5], [1.25, 1.25, 7.0, 1.25]])
P = np.array([[0.1, 0.8, 0.5, 0.2], [0.4, 0.2, 0.1, 0.8]])
MASK = np.array([[1, 1, 1, 1], [1, 1, 0, 1]])
A = np.array([1.0, -1.0])
F, T = False, True
ALL = [[T, T, T, T], [T, T, F, T]]
NORM = 7.75 / 7

BY_HAND: list[tuple[str, dict[str, Any], list[list[float]], list[list[bool]]]] = [
    ("nemo_rl:tis", {}, [[2, 0.5, 1, 0.5], [1.25, 1.25, 0, 1.25]], ALL),
    (
        "nemo_rl:tis",
        {"truncated_importance_sampling_ratio": 1.2, "truncated_importance_sampling_ratio_min": 0.8},
        [[1.2, 0.8, 1, 0.8], [1.2, 1.2, 0, 1.2]],
        [[T, T, T, T], [T, T, F, T]],
    ),
    (
        "nemo_rl:icepop",
        {"truncated_importance_sampling_ratio": 3.0, "truncated_importance_sampling_ratio_min": 0.6},
        [[0, 0, 1, 0], [1.25, 1.25, 0, 1.25]],
        [[F, F, T, F], [T, T, F, T]],
    ),
    # reply 1 has geometric mean 1 and keeps raw weights, 4 among them; reply 2 is out
    ("nemo_rl:seq-mask-tis", {}, [[4, 0.5, 1, 0.5], [0, 0, 0, 0]], [[T, T, T, T], [F, F, F, F]]),
    ("nemo_rl:sequence_level", {}, [[1, 1, 1, 1], [1.953125, 1.953125, 0, 1.953125]], ALL),
    # e^|d|: (4 + 2 + 1 + 2) / 4 = 2.25 and 1.25
    ("nemo_rl:seq_logprob_error_threshold", {}, [[0] * 4, [1, 1, 0, 1]], [[F] * 4, [T, T, F, T]]),
    ("slime:tis", {}, [[2, 0.5, 1, 0.5], [1.25, 1.25, 0, 1.25]], ALL),
    ("slime:tis", {"tis_clip": 1.1, "tis_clip_low": 0.9}, [[1.1, 0.9, 1, 0.9], [1.1, 1.1, 0, 1.1]], ALL),
    ("slime:icepop", {"tis_clip": 3.0}, [[0, 0.5, 1, 0.5], [1.25, 1.25, 0, 1.25]], [[F, T, T, T], [T, T, F, T]]),
    ("slime:mis", {}, [[2, 0.5, 1, 0.5], [1.25, 1.25, 0, 1.25]], ALL),
    (
        "slime:mis",
        {"tis_mode": "clip", "tis_level": "token", "tis_lower_bound": 0.75},
        [[2, 0.75, 1, 0.75], [1.25, 1.25, 0, 1.25]],
        ALL,
    ),
    (
        "slime:mis",
        {"tis_mode": "mask", "tis_lower_bound": 0.75},
        [[0, 0, 1, 0], [1.25, 1.25, 0, 1.25]],
        [[F, F, T, F], [T, T, F, T]],
    ),
    (
        "slime:mis",
        {"tis_mode": "mask", "tis_level": "sequence", "tis_upper_bound": 1.5},
        [[1, 1, 1, 1], [0, 0, 0, 0]],
        [[T] * 4, [F] * 4],
    ),
    (
        "slime:mis",
        {"tis_mode": "truncate", "tis_level": "geometric", "tis_upper_bound": 1.1},
        [[1, 1, 1, 1], [1.1, 1.1, 0, 1.1]],
        ALL,
    ),
    # the veto drops reply 1 for its one token with ratio 1/2, weights of reply 2 stay
    ("slime:mis", {"rs_veto_threshold": 0.6}, [[0] * 4, [1.25, 1.25, 0, 1.25]], [[F] * 4, [T, T, F, T]]),
    # truncated weights 2, .5, 1, .5 and three of 1.25: their mean over tokens is 7.75 / 7
    (
        "slime:mis",
        {"tis_batch_normalize": True, "use_rs": True, "rs_lower_bound": 0.75, "rs_upper_bound": 4.0},
        [[2 / NORM, 0, 1 / NORM, 0], [1.25 / NORM, 1.25 / NORM, 0, 1.25 / NORM]],
        [[T, F, T, F], [T, T, F, T]],
    ),
    # products 1 and 1.953125 weigh; geometric means 1 and 1.25 decide
    (
        "slime:mis",
        {"tis_level": "sequence", "use_rs": True, "rs_level": "geometric", "rs_upper_bound": 1.2},
        [[1] * 4, [0] * 4],
        [[T] * 4, [F] * 4],
    ),
    ("prime_rl:icepop", {"ratio_low": 0.6}, [[4, 0, 1, 0], [1.25, 1.25, 0, 1.25]], [[T, F, T, F], [T, T, F, T]]),
    # A < 0 on reply 2 only, whose mean of old - current is -log 1.25 < 0: kept
    ("slime:opsm", {}, [[1] * 4, [1, 1, 0, 1]], ALL),
    # q - p: .3, -.4, 0, -.1 with A > 0: the first is up by more than .2; .1, .05, -, .2 with A < 0: none is down
    ("prime_rl:default", {}, [[0, 0.5, 1, 0.5], [1.25, 1.25, 0, 1.25]], [[F, T, T, T], [T, T, F, T]]),
    ("prime_rl:ipo", {}, [[0, 0, 1, 0.5], [1.25, 1.25, 0, 0]], [[F, F, T, T], [T, T, F, F]]),
    # KL(.1 || .4) = .226, of (.8, .4): .382; (.2, .1): .044 and .037; (.4, .5): .020; (.2, .25): .007; (.8, 1): large
    ("prime_rl:kpop", {}, [[0, 0, 1, 0.5], [1.25, 1.25, 0, 0]], [[F, F, T, T], [T, T, F, F]]),
    ("roll:is_weight", {}, [[1.2, 0.5, 1, 0.5], [1.2, 1.2, 0, 1.2]], ALL),
    ("roll:is_weight", {"weight_type": "geometric"}, [[1] * 4, [1.2, 1.2, 0, 1.2]], ALL),
    ("roll:is_weight", {"weight_type": "sequence", "upper_bound": 1.9}, [[1] * 4, [1.9, 1.9, 0, 1.9]], ALL),
    ("roll:is_weight", {"weight_type": "segment", "upper_bound": 1.3}, [[1] * 4, [1.25, 1.25, 0, 1.25]], ALL),
    ("roll:ratio_filter", {}, [[0, 0, 1, 0], [0, 0, 0, 0]], [[F, F, T, F], [F, F, F, F]]),
    ("roll:ratio_filter", {"agg_type": "geometric"}, [[1] * 4, [0] * 4], [[T] * 4, [F] * 4]),
    ("roll:ratio_filter", {"agg_type": "sequence", "ratio_high": 2.0}, [[1] * 4, [1, 1, 0, 1]], ALL),
    # signed: within -.2 and .15
    ("roll:diff_filter", {"diff_high": 0.15}, [[0, 0, 1, 1], [1, 1, 0, 0]], [[F, F, T, T], [T, T, F, F]]),
    ("open_instruct:rho", {}, [[2, 0.5, 1, 0.5], [1.25, 1.25, 0, 1.25]], ALL),
    (
        "open_instruct:rho",
        {"rho_mask_lower_bound": 0.6, "rho_mask_upper_bound": 3.0, "rho_clamp_upper_bound": 1.2},
        [[0, 0, 1, 0], [1.2, 1.2, 0, 1.2]],
        [[F, F, T, F], [T, T, F, T]],
    ),
    # mean |r - 1| is 1 and .25; above .5 in reply 1, whose A > 0: the token with d > 0 goes
    (
        "open_instruct:vaco",
        {"rho_mask_upper_bound": 0.5},
        [[0, 0.5, 1, 0.5], [1.25, 1.25, 0, 1.25]],
        [[F, T, T, T], [T, T, F, T]],
    ),
    ("tunix:token", {}, [[2, 0.5, 1, 0.5], [1.25, 1.25, 0, 1.25]], ALL),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "weights", "keep"), BY_HAND, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(BY_HAND)]
)
def test_numbers_worked_by_hand(name: str, options: dict[str, Any], weights: Any, keep: Any) -> None:
    p = corrections.preset(name, **options)
    sampler, policy = np.log(P), np.log(P * RATIOS)
    behind = {"old": sampler} if p.behind == "old" else {"sampler": sampler}
    named = {"current": policy} if p.mode == "bypass" else {"old": policy}
    c = p(**behind, **named, mask=MASK, advantages=A)
    np.testing.assert_allclose(c.weights, weights, rtol=1e-12, atol=1e-15)
    assert c.keep.tolist() == keep
    assert c.denominator == (c.keep.sum() if p.denominator == "kept" else MASK.sum())


def test_every_origin_without_a_wheel_is_worked_by_hand() -> None:
    hand = {n for n, t in tables().items() if t["checked"] == "by hand"}
    assert hand == {n for n, *_ in BY_HAND}


def test_opsm_drops_a_stale_bad_reply() -> None:
    """slime: reply 2 has A < 0; old is above current on the mean by log 1.25."""
    old, current = np.log(P), np.log(P / RATIOS)
    c = corrections.preset("slime:opsm", opsm_delta=0.2)(old=old, current=current, mask=MASK, advantages=A)
    assert c.keep.tolist() == [[T] * 4, [F] * 4]
    c = corrections.preset("slime:opsm", opsm_delta=0.23)(old=old, current=current, mask=MASK, advantages=A)
    assert c.keep.sum() == 7  # log 1.25 = .2231


@pytest.mark.parametrize("name", corrections.presets())
def test_each_says_where_it_comes_from(name: str) -> None:
    p = corrections.preset(name)
    assert p.name == name and p.source and p.date == "2026-11-30" and p.note
    assert p.mode in ("decoupled", "bypass") or name == "verl:disabled"
    assert corrections.preset(name, **dict(p.more)).stages == p.stages
    assert str(p) == " -> ".join(str(s) for s in p.stages) or str(p) == "nothing"


def test_names_are_framework_and_preset() -> None:
    assert {n.partition(":")[0] for n in corrections.presets()} == set(FILES)
    assert len(corrections.presets()) == len(set(corrections.presets())) >= 60


@pytest.mark.parametrize(
    ("spec", "band"),
    [("0.5_2.0", (0.5, 2.0)), ([0.5, 2.0], (0.5, 2.0)), (4.0, (0.25, 4.0)), ("4", (0.25, 4.0)), ((0.1, 9), (0.1, 9))],
)
def test_forms_of_a_band(spec: Any, band: tuple[float, float]) -> None:
    options = corrections.preset("verl:decoupled_geo_rs", rollout_rs_threshold=spec).stages[0].options
    assert (options["low"], options["high"]) == band


def test_a_number_as_text() -> None:
    assert corrections.preset("verl:decoupled_token_is", rollout_is_threshold="3.0").stages[0].options["cap"] == 3.0


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("verl:decoupled_k3", {}, "did you mean 'verl:decoupled_k3_rs'"),
        ("verl:decoupled_k3_rs", {"rollout_rs_treshold": 1}, "did you mean 'rollout_rs_threshold'"),
        ("verl:decoupled_geo_rs", {"rollout_rs_threshold": "a_b"}, "wanted a number"),
        ("verl:decoupled_geo_rs", {"rollout_rs_threshold": "1_2_3"}, "wanted 'low_high'"),
        ("verl:decoupled_geo_rs", {"rollout_rs_threshold": "2.0_0.5"}, "nothing would be kept"),
        ("verl:decoupled_token_is", {"rollout_is_threshold": "0.5_5.0"}, "wanted a number"),
        ("slime:tis", {"tis_clip": -1.0}, "cap is -1.0"),
        # a mode with a typing mistake would leave every stage out, and correct nothing
        ("slime:mis", {"tis_mode": "trunkate"}, "unknown tis_mode of slime:mis 'trunkate'; did you mean 'truncate'"),
        ("slime:mis", {"tis_level": None}, "unknown tis_level"),
        ("skyrl:off_policy_correction", {"tis_ratio_type": "tokens"}, "did you mean 'token'"),
        ("roll:is_weight", {"weight_type": 3}, "unknown weight_type of roll:is_weight '3'"),
        ("verl:decoupled_token_is", {"rollout_is_batch_normalize": "x"}, "wanted True or False"),
        # also of a stage that is off as things stand
        ("slime:mis", {"tis_lower_bound": "x"}, "tis_lower_bound='x', wanted a number"),
        ("skyrl:off_policy_correction", {"geo_mask_low": math.nan}, "wanted a number"),
    ],
)
def test_refused_when_made_not_in_the_loop(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as e:
        corrections.preset(name, **options)
    assert "\n" not in str(e.value)


def test_a_preset_may_be_told_to_do_nothing() -> None:
    """ "none" where that is the default."""
    assert corrections.preset("skyrl:off_policy_correction", tis_ratio_type="none").stages == ()
    assert corrections.preset("skyrl:off_policy_correction", tis_ratio_type=None).stages == ()
    assert len(corrections.preset("skyrl:off_policy_correction", tis_ratio_type="token").stages) == 1


def test_a_preset_refuses_the_other_mode() -> None:
    lp, mask = np.zeros((1, 2)), np.ones((1, 2))
    with pytest.raises(UsageError, match="decoupled mode: it needs old="):
        corrections.preset("trl:sequence_mask")(sampler=lp, current=lp, mask=mask)
    with pytest.raises(UsageError, match="bypass mode: it needs current="):
        corrections.preset("verl:bypass_pg_is")(sampler=lp, old=lp, mask=mask)
    with pytest.raises(UsageError, match="current against old"):
        corrections.preset("slime:opsm")(sampler=lp, current=lp, mask=mask, advantages=lp)
    with pytest.raises(UnknownName, match="did you mean 'advantages'"):
        corrections.preset("trl:token_mask")(sampler=lp, old=lp, mask=mask, advantage=lp)


def test_the_denominator_of_a_preset_can_be_overruled() -> None:
    sampler, old = np.log(P), np.log(P * RATIOS)
    p = corrections.preset("verl:decoupled_geo_rs", rollout_rs_threshold="0.9_1.1")
    assert p(sampler=sampler, old=old, mask=MASK).denominator == 4
    assert p(sampler=sampler, old=old, mask=MASK, denominator="all").denominator == 7
    assert p(sampler=sampler, old=old, mask=MASK, denominator=1000).denominator == 1000
    assert math.isclose(float(p(sampler=sampler, old=old, mask=MASK).effects["kept/share"]), 4 / 7)
