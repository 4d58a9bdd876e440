"""OpenRLHF: `PolicyLoss` with a correction and a monitor, or the same on an `Experience`.

    from openrlhf.trainer.ray import ppo_actor
    ppo_actor.PolicyLoss = openrlhf.policy_loss(ppo_actor.PolicyLoss, "openrlhf:icepop", monitor)

The actor builds its loss under that name. OpenRLHF asks vLLM for log-probs only while its own correction is on, so
`--algo.advantage.is_correction_level token` is needed; `policy_loss` switches that off again in the loss, so that
nothing is weighted twice. A log-prob that vLLM did not give is 0.0 there: the monitor calls it a placeholder.
"""

from __future__ import annotations

from typing import Any

from onepolicy.errors import ContentError
from onepolicy.integrations.columns import Columns, Correcting, applied, chosen, trained, weighted


def columns(experience: Any) -> Columns:
    """The columns of an `Experience`, `[B, A]` actions; `action_log_probs` are those before the update.

    Errors: `ContentError` where the sampler's log-probs were not kept.
    """
    return _columns(
        experience.rollout_log_probs,
        experience.action_log_probs,
        experience.action_mask,
        reference=experience.base_action_log_probs,
        advantages=experience.advantages,
    )


def _columns(sampler: Any, old: Any, mask: Any, **more: Any) -> Columns:
    if sampler is None:
        raise ContentError("OpenRLHF: no rollout_log_probs; its own correction must be on: that asks vLLM for them")
    return Columns(sampler=sampler, old=old, mask=mask, **more)


def apply(experience: Any, correction: Correcting | None = None, monitor: Any = None) -> Any:
    """The experience, observed, with weighted advantages: for the driver, between `make_experience` and the update.

    What a loss then does with the advantages is linear in them (`columns.weighted`). Returns it, changed in place.
    """
    seen = columns(experience)
    c, _ = applied(seen, correction, monitor)
    if c is not None:
        experience.advantages = weighted(experience.advantages, c)
        experience.action_mask = trained(seen.mask, c)
    return experience


def policy_loss(base: type[Any], correction: Correcting | None = None, monitor: Any = None) -> type[Any]:
    """A subclass of OpenRLHF's `PolicyLoss` for `base`; it sees the current policy and each micro-batch.

    A monitor wants `micro_batches=None` and `step_after`, or the number of micro-batches of a step.
    """
    act = None if correction is None else chosen(correction)

    class Loss(base):  # pyright: ignore[reportUntypedBaseClass]
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            if act is not None:
                self.is_correction_level = "off"

        def forward(
            self,
            log_probs: Any,
            old_log_probs: Any,
            advantages: Any,
            action_mask: Any = None,
            rollout_log_probs: Any = None,
            **keywords: Any,
        ) -> Any:
            seen = _columns(rollout_log_probs, old_log_probs, action_mask, current=log_probs, advantages=advantages)
            c, out = applied(seen, act, monitor)
            if c is not None:
                advantages, action_mask = weighted(advantages, c), trained(action_mask, c)
            found = super().forward(
                log_probs, old_log_probs, advantages, action_mask, rollout_log_probs=rollout_log_probs, **keywords
            )
            return found if out is None else (found[0] * out.weight, *found[1:])

    Loss.__name__ = Loss.__qualname__ = base.__name__
    return Loss
