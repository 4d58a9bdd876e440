"""What the monitor gives back, what it raises, and what it may do about a finding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from onepolicy.arrays import Array
from onepolicy.errors import ContentError, OnepolicyError, UsageError
from onepolicy.gates.bounds import Bound
from onepolicy.monitor.judge import metric_of
from onepolicy.monitor.vector import SLOT
from onepolicy.types import Finding

Action = Literal["warn", "skip_batch", "halt"]
#: name -> what is done about a failing finding
ACTIONS: dict[str, str] = {
    "warn": "say it in the log, once when it begins",
    "skip_batch": "give the weight 0 for the batch that crossed a bound, and for every one while an alarm is on",
    "halt": "raise `Halted` naming the finding, on all ranks at the same step",
}
#: What a function may be given for `on_drift`: findings and numbers of the step in, an action's name or None out.
OnDrift = str | Callable[[Sequence[Finding], Mapping[str, float | None]], Any]


class Halted(OnepolicyError):
    """The monitor ends the run, on every rank at the same step. `findings`: why; `step`: the one that was judged."""

    exit_code = 1

    def __init__(self, findings: Sequence[Finding], step: int) -> None:
        first, more = findings[0], len(findings) - 1
        also = f" (and {more} more)" if more else ""
        super().__init__(f"step {step}: {first.code}: {first.message}{also}; {first.advice}")
        self.findings, self.step = tuple(findings), step


class SetUpError(ContentError):
    """The first step shows that the monitor is not wired as it must be. Raised on every rank."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a call gives back: the last step that was judged, one behind the one just observed.

    `step`: its number, None before there is one. `numbers`: plain dict, None for what could not be measured.
    `findings`: what is on now, failing ones first. `weight`: 0-dim, 1 or 0, on the batch's device: multiply the loss
    with it. `skip`: whether the weight is known to be 0; on a device it may be 0 without the host knowing yet.
    """

    step: int | None = None
    numbers: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])
    findings: tuple[Finding, ...] = ()
    weight: Any = 1.0
    skip: bool = False


def checked(on_drift: OnDrift) -> OnDrift:
    """Errors: `UsageError` for what is no action."""
    if not callable(on_drift) and on_drift not in ACTIONS:
        raise UsageError(f"on_drift is {on_drift!r}, wanted one of {', '.join(ACTIONS)}, or a function")
    return on_drift


#: Bounds that a device can hold a batch against by itself: metric -> (sum, count, row sums).
_ON_DEVICE = {
    "abs_log_ratio/mean": ("token:scored:abs_log_ratio", "scored", "abs_log_ratio"),
    "kl_sampler_scorer_k3/mean": ("token:finite:k3", "finite", "k3"),
    "ratio_bias/mean": ("token:finite:ratio_minus_one", "finite", "ratio_minus_one"),
}
#: Standard errors by which a batch's mean must be above its bound.
_ERRORS = 3.0


def within(rows: Array, bounds: Sequence[Bound]) -> Array:
    """0-dim on the device of `rows` `[world, LENGTH]`: 1 where this step keeps the bounds that a mean can cross,
    0 where it is above one by three standard errors. Nothing is read."""
    total = rows.sum(0)
    at = lambda name: total[SLOT[name]]
    good = at("scored") * 0 + 1
    for bound in bounds:
        if metric_of(bound) not in _ON_DEVICE:
            continue
        slot, count, rowed = _ON_DEVICE[metric_of(bound)]
        n = at(count) + (at(count) == 0)
        mean = at(slot) / n
        squares = at(f"rows:squares:{rowed}") - 2 * mean * at(f"rows:by_tokens:{rowed}")
        error = abs(squares + mean * mean * at("rows:tokens_squared")) ** 0.5 / n
        size = abs(mean) if bound.absolute else mean
        good = good * (size - _ERRORS * error <= bound.at_most)  # NaN, which only overflow makes, skips
    return good
