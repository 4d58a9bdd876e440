"""Scenarios of the codes that the monitor makes: a short run with one fault, its findings on a healthy pair's report.

Numpy alone; the runs are those of `onepolicy.Monitor`, so what a page shows is what a log says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from onepolicy.gates.judge import worst
from onepolicy.monitor import Monitor
from onepolicy.types import Finding, Report

ROWS, TOKENS = 48, 64


def columns(step: int, gap: float = 0.03, tail: float = 0.0, far: float = 0.0) -> dict[str, np.ndarray]:
    """Sampler's and scorer's log-probs of one step, `[B, T]`; `tail`: share of tokens half a nat off, `far`: with
    ratios of about 8."""
    rng = np.random.default_rng(20261130 + step)
    sampler = -0.5 - rng.exponential(1.0, (ROWS, TOKENS))
    d = gap * rng.standard_normal((ROWS, TOKENS)) - gap**2 / 2
    pick = rng.random((ROWS, TOKENS))
    d = np.where(pick < tail, np.where(pick < tail / 2, 0.5, -0.5), d)
    d = np.where(pick < far, 2.1, d)
    return {
        "sampler_logprobs": sampler - 3.0 * (pick < far),
        "old_logprobs": sampler + d - 3.0 * (pick < far),
        "mask": sampler < 0,
    }


def run(steps: int, at: Callable[[int], dict[str, Any]], **choices: Any) -> list[Finding]:
    """What the monitor says of the last of so many steps."""
    monitor = Monitor(**choices)
    for step in range(1, steps + 1):
        monitor.observe(**at(step))
    return list(monitor.close().findings)


def _observe_failed() -> list[Finding]:
    def at(step: int) -> dict[str, Any]:
        made = columns(step)
        return made if step < 3 else {**made, "old_logprobs": made["old_logprobs"][:, :-1]}

    return run(3, at)


def _uncorrected() -> list[Finding]:
    return run(2, lambda step: {**(made := columns(step)), "current_logprobs": made["old_logprobs"].copy()})


def _never_updated() -> list[Finding]:
    return run(6, lambda step: {**columns(step), "policy_version": 1, "scorer_version": step}, max_lag=4)


def _rechecked() -> list[Finding]:
    monitor = Monitor()
    monitor.every(2, lambda: False)
    for step in range(1, 4):
        monitor.observe(**columns(step))
    return list(monitor.close().findings)


def _ess() -> list[Finding]:
    def at(step: int) -> dict[str, Any]:
        made = columns(step)
        made["old_logprobs"][0, :2] = -0.1
        made["sampler_logprobs"][0, :2] = -7.5
        return made

    return run(3, at)


RUNS: dict[str, Callable[[], list[Finding]]] = {
    "observe-failed": _observe_failed,
    "uncorrected-off-policy": _uncorrected,
    "engine-never-updated": _never_updated,
    "gap-jumped": lambda: run(14, lambda step: columns(step, 0.03 if step < 13 else 0.08)),
    "gap-grows": lambda: run(80, lambda step: columns(step, 0.03 * 1.015 ** max(0, step - 32))),
    "tail-rises": lambda: run(44, lambda step: columns(step, tail=0.03 if step > 36 else 0.001)),
    "ess-collapse": _ess,
    "ratios-over-two": lambda: run(3, lambda step: columns(step, far=0.03)),
    "recheck-drifted": _rechecked,
}


def _report(code: str, healthy: Callable[[], Report]) -> Report:
    found = [f for f in RUNS[code]() if f.code == code]
    return replace(healthy(), findings=tuple(found), outcome=worst([f.outcome for f in found]))


def scenarios(healthy: Callable[[], Report]) -> dict[str, Callable[[], Report]]:
    """code -> its report; `healthy`: a pair's report without findings."""
    return {code: (lambda code=code: _report(code, healthy)) for code in RUNS}
