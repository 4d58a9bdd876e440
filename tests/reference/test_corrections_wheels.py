"""Presets of OpenRLHF, AReaL, SkyRL and ms-swift against their own lines: see `framework_code`."""

from __future__ import annotations

import types
from functools import cache
from typing import Any

import pytest
import torch

from framework_code import batches, cut, ours, same
from onepolicy import corrections

# OpenRLHF


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tis", ("token", "clip", "ratio", [0.5, 5.0])),
        ("icepop", ("token", "mask", "ratio", [0.5, 5.0])),
        ("seq-mask-tis", ("seq", "mask", "ratio", [0.5, 5.0])),
        ("tis", ("token", "clip", "ratio", [0.9, 1.1])),
        ("icepop", ("token", "mask", "ratio", [0.9, 1.1])),
        ("seq-mask-tis", ("seq", "mask", "ratio", [0.98, 1.02])),
        ("token_tv", ("token", "mask", "tv", [0.0, 0.02])),
        ("token_binary_kl", ("token", "mask", "binary_kl", [0.0, 0.01])),
        ("flash_reinforce", ("seq", "mask", "binary_kl", [0.0, 0.01])),
    ],
)
def test_openrlhf(name: str, options: tuple[str, str, str, list[float]]) -> None:
    """Their loss is linear in the advantages when current is old: its gradient shows the coefficient."""
    masked_mean = cut("openrlhf", "openrlhf/models/utils.py", "masked_mean")["masked_mean"]
    space = cut("openrlhf", "openrlhf/models/loss.py", "aggregate_loss", "PolicyLoss", masked_mean=masked_mean)
    level, mode, gating, threshold = options
    loss = space["PolicyLoss"](
        is_correction_level=level,
        is_correction_mode=mode,
        is_correction_gating=gating,
        is_correction_threshold=threshold,
    )
    for _, x in batches():
        A = x["A"].clone().requires_grad_()
        value = loss(x["policy"], x["policy"], A, x["mask"].double(), x["sampler"])[0]
        (gradient,) = torch.autograd.grad(value, A)
        c = ours(f"openrlhf:{name}", x, is_correction_threshold=threshold)
        torch.testing.assert_close(c.weights * c.keep / c.denominator, -gradient, rtol=1e-8, atol=1e-14)


# AReaL


@cache
def areal() -> dict[str, Any]:
    config = cut("areal", "areal/api/cli_args.py", "RejectionSamplingConfig")["RejectionSamplingConfig"]
    estimator = cut("areal", "areal/utils/data.py", "_compute_approx_kl")["_compute_approx_kl"]
    names = ("RejectionSamplingResult", "_check_bounds", "apply_rejection_sampling")
    given = {"KLEstimator": types.SimpleNamespace(_compute_approx_kl=estimator), "RejectionSamplingConfig": config}
    masking = cut("areal", "areal/trainer/ppo/actor.py", "_apply_m2po_masking", "_get_m2po_loss_mask")
    return {
        **cut("areal", "areal/utils/functional/functional.py", *names, **given),
        "m2po": masking["_apply_m2po_masking"],
    }


@pytest.mark.parametrize(
    ("name", "config", "options"),
    [
        ("token_mask", {}, {}),
        ("token_mask", {"upper": 1.1, "lower": 0.9}, {"upper": 1.1, "lower": 0.9}),
        ("token_clamp", {"action": "clamp", "upper": 1.1, "lower": 0.9}, {"upper": 1.1, "lower": 0.9}),
        ("sequence_mask", {"level": "sequence", "upper": 1.02, "lower": 0.98}, {"upper": 1.02, "lower": 0.98}),
        ("sequence_clamp", {"level": "sequence", "action": "clamp", "upper": 1.02}, {"upper": 1.02}),
        ("sequence_mask_k3", {"level": "sequence", "metric": "kl_k3", "upper": 0.01}, {"upper": 0.01}),
        ("sequence_mask_k2", {"level": "sequence", "metric": "kl_k2", "upper": 0.01}, {"upper": 0.01}),
        ("token_mask_k3", {"metric": "kl_k3", "upper": 0.01}, {"upper": 0.01}),
    ],
)
def test_areal(name: str, config: dict[str, Any], options: dict[str, Any]) -> None:
    function, made = areal()["apply_rejection_sampling"], areal()["RejectionSamplingConfig"](**config)
    for _, x in batches():
        result = function(x["policy"], x["sampler"], x["mask"], None, made)
        c = ours(f"areal:{name}", x, **options)
        torch.testing.assert_close((c.weights * c.keep).float(), result.behave_imp_weight, rtol=1e-5, atol=0)
        assert torch.equal(c.keep, result.loss_mask)


def test_areal_m2po() -> None:
    below = 0
    for _, x in batches():
        theirs = areal()["m2po"](x["sampler"], x["policy"], x["mask"], 0.01)
        c = ours("areal:m2po", x, m2_threshold=0.01)
        if int(theirs.sum()) == 1:  # AReaL never empties a batch, even above the bound
            continue
        below += 1
        assert torch.equal(c.keep, theirs)
    assert below > 50


# SkyRL


@cache
def skyrl() -> dict[str, Any]:
    utils = cut("skyrl", "skyrl/backends/skyrl_train/utils/torch_utils.py", "safe_exp_delta", "masked_mean")
    names = ("off_policy_correction_enabled", "compute_tis_ratio", "compute_outlier_token_mask", "compute_token_mask")
    names += ("compute_sequence_mask", "compute_off_policy_correction")
    given = {k: utils[k] for k in ("safe_exp_delta", "masked_mean")} | {"DictConfig": object}
    path = "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py"
    return {**cut("skyrl", path, *names, **given), **given}


SKYRL = [
    {"tis_ratio_type": "token"},
    {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.05},
    {"sequence_mask_metric": "product", "product_mask_low": 0.9, "product_mask_high": 1.1},
    {"sequence_mask_metric": "geometric"},
    {"outlier_token_is_threshold_low": 0.5},
    {"outlier_token_is_threshold_low": 0.5, "outlier_token_is_threshold_high": 1.5},
    {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.2},
    {
        "tis_ratio_type": "sequence", "sequence_mask_metric": "geometric", "outlier_token_is_threshold_high": 2.0,
        "token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.2,
    },  # the order shows: TIS and the geometric mean see what the masks left
]  # fmt: skip


@pytest.mark.parametrize("options", SKYRL, ids=[str(i) for i in range(len(SKYRL))])
def test_skyrl(options: dict[str, Any]) -> None:
    defaults = corrections.preset("skyrl:off_policy_correction").more
    config = types.SimpleNamespace(**{**defaults, **options})
    for _, x in batches():
        # SkyRL's exp is float32; their function is called with float64 and compared at 1e-6
        tis, _, mask = skyrl()["compute_off_policy_correction"](x["policy"], x["sampler"], x["mask"].double(), config)
        weights = mask if tis is None else tis.expand_as(mask) * mask
        c = ours("skyrl:off_policy_correction", x, **options)
        torch.testing.assert_close(c.weights * c.keep, weights, rtol=1e-6, atol=0)
        assert torch.equal(c.keep, mask.bool())


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_skyrl_dppo(kind: str) -> None:
    def nothing(loss: Any, old: Any, rollout: Any, mask: Any, config: Any) -> Any:
        return loss, mask, {}

    function = cut(
        "skyrl", "skyrl/backends/skyrl_train/utils/ppo_utils.py", "dppo_policy_loss", "reduce_loss",
        apply_off_policy_correction=nothing, AlgorithmConfig=object,
        **{k: skyrl()[k] for k in ("safe_exp_delta", "masked_mean")},
    )["dppo_policy_loss"]  # fmt: skip
    settings = types.SimpleNamespace(dppo_type=f"binary_{kind}", delta_low=0.02, delta_high=0.05)
    config = types.SimpleNamespace(dppo=settings, off_policy_correction=None)
    for _, x in batches():
        A = x["A"].clone().requires_grad_()
        loss, _ = function(x["policy"], x["policy"], A, config, x["mask"].double(), x["sampler"])
        (gradient,) = torch.autograd.grad(loss, A)
        c = ours(f"skyrl:dppo_binary_{kind}", x, delta_low=0.02, delta_high=0.05)
        torch.testing.assert_close(c.weights * c.keep, -gradient, rtol=1e-6, atol=0)


# ms-swift


@cache
def swift() -> dict[str, Any]:
    path = "swift/rlhf_trainers/grpo_trainer.py"
    names = (
        "_compute_sequence_level_ratios",
        "_apply_rollout_importance_sampling",
        "_compute_off_policy_sequence_mask",
    )
    return cut("ms_swift", path, *names)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("threshold", [2.0, 1.01])
def test_swift(mode: str, threshold: float) -> None:
    trainer = types.SimpleNamespace(rollout_importance_sampling_mode=mode)
    trainer.rollout_importance_sampling_threshold = threshold
    trainer._compute_sequence_level_ratios = types.MethodType(swift()["_compute_sequence_level_ratios"], trainer)
    for _, x in batches():
        d, mask = x["policy"] - x["sampler"], x["mask"].double()
        weights = swift()["_apply_rollout_importance_sampling"](trainer, d, mask) * mask
        same(ours(f"swift:{mode}", x, rollout_importance_sampling_threshold=threshold), weights, mode)


def test_swift_off_policy_sequence_mask() -> None:
    trainer = types.SimpleNamespace(off_policy_sequence_mask_delta=0.01)
    for _, x in batches():
        A = x["A"][:, 0]
        keep = swift()["_compute_off_policy_sequence_mask"](trainer, x["policy"], x["sampler"], x["mask"], A)
        keep = keep[:, None] & x["mask"]
        c = ours("swift:off_policy_sequence_mask", {**x, "A": A}, off_policy_sequence_mask_delta=0.01)
        same(c, keep, "off-policy", keep)
