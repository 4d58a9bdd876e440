"""One JSON line a step, readable while it grows (`onepolicy watch`)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onepolicy.errors import UsageError
from onepolicy.gates.bounds import Preset
from onepolicy.monitor.judge import loop_bounds, metric_of
from onepolicy.types import Finding

FORMAT = 1


class JsonLines:
    """Appends to the file; a header line says which bounds are judged, and which a loop cannot cover. A line is written
    whole or not at all."""

    def __init__(self, target: str, preset: Preset) -> None:
        """Errors: `UsageError` for a path that cannot be written."""
        if not target:
            raise UsageError("sink jsonl has no file; wanted jsonl:PATH, as jsonl:monitor.jsonl")
        self.path = Path(target)
        judged, left = loop_bounds(preset)
        bounds = [{"metric": metric_of(b), "at_most": b.at_most, "absolute": b.absolute} for b in judged]
        header = {"onepolicy_monitor": FORMAT, "time": time.time(), "preset": preset.name, "bounds": bounds}
        header["not_covered"] = [b.metric for b in left]
        try:
            self._file = self.path.open("ab", buffering=0)
            self._append(header)
        except OSError as err:
            raise UsageError(f"sink jsonl: {target} cannot be written: {err.strerror or err}") from None

    def write(self, row: Mapping[str, Any]) -> None:
        self._append({**row, "findings": [finding_dict(f) for f in row["findings"]]})

    def close(self) -> None:
        self._file.close()

    def _append(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row, ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=str).encode() + b"\n"
        start = self._file.seek(0, 2)
        try:
            done = self._file.write(line)
        except OSError:
            done = None
        if done != len(line):  # a full disk takes part of a line: take it back, so that the next one starts a line
            self._file.truncate(start)
            raise OSError(f"{self.path}: {done or 0} of {len(line)} bytes written; is the disk full?")


def finding_dict(finding: Finding) -> dict[str, Any]:
    """A finding as JSON. Evidence that is no finite number is null."""
    evidence = {
        k: None if isinstance(v, float) and not abs(v) < float("inf") else v for k, v in finding.evidence.items()
    }
    return {
        "code": finding.code,
        "severity": str(finding.severity),
        "outcome": str(finding.outcome),
        "message": finding.message,
        "evidence": evidence,
        "rivals": list(finding.rivals),
        "advice": finding.advice,
    }
