"""The integrations of frameworks that no package brings, on batches in their documented layout, against formulas by
hand; and what all integrations share."""

from __future__ import annotations

import importlib
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onepolicy import Halted, Monitor, corrections
from onepolicy.errors import ContentError, UnknownName, UsageError
from onepolicy.integrations import INTEGRATIONS, slime, step_after
from onepolicy.integrations import nemo_rl as nemo
from onepolicy.integrations import prime_rl as prime
from onepolicy.integrations.columns import Columns, trained, weighted

DOCS = Path(__file__).resolve().parents[2] / "docs"


def policies(
    rows: int, tokens: int, seed: int = 0, gap: float = 0.1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sampler, scorer) log-probs `[B, T]`, mask: each row a token shorter than the one before."""
    rng = torch.Generator().manual_seed(seed)
    sampler = -torch.rand(rows, tokens, generator=rng) * 3 - 0.01
    scorer = (sampler + gap * torch.randn(rows, tokens, generator=rng)).clamp(max=-1e-4)
    return sampler, scorer, torch.arange(tokens) < (tokens - torch.arange(rows))[:, None]


# slime


def slime_keywords(seed: int = 0) -> dict[str, Any]:
    sampler, scorer, mask = policies(4, 9, seed)
    lengths = mask.sum(1).tolist()
    part = lambda x: [row[:n] for row, n in zip(x, lengths, strict=True)]
    masks = part(torch.ones_like(sampler).int())
    masks[1][2:4] = 0  # a tool's output
    return {
        "pg_loss": torch.arange(float(sum(lengths))), "train_log_probs": part(scorer), "loss_masks": masks,
        "rollout_log_probs": part(sampler), "total_lengths": [n + 3 for n in lengths], "response_lengths": lengths,
    }  # fmt: skip


def test_slime_weights_the_flat_loss_and_shrinks_the_masks() -> None:
    given = slime_keywords()
    correction = corrections.compose((corrections.token_mask, {"low": 0.9, "high": 1.1}), corrections.truncate)
    kept_only = lambda **inputs: correction(**inputs, denominator="kept")
    loss, masks, metrics = slime.tis_function(kept_only)(types.SimpleNamespace(), **given, something_new=1)
    flat = lambda name: torch.cat(given[name])
    ratio = (flat("train_log_probs") - flat("rollout_log_probs")).exp()
    keep = (ratio >= 0.9) & (ratio <= 1.1) & (flat("loss_masks") > 0)
    torch.testing.assert_close(loss, given["pg_loss"] * ratio * keep)
    assert [len(x) for x in masks] == given["response_lengths"]
    assert torch.equal(torch.cat(masks) > 0, keep)
    assert torch.equal(metrics["onepolicy_kept"] > 0, keep)


def test_slime_shows_whole_rows_to_the_monitor() -> None:
    given = slime_keywords()
    monitor = Monitor("bf16", micro_batches=None, sinks=[])
    slime.tis_function(None, monitor)(None, **given)
    monitor.step()
    seen = slime.columns(
        {k: given[f"{v}_log_probs"] for k, v in {"log_probs": "train", "rollout_log_probs": "rollout"}.items()}
        | {"loss_masks": given["loss_masks"]}
    )
    numbers = monitor.close().numbers
    assert numbers["tokens"] == sum(int(x.sum()) for x in given["loss_masks"]) == int(seen.mask.sum())
    gaps = torch.cat(given["train_log_probs"]) - torch.cat(given["rollout_log_probs"])
    gap = gaps[torch.cat(given["loss_masks"]) > 0].double().abs().mean()
    assert numbers["abs_log_ratio/mean"] == pytest.approx(float(gap), rel=1e-6)


def test_slime_refuses_parts_of_rows() -> None:
    given = slime_keywords()
    given["train_log_probs"] = [row[: len(row) // 2] for row in given["train_log_probs"]]
    with pytest.raises(ContentError, match="context parallelism"):
        slime.tis_function("slime:tis")(None, **given)


def test_slime_without_rows() -> None:
    nothing = {k: [] for k in ("train_log_probs", "rollout_log_probs", "loss_masks")}
    with pytest.raises(ContentError, match="no sequences"):
        slime.tis_function(None)(None, pg_loss=torch.zeros(0), **nothing)


# NeMo-RL


def nemo_data(seed: int = 0) -> dict[str, torch.Tensor]:
    """`train_data` as `grpo_train` has it: prompts of 3 tokens, index 0 unused, one row left out."""
    sampler, scorer, mask = policies(5, 12, seed)
    token_mask = mask.float()
    token_mask[:, :3] = 0
    generation, prev = (torch.where(token_mask > 0, x, 0.0) for x in (sampler, scorer))
    return {
        "input_ids": torch.ones(5, 12, dtype=torch.long), "input_lengths": mask.sum(1), "token_mask": token_mask,
        "sample_mask": torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]), "generation_logprobs": generation,
        "prev_logprobs": prev, "advantages": torch.linspace(-1, 1, 5)[:, None].expand(5, 12).clone(),
    }  # fmt: skip


def nemo_loss(data: dict[str, torch.Tensor], current: torch.Tensor) -> torch.Tensor:
    """The core of its `ClippedPGLossFn`, as its guide writes it: clipped, token-level, index 0 left out."""
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    ratio = (current - data["prev_logprobs"][:, 1:]).exp()
    A = data["advantages"][:, 1:]
    return (torch.maximum(-A * ratio, -A * ratio.clamp(0.8, 1.28)) * mask).sum() / mask.sum()


def test_nemo_rl_weights_advantages() -> None:
    """icepop by hand times the loss, against the loss on the batch that we changed."""
    data = nemo_data()
    current = (data["prev_logprobs"] + 0.2 * torch.randn(5, 12, generator=torch.Generator().manual_seed(1)))[:, 1:]
    ratio = (data["prev_logprobs"] - data["generation_logprobs"])[:, 1:].exp()
    by_hand = dict(data)
    weights = torch.nn.functional.pad(ratio * (ratio >= 0.9) * (ratio <= 1.1), (1, 0))
    by_hand["advantages"] = data["advantages"] * weights
    options = {
        "truncated_importance_sampling_ratio_min": 0.9,
        "truncated_importance_sampling_ratio": 1.1,
    }
    changed = nemo.apply(dict(data), corrections.preset("nemo_rl:icepop", **options))
    torch.testing.assert_close(nemo_loss(changed, current), nemo_loss(by_hand, current))
    assert torch.equal(changed["token_mask"], data["token_mask"])


def test_nemo_rl_leaves_out_rows_of_the_sample_mask() -> None:
    data = nemo_data()
    data["generation_logprobs"][2] = -50.0  # the row that is left out
    monitor = Monitor("bf16")
    nemo.apply(data, None, monitor)
    numbers = monitor.close().numbers
    assert numbers["tokens"] == int((data["token_mask"] * data["sample_mask"][:, None]).sum())
    assert numbers["abs_log_ratio/max"] is not None and numbers["abs_log_ratio/max"] < 1


def test_nemo_rl_refuses_zeros_for_the_scorer() -> None:
    data = nemo_data()
    data["prev_logprobs"] = torch.zeros_like(data["prev_logprobs"])
    with pytest.raises(ContentError, match="force_on_policy_ratio"):
        nemo.apply(data, "nemo_rl:tis")


# prime-rl


@dataclass
class LossInputs:
    """As in prime-rl's docs."""

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None


@dataclass
class LossOutputs:
    loss: torch.Tensor
    metrics: dict[str, torch.Tensor]


def prime_inputs(seed: int = 0) -> LossInputs:
    sampler, current, _ = policies(1, 40, seed)
    advantages = torch.where(torch.arange(40) % 3 > 0, 0.7, -1.1)
    return LossInputs(current[0].requires_grad_(), sampler[0], None, advantages, torch.arange(40) > 4)


def test_prime_rl_has_the_gradient_of_its_documented_loss() -> None:
    """Its IPO: -1(|p - q| <= eps) A p / q over the tokens, whose ratio carries the gradient."""
    inputs = prime_inputs()
    correction = corrections.preset("prime_rl:ipo")
    mine = prime.loss_function(correction, outputs=LossOutputs)(inputs)
    (gradient,) = torch.autograd.grad(mine.loss, inputs.trainer_logprobs)
    p, q = inputs.trainer_logprobs.exp(), inputs.inference_logprobs.exp()
    keep = ((p - q).abs() <= next(iter(correction.more.values()))) & inputs.loss_mask
    assert 0 < int(keep.sum()) < int(inputs.loss_mask.sum())
    theirs = -(p / q * inputs.advantages)[keep].sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(theirs, inputs.trainer_logprobs)[0])
    assert set(mine.metrics) == {"onepolicy/kept/share", "onepolicy/weight/mean", "onepolicy/ratio/mean"}


def test_prime_rl_multiplies_its_own_weights() -> None:
    inputs = prime_inputs()
    plain = prime.loss_function(corrections.truncate, outputs=LossOutputs)(inputs).loss
    inputs.loss_weights = torch.full((40,), 0.5)
    half = prime.loss_function(corrections.truncate, outputs=LossOutputs)(inputs).loss
    torch.testing.assert_close(half, plain / 2)


def test_prime_rl_monitor_steps_with_the_optimizer() -> None:
    """Its loss sees sequences, never a step: the optimizer's step ends the monitor's."""
    monitor = Monitor("bf16", micro_batches=None)
    loss = prime.loss_function("prime_rl:ipo", monitor, outputs=LossOutputs)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    handle = step_after(monitor, optimizer)
    for step in range(3):
        for i in range(4):
            loss(prime_inputs(10 * step + i))
        optimizer.step()
    handle.remove()
    optimizer.step()
    out = monitor.close()
    assert out.step == 3
    assert out.numbers["sequences"] == 4


def test_a_halt_comes_out_of_the_optimizer() -> None:
    """With the hook on every optimizer of the process."""
    monitor = Monitor("bf16", "halt", micro_batches=None)
    loss = prime.loss_function("prime_rl:ipo", monitor, outputs=LossOutputs)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)

    def train() -> None:
        for seed in range(4):
            for i in range(25):
                inputs = prime_inputs(100 * seed + i)
                inputs.inference_logprobs = inputs.inference_logprobs - 1.0
                loss(inputs)
            optimizer.step()

    handle = step_after(monitor)
    try:
        with pytest.raises(Halted, match="above"):
            train()
    finally:
        handle.remove()


# all of them


def test_every_integration_has_columns_and_a_place_in_the_docs() -> None:
    text = (DOCS / "integrations.md").read_text(encoding="utf-8")
    for name, entry in INTEGRATIONS.items():
        assert callable(importlib.import_module(entry.module).columns)
        assert f"`{name}`" in text and entry.version in text, name


def test_a_missing_column_is_named() -> None:
    from onepolicy.integrations import areal, openrlhf, skyrl, verl

    with pytest.raises(ContentError, match="old_log_probs"):
        verl.columns({"rollout_log_probs": torch.zeros(1, 1), "response_mask": torch.ones(1, 1)})
    with pytest.raises(ContentError, match="action_log_probs"):
        skyrl.columns({"rollout_logprobs": 1, "loss_mask": 1, "action_log_probs": None})
    with pytest.raises(ContentError, match="prox_logp"):
        areal.columns({"logprobs": 1, "loss_mask": 1, "advantages": 1})
    with pytest.raises(ContentError, match="no rollout_log_probs"):
        openrlhf.apply(types.SimpleNamespace(rollout_log_probs=None, action_log_probs=1, action_mask=1,
                                             base_action_log_probs=None, advantages=None))  # fmt: skip


def columns(**more: Any) -> Columns:
    sampler, scorer, mask = policies(3, 8)
    return Columns(sampler, scorer, mask, advantages=torch.tensor([1.0, -1.0, 0.5]), **more)


def test_a_preset_chooses_its_policy() -> None:
    """Decoupled takes old, bypass current, and one that holds current against old takes both."""
    seen = columns(current=policies(3, 8, gap=0.2)[1])
    token = seen.correct("verl:decoupled_token_is").weights
    torch.testing.assert_close(token[seen.mask], (seen.old - seen.sampler).exp().clamp(max=2.0)[seen.mask])
    assert seen.correct("prime_rl:ipo").keep.shape == (3, 8)
    assert seen.correct("slime:opsm").keep.shape == (3, 8)
    assert torch.equal(seen.correct(corrections.truncate).weights, token)


def test_wrong_corrections_are_refused() -> None:
    with pytest.raises(UnknownName, match="decoupled_token_is"):
        columns().correct("verl:decoupled_token_iss")
    with pytest.raises(UsageError, match="wanted a preset's name"):
        columns().correct(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="current="):
        columns().correct("prime_rl:ipo")


def test_a_mask_that_would_be_empty_stays() -> None:
    """Some frameworks divide by the mask's sum; the weights are 0 anyway."""
    seen = columns()
    drop = corrections.compose((corrections.token_mask, {"low": 5.0, "high": 6.0}))
    c = drop(sampler=seen.sampler, old=seen.old, mask=seen.mask, denominator="kept")
    assert torch.equal(trained(seen.mask, c) > 0, seen.mask)
    assert not weighted(seen.advantages, c).any()


def test_columns_are_numpy_too() -> None:
    """What needs no torch works without tensors."""
    seen = columns()
    arrays = Columns(*(np.asarray(x) for x in (seen.sampler, seen.old, seen.mask)), advantages=np.ones(3))
    c = arrays.correct("verl:decoupled_token_is")
    np.testing.assert_allclose(c.weights, seen.correct("verl:decoupled_token_is").weights.numpy(), rtol=1e-6)
    assert weighted(arrays.advantages, c).shape == (3, 8)
