"""Where a framework shows us micro-batches only: the monitor's step ends when its optimizer has stepped."""

from __future__ import annotations

from typing import Any


def step_after(monitor: Any, optimizer: Any = None) -> Any:
    """Ends the monitor's step after each step of `optimizer`, or of any in this process; returns torch's handle.

    The monitor wants `micro_batches=None`. Every rank steps its optimizer once a step, so every rank ends the step, one
    that observed nothing too. Name the optimizer where there are several (a critic's, one for experts). With
    `on_drift="halt"` the exception comes out of `optimizer.step()`.
    """
    hook = lambda *_: (monitor.step(), None)[1]
    if optimizer is not None:
        return optimizer.register_step_post_hook(hook)
    from torch.optim.optimizer import register_optimizer_step_post_hook

    return register_optimizer_step_post_hook(hook)
