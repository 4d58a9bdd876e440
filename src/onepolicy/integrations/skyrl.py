"""SkyRL: the training batch between `compute_advantages_and_returns` and the update, or a registered policy loss.

    class Trainer(RayPPOTrainer):
        def compute_advantages_and_returns(self, data):
            return skyrl.apply(super().compute_advantages_and_returns(data), "skyrl:off_policy_correction", monitor)

    register_policy_loss("corrected")(skyrl.policy_loss(ppo_policy_loss, "skyrl:dppo_binary_tv"))

Leave SkyRL's `off_policy_correction` off, so that nothing is weighted twice.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from onepolicy.integrations.columns import Columns, Correcting, applied, chosen, present, trained, weighted


def columns(batch: MutableMapping[str, Any]) -> Columns:
    """The columns of a `TrainingInputBatch`: responses `[B, T]`; `action_log_probs` are those before the update.

    Errors: `ContentError`; also where SkyRL skipped that forward, and only a policy loss can compare.
    """
    present("SkyRL batch", batch, "rollout_logprobs", "action_log_probs", "loss_mask")
    return Columns(
        sampler=batch["rollout_logprobs"],
        old=batch["action_log_probs"],
        mask=batch["loss_mask"],
        reference=batch.get("base_action_log_probs", None),
        advantages=batch.get("advantages", None),
    )


def apply(batch: Any, correction: Correcting | None = None, monitor: Any = None) -> Any:
    """The batch, observed on the driver (`Monitor(ranks="alone")`), with weighted `advantages`.

    `loss_mask` shrinks where the correction counts kept tokens only. SkyRL's losses are linear in the advantages.
    Returns it, changed in place.
    """
    seen = columns(batch)
    c, _ = applied(seen, correction, monitor)
    if c is not None:
        batch["advantages"] = weighted(seen.advantages, c)
        batch["loss_mask"] = trained(seen.mask, c)
    return batch


def policy_loss(base: Callable[..., Any], correction: Correcting) -> Callable[..., Any]:
    """A policy loss of SkyRL's own signature that calls `base` with weighted advantages.

    It runs in the workers and sees the current policy, so it can also correct that against the sampler (bypass)."""
    act = chosen(correction)

    def loss(
        log_probs: Any,
        old_log_probs: Any,
        advantages: Any,
        config: Any,
        loss_mask: Any = None,
        rollout_logprobs: Any = None,
    ) -> Any:
        seen = Columns(
            sampler=rollout_logprobs, old=old_log_probs, mask=loss_mask, current=log_probs, advantages=advantages
        )
        c = seen.correct(act)
        given = weighted(advantages, c), config, trained(loss_mask, c), rollout_logprobs
        return base(log_probs, old_log_probs, *given)

    return loss
