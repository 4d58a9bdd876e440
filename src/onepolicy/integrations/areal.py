"""AReaL: the batch between `compute_advantages` and `ppo_update`.

    batch = [areal.apply(x, "areal:token_mask", monitor) for x in actor.compute_advantages(rollouts)]
    monitor.step()
    actor.ppo_update(batch)

Decoupled PPO only (`use_decoupled_loss`, `prox_logp_method: recompute`): elsewhere one policy overwrites the other.
Leave `rejection_sampling` unset, so that nothing is weighted twice.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from onepolicy.integrations.columns import Columns, Correcting, applied, present, trained, weighted


def columns(data: MutableMapping[str, Any]) -> Columns:
    """The columns of a batch after `compute_advantages`: `[B, S]`, where position i is of token i + 1.

    `logprobs` are the sampler's, `prox_logp` the scorer's. AReaL leaves `versions` alone at token i: moved here.

    Errors: `ContentError`.
    """
    present("AReaL batch", data, "logprobs", "prox_logp", "loss_mask", "advantages")
    versions = data.get("versions", None)
    return Columns(
        sampler=data["logprobs"],
        old=data["prox_logp"],
        mask=data["loss_mask"],
        reference=data.get("ref_logp", None),
        advantages=data["advantages"],
        policy_version=None if versions is None else versions.roll(-1, -1),
    )


def apply(data: Any, correction: Correcting | None = None, monitor: Any = None) -> Any:
    """The batch, observed, with weighted `advantages`, and `loss_mask` where the correction counts kept tokens only.

    AReaL's losses are linear in the advantages (`columns.weighted`). Returns it, changed in place.
    """
    seen = columns(data)
    c, _ = applied(seen, correction, monitor)
    if c is not None:
        data["advantages"] = weighted(seen.advantages, c)
        data["loss_mask"] = trained(seen.mask, c)
    return data
