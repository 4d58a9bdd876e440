"""Each dialect whose framework has a wheel against its own lines (see `framework_code`).

In float64 the numbers agree to 1e-12 relative where the framework's code computes in the tensors' type. Where it casts
to float32 itself (miles' KL and ESS, AReaL's weights, SkyRL's ratios, every share that is a mean of `.float()`), to
float32's rounding.
"""

from __future__ import annotations

import itertools
import math
import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from framework_code import batches, cut
from onepolicy.dialects import DIALECTS
from onepolicy.dialects.accumulate import Accumulator
from onepolicy.dialects.view import View

SEEDS = 20
#: relative, absolute: a mean of float64 terms, of float32 ones; a standard deviation made of two near means.
DOUBLE, SINGLE, CANCELLED = (1e-12, 2e-15), (2e-6, 2e-7), (1e-6, 3e-8)


def view_of(x: Mapping[str, torch.Tensor], **more: torch.Tensor) -> View:
    """The tokens under the mask."""
    mask = x["mask"].numpy()
    pick = lambda t: t.numpy()[mask].astype(np.float64)
    runs = [len(list(g)) for row in mask.tolist() for on, g in itertools.groupby(row) if on]
    columns = {k: pick(v) for k, v in more.items()}
    return View(pick(x["sampler"]), mask.sum(1), width=mask.shape[1], runs=np.array(runs, dtype=np.int64), **columns)


def policies(x: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """old is the batch's policy; current is one update further."""
    step = torch.from_numpy(np.random.default_rng(int(x["mask"].sum())).normal(0, 0.1, x["mask"].shape))
    return {"old": x["policy"], "current": torch.clamp(x["policy"] + step * x["mask"], max=0.0), "advantages": x["A"]}


def some(**options: Any) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    for _, x in itertools.islice(batches(**options), SEEDS):
        yield x, policies(x)


def numbers(name: str, view: View, **options: Any) -> dict[str, float | None]:
    acc = Accumulator(name, {"precision": "float64", **options})
    acc.add(view)
    return acc.numbers()


def same(theirs: Mapping[str, Any], ours: Mapping[str, Any], what: Any, loose: Mapping[str, Any], rest: Any) -> None:
    """Every key of theirs, to its tolerance; NaN is None or NaN."""
    for key, value in theirs.items():
        want, got = float(value), ours[key]
        if math.isnan(want):
            assert got is None or math.isnan(got), (what, key)
            continue
        rtol, atol = next((t for part, t in loose.items() if part in key), rest)
        assert got == pytest.approx(want, rel=rtol, abs=atol), (what, key)


# -- verl --------------------------------------------------------------------------------------------------------------


@cache
def verl() -> dict[str, Any]:
    functional = cut("verl", "verl/utils/torch_functional.py", "masked_sum", "masked_mean")
    verl_F = types.SimpleNamespace(**{k: functional[k] for k in ("masked_sum", "masked_mean")})
    names = ("SAFETY_BOUND", "SUPPORTED_ROLLOUT_RS_OPTIONS", "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS")
    names += ("_parse_rollout_is_threshold", "_parse_rollout_rs_thresholds", "compute_rollout_rejection_mask")
    names += ("compute_rs_metrics", "compute_rollout_correction_weights", "compute_is_metrics")
    names += ("compute_offpolicy_metrics", "compute_rollout_correction_and_rejection_mask")
    proto = types.SimpleNamespace(from_dict=lambda tensors: tensors)
    return cut("verl", "verl/trainer/ppo/rollout_corr_helper.py", *names, verl_F=verl_F, DataProto=proto)


ALL_K1 = {"rollout_rs": "token_k1,seq_sum_k1,seq_mean_k1", "rollout_rs_threshold": "0.9_1.2,0.5_3.0,0.999_1.001"}
ALL_K23 = {
    "rollout_rs": "token_k2,token_k3,seq_sum_k2,seq_sum_k3,seq_mean_k2,seq_mean_k3,seq_max_k2,seq_max_k3",
    "rollout_rs_threshold": "0.01,0.02,0.1,0.1,0.01,0.01,0.05,0.05",
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rollout_is": "token", "rollout_is_threshold": 1.1},
        {"rollout_is": "token", "rollout_is_threshold": "0.8_1.3", "rollout_is_batch_normalize": True},
        {"rollout_is": "sequence", "rollout_is_threshold": 1.5, "rollout_is_batch_normalize": True},
        {"rollout_is": "sequence", "rollout_is_threshold": "0.5_5.0"},
        ALL_K1,
        ALL_K23,
    ],
)
def test_verl(options: dict[str, Any]) -> None:
    compute = verl()["compute_rollout_correction_and_rejection_mask"]
    loose = {"masked_fraction": SINGLE, "fraction": SINGLE, "oob": SINGLE, "_std": CANCELLED}
    for x, p in some():
        ours = numbers("verl", view_of(x, **p), **options)
        if "rollout_is" in options and not ours["rollout_corr/rollout_is_mean"]:
            assert ours["rollout_corr/rollout_is_eff_sample_size"] is None  # all weights are 0: 1 / 0 there
            continue
        theirs = compute(p["old"], x["sampler"], x["mask"].long(), **options)[2]
        assert {k for k in ours if k.startswith("rollout_corr/")} == set(theirs)
        same(theirs, ours, options, loose, DOUBLE)


def test_verl_debug_metrics() -> None:
    names = ("pearson_correlation_coefficient", "calculate_log_prob_diff", "calculate_debug_metrics")
    logger = types.SimpleNamespace(debug=lambda *_: None, warning=lambda *_: None)
    compute = cut("verl", "verl/utils/debug/metrics.py", *names, DataProto=object, logger=logger)
    for x, p in some():
        batch = {"rollout_log_probs": x["sampler"], "old_log_probs": p["old"], "response_mask": x["mask"].long()}
        data = types.SimpleNamespace(batch={**batch, "responses": x["mask"]})
        if x["mask"].sum() > 1:
            theirs = compute["calculate_debug_metrics"](data)
            same(theirs, numbers("verl", view_of(x, **p)), "debug", {"_corr": CANCELLED, "_std": CANCELLED}, DOUBLE)


def test_verl_current_policy_in_bypass_mode() -> None:
    compute = verl()["compute_offpolicy_metrics"]
    for x, p in itertools.islice(some(), 10):
        theirs = {f"rollout_corr/{k}": v for k, v in compute(p["current"], x["sampler"], x["mask"].long()).items()}
        same(theirs, numbers("verl", view_of(x, **p), scorer="current"), "bypass", {}, DOUBLE)


def test_float32_copies_the_rounding_of_verls_k3() -> None:
    """Near equal engines: in float32 e^d - d - 1 is mostly rounding, and that is what the dashboard shows."""
    rng = np.random.default_rng(5)
    sampler = torch.from_numpy(-rng.exponential(1.0, (8, 20_000))).float()
    old = sampler + torch.from_numpy(rng.normal(0, 2e-4, sampler.shape)).float()
    mask = torch.ones_like(old, dtype=torch.bool)
    theirs = verl()["compute_offpolicy_metrics"](old, sampler, mask.long())["k3_kl"]
    view = view_of({"sampler": sampler, "mask": mask}, old=old)
    assert numbers("verl", view)["rollout_corr/k3_kl"] == pytest.approx(2e-8, rel=0.02)
    assert 0 < theirs < 1.2e-8
    assert numbers("verl", view, precision="float32")["rollout_corr/k3_kl"] == pytest.approx(theirs, rel=2e-3)


# -- TRL ---------------------------------------------------------------------------------------------------------------


def trl_lines() -> Any:
    """The lines from the differences to the logged numbers, as a function of a stand-in for the trainer."""
    import ast

    from framework_code import source

    tree = source("trl", "trl/trainer/grpo_trainer.py")
    names = ("per_token_logps_diff", "delta")
    found: dict[str, ast.If] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).startswith("self.use_vllm and self.vllm_importance"):
            for name in names:
                if any(
                    isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(node)
                ):
                    found[name] = node
    assert set(found) == set(names)
    args = "self, old_per_token_logps, sampling_per_token_logps, completion_mask, tool_mask, mode, device"
    head = ast.parse(f"def run({args}):\n    pass").body[0]
    assert isinstance(head, ast.FunctionDef)
    head.body = [*found["per_token_logps_diff"].body, *found["delta"].body]
    nan = lambda f: lambda t: f(t[~torch.isnan(t)])
    space: dict[str, Any] = {"torch": torch, "math": math, "nanmin": nan(torch.min), "nanmax": nan(torch.max)}
    exec(compile(ast.fix_missing_locations(ast.Module([head], [])), "trl", "exec"), space)
    return space["run"]


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize(("low", "high"), [(None, 3.0), (0.9, 1.1), (0.8, None)])
def test_trl(mode: str, low: float | None, high: float | None) -> None:
    run = trl_lines()
    options = {f"vllm_importance_sampling_{k}": v for k, v in (("mode", mode), ("clip_min", low), ("clip_max", high))}
    for i, (x, p) in enumerate(some()):
        sampler = x["sampler"].clone()
        if i % 3 == 0:  # a token that vLLM could not score
            sampler[tuple(x["mask"].nonzero()[0])] = math.nan
        metrics: dict[str, dict[str, list[float]]] = {"train": {k: [] for k in DIALECTS["trl"].keys}}
        accelerator = types.SimpleNamespace(gather=lambda t: t.reshape(1))
        trainer = types.SimpleNamespace(_metrics=metrics, accelerator=accelerator, **options)
        run(trainer, p["old"], sampler, x["mask"].long(), None, "train", "cpu")
        ours = numbers("trl", view_of({**x, "sampler": sampler}, **p), **options)
        theirs = {k: v[0] for k, v in metrics["train"].items() if ours[k] is not None}
        assert len(theirs) == 5 or bool(x["mask"].sum() == 1)
        same(theirs, ours, options, {}, DOUBLE)


# -- OpenRLHF ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["token", "seq"])
@pytest.mark.parametrize(("gating", "low", "high"), [("ratio", 0.9, 1.1), ("binary_kl", 0.0, 0.01), ("tv", 0.0, 0.02)])
def test_openrlhf(level: str, gating: str, low: float, high: float) -> None:
    mean = cut("openrlhf", "openrlhf/models/utils.py", "masked_mean")["masked_mean"]
    space = cut("openrlhf", "openrlhf/models/loss.py", "aggregate_loss", "PolicyLoss", masked_mean=mean)
    loss = space["PolicyLoss"](
        is_correction_level=level,
        is_correction_gating=gating,
        is_correction_threshold=[low, high],
        token_level_loss=False,
    )
    options = {"is_correction_level": level, "is_correction_gating": gating}
    options |= {"is_correction_low": low, "is_correction_high": high}
    for x, p in some():
        rows = x["mask"].any(1)  # a sequence without tokens is 0 / 0 there
        x, p = {k: v[rows] for k, v in x.items()}, {k: v[rows] for k, v in p.items()}
        args = (p["current"], p["old"], x["A"], x["mask"], x["sampler"])
        _, _, ppo_kl, vllm_kl, filtered = loss(*args[:3], action_mask=args[3], rollout_log_probs=args[4])
        theirs = {"ppo_kl": ppo_kl, "vllm_kl": vllm_kl, "is_filter_ratio": filtered}
        same(theirs, numbers("openrlhf", view_of(x, **p), **options), options, {"filter": SINGLE}, DOUBLE)


# -- AReaL -------------------------------------------------------------------------------------------------------------


@cache
def areal() -> dict[str, Any]:
    estimator = cut("areal", "areal/utils/data.py", "KLEstimator")["KLEstimator"]
    estimator._compute_approx_kl = staticmethod(estimator._compute_approx_kl)
    names = ("RejectionSamplingResult", "_check_bounds", "apply_rejection_sampling", "ppo_actor_loss_fn")
    path = "areal/utils/functional/functional.py"
    return cut("areal", path, *names, KLEstimator=estimator, RejectionSamplingConfig=object)


AREAL = [
    {"upper": 1.1},
    {"upper": 1.1, "lower": 0.9, "action": "clamp"},
    {"upper": 1.01, "lower": 0.99, "level": "sequence"},
    {"upper": 1.05, "level": "sequence", "agg": "max"},
    {"upper": 1.05, "lower": 0.5, "level": "sequence", "agg": "sum", "action": "clamp"},
    {"upper": 0.05, "lower": -0.05, "metric": "kl_k1"},
    {"upper": 0.01, "metric": "kl_k2"},
    {"upper": 0.01, "metric": "kl_k3"},
    {"upper": 0.02, "metric": "kl_k3", "level": "sequence", "agg": "sum"},
]


@pytest.mark.parametrize("options", AREAL)
def test_areal(options: dict[str, Any]) -> None:
    defaults = {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean", "lower": None}
    config = types.SimpleNamespace(**{**defaults, **options})
    for x, p in some():
        args = (p["current"], p["old"], x["sampler"], x["A"], 0.2, x["mask"].clone())
        stat = areal()["ppo_actor_loss_fn"](*args, rejection_sampling=config)[1]
        valid, kept = x["mask"], stat["behave_mask"]
        gap = p["current"].float() - x["sampler"].float()
        kl = {"direct": -gap, "taylor": gap**2 / 2, "dual": gap.exp() - 1 - gap}
        tracked = {name: (stat[name], valid) for name in ("importance_weight", "approx_kl")}
        tracked |= {name: (stat[name], kept) for name in ("behave_imp_weight", "behave_approx_kl")}
        tracked |= {f"kl_div_{name}": (value, kept) for name, value in kl.items()}
        theirs = {"rs_filtered_fraction": stat["filtered_fraction"]}
        for name, (value, on) in tracked.items():  # as stats_tracker's _avg_of, _min_of and _max_of
            if on.any():
                theirs |= {
                    f"{name}/avg": value[on].mean(),
                    f"{name}/min": value[on].min(),
                    f"{name}/max": value[on].max(),
                }
        ours = numbers("areal", view_of(x, **p), **options)
        assert set(theirs) == {k for k, v in ours.items() if v is not None}
        same(theirs, ours, options, {"approx_kl": DOUBLE, "importance_weight": DOUBLE, "filtered": DOUBLE}, SINGLE)


# -- SkyRL -------------------------------------------------------------------------------------------------------------


@cache
def skyrl() -> dict[str, Any]:
    torch_utils = cut("skyrl", "skyrl/backends/skyrl_train/utils/torch_utils.py", "masked_mean", "safe_exp_delta")
    given = {k: torch_utils[k] for k in ("masked_mean", "safe_exp_delta")}
    names = ("off_policy_correction_enabled", "compute_tis_ratio", "compute_outlier_token_mask", "compute_token_mask")
    names += ("compute_sequence_mask", "compute_off_policy_correction")
    path = "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py"
    return cut("skyrl", path, *names, DictConfig=object, **given)


SKYRL = [
    {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1},
    {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.05, "outlier_token_is_threshold_low": 0.8},
    {"sequence_mask_metric": "geometric", "token_mask_is_threshold_low": 0.9, "token_mask_is_threshold_high": 1.1},
    {
        "tis_ratio_type": "token",
        "token_tis_ratio_clip_high": 1.02,
        "sequence_mask_metric": "product",
        "outlier_token_is_threshold_high": 1.5,
        "outlier_token_is_threshold_low": 0.5,
        "token_mask_is_threshold_low": 0.9,
        "token_mask_is_threshold_high": 1.1,
    },
]


@pytest.mark.parametrize("options", SKYRL)
def test_skyrl(options: dict[str, Any]) -> None:
    config = types.SimpleNamespace(**DIALECTS["skyrl"].resolve(options))
    compute = skyrl()["compute_off_policy_correction"]
    for x, p in some():
        theirs = compute(p["old"], x["sampler"], x["mask"].double(), config)[1]
        gap = (x["sampler"][x["mask"]] - p["old"][x["mask"]]).abs()
        shown = {"max": gap.max(), "min": gap.min(), "mean": gap.mean(), "std": gap.std()}
        gaps = {f"policy/rollout_train_logprobs_abs_diff_{k}": v for k, v in shown.items()}
        ours = numbers("skyrl", view_of(x, **p), **options)
        assert set(ours) == {*theirs, *gaps}
        same(gaps, ours, options, {"_std": CANCELLED}, DOUBLE)
        if ours.get("token_mask_ratio", 0.0) is None:
            assert theirs.pop("token_mask_ratio") == 0.0  # no token is left to be judged: 0 / 1 there
            assert theirs.pop("tis_token_clip_high_ratio") == 0.0
        same(theirs, ours, options, {}, SINGLE)


# -- ms-swift ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("threshold", [1.02, 2.0])
def test_ms_swift(mode: str, threshold: float) -> None:
    names = ("_compute_sequence_level_ratios", "_apply_rollout_importance_sampling")
    names += ("_compute_rollout_offpolicy_metrics", "_compute_is_correction_metrics")
    f = cut("ms_swift", "swift/rlhf_trainers/grpo_trainer.py", *names)
    options = {"rollout_importance_sampling_mode": mode, "rollout_importance_sampling_threshold": threshold}
    me = types.SimpleNamespace(**options)
    me._compute_sequence_level_ratios = types.MethodType(f["_compute_sequence_level_ratios"], me)
    for x, p in some():
        theirs = f["_compute_rollout_offpolicy_metrics"](me, p["old"], x["sampler"], x["mask"])
        d = (p["old"] - x["sampler"]) * x["mask"]
        weights = f["_apply_rollout_importance_sampling"](me, d, x["mask"])
        theirs |= f["_compute_is_correction_metrics"](me, d, weights, x["mask"])
        ours = numbers("ms_swift", view_of(x, **p), **options)
        assert set(ours) == {f"rollout_correction/{k}" for k in theirs}
        prefixed = {f"rollout_correction/{k}": v for k, v in theirs.items()}
        same(prefixed, ours, options, {"clipped_frac": SINGLE}, DOUBLE)


# -- miles -------------------------------------------------------------------------------------------------------------


@cache
def miles() -> dict[str, Any]:
    one = types.SimpleNamespace(cp=types.SimpleNamespace(size=1, rank=0))
    given = {"get_parallel_state": lambda: one, "Namespace": object}
    kl = cut("miles_rl", "miles/utils/ppo_utils.py", "compute_approx_kl", "compute_opsm_mask")
    reducer = cut("miles_rl", "miles/backends/training_utils/cp_utils.py", "get_sum_of_sample_mean", **given)
    slices = {"slice_loss_masks_for_local_cp": lambda masks, *_: masks}
    names = ("vanilla_tis_function", "compute_ess_ratio_contribution")
    loss = cut("miles_rl", "miles/backends/training_utils/loss.py", *names, **given, **slices)
    return {**kl, **reducer, **loss}


@pytest.mark.parametrize("per_token", [False, True])
def test_miles(per_token: bool) -> None:
    f, args = miles(), types.SimpleNamespace(tis_clip=1.1, tis_clip_low=0.9, opsm_delta=1e-3)
    options = {"calculate_per_token_loss": per_token, "use_opsm": True, **vars(args)}
    for i, (x, p) in enumerate(some()):
        sampler = x["sampler"].clone()
        if i % 3 == 0:
            sampler[tuple(x["mask"].nonzero()[0])] = (math.nan, -math.inf)[i % 2]
        masks, lengths = [m.double() for m in x["mask"]], [x["mask"].shape[1]] * len(x["mask"])
        total = f["get_sum_of_sample_mean"](lengths, lengths, masks, per_token)
        count = float(x["mask"].sum()) if per_token else len(masks)
        on = x["mask"].flatten()
        finite = lambda t, on=on: torch.where(on, torch.nan_to_num(t.flatten(), 0.0, 0.0, 0.0), 0.0)
        theirs = {
            "train/train_rollout_logprob_abs_diff": total(finite((p["old"] - sampler).abs())) / count,
            "train/train_rollout_kl": total(finite(f["compute_approx_kl"](sampler, p["old"], "low_var_kl"))) / count,
        }
        ess = f["compute_ess_ratio_contribution"](
            (p["old"] - p["current"]).flatten(), masks, lengths, lengths, "thd", None, per_token
        )
        theirs["train/ess_ratio"] = ess / count
        tis = f["vanilla_tis_function"](
            args, pg_loss=torch.zeros(x["mask"].numel()), train_log_probs=list(p["old"]),
            rollout_log_probs=list(x["sampler"]), loss_masks=masks,
        )[2]  # fmt: skip
        clean = numbers("miles", view_of(x, **p), **options)
        opsm = f["compute_opsm_mask"](args, list(p["current"]), list(p["old"]), list(x["A"] * x["mask"]), masks)[1]
        same({f"train/{k}": total(v) / count for k, v in tis.items()}, clean, "tis", {"frac": SINGLE}, DOUBLE)
        same({"train/opsm_clipfrac": opsm / len(masks)}, clean, "opsm", {}, SINGLE)
        ours = numbers("miles", view_of({**x, "sampler": sampler}, **p), **options)
        same(theirs, ours, per_token, {"abs_diff": DOUBLE}, SINGLE)
