"""Frameworks' own batches and extension points, under our names: they rename, and nothing else.

Each file has `columns(batch) -> Columns` with the framework's key names, and what its extension point wants. Nothing of
a framework is imported: its class or function is handed in, or ours is handed to it.

To add one: a file with `columns` and a function of the framework's own signature, a line here, a test that runs it
against the framework's code, or on its documented structure where pip has none, and its section in the docs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from onepolicy.integrations.columns import Columns
from onepolicy.integrations.stepping import step_after


@dataclass(frozen=True, slots=True)
class Integration:
    """module: where it is. version: what was read. checked: "trained" for real with it, "code" of its package was run
    against it in tests, or its "documented" structure only. at: where it is hooked in."""

    module: str
    version: str
    checked: Literal["trained", "code", "documented"]
    at: str


INTEGRATIONS: dict[str, Integration] = {
    "trl": Integration("onepolicy.integrations.trl", "1.16.0", "trained", "bases of the trainer"),
    "verl": Integration("onepolicy.integrations.verl", "0.9.1", "code", "driver, for its rollout correction"),
    "openrlhf": Integration("onepolicy.integrations.openrlhf", "0.11.2", "code", "the actor's PolicyLoss"),
    "slime": Integration("onepolicy.integrations.slime", "2026-08", "documented", "--custom-tis-function-path"),
    "miles": Integration("onepolicy.integrations.slime", "0.0.2", "code", "--custom-tis-function-path"),
    "nemo_rl": Integration("onepolicy.integrations.nemo_rl", "2026-08", "documented", "train_data on the driver"),
    "prime_rl": Integration("onepolicy.integrations.prime_rl", "2026-08", "documented", "trainer.loss, custom"),
    "skyrl": Integration("onepolicy.integrations.skyrl", "0.3.0", "code", "training batch, or a policy loss"),
    "areal": Integration("onepolicy.integrations.areal", "1.0.4", "code", "batch before ppo_update"),
}

__all__ = ["INTEGRATIONS", "Columns", "Integration", "step_after"]
