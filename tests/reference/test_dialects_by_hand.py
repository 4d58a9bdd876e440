"""The dialects whose frameworks have no wheel against numbers worked by hand after their published formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from onepolicy.dialects import DIALECTS
from onepolicy.dialects.accumulate import Accumulator
from onepolicy.dialects.view import View


def numbers(name: str, view: View, **options: Any) -> dict[str, float | None]:
    acc = Accumulator(name, {"precision": "float64", **options})
    acc.add(view)
    return acc.numbers()


LN2 = math.log(2)
P = np.array([0.2, 0.4, 0.5, 0.5, 0.1])
R = np.array([2.0, 0.5, 1.0, 1.0, 4.0])
#: Two sequences: ratios 2 and 1/2, then 1, 1 and 4; the sampler's probabilities .2 and .4, then .5, .5 and .1.
HAND = View(
    np.log(P),
    np.array([2, 3]),
    old=np.log(P * R),
    current=np.log(P * R * 1.1),
    entropy=np.array([1.0, 2.0, 0.5, 0.5, 1.0]),
    advantages=np.array([-1.0, -1.0, 1.0, 1.0, 1.0]),
    width=4,
    runs=np.array([2, 1, 2]),
)
AS_OLD = {"scorer": "old"}
BY_HAND: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    (
        "slime",
        {"mismatch_metrics": True, "use_opsm": True, "rs_veto_threshold": 0.6, "tis_clip_low": 0.6},
        {
            "train/train_rollout_logprob_abs_diff": (LN2 + 2 * LN2 / 3) / 2,
            "train/tis": (1.25 + 2) / 2,
            "train/tis_abs": (0.75 + 1) / 2,
            "train/tis_clipfrac": (0.5 + 1 / 3) / 2,
            "train/ois": 1.1,
            "train/opsm_clipfrac": 0.0,
            "train/mis_kl": (0 - 2 * LN2 / 3) / 2,
            "train/mis_k3_kl": ((1 - LN2 + LN2 - 0.5) / 2 + (3 - 2 * LN2) / 3) / 2,
            "train/mis_ppl_ratio": (1 + 4 ** (-1 / 3)) / 2,
            "train/mis_chi2_token": ((3 - 0.75) / 2 + 15 / 3) / 2,
            "train/mis_chi2_seq": (0 + 15) / 2,
            "train/mis_tis_weight_after_bound": (1.25 + 4 / 3) / 2,
            "train/mis_tis_truncate_fraction": (0 + 1 / 3) / 2,
            "train/mis_rs_catastrophic_token_fraction": 0.25,
            "train/mis_rs_catastrophic_seq_fraction": 0.5,
            "train/mis_is_ratio_min_final": (0.5 + 1) / 2,
            "train/mis_is_ratio_max_final": (2 + 2) / 2,
        },
    ),
    (
        "slime",
        {"mismatch_metrics": True, "calculate_per_token_loss": True, "tis_level": "geometric", "tis_mode": "mask"},
        {
            "train/train_rollout_logprob_abs_diff": 4 * LN2 / 5,
            "train/mis_tis_weight_before_bound": (2 + 3 * 4 ** (1 / 3)) / 5,
            "train/mis_tis_mask_fraction_high": 0.0,
            "train/mis_log_ppl_diff": (0 - 3 * 2 * LN2 / 3) / 5,
        },
    ),
    # truncated weights 2, 1/2 and 1, 1, 2: their mean over tokens is 1.3, which all are divided by
    (
        "slime",
        {
            "mismatch_metrics": True,
            "tis_batch_normalize": True,
            "use_rs": True,
            "rs_upper_bound": 3,
            "rs_lower_bound": 0.6,
        },
        {
            "train/mis_batch_norm_factor": 6.5 / 5,
            "train/mis_tis_weight_after_bound": (1.25 + 4 / 3) / 2,
            "train/mis_is_ratio_mean_after_tis_rs": (1.25 + 4 / 3) / 2,
            "train/mis_is_ratio_mean_final": (1.25 + 4 / 3) / 2 / 1.3,
            "train/mis_is_ratio_min_final": (0.5 + 1) / 2 / 1.3,
            "train/mis_is_ratio_max_final": 2 / 1.3,
            "train/mis_rs_mask_fraction_low": (1 / 2 + 0) / 2,
            "train/mis_rs_mask_fraction_high": (0 + 1 / 3) / 2,
        },
    ),
    # products 1 and 4, the second truncated to 2: their mean over sequences is 1.5
    (
        "slime",
        {
            "mismatch_metrics": True,
            "tis_batch_normalize": True,
            "tis_level": "sequence",
            "use_rs": True,
            "rs_level": "geometric",
            "rs_upper_bound": 1.5,
        },
        {
            "train/mis_batch_norm_factor": 1.5,
            "train/mis_is_ratio_max_final": (1 + 2) / 2 / 1.5,
            "train/mis_rs_mask_fraction_high": (0 + 1) / 2,  # 4^(1/3) = 1.587
        },
    ),
    (
        "nemo_rl",
        {"truncated_importance_sampling_ratio": 1.5, "seq_logprob_error_threshold": 2.0},
        {
            "token_mult_prob_error": (2 + 2 + 1 + 1 + 4) / 5,
            "gen_kl_error": (1 - LN2 - 0.5 + LN2 + 3 - 2 * LN2) / 5,
            "policy_kl_error": (-0.5 + LN2 + 1 - LN2 - 0.75 + 2 * LN2) / 5,
            "sampling_importance_ratio": (1.5 + 0.5 + 1 + 1 + 1.5) / 5,
            "is_oob_ratio": 2 / 5,
            "approx_entropy": -1.1 * float(np.mean(R * np.log(P * R * 1.1))),
            "probs_ratio": 1.1,
            "probs_ratio_clamped_max": 1.1,
            "max_seq_mult_prob_error": 2.0,
            "mean_seq_mult_prob_error": 2.0,
            "num_masked_seqs_by_logprob_error": 0.0,
        },
    ),
    (
        "nemo_rl",
        {
            "truncated_importance_sampling_ratio": 1.2,
            "truncated_importance_sampling_ratio_min": 0.9,
            "truncated_importance_sampling_type": "seq-mask-tis",
            "reference_policy_kl_type": "k2",
        },
        {
            "gen_kl_error": (LN2**2 * (1 + 1 + 4) / 2) / 5,
            "sampling_importance_ratio": (2 + 0.5) / 5,
            "is_oob_ratio": 0.5,
        },
    ),
    (
        "nemo_rl",
        {
            "sequence_level_importance_ratios": True,
            "truncated_importance_sampling_ratio": 5,
            "truncated_importance_sampling_type": "icepop",
            "truncated_importance_sampling_ratio_min": 0.5,
        },
        {"sampling_importance_ratio": (1 + 4) / 2, "is_oob_ratio": 0.0},
    ),
    # the lower bound of tis clamps, and counts: ratios 2, 1/2, 1, 1, 4
    (
        "nemo_rl",
        {"truncated_importance_sampling_ratio": 1.5, "truncated_importance_sampling_ratio_min": 0.8},
        {"sampling_importance_ratio": (1.5 + 0.8 + 1 + 1 + 1.5) / 5, "is_oob_ratio": 3 / 5},
    ),
    # one weight a sequence, and yet the share out of bounds is of tokens: three of five
    (
        "nemo_rl",
        {"sequence_level_importance_ratios": True, "truncated_importance_sampling_ratio": 3},
        {"sampling_importance_ratio": (1 + 3) / 2, "is_oob_ratio": 3 / 5},
    ),
    (
        "prime_rl",
        {**AS_OLD, "dppo_mask_high": 0.25, "dppo_mask_low": 0.15},
        {
            "mismatch_kl/all/mean": (0.5 + 3 - 2 * LN2) / 5,
            "mismatch_kl/all/max": 3 - 2 * LN2,
            # each sample alike: one of two tokens in the first, one of three in the second
            "is_masked/mean": (1 / 2 + 1 / 3) / 2,
            "is_masked/max": 1 / 2,
            "is_masked_low/mean": 1 / 4,
            "is_masked_high/mean": 1 / 6,
            "masked_mismatch_kl/mean": (LN2 - 0.5 + 3 - 2 * LN2) / 2,
            "masked_mismatch_kl/max": 3 - 2 * LN2,
            "unmasked_mismatch_kl/mean": (1 - LN2 + 0) / 2,
            "masked_advantage_positive/mean": 0.5,
            "masked_advantage_negative/mean": 0.5,
            "entropy/all/mean": 1.0,
            "kl_ent_ratio/mean": (0.5 + 3 - 2 * LN2) / 5,
        },
    ),
    ("prime_rl", {**AS_OLD, "loss": "ipo", "ipo_threshold": 0.19}, {"is_masked/mean": (1 + 1 / 3) / 2}),
    # a sample without a masked token has a masked KL of 0, and counts
    (
        "prime_rl",
        {**AS_OLD, "loss": "icepop", "ratio_low": 0.4, "ratio_high": 3.0, "expm1": True},
        {"masked_mismatch_kl/mean": (0 + 3 - 2 * LN2) / 2, "is_masked/mean": (0 + 1 / 3) / 2},
    ),
    (
        "prime_rl",
        {**AS_OLD, "loss": "ppo", "ratio_low": 0.8, "ratio_high": 1.2, "max_importance_ratio": 3.0},
        {"is_clipped/mean": (1 / 2 + 1 / 3) / 2, "ratio_capped/mean": (0 + 1 / 3) / 2, "ratio_capped/max": 1 / 3},
    ),
    (
        "prime_rl",
        {**AS_OLD, "loss": "cispo", "ratio_low": 0.0, "ratio_high": 3.0},
        {"is_clipped/mean": (0 + 1 / 3) / 2},
    ),
    (
        "roll",
        {"is_weight": True, "ratio_enabled": True, "diff_enabled": True, "ratio_high": 2.5, "diff_high": 0.25},
        {
            "actor/train_infer_ratio_token_mean": (1.25 + 2) / 2,
            "actor/train_infer_ratio_geometric_mean": (1 + 4 ** (1 / 3)) / 2,
            "actor/train_infer_ratio_sequence_mean": (1 + 4) / 2,
            "actor/train_infer_ratio_segment_mean": (1 + (1 + 2 + 2) / 3) / 2,
            "actor/train_infer_diff_token_mean": (0 + 0.1) / 2,
            "actor/train_infer_diff_sequence_mean": (0 + 0.3) / 2,
            "actor/train_infer_token_ratio_mask_mean": 3 / 5,
            "actor/train_infer_token_diff_mask_mean": 4 / 5,
            "actor/train_infer_final_mask_mean": 3 / 5,
            "actor/is_weight_clipfrac": 2 / 5,
            # the other way round: 1/2 - 1 + log 2 and 2 - 1 - log 2, then 0, 0 and 1/4 - 1 + 2 log 2
            "actor/train_infer_kl": (0.5 / 2 + (2 * LN2 - 0.75) / 3) / 2,
            "actor/train_infer_ratio_token_max": 4.0,
            "actor/train_infer_ratio_token_min": 0.5,
        },
    ),
    (
        "open_instruct",
        {**AS_OLD, "rho_mask_lower_bound": 0.6, "rho_mask_upper_bound": 3.0},
        {
            "debug/vllm_vs_local_logprob_diff_mean": 4 * LN2 / 5,
            "debug/vllm_vs_local_logprob_diff_max": 2 * LN2,
            "debug/vllm_vs_local_logprob_diff_std": LN2 * math.sqrt((6 - 16 / 5) / 4),
            "debug/vllm_local_reverse_kl": LN2 * (-0.2 + 0.4 - 0.2) / 5,
            "val/rho_drop_frac": 2 / 5,
            "val/rho_drop_low_frac": 1 / 5,
            "val/rho_drop_high_frac": 1 / 5,
            "val/rho_weight": (2 + 0 + 1 + 1 + 0) / 5,
            "val/rho_clipfrac": 1 / 5,
        },
    ),
    # mean |r - 1| is 3/4 and 1; above 0.9 in the second sequence, whose A > 0: the token with d > 0 goes
    (
        "open_instruct",
        {**AS_OLD, "rho_mask_upper_bound": 0.9, "rho_mask_tv_divergence": True},
        {"val/rho_drop_frac": 1 / 5, "val/rho_weight": (2 + 0.5 + 1 + 1 + 0) / 5},
    ),
    ("open_instruct", {**AS_OLD, "weighted_reverse_kl": False}, {"debug/vllm_local_reverse_kl": -2 * LN2 / 5}),
    (
        "torchtitan",
        AS_OLD,
        {
            "bit_wise/logprob_diff/mean": 2 * LN2 / 5,
            "bit_wise/logprob_diff/max": 2 * LN2,
            "bit_wise/ratio_tokens_different/mean": 3 / 5,
            "loss/ratio_mean": 8.5 / 5,
            "loss/ratio_clipped_frac": 3 / 5,
            "loss/generator_logprob_nan_frac": 0.0,
            "trainer/entropy/mean": 1.0,
        },
    ),
    (
        "tunix",
        {},
        {
            "sampler_trainer/logp_diff_mean": 4 * LN2 / 5,
            "sampler_trainer/logp_diff_max": 2 * LN2,
            "sampler_trainer/prob_diff_mean": (0.2 + 0.2 + 0.3) / 5,
            "sampler_trainer/prob_diff_max": 0.3,
            "sampler_trainer/probs_pearson_corr": float(np.corrcoef(P, P * R)[0, 1]),
            "sampler_is/weight_mean": (2 + 0.5 + 1 + 1 + 2) / 5,
            "sampler_is/weight_max": 2.0,
            "sampler_is/frac_clipped_at_threshold": 1 / 5,
            "sampler_trainer/mult_prob_error_mean": (2 + 2 + 1 + 1 + 4) / 5,
            "sampler_is/seq_kl_mean": (0 - 2 * LN2 / 3) / 2,
            "sampler_is/seq_geo_ratio_mean": (1 + 4 ** (1 / 3)) / 2,
            "sampler_is/seq_geo_ratio_max": 4 ** (1 / 3),
        },
    ),
    (
        "tunix",
        {"sampler_rs": "geometric", "sampler_rs_max": 1.5, "seq_logprob_error_threshold": 1.9},
        {
            "sampler_rs/rejected_fraction": 1 / 2,
            "sampler_is/weight_mean": (2 + 0.5) / 5,
            "sampler_trainer/seq_error_masked_frac": 1.0,
            "sampler_trainer/seq_error_masked_count": 2.0,
        },
    ),
    (
        "tunix",
        {"sampler_is": "none", "sampler_rs": "token", "sampler_rs_max": 3},
        {"sampler_rs/rejected_fraction": 1 / 5, "sampler_is/weight_mean": 4 / 5, "sampler_is/weight_max": 1.0},
    ),
    (
        "areal",
        {"enable_router_replay": True, "upper": 1.5},
        {
            "r3/rollout_train_k3_kl/avg": (1 - LN2 - 0.5 + LN2 + 3 - 2 * LN2) / 5,
            "r3/rollout_train_logp_sq_diff/avg": LN2**2 * (1 + 1 + 4) / 5,
            "r3/rollout_train_logp_abs_diff/max": 2 * LN2,
            "r3/rollout_train_extreme_frac_tau2/avg": 1 / 5,
            "r3/rollout_train_extreme_frac_tau5/avg": 0.0,
        },
    ),
    (
        "tinker",
        AS_OLD,
        {
            "optim/kl_sample_train_v1": -2 * LN2 / 5,
            "optim/kl_sample_train_v2": LN2**2 * (1 + 1 + 4) / 2 / 5,
            "optim/entropy": -float(np.log(P).mean()),
        },
    ),
    ("miles", {"mismatch_metrics": True}, {"train/mis_kl": (0 - 2 * LN2 / 3) / 2}),
]


@pytest.mark.parametrize(("name", "options", "wanted"), BY_HAND)
def test_by_hand(name: str, options: dict[str, Any], wanted: dict[str, float]) -> None:
    got = numbers(name, HAND, **options)
    assert {k: got[k] for k in wanted} == {k: pytest.approx(v, rel=1e-12, abs=1e-15) for k, v in wanted.items()}


def test_every_dialect_is_checked() -> None:
    assert {d for d in DIALECTS if "by hand" in DIALECTS[d].checked} <= {name for name, _, _ in BY_HAND}
    own = {"verl", "trl", "openrlhf", "areal", "skyrl", "ms_swift", "miles"}
    assert {d for d in DIALECTS if "its own code" in DIALECTS[d].checked} == own


def test_nemo_rl_js_on_one_token() -> None:
    """p .2, q .4, m .3: half of 4/3 - log(4/3) - 1 and half of 2/3 - log(2/3) - 1."""
    view = View(np.log([0.2]), np.array([1]), old=np.log([0.4]), width=1)
    wanted = 0.5 * (4 / 3 - math.log(4 / 3) - 1) + 0.5 * (2 / 3 - math.log(2 / 3) - 1)
    assert numbers("nemo_rl", view)["js_divergence_error"] == pytest.approx(wanted, rel=1e-12)


def test_torchtitan_drops_a_token_without_a_finite_value() -> None:
    sampler = np.array([-1.0, -math.inf, math.nan, -2.0])
    view = View(sampler, np.array([4]), current=np.array([-1.5, -1.0, -1.0, -2.0]), width=4)
    got = numbers("torchtitan", view)
    assert got["bit_wise/logprob_diff/mean"] == -0.25
    assert got["loss/generator_logprob_nan_frac"] == 1.0
