"""verl: in place of `compute_rollout_correction_and_add_to_batch`, on the driver, where both policies are known.

    from verl.trainer.ppo import rollout_corr_helper
    rollout_corr_helper.compute_rollout_correction_and_add_to_batch = verl.rollout_correction(
        "verl:decoupled_token_is", Monitor("bf16", ranks="alone")
    )

verl calls it in decoupled mode (`algorithm.rollout_correction` set, `bypass_mode` false, `rollout.calculate_log_probs`
true). `RayPPOTrainer` imports the name when it runs; `verl.trainer.ppo.v1.trainer_base` holds a name of its own. Every
policy loss of verl multiplies `rollout_is_weights` in after its clip.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onepolicy.integrations.columns import Columns, Correcting, applied, chosen, numbers_of, present, trained


def columns(data: Any) -> Columns:
    """The columns of a `DataProto` (or of its `.batch`): padded responses `[B, T]`.

    `min_global_steps` and `max_global_steps` of an asynchronous trainer are the versions that drew a response's first
    and last tokens; where they differ, those in between are not known. Errors: `ContentError`.
    """
    batch = getattr(data, "batch", data)
    present("verl batch", batch, "rollout_log_probs", "old_log_probs", "response_mask")
    return Columns(
        sampler=batch["rollout_log_probs"],
        old=batch["old_log_probs"],
        mask=batch["response_mask"],
        reference=batch.get("ref_log_prob", None),
        advantages=batch.get("advantages", None),
        policy_version=_versions(data, batch["response_mask"]),
    )


def _versions(data: Any, mask: Any) -> Any:
    """`[B]`, or `[B, T]` where a response holds more than one version; -1: not known."""
    held = getattr(data, "non_tensor_batch", {})
    newest, oldest = (held.get(f"{end}_global_steps") for end in ("max", "min"))
    if newest is None:
        return None
    row = lambda steps: mask.new_zeros(0).float().new_tensor([-1.0 if x is None else float(x) for x in steps])
    last = row(newest)
    first = last if oldest is None else row(oldest)
    if bool((first == last).all()):
        return last
    on = mask != 0
    begins, ends = on & (on.cumsum(-1) == 1), on & (on.flip(-1).cumsum(-1).flip(-1) == 1)
    versions = last[:, None].where((first == last)[:, None], last.new_tensor(-1.0)).repeat(1, mask.shape[1])
    return versions.where(~begins, first[:, None]).where(~ends, last[:, None])


def rollout_correction(
    correction: Correcting | None = None, monitor: Any = None
) -> Callable[[Any, Any], tuple[Any, dict[str, float]]]:
    """A function of verl's own signature: (batch, rollout_corr_config) -> (batch, metrics).

    It writes `rollout_is_weights`, and `response_mask` where the correction counts kept tokens only, as verl does.
    Without a correction the batch stays as it is. verl's `rollout_correction` options are not read.
    """
    act = None if correction is None else chosen(correction)

    def correct(batch: Any, rollout_corr_config: Any = None) -> tuple[Any, dict[str, float]]:
        seen = columns(batch)
        c, out = applied(seen, act, monitor)
        if c is not None:
            batch.batch["rollout_is_weights"] = c.weights
            batch.batch["response_mask"] = trained(seen.mask, c)
        return batch, numbers_of(out, c)

    return correct
