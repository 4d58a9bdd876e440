"""slime and miles: the function behind `--custom-tis-function-path`, which sees both policies of a micro-batch.

    # my_tis.py
    from onepolicy.integrations import slime
    tis = slime.tis_function("slime:mis", monitor)

    --use-tis --custom-tis-function-path my_tis.tis

Both frameworks call it after the clip, take the loss that it returns, and count their denominators with the masks that
it returns. It may see no context parallelism: a rank would hold parts of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onepolicy.integrations.columns import (
    Columns,
    Correcting,
    applied,
    chosen,
    padded,
    present,
    same_lengths,
    trained,
    unpadded,
)


def columns(batch: Mapping[str, Any]) -> Columns:
    """The columns of a `RolloutBatch`: lists of `B` one-dimensional tensors of responses, filled up to `[B, T]`.

    With `--use-rollout-logprobs` there are no `log_probs` to compare. Errors: `ContentError`.
    """
    present("slime batch", batch, "rollout_log_probs", "log_probs", "loss_masks")
    more = {"reference": batch.get("ref_log_probs"), "advantages": batch.get("advantages")}
    return _columns(
        batch["rollout_log_probs"],
        batch["log_probs"],
        batch["loss_masks"],
        **{name: padded(rows) for name, rows in more.items() if rows is not None},
    )


def _columns(sampler: Sequence[Any], old: Sequence[Any], masks: Sequence[Any], **more: Any) -> Columns:
    same_lengths("slime batch", rollout_log_probs=sampler, log_probs=old, loss_masks=masks)
    return Columns(sampler=padded(sampler), old=padded(old), mask=padded(masks), **more)


def tis_function(
    correction: Correcting | None = None, monitor: Any = None
) -> Callable[..., tuple[Any, list[Any], dict[str, Any]]]:
    """A function of the frameworks' own signature: keywords -> (pg_loss, loss_masks, metrics).

    pg_loss is flat over the tokens of all responses; metrics are flat likewise, and the framework averages them. A
    monitor wants `micro_batches=None`, `step_after`, and the `ranks=` of the last pipeline stage: it alone has losses.
    """
    act = None if correction is None else chosen(correction)

    def tis(
        args: Any,
        *,
        pg_loss: Any,
        train_log_probs: Sequence[Any],
        rollout_log_probs: Sequence[Any],
        loss_masks: Sequence[Any],
        **_: Any,
    ) -> tuple[Any, list[Any], dict[str, Any]]:
        seen = _columns(rollout_log_probs, train_log_probs, loss_masks)
        lengths = [int(x.shape[0]) for x in loss_masks]
        c, out = applied(seen, act, monitor)
        skip = 1.0 if out is None else out.weight
        if c is None:
            return pg_loss * skip, list(loss_masks), {}
        flat = lambda x: _flat(x, lengths).to(pg_loss.dtype)
        weights = flat(c.weights)
        metrics = {"onepolicy_weight": weights, "onepolicy_kept": flat(c.keep)}
        return pg_loss * weights * skip, unpadded(trained(seen.mask, c), lengths), metrics

    return tis


def _flat(x: Any, lengths: Sequence[int]) -> Any:
    import torch

    return torch.cat(unpadded(x, lengths))
