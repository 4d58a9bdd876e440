"""Weights & Biases: the run that is going on, or one of its own (offline with WANDB_MODE=offline)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onepolicy.errors import MissingExtra
from onepolicy.gates.bounds import Preset
from onepolicy.monitor.sinks import scalars


class WeightsAndBiases:
    """`wandb:` logs into the run that the trainer has started, `wandb:PROJECT` starts one where there is none.

    Its rows carry `onepolicy/step` and leave the run's own step counter alone: they come one step late.
    """

    def __init__(self, target: str, preset: Preset) -> None:
        """Errors: `MissingExtra`; wandb's own."""
        try:
            import wandb
        except ImportError:
            raise MissingExtra("wandb", "wandb", "the sink wandb") from None
        self._own = wandb.run is None
        self._run: Any = wandb.run or wandb.init(
            project=target or "onepolicy", config={"onepolicy_bounds": preset.name}
        )
        self._run.define_metric("onepolicy/step", hidden=True)
        self._run.define_metric("onepolicy/*", step_metric="onepolicy/step")

    def write(self, row: Mapping[str, Any]) -> None:
        self._run.log({**scalars(row), "onepolicy/step": row["step"]}, commit=self._own)

    def close(self) -> None:
        if self._own:
            self._run.finish()
