"""Prometheus: the last step's numbers for a scraper, on loopback unless an address is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onepolicy.errors import MissingExtra, UsageError
from onepolicy.gates.bounds import Preset


class Prometheus:
    """`prometheus:PORT` or `prometheus:ADDRESS:PORT`; port 0 takes a free one, `port` says which.

    Gauges: `onepolicy_number{name="..."}`, `onepolicy_finding{code="..."}` (1 while it is on, 0 after),
    `onepolicy_step`.
    """

    def __init__(self, target: str, preset: Preset) -> None:
        """Errors: `MissingExtra`, `UsageError` for a port that is no number or is taken."""
        try:
            import prometheus_client as client
        except ImportError:
            raise MissingExtra("prometheus-client", "prometheus", "the sink prometheus") from None
        address, _, port = target.rpartition(":")
        if not port.isdigit():
            raise UsageError(f"sink prometheus:{target}: wanted prometheus:PORT, as prometheus:9095")
        registry = client.CollectorRegistry()
        self._number = client.Gauge("onepolicy_number", "the last judged step", ["name"], registry=registry)
        self._finding = client.Gauge("onepolicy_finding", "1 while the finding is on", ["code"], registry=registry)
        self._step = client.Gauge("onepolicy_step", "the last judged step's number", registry=registry)
        self._on, self._names = set[str](), set[str]()
        try:
            self._server, self._thread = client.start_http_server(int(port), address or "127.0.0.1", registry)
        except (OSError, OverflowError) as err:
            raise UsageError(f"sink prometheus:{target} cannot listen there: {err}") from None
        self.port: int = self._server.server_port

    def write(self, row: Mapping[str, Any]) -> None:
        self._names |= set(row["numbers"])
        for name in self._names:  # what this step did not measure must not stand there as it was
            value = row["numbers"].get(name)
            self._number.labels(name).set(float("nan") if value is None else value)
        now = {f.code for f in row["findings"]}
        for code in self._on | now:
            self._finding.labels(code).set(float(code in now))
        self._on |= now
        self._step.set(row["step"])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
