"""prime-rl: a custom loss, which sees one sequence at a time; the sampler's policy is the only old one (bypass).

# my_loss.py
from onepolicy.integrations import prime_rl
loss = prime_rl.loss_function("prime_rl:ipo", monitor)

[trainer.loss]
type = "custom"
import_path = "my_loss.loss"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onepolicy.integrations.columns import Columns, Correcting, applied, chosen


def columns(inputs: Any) -> Columns:
    """The columns of a `LossInputs`: one sequence, `[1, T]`."""
    row = lambda x: None if x is None else x.reshape(1, -1)
    return Columns(
        sampler=row(inputs.inference_logprobs),
        old=None,
        mask=row(inputs.loss_mask),
        current=row(inputs.trainer_logprobs),
        reference=row(getattr(inputs, "ref_logprobs", None)),
        advantages=row(inputs.advantages),
    )


def loss_function(
    correction: Correcting, monitor: Any = None, outputs: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A function of prime-rl's own signature: `LossInputs` -> `LossOutputs`, the sum over one sequence's tokens.

    The loss is -w A log p_current with detached weights w of the current policy against the sampler's: the gradient of
    prime-rl's -A ratio where w is the ratio itself. `loss_weights` multiply each token. A monitor wants
    `micro_batches=None` and `step_after`. `outputs`: prime-rl's `LossOutputs` unless given.
    """
    act = chosen(correction)

    def loss(inputs: Any, **_: Any) -> Any:
        seen = columns(inputs)
        c, out = applied(seen, act, monitor)
        assert c is not None
        weights = getattr(inputs, "loss_weights", None)
        current = inputs.trainer_logprobs.reshape(1, -1).masked_fill(~c.keep, 0.0)
        terms = -c.weights * seen.advantages * current
        total = (terms if weights is None else terms * weights.reshape(1, -1)).sum()
        metrics = {f"onepolicy/{name}": c.effects[name] for name in ("kept/share", "weight/mean", "ratio/mean")}
        return (outputs or _outputs())(loss=total if out is None else total * out.weight, metrics=metrics)

    return loss


def _outputs() -> Any:
    from prime_rl.trainer.rl.loss import LossOutputs  # pyright: ignore[reportMissingImports]

    return LossOutputs
