"""Presets of verl and TRL against the lines of verl and TRL: see `framework_code`."""

from __future__ import annotations

import ast
import math
import types
from functools import cache
from typing import Any

import pytest
import torch

from framework_code import batches, cut, names_of, ours, same, source
from onepolicy import corrections

# verl


@cache
def verl() -> dict[str, Any]:
    functional = cut("verl", "verl/utils/torch_functional.py", "masked_sum", "masked_mean")
    config = cut("verl", "verl/trainer/config/algorithm.py", "RolloutCorrectionConfig", BaseConfig=object)
    names = ("SAFETY_BOUND", "SUPPORTED_ROLLOUT_RS_OPTIONS", "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS")
    names += ("_parse_rollout_is_threshold", "_parse_rollout_rs_thresholds", "compute_rollout_rejection_mask")
    names += ("compute_rs_metrics", "compute_rollout_correction_weights", "compute_is_metrics")
    verl_F = types.SimpleNamespace(**{k: functional[k] for k in ("masked_sum", "masked_mean")})
    helper = cut("verl", "verl/trainer/ppo/rollout_corr_helper.py", *names, verl_F=verl_F)
    return {**helper, "config": config["RolloutCorrectionConfig"], "verl_F": verl_F}


def verl_apply(config: Any, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, kept) as compute_rollout_correction_and_rejection_mask puts them together."""
    f, d, mask = verl(), x["policy"] - x["sampler"], x["mask"].long()
    weights, keep = mask.double(), mask
    if config.rollout_is is not None:
        weights, _ = f["compute_rollout_correction_weights"](
            d, mask, config.rollout_is, config.rollout_is_threshold, config.rollout_is_batch_normalize
        )
    if config.rollout_rs is not None:
        keep, _ = f["compute_rollout_rejection_mask"](d, mask, config.rollout_rs, config.rollout_rs_threshold)
    return weights * keep, keep


VERL = [n for n in corrections.presets() if n.startswith("verl:") and ":dppo" not in n]


def test_every_preset_of_verl_is_there() -> None:
    config = verl()["config"]
    theirs = {k for k in dir(config) if k.startswith(("decoupled", "bypass_p", "disabled"))}
    assert {n.removeprefix("verl:") for n in VERL} == theirs and len(theirs) == 19


@pytest.mark.parametrize("name", VERL)
def test_verl(name: str) -> None:
    config = getattr(verl()["config"], name.removeprefix("verl:"))()
    changed = 0
    for batch, x in batches():
        weights, keep = verl_apply(config, x)
        changed += int((weights != 1)[x["mask"]].sum())
        c = ours(name, x, like_origin=True)
        icepop = "icepop" in name  # verl leaves the mask alone, the weight is 0
        same(c, weights, (name, batch), None if icepop else keep)
    p = corrections.preset(name)
    assert (p.mode == "bypass") == config.bypass_mode
    assert changed > 50 or not p.stages


@pytest.mark.parametrize("name", ["decoupled_token_is", "decoupled_seq_is", "decoupled_token_icepop", "bypass_pg_is"])
def test_verl_batch_normalisation(name: str) -> None:
    config = getattr(verl()["config"], name)()
    config.rollout_is_batch_normalize = True
    for _, x in batches():
        same(ours(f"verl:{name}", x, rollout_is_batch_normalize=True), verl_apply(config, x)[0], name)


def test_verl_inverted_bounds_are_not_copied() -> None:
    """0.5 to 3: documented as a band of the ratio; verl keeps 1/3 to 2, ours 0.5 to 3 unless told otherwise."""
    ratios = torch.tensor([[0.4], [0.6], [1.0], [1.9], [2.5], [4.0]], dtype=torch.float64)
    x = {"sampler": torch.zeros_like(ratios) - 3, "policy": ratios.log() - 3, "mask": ratios > 0, "A": ratios}
    config = verl()["config"](rollout_is=None, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_3.0")
    theirs = verl_apply(config, x)[1].bool().flatten().tolist()
    options = {"rollout_rs_threshold": "0.5_3.0"}
    assert theirs == [True, True, True, True, False, False]
    assert ours("verl:decoupled_seq_is_rs", x, **options).keep.flatten().tolist() == [
        False,
        True,
        True,
        True,
        True,
        False,
    ]
    assert ours("verl:decoupled_seq_is_rs", x, like_origin=True, **options).keep.flatten().tolist() == theirs


@pytest.mark.parametrize(
    "option", ["token_k2", "token_k3", "seq_sum_k2", "seq_sum_k3", "seq_mean_k2", "seq_max_k2", "seq_max_k3"]
)
def test_verl_other_rejections(option: str) -> None:
    level, _, estimator = option.rpartition("_")
    for _, x in batches():
        config = verl()["config"](rollout_is=None, rollout_rs=option, rollout_rs_threshold=0.05)
        inputs = {"sampler": x["sampler"], "old": x["policy"], "mask": x["mask"]}
        if level == "token":
            c = corrections.divergence_mask(**inputs, estimator=estimator, at_most=0.05)
        else:
            over = level.removeprefix("seq_")
            c = corrections.divergence_reject(**inputs, estimator=estimator, over=over, at_most=0.05)
        weights, keep = verl_apply(config, x)
        same(c, weights, option, keep)


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_verl_dppo(kind: str) -> None:
    """Their loss is linear in A times log p, with everything else detached: its gradient shows weight and mask."""

    def mean(loss_mat: Any, loss_mask: Any, loss_agg_mode: str, **more: Any) -> Any:
        return (loss_mat * loss_mask).sum()

    function = cut(
        "verl", "verl/trainer/ppo/core_algos.py", f"compute_policy_loss_dppo_{kind}",
        verl_F=verl()["verl_F"], agg_loss=mean, ActorConfig=object, AlgoConfig=type("AlgoConfig", (), {}),
    )[f"compute_policy_loss_dppo_{kind}"]  # fmt: skip

    class Config(dict):
        clip_ratio, clip_ratio_low, clip_ratio_high, global_batch_info = 0.2, 0.02, 0.05, {}

    for _, x in batches():
        log_prob = x["policy"].clone().requires_grad_()
        loss, _ = function(x["sampler"], log_prob, x["A"], x["mask"].long(), config=Config())
        (gradient,) = torch.autograd.grad(loss, log_prob)
        c = ours(f"verl:dppo_{kind}", x, clip_ratio_low=0.02, clip_ratio_high=0.05)
        torch.testing.assert_close(c.weights * c.keep, -gradient / x["A"], rtol=1e-6, atol=1e-12)


# TRL


@cache
def trl_ratio() -> types.CodeType:
    """The lines of GRPOTrainer that make vllm_importance_sampling_ratio."""
    for node in ast.walk(source("trl", "trl/trainer/grpo_trainer.py")):
        if isinstance(node, ast.If) and any("per_token_logps_diff" in names_of(n) for n in node.body):
            return compile(ast.Module(node.body, []), "trl", "exec")
    raise AssertionError("TRL's lines are elsewhere")


@pytest.mark.parametrize("mode", ["sequence_mask", "sequence_truncate", "token_mask", "token_truncate"])
@pytest.mark.parametrize("bounds", [(None, 3.0), (0.8, 1.3)])
def test_trl(mode: str, bounds: tuple[float | None, float]) -> None:
    prefix = "vllm_importance_sampling"
    trainer = types.SimpleNamespace(
        **{f"{prefix}_mode": mode, f"{prefix}_clip_min": bounds[0], f"{prefix}_clip_max": bounds[1]}
    )
    for _, x in batches():
        space = {"torch": torch, "math": math, "self": trainer, "tool_mask": None, "completion_mask": x["mask"].long()}
        space |= {"old_per_token_logps": x["policy"], "sampling_per_token_logps": x["sampler"]}
        exec(trl_ratio(), space)
        options = {f"{prefix}_clip_min": bounds[0], f"{prefix}_clip_max": bounds[1]}
        same(ours(f"trl:{mode}", x, **options), space["vllm_importance_sampling_ratio"] * x["mask"], mode)


def test_trl_missing_log_prob_is_1_there_and_dropped_here() -> None:
    x = {"sampler": torch.tensor([[-1.0, math.nan]]), "policy": torch.tensor([[-1.0, -2.0]])}
    trainer = types.SimpleNamespace(
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=3.0,
    )
    space = {"torch": torch, "math": math, "self": trainer, "tool_mask": None, "completion_mask": torch.ones(1, 2)}
    space |= {"old_per_token_logps": x["policy"], "sampling_per_token_logps": x["sampler"]}
    exec(trl_ratio(), space)
    assert space["vllm_importance_sampling_ratio"].tolist() == [[1.0, 1.0]]
    c = corrections.preset("trl:token_truncate")(sampler=x["sampler"], old=x["policy"], mask=torch.ones(1, 2))
    assert c.weights.tolist() == [[1.0, 0.0]]
    assert c.effects.floats()["tokens/missing"] == 1


def test_trl_off_policy_mask() -> None:
    function = cut("trl", "trl/trainer/grpo_trainer.py", "get_off_policy_mask")["get_off_policy_mask"]
    dropped = 0
    for _, x in batches():
        A = x["A"][:, :1]
        keep = function(A, x["policy"], x["sampler"], x["mask"].double(), 0.01).expand_as(x["mask"]) * x["mask"]
        c = ours("trl:off_policy_mask", {**x, "A": A}, off_policy_mask_threshold=0.01)
        same(c, keep, "off-policy", keep)
        dropped += int((x["mask"] & ~c.keep).sum())
    assert dropped > 50
