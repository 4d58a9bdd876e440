"""Where a step's row goes besides the dict that `observe` returns.

To add one: a file with a class that has `write(row)` and `close()`, and a line in the table. It fails loudly when it is
opened; in the loop a failure is counted, said, and the training goes on.

A row: `step`, `time` (seconds), `numbers` (name -> float or None), `findings` (list of `Finding`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from onepolicy.errors import UnknownName, UsageError
from onepolicy.gates.bounds import Preset

#: name in "name:target" -> the class that is opened with (target, preset)
SINKS: dict[str, str] = {
    "jsonl": "onepolicy.monitor.sinks.jsonl:JsonLines",
    "tensorboard": "onepolicy.monitor.sinks.tensorboard:TensorBoard",
    "wandb": "onepolicy.monitor.sinks.wandb:WeightsAndBiases",
    "mlflow": "onepolicy.monitor.sinks.mlflow:MLflow",
    "prometheus": "onepolicy.monitor.sinks.prometheus:Prometheus",
}


class Sink(Protocol):
    """What takes rows."""

    def write(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def open_sink(what: str | Sink, preset: Preset) -> Sink:
    """A sink from "name:target", or the object itself. Errors: `UsageError`, `MissingExtra`, or the sink's own."""
    if not isinstance(what, str):
        if not callable(getattr(what, "write", None)) or not callable(getattr(what, "close", None)):
            raise UsageError(f"sink is a {type(what).__name__}, wanted write(row) and close(), or 'name:target'")
        return what
    name, _, target = what.partition(":")
    if name not in SINKS:
        raise UnknownName("sink", name, SINKS)
    module, _, cls = SINKS[name].partition(":")
    return getattr(importlib.import_module(module), cls)(target, preset)


class Sinks:
    """Several sinks as one that never raises once it is open."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks, self.failures = list(sinks), 0

    @classmethod
    def of(cls, what: Sequence[str | Sink], preset: Preset) -> Sinks:
        """All of them, opened. Errors: as `open_sink`; the ones opened before are closed again."""
        opened = list[Sink]()
        try:
            for one in what:
                opened.append(open_sink(one, preset))
        except Exception:
            cls(opened).close()
            raise
        return cls(opened)

    def write(self, row: Mapping[str, Any]) -> list[str]:
        """One message for every sink that failed; it is asked again at the next step."""
        return self._each(lambda sink: sink.write(row))

    def close(self) -> list[str]:
        """One message for every sink that failed."""
        out = self._each(lambda sink: sink.close())
        self._sinks = []
        return out

    def _each(self, call: Any) -> list[str]:
        out = list[str]()
        for sink in self._sinks:
            try:
                call(sink)
            except Exception as err:
                self.failures += 1
                out.append(f"sink {type(sink).__name__} failed: {type(err).__name__}: {err}")
        return out


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that a dashboard can draw: those that were measured, named `onepolicy/...`, and for every finding
    that is on `onepolicy/finding/CODE` = 1."""
    found = {f"onepolicy/{name}": float(x) for name, x in row["numbers"].items() if x is not None}
    return found | {f"onepolicy/finding/{f.code}": 1.0 for f in row["findings"]}
