"""`monitor.every`: the live engines checked again while the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from onepolicy.errors import UsageError
from onepolicy.types import Finding, Outcome


@dataclass(frozen=True, slots=True)
class Recheck:
    """A check that runs every so many steps. `alone`: by the first rank only."""

    steps: int
    check: Callable[[], Any]
    name: str
    alone: bool

    @classmethod
    def of(cls, steps: int, check: Any, name: str) -> Recheck:
        """Errors: `UsageError`."""
        if callable(check):
            return cls(steps, check, name, False)
        if isinstance(check, str) or not isinstance(check, Iterable) or len(list(check)) != 2:
            raise UsageError(f"check is {check!r}, wanted a function, or two engines: (sampler, scorer)")
        sampler, scorer = check
        return cls(steps, lambda: _check(sampler, scorer), name, True)

    def run(self, rank: int) -> Any:
        """The check's result; None on the ranks that do not run it."""
        return self.check() if rank == 0 or not self.alone else None


def _check(sampler: Any, scorer: Any) -> Any:
    """The smoke suite through both engines with every leg they can run: each starts, scores and ends. Eight prompts are
    too few to pass, and enough for the legs to find that the two compute different functions."""
    from onepolicy.check import Choices, check_engines

    report, _ = check_engines(sampler, scorer, choices=Choices(suite="smoke"))
    return report


def outcome_of(result: Any) -> Outcome | None:
    """Of a report, an outcome, findings, True or False; None for no answer. Errors: `UsageError`."""
    if result is None:
        return None
    if isinstance(result, bool):
        return Outcome.PASS if result else Outcome.DRIFT
    if hasattr(result, "outcome"):
        return Outcome(result.outcome)
    if isinstance(result, str):
        return Outcome(result)
    if isinstance(result, Iterable):
        found = [f.outcome for f in result if isinstance(f, Finding)]
        order = (Outcome.ERROR, Outcome.DRIFT, Outcome.INCONCLUSIVE, Outcome.PASS)
        return next((o for o in order if o in found), Outcome.PASS)
    raise UsageError(
        f"the check gave a {type(result).__name__}, wanted a report, an outcome, findings, or True / False"
    )
