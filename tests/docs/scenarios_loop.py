"""One short run for each finding of the monitor: healthy steps, then one fault, told as the report that shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from onepolicy.gates.judge import worst
from onepolicy.monitor import Monitor, Observation
from onepolicy.types import Outcome, TokenReport

B, T = 48, 96


class Run:
    """A monitor and the random numbers that it is fed with."""

    def __init__(self) -> None:
        self.monitor, self.rng, self.n = Monitor(bounds="bf16", step_zero=False), np.random.default_rng(20261130), 0

    def step(self, noise: float = 0.02, change: Callable[[Any], Any] | None = None, **more: Any) -> Observation:
        """One healthy step, or one with another noise (nats), or with changed old log-probs."""
        sampler = -4.0 - self.rng.exponential(0.8, (B, T))
        old = sampler + np.minimum(noise * self.rng.standard_normal((B, T)) - noise**2 / 2, 4.0)
        old = old if change is None else change(old)
        self.n += 1
        mask = more.pop("mask", np.ones((B, T), dtype=bool))
        given = {"current_logprobs": old - 1e-4, **more}
        return self.monitor.observe(sampler, old, mask, **given)

    def steps(self, times: int, **more: Any) -> Run:
        for _ in range(times):
            self.step(**more)
        return self

    def told(self, code: str) -> TokenReport:
        """What is said when the run ends; of the findings that are on, this one is looked at."""
        found = tuple(f for f in self.monitor.close().findings if f.code == code)
        assert found, f"{code} is not on"
        outcome = worst([f.outcome for f in found])
        said = "the run goes on" if outcome is Outcome.PASS else ""
        return TokenReport(outcome, found, {}, {"steps": self.n}, headline=said)


def _far(old: Any) -> Any:
    """Two and a half percent of the tokens go .15 nats off; the mean hardly moves."""
    out = old.copy()
    out[::2, 5:10] -= 0.15
    return out


def _observe_failed() -> TokenReport:
    run = Run().steps(4)
    run.step(mask=np.ones((B, T - 1), dtype=bool))
    return run.told("observe-failed")


def _uncorrected() -> TokenReport:
    run = Run()
    for _ in range(4):
        sampler = -0.05 - run.rng.exponential(0.8, (B, T))
        old = np.minimum(sampler + 0.02 * run.rng.standard_normal((B, T)), 0)
        run.monitor.observe(sampler, old, np.ones((B, T), dtype=bool), current_logprobs=old + 0.0)
    return run.told("uncorrected-off-policy")


def _never_updated() -> TokenReport:
    run = Run()
    for version in range(20):
        run.step(policy_version=np.zeros(B, dtype=int), scorer_version=version)
    return run.told("engine-never-updated")


def _nonfinite_weight() -> TokenReport:
    run, weights = Run().steps(3), np.ones((B, T))
    weights[7, 11:14] = np.nan
    run.step(correction=weights)
    return run.told("nonfinite-weight")


def _mixed_versions() -> TokenReport:
    """In six replies the weights change after 40 tokens."""
    run = Run()
    for version in range(3, 8):
        drawn_at = np.full((B, T), version)
        drawn_at[:6, :40] = version - 1
        run.step(policy_version=drawn_at, scorer_version=version)
    return run.told("mixed-weight-versions")


def _version_ahead() -> TokenReport:
    run = Run()
    for step in range(1, 5):
        run.step(policy_version=4 * step, scorer_version=step)
    return run.told("version-ahead")


def _recheck() -> TokenReport:
    run = Run()
    run.monitor.every(2, lambda: Outcome.DRIFT)
    return run.steps(5).told("recheck-drifted")


SCENARIOS: dict[str, Callable[[], TokenReport]] = {
    "observe-failed": _observe_failed,
    "uncorrected-off-policy": _uncorrected,
    "engine-never-updated": _never_updated,
    "nonfinite-weight": _nonfinite_weight,
    "mixed-weight-versions": _mixed_versions,
    "version-ahead": _version_ahead,
    "gap-jumped": lambda: Run().steps(20).steps(3, noise=0.08).told("gap-jumped"),
    "gap-grows": lambda: Run().steps(40).steps(60, noise=0.04).told("gap-grows"),
    "tail-rises": lambda: Run().steps(40).steps(20, change=_far).told("tail-rises"),
    "ess-collapse": lambda: Run().steps(4).steps(5, noise=1.6).told("ess-collapse"),
    "ratios-over-two": lambda: Run().steps(4).steps(5, noise=0.6).told("ratios-over-two"),
    "recheck-drifted": _recheck,
}
