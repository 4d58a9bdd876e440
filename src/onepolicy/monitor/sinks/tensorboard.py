"""TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onepolicy.errors import MissingExtra
from onepolicy.gates.bounds import Preset
from onepolicy.monitor.sinks import scalars


class TensorBoard:
    """`tensorboard:DIR`: scalars by step; a finding's message as text when it begins."""

    def __init__(self, target: str, preset: Preset) -> None:
        """Errors: `MissingExtra`; the writer's own for a directory that cannot be written."""
        try:
            from torch.utils.tensorboard import SummaryWriter  # pyright: ignore[reportPrivateImportUsage]
        except ImportError:
            raise MissingExtra("tensorboard", "tensorboard", "the sink tensorboard") from None
        self._writer: Any = SummaryWriter(target or "runs")
        self._on = frozenset[str]()

    def write(self, row: Mapping[str, Any]) -> None:
        step = row["step"]
        for name, value in scalars(row).items():
            self._writer.add_scalar(name, value, step)
        for f in row["findings"]:
            if f.code not in self._on:
                self._writer.add_text(f"onepolicy/{f.code}", f"{f.message}; {f.advice}", step)
        for code in self._on - {f.code for f in row["findings"]}:
            self._writer.add_scalar(f"onepolicy/finding/{code}", 0.0, step)
        self._on = frozenset(f.code for f in row["findings"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
