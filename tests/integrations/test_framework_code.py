"""The integrations against the frameworks' own losses (`framework_code`): batches in their layout, their function
called with what ours changed, compared with the same loss under their own correction."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from framework_code import batches, cut
from onepolicy import Monitor, corrections
from onepolicy.integrations import areal, openrlhf, skyrl, slime, verl
from onepolicy.integrations.columns import Columns

Tensors = dict[str, torch.Tensor]


def moved(x: Tensors, seed: int = 0) -> torch.Tensor:
    """A current policy off the old one, far enough that some tokens are clipped; wants a gradient."""
    noise = torch.randn(x["policy"].shape, generator=torch.Generator().manual_seed(seed), dtype=x["policy"].dtype)
    return (x["policy"] + 0.3 * noise).detach().requires_grad_()


def agree(mine: torch.Tensor, theirs: torch.Tensor, current: torch.Tensor, single: bool = False) -> None:
    """Values and gradients. `single`: theirs takes its weights through float32."""
    rtol, atol = (1e-5, 1e-7) if single else (1e-9, 1e-12)
    torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
    gradients = [torch.autograd.grad(x, current, retain_graph=True)[0] for x in (mine, theirs)]
    torch.testing.assert_close(*gradients, rtol=rtol, atol=atol)


class Recorder:
    """Stands for a monitor: keeps what it was shown."""

    def __init__(self, weight: float = 1.0) -> None:
        self.seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.out = types.SimpleNamespace(weight=weight, numbers={"abs_log_ratio/mean": 0.5, "empty": None})

    def observe(self, *args: Any, **keywords: Any) -> Any:
        self.seen.append((args, keywords))
        return self.out

    def shown(self, sampler: Any, old: Any, mask: Any, **more: Any) -> None:
        """What was shown last is this."""
        args, keywords = self.seen[-1]
        for got, wanted in zip(args, (sampler, old, mask), strict=True):
            assert (got is None) is (wanted is None)
            assert wanted is None or torch.equal(got, wanted)
        for name, wanted in more.items():
            assert torch.equal(keywords[name], wanted)


# verl


@cache
def verl_code() -> dict[str, Any]:
    masked = cut("verl", "verl/utils/torch_functional.py", "masked_sum", "masked_mean")
    functional = types.SimpleNamespace(**{k: masked[k] for k in ("masked_sum", "masked_mean")})
    path, names = "verl/trainer/ppo/core_algos.py", ("agg_loss", "compute_policy_loss_vanilla")
    given = {"verl_F": functional, "AlgoConfig": type("AlgoConfig", (), {}), "ActorConfig": object}
    return {**cut("verl", path, *names, **given), "F": functional}


class VerlConfig(types.SimpleNamespace):
    clip_ratio, clip_ratio_low, clip_ratio_high = 0.2, 0.2, 0.28
    global_batch_info: dict[str, Any] = {}  # noqa: RUF012

    def get(self, name: str, default: Any) -> Any:
        return default


def verl_batch(x: Tensors) -> Any:
    """What a `DataProto` holds after the old log-probs were computed."""
    tensors = {
        "rollout_log_probs": x["sampler"].clone(), "old_log_probs": x["policy"], "advantages": x["A"],
        "response_mask": x["mask"].long(), "responses": x["mask"].long(),
    }  # fmt: skip
    versions = {"max_global_steps": [3] * len(x["A"])}
    return types.SimpleNamespace(batch=tensors, non_tensor_batch=versions, meta_info={})


@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_verl_losses_take_our_weights(denominator: str) -> None:
    """Truncated weights and a mask by hand, through verl's loss, against the batch that our function made."""
    loss = verl_code()["compute_policy_loss_vanilla"]

    def correction(**inputs: Any) -> Any:
        act = corrections.compose((corrections.token_mask, {"low": 0.9, "high": 1.1}), corrections.truncate)
        return act(**inputs, denominator=denominator)

    for _, x in batches():
        batch, _ = verl.rollout_correction(correction)(verl_batch(x), {"rollout_is": "sequence"})
        current = moved(x)
        mask = batch.batch["response_mask"]
        rest = (x["policy"], current, x["A"])
        mine, _ = loss(*rest, mask, config=VerlConfig(), rollout_is_weights=batch.batch["rollout_is_weights"])
        ratio = (x["policy"] - x["sampler"]).exp()
        keep = (ratio >= 0.9) & (ratio <= 1.1) & x["mask"]
        by_hand = keep if denominator == "kept" and keep.any() else x["mask"]
        theirs, _ = loss(*rest, by_hand.long(), config=VerlConfig(), rollout_is_weights=ratio.clamp(max=2.0) * keep)
        agree(mine, theirs, current)


def test_verl_is_observed_and_logged() -> None:
    _, x = next(batches())
    recorder = Recorder()
    batch, metrics = verl.rollout_correction(monitor=recorder)(verl_batch(x))
    assert metrics == {"onepolicy/abs_log_ratio/mean": 0.5}
    assert "rollout_is_weights" not in batch.batch and torch.equal(batch.batch["response_mask"], x["mask"].long())
    versions = torch.full((len(x["A"]),), 3.0)
    recorder.shown(x["sampler"], x["policy"], x["mask"].long(), policy_version=versions)
    _, metrics = verl.rollout_correction("verl:decoupled_token_is")(verl_batch(x))
    assert metrics["onepolicy/tokens/trained"] == int(x["mask"].sum())


def test_verl_replies_that_an_update_cut_through() -> None:
    """The newest step alone would call the older tokens fresh."""
    _, x = next(batches())
    batch, n = verl_batch(x), len(x["A"])
    cut_row = int(x["mask"].sum(-1).argmax())
    on = x["mask"][cut_row].nonzero()[:, 0].tolist()
    oldest = [2 if row == cut_row else 3 for row in range(n)]
    batch.non_tensor_batch = {"max_global_steps": [3] * n, "min_global_steps": oldest}
    versions = verl.columns(batch).policy_version
    wanted = torch.full(x["mask"].shape, 3.0)
    wanted[cut_row] = -1.0
    wanted[cut_row, on[0]], wanted[cut_row, on[-1]] = 2.0, 3.0
    shown = x["mask"] | (torch.arange(n) != cut_row)[:, None]
    assert versions is not None and len(on) > 2 and torch.equal(versions[shown], wanted[shown])
    monitor = Monitor(step_zero=False)
    verl.columns(batch).observe(monitor)
    (found,) = [f for f in monitor.close().findings if f.code == "mixed-weight-versions"]
    assert "1 of" in found.message and "where it changes is not known" in found.message


def test_verl_without_versions() -> None:
    """A trainer that is not asynchronous has the keys too, without values."""
    _, x = next(batches())
    batch = verl_batch(x)
    batch.non_tensor_batch = {f"{end}_global_steps": [None] * len(x["A"]) for end in ("max", "min")}
    monitor = Monitor(step_zero=False)
    verl.columns(batch).observe(monitor)
    assert "lag/mean" not in monitor.close().numbers and monitor.warnings == {}


def test_verl_calls_it_as_it_is_written() -> None:
    """The name and the arguments of the function whose place it takes."""
    path, name = "verl/trainer/ppo/rollout_corr_helper.py", "compute_rollout_correction_and_add_to_batch"
    theirs = cut("verl", path, name, DataProto=object, RolloutCorrectionConfig=object)[name]
    assert list(inspect.signature(theirs).parameters) == list(inspect.signature(verl.rollout_correction()).parameters)


# OpenRLHF


@cache
def openrlhf_code() -> dict[str, Any]:
    masked_mean = cut("openrlhf", "openrlhf/models/utils.py", "masked_mean")["masked_mean"]
    space = cut("openrlhf", "openrlhf/models/loss.py", "aggregate_loss", "PolicyLoss", masked_mean=masked_mean)
    import dataclasses

    path, given = "openrlhf/trainer/ppo_utils/experience.py", {"fields": dataclasses.fields}
    experience = cut("openrlhf", path, "tensor_field", "Experience", **given)["Experience"]
    return {"PolicyLoss": space["PolicyLoss"], "Experience": experience}


OPENRLHF = {
    "tis": {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": [0.9, 1.1]},
    "icepop": {"is_correction_level": "token", "is_correction_mode": "mask", "is_correction_threshold": [0.9, 1.1]},
    "seq-mask-tis": {
        "is_correction_level": "seq",
        "is_correction_mode": "mask",
        "is_correction_threshold": [0.98, 1.02],
    },
}


@pytest.mark.parametrize("name", OPENRLHF)
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_openrlhf_policy_loss(name: str, dual_clip: float | None) -> None:
    """A run with their correction on: our subclass has it off and ours on, and gives the same loss."""
    base, threshold = openrlhf_code()["PolicyLoss"], OPENRLHF[name]["is_correction_threshold"]
    correction = corrections.preset(f"openrlhf:{name}", is_correction_threshold=threshold)
    recorder = Recorder()
    mine = openrlhf.policy_loss(base, correction, recorder)(dual_clip=dual_clip, **OPENRLHF[name])
    theirs = base(dual_clip=dual_clip, **OPENRLHF[name])
    for _, x in batches():
        current, mask = moved(x), x["mask"].double()
        given = (current, x["policy"], x["A"], mask, x["sampler"])
        agree(mine(*given)[0], theirs(*given)[0], current)
        recorder.shown(x["sampler"], x["policy"], mask, current_logprobs=current, advantages=x["A"])


def test_openrlhf_skips_a_batch_with_the_monitors_weight() -> None:
    _, x = next(batches())
    loss = openrlhf.policy_loss(openrlhf_code()["PolicyLoss"], None, Recorder(weight=0.0))()
    assert loss(x["policy"], x["policy"], x["A"], x["mask"].double(), x["sampler"])[0] == 0.0


def test_openrlhf_experience() -> None:
    """On the driver: weighted advantages, through their loss, are their correction."""
    base = openrlhf_code()["PolicyLoss"]
    for _, x in batches():
        mask, current = x["mask"].double(), moved(x)
        experience = openrlhf_code()["Experience"](
            rollout_log_probs=x["sampler"], action_log_probs=x["policy"], action_mask=mask, advantages=x["A"]
        )
        changed = openrlhf.apply(experience, "openrlhf:icepop")
        mine = base()(current, x["policy"], changed.advantages, changed.action_mask)[0]
        options = {"is_correction_level": "token", "is_correction_mode": "mask", "is_correction_threshold": [0.5, 5.0]}
        agree(mine, base(**options)(current, x["policy"], x["A"], mask, x["sampler"])[0], current)


# miles, whose function has slime's signature


@cache
def miles_code() -> dict[str, Any]:
    return cut("miles_rl", "miles/backends/training_utils/loss.py", "vanilla_tis_function", "icepop_function")


def rows(x: Tensors) -> tuple[dict[str, Any], torch.Tensor]:
    """Their keywords: lists of responses of different lengths, as in a micro-batch; and the flat loss."""
    lengths = [max(1, int(n)) for n in (x["mask"].cumsum(1).argmax(1) + 1)]
    cut_to = lambda key: [row[:n] for row, n in zip(x[key], lengths, strict=True)]
    current = moved(x)
    flat = torch.cat([row[:n] for row, n in zip(current * x["A"], lengths, strict=True)])
    found = {"train_log_probs": cut_to("policy"), "rollout_log_probs": cut_to("sampler")}
    found |= {"loss_masks": [row.int() for row in cut_to("mask")], "response_lengths": lengths}
    return found | {"pg_loss": flat, "total_lengths": [n + 2 for n in lengths]}, current


@pytest.mark.parametrize(("name", "function"), [("tis", "vanilla_tis_function"), ("icepop", "icepop_function")])
def test_miles_tis_function(name: str, function: str) -> None:
    args = types.SimpleNamespace(tis_clip_low=0.9, tis_clip=1.1)
    mine = slime.tis_function(corrections.preset(f"slime:{name}", tis_clip_low=0.9, tis_clip=1.1))
    for _, x in batches():
        given, current = rows(x)
        loss, masks, metrics = mine(args, **given, parallel_state=None, max_seq_lens=None)
        theirs, their_masks, _ = miles_code()[function](args, **given)
        trained = torch.cat(their_masks).bool()  # where nothing is trained ours is 0, theirs is masked later
        agree(loss[trained].sum(), theirs[trained].sum(), current)
        assert all(torch.equal(a, b) for a, b in zip(masks, their_masks, strict=True))
        assert all(value.shape == loss.shape for value in metrics.values())


# SkyRL


@cache
def skyrl_code() -> dict[str, Any]:
    utils = cut("skyrl", "skyrl/backends/skyrl_train/utils/torch_utils.py", "safe_exp_delta", "masked_mean")
    given = {k: utils[k] for k in ("safe_exp_delta", "masked_mean")}
    names = ("off_policy_correction_enabled", "compute_tis_ratio", "compute_outlier_token_mask", "compute_token_mask")
    names += ("compute_sequence_mask", "compute_off_policy_correction", "apply_off_policy_correction")
    path = "skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py"
    given |= cut("skyrl", path, *names, **given, DictConfig=object)
    losses = cut(
        "skyrl", "skyrl/backends/skyrl_train/utils/ppo_utils.py", "ppo_policy_loss", "reduce_loss",
        **{k: v for k, v in given.items() if not k.startswith("__")}, AlgorithmConfig=object,
    )  # fmt: skip
    space = {"DictType": __import__("typing").TypeVar("DictType"), "TensorList": type("TensorList", (), {})}
    batch = cut("skyrl", "skyrl/backends/skyrl_train/training_batch.py", "TensorBatch", **space)["TensorBatch"]
    return {"loss": losses["ppo_policy_loss"], "batch": batch}


def skyrl_config(**changed: Any) -> Any:
    correction = {**corrections.preset("skyrl:off_policy_correction").more, **changed}
    return types.SimpleNamespace(
        policy_loss_type="dual_clip", eps_clip_low=0.2, eps_clip_high=0.28, clip_ratio_c=3.0,
        off_policy_correction=types.SimpleNamespace(**correction),
    )  # fmt: skip


def skyrl_batch(x: Tensors) -> Any:
    return skyrl_code()["batch"](
        rollout_logprobs=x["sampler"], action_log_probs=x["policy"], loss_mask=x["mask"].double(), advantages=x["A"],
        base_action_log_probs=None,
    )  # fmt: skip


def test_skyrl_training_batch() -> None:
    """Their batch class with our weights, through their loss without its correction, is their correction."""
    options = {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1}
    loss, correction = skyrl_code()["loss"], corrections.preset("skyrl:off_policy_correction", **options)
    for _, x in batches():
        current, batch = moved(x), skyrl.apply(skyrl_batch(x), correction)
        kept = (batch["advantages"], skyrl_config(), batch["loss_mask"], x["sampler"])
        mine = loss(current, x["policy"], *kept)[0]
        theirs = loss(current, x["policy"], x["A"], skyrl_config(**options), x["mask"].double(), x["sampler"])[0]
        agree(mine, theirs, current, single=True)


def test_skyrl_policy_loss() -> None:
    """A registered loss: their signature, with ours around theirs."""
    options = {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.1}
    loss = skyrl_code()["loss"]
    mine = skyrl.policy_loss(loss, corrections.preset("skyrl:off_policy_correction", **options))
    assert list(inspect.signature(mine).parameters) == list(inspect.signature(loss).parameters)
    for _, x in batches():
        current, mask = moved(x), x["mask"].double()
        found = mine(current, x["policy"], x["A"], skyrl_config(), mask, x["sampler"])[0]
        theirs = loss(current, x["policy"], x["A"], skyrl_config(**options), mask, x["sampler"])[0]
        agree(found, theirs, current, single=True)


# AReaL


@cache
def areal_code() -> dict[str, Any]:
    config = cut("areal", "areal/api/cli_args.py", "RejectionSamplingConfig")["RejectionSamplingConfig"]
    estimator = cut("areal", "areal/utils/data.py", "_compute_approx_kl")["_compute_approx_kl"]
    names = ("RejectionSamplingResult", "_check_bounds", "apply_rejection_sampling", "ppo_actor_loss_fn")
    given = {"KLEstimator": types.SimpleNamespace(_compute_approx_kl=estimator), "RejectionSamplingConfig": config}
    return cut("areal", "areal/utils/functional/functional.py", *names, **given) | {"config": config}


def areal_batch(x: Tensors) -> dict[str, Any]:
    """What `compute_advantages` returns: columns of token i + 1 at i, versions of token i at i."""
    versions = torch.where(x["mask"], 5, -1).roll(1, -1)
    return {
        "logprobs": x["sampler"], "prox_logp": x["policy"], "loss_mask": x["mask"].double(), "advantages": x["A"],
        "versions": versions,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "config"),
    [("token_mask", {"upper": 1.1}), ("token_clamp", {"action": "clamp", "upper": 1.1, "lower": 0.9})],
)
def test_areal_batch(name: str, config: dict[str, Any]) -> None:
    options = {k: config[k] for k in ("upper", "lower") if k in config}
    loss, correction = areal_code()["ppo_actor_loss_fn"], corrections.preset(f"areal:{name}", **options)
    for _, x in batches():
        current, data = moved(x), areal.apply(areal_batch(x), correction)
        call: Callable[..., Any] = lambda A, mask, sampling, x=x, current=current: loss(
            current, x["policy"], x["sampler"], A, 0.2, mask, c_clip=3.0, rejection_sampling=sampling
        )[0]
        mine = call(data["advantages"], data["loss_mask"].bool(), None)
        agree(mine, call(x["A"], x["mask"], areal_code()["config"](**config)), current, single=True)


def test_areal_versions_are_of_their_token() -> None:
    _, x = next(batches())
    seen = areal.columns(areal_batch(x))
    assert seen.policy_version is not None
    assert torch.equal(seen.policy_version, torch.where(x["mask"], 5, -1))


def test_every_batch_is_shown_under_our_names() -> None:
    """The same arrays in each layout come out as the same columns."""
    _, x = next(batches(rows=6, columns=12))
    found: dict[str, Columns] = {
        "verl": verl.columns(verl_batch(x)),
        "skyrl": skyrl.columns(skyrl_batch(x)),
        "areal": areal.columns(areal_batch(x)),
        "openrlhf": openrlhf.columns(
            openrlhf_code()["Experience"](
                rollout_log_probs=x["sampler"], action_log_probs=x["policy"], action_mask=x["mask"], advantages=x["A"]
            )
        ),
    }
    for name, seen in found.items():
        assert torch.equal(seen.sampler, x["sampler"]), name
        assert seen.old is not None and torch.equal(seen.old, x["policy"]), name
        assert torch.equal(seen.mask != 0, x["mask"]), name
        assert seen.advantages is not None and torch.equal(seen.advantages, x["A"]), name
