"""A public fault as a small input (`cases/step4_monitor.jsonl`): what the monitor makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onepolicy import Monitor
from onepolicy.codes import CODES
from onepolicy.types import Finding, Outcome, Severity

LINES = (Path(__file__).parent / "cases" / "step4_monitor.jsonl").read_text(encoding="utf-8").splitlines()
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in map(json.loads, LINES)}


def replies(spans: bool, kind: str) -> dict[str, Any]:
    """The reply of C50: with a version per token, or with its one label."""
    record = CASES["C50"]["input"]["records"][0]
    version = np.full((1, len(record["loss_mask"])), record["weight_version"])
    for start, stop, drawn_at in record["version_spans"] if spans else []:
        version[0, start:stop] = drawn_at
    columns = {
        "sampler_logprobs": np.array([record["rollout_logprobs"]]),
        "old_logprobs": np.array([record["trainer_logprobs"]]),
        "mask": np.array([record["loss_mask"]]),
        "policy_version": version,
    }
    return columns if kind == "numpy" else {name: torch.tensor(x) for name, x in columns.items()}


def judged(given: dict[str, Any], scorer_version: int) -> tuple[dict[str, float | None], dict[str, Finding]]:
    monitor = Monitor()
    monitor.observe(**given, scorer_version=scorer_version)
    last = monitor.close()
    return dict(last.numbers), {f.code: f for f in last.findings}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_c50_one_reply_two_weight_versions(kind: str) -> None:
    case, wanted = CASES["C50"]["input"], CASES["C50"]["expected"]
    numbers, found = judged(replies(True, kind), case["trainer_version"])
    finding = found[wanted["finding"]]
    assert (finding.severity, finding.outcome) == (Severity.WARN, Outcome.PASS)
    assert CODES[finding.code].rank == 4
    assert finding.evidence["first_change"] == finding.evidence["last_change"] == wanted["change_point"]
    assert numbers["mixed_version/first_change"] == wanted["change_point"]
    assert numbers["stale.log_ratio/sd"] == pytest.approx(wanted["sd_before"], abs=1e-6)
    assert numbers["lag_0.log_ratio/sd"] == pytest.approx(wanted["sd_after"], abs=1e-6)
    # what one label covers
    fresh = numbers["lag_0.tokens"]
    assert wanted["label_covers_only"] == f"tokens {wanted['change_point']}..39" and fresh == 40 - 23
    assert all(f.severity is Severity.WARN for f in found.values())


def test_c50_one_label_hides_it() -> None:
    """Without spans nothing is mixed by the labels: nothing is claimed."""
    numbers, found = judged(replies(False, "numpy"), 13)
    assert "mixed-weight-versions" not in found and "version-ahead" not in found
    assert numbers["mixed_version/share"] == 0.0 and numbers["mixed_version/first_change"] is None


def test_c50_a_label_that_counts_calls() -> None:
    second = CASES["C50"]["input"]["second"]
    given = {**replies(False, "numpy"), "policy_version": second["weight_version"]}
    numbers, found = judged(given, second["optimizer_steps"])
    finding = found["version-ahead"]
    assert finding.severity is Severity.WARN and finding.evidence["newest"] == second["weight_version"]
    assert finding.evidence["scorer"] == second["optimizer_steps"]
    assert any("calls of the weight update" in rival for rival in finding.rivals)
    # such tokens are not fresh, and have no lag
    assert numbers["lag/mean"] is None and numbers["lag/max"] is None and "lag_0.tokens" not in numbers
    assert numbers["ahead/share"] == 1.0


def test_versions_behind_or_equal_are_not_ahead() -> None:
    for version in (4, 3):
        _, found = judged({**replies(False, "numpy"), "policy_version": version}, 4)
        assert "version-ahead" not in found
