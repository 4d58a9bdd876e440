"""The monitor: the numbers of a check inside a training loop, alarms with an error budget, and what is done then.

    monitor = onepolicy.Monitor(bounds="bf16", on_drift="warn")
    out = monitor.observe(sampler_logprobs, old_logprobs, mask, current_logprobs=..., advantages=...)

`batch` says what the arrays must be, `observe` makes one vector of them on their device, `vector` names its slots,
`ranks` gathers it, `numbers`, `series`, `alarms` and `judge` make numbers and findings of it, `state` is the loop.
"""

from __future__ import annotations

from onepolicy.monitor.actions import ACTIONS, Halted, Observation, SetUpError
from onepolicy.monitor.sinks import SINKS
from onepolicy.monitor.state import Monitor

__all__ = ["ACTIONS", "SINKS", "Halted", "Monitor", "Observation", "SetUpError"]
