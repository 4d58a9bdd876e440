"""Each framework's batch in its own layout, corrected and observed: what to write where, without the framework.

    pip install onepolicy torch
    python examples/frameworks.py

The batches are made here of one set of replies; in a trainer they are the framework's own. TRL has an example that
trains (`trl_grpo.py`), and for a loop of your own there is `plain_torch.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from onepolicy import Monitor
from onepolicy.integrations import areal, nemo_rl, openrlhf, prime_rl, skyrl, slime, step_after, verl

ROWS, TOKENS, PROMPT = 24, 50, 3


def replies() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sampler's log-probs, scorer's, mask, advantages), `[B, T]` each."""
    rng = torch.Generator().manual_seed(0)
    sampler = torch.randn(ROWS, TOKENS, generator=rng).abs().neg() - 0.01
    scorer = (sampler + 0.02 * torch.randn(ROWS, TOKENS, generator=rng)).clamp(max=-1e-4)
    mask = torch.arange(TOKENS) < torch.arange(TOKENS - ROWS, TOKENS)[:, None]
    return sampler, scorer, mask.float(), torch.linspace(-1, 1, ROWS)[:, None].expand(-1, TOKENS).clone()


def verl_example(monitor: Monitor) -> Any:
    """`RayPPOTrainer.fit` has a `DataProto` at hand: padded responses."""
    sampler, scorer, mask, advantages = replies()
    tensors = {"rollout_log_probs": sampler, "old_log_probs": scorer, "response_mask": mask, "advantages": advantages}
    data = SimpleNamespace(batch=tensors, non_tensor_batch={}, meta_info={})
    # rollout_corr_helper.compute_rollout_correction_and_add_to_batch = verl.rollout_correction(...)
    correct = verl.rollout_correction("verl:decoupled_token_is", monitor)
    data, metrics = correct(data, {"rollout_is": None})
    return data.batch["rollout_is_weights"], metrics


def openrlhf_example(monitor: Monitor) -> Any:
    """The experience maker returns `Experience`s: actions, padded."""
    sampler, scorer, mask, advantages = replies()
    experience = SimpleNamespace(
        rollout_log_probs=sampler, action_log_probs=scorer, base_action_log_probs=None, action_mask=mask,
        advantages=advantages,
    )  # fmt: skip
    # in the actor: ppo_actor.PolicyLoss = openrlhf.policy_loss(ppo_actor.PolicyLoss, "openrlhf:icepop", monitor)
    return openrlhf.apply(experience, "openrlhf:icepop", monitor).advantages


def slime_example(monitor: Monitor) -> Any:
    """slime and miles call the function of `--custom-tis-function-path` with lists of responses, and a flat loss."""
    sampler, scorer, mask, _ = replies()
    lengths = mask.sum(1).int().tolist()
    part = lambda x: [row[:n] for row, n in zip(x, lengths, strict=True)]
    tis = slime.tis_function("slime:tis", monitor)
    loss, masks, metrics = tis(
        SimpleNamespace(), pg_loss=torch.ones(sum(lengths)), train_log_probs=part(scorer),
        rollout_log_probs=part(sampler), loss_masks=part(mask), response_lengths=lengths,
        total_lengths=[n + PROMPT for n in lengths],
    )  # fmt: skip
    return loss, masks, metrics


def nemo_rl_example(monitor: Monitor) -> Any:
    """`train_data` holds prompt and response; index 0 is not used."""
    sampler, scorer, mask, advantages = (torch.nn.functional.pad(x, (PROMPT, 0)) for x in replies())
    train_data = {
        "generation_logprobs": sampler, "prev_logprobs": scorer, "token_mask": mask, "sample_mask": torch.ones(ROWS),
        "advantages": advantages,
    }  # fmt: skip
    return nemo_rl.apply(train_data, "nemo_rl:icepop", monitor)["advantages"]


def prime_rl_example(monitor: Monitor) -> Any:
    """A custom loss gets one sequence at a time; the optimizer's step ends the monitor's."""
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    handle = step_after(monitor, optimizer)
    loss = prime_rl.loss_function("prime_rl:ipo", monitor, outputs=SimpleNamespace)
    total = torch.zeros(())
    for sampler, scorer, mask, advantages in zip(*replies(), strict=True):
        inputs = SimpleNamespace(
            trainer_logprobs=scorer + weight, inference_logprobs=sampler, ref_logprobs=None, advantages=advantages,
            loss_mask=mask.bool(), loss_weights=None,
        )  # fmt: skip
        total = total + loss(inputs).loss
    total.backward()
    optimizer.step()
    handle.remove()
    return total


def skyrl_example(monitor: Monitor) -> Any:
    """A `TrainingInputBatch` is a dict of padded responses."""
    sampler, scorer, mask, advantages = replies()
    batch = {"rollout_logprobs": sampler, "action_log_probs": scorer, "loss_mask": mask, "advantages": advantages}
    return skyrl.apply(batch, "skyrl:off_policy_correction", monitor)["advantages"]


def areal_example(monitor: Monitor) -> Any:
    """After `compute_advantages` position i is of token i + 1, but for `versions`."""
    sampler, scorer, mask, advantages = replies()
    versions = torch.where(mask.bool(), 7, -1).roll(1, -1)
    data = {
        "logprobs": sampler, "prox_logp": scorer, "loss_mask": mask, "advantages": advantages, "versions": versions,
    }  # fmt: skip
    return areal.apply(data, "areal:token_mask", monitor)["advantages"]


EXAMPLES = {
    "verl": verl_example,
    "openrlhf": openrlhf_example,
    "slime": slime_example,
    "nemo_rl": nemo_rl_example,
    "prime_rl": prime_rl_example,
    "skyrl": skyrl_example,
    "areal": areal_example,
}
#: These are shown parts of a step: who calls `step` is the optimizer's hook, or here the end.
IN_PARTS = ("slime", "prime_rl")


def observed(name: str) -> dict[str, float | None]:
    """Runs one example; the numbers of its step."""
    monitor = Monitor("bf16", "halt", micro_batches=None if name in IN_PARTS else 1, ranks="alone")
    EXAMPLES[name](monitor)
    if name == "slime":
        monitor.step()
    return dict(monitor.close().numbers)


def main() -> None:
    for name in EXAMPLES:
        numbers = observed(name)
        print(f"{name:9} {numbers['tokens']:.0f} tokens, mean |d| {numbers['abs_log_ratio/mean']:.4f} nats")


if __name__ == "__main__":
    main()
