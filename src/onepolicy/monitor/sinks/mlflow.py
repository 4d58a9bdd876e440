"""MLflow: the active run, or one of its own at a tracking address."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onepolicy.errors import MissingExtra
from onepolicy.gates.bounds import Preset
from onepolicy.monitor.sinks import scalars


class MLflow:
    """`mlflow:` logs into the active run, `mlflow:URI` (a folder, a database, a server) starts one there."""

    def __init__(self, target: str, preset: Preset) -> None:
        """Errors: `MissingExtra`; MLflow's own for an address that cannot be reached."""
        try:
            import mlflow
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise MissingExtra("mlflow-skinny", "mlflow", "the sink mlflow") from None
        active = None if target else mlflow.active_run()
        self._own = active is None
        self._client: Any = MlflowClient(tracking_uri=target or None)
        if active is not None:
            self._run = active.info.run_id
        else:
            found = self._client.get_experiment_by_name("onepolicy")
            experiment = found.experiment_id if found else self._client.create_experiment("onepolicy")
            self._run = self._client.create_run(experiment, tags={"onepolicy.bounds": preset.name}).info.run_id

    def write(self, row: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        when = int(row["time"] * 1000)
        metrics = [Metric(name, value, when, row["step"]) for name, value in scalars(row).items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self) -> None:
        if self._own:
            self._client.set_terminated(self._run)
