"""Rules: pure functions `(ratio, state, **options) -> Verdict`, and stages: a rule with its options chosen."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from onepolicy.arrays import Array
from onepolicy.corrections.ratio import INPUTS, Ratio
from onepolicy.errors import UnknownName, UsageError


@dataclass(slots=True)
class State:
    """Where a composition stands when a rule is asked.

    seen: the tokens the rule may look at, `[B, T]`. keep: what the rules before it kept. weights: theirs, None for 1.
    """

    seen: Array
    keep: Array
    weights: Array | None = None


@dataclass(slots=True)
class Verdict:
    """What one rule says; every array broadcasts to the tokens.

    weights: a factor, None for 1. keep: None for all. low, high: true where what the rule looks at was outside on that
    side, so that the token was changed or dropped; None for nowhere.
    """

    weights: Array | None = None
    keep: Array | None = None
    low: Array | None = None
    high: Array | None = None


Rule: TypeAlias = Callable[..., Verdict]
REQUIRED = object()


@dataclass(frozen=True)
class Stage:
    """A rule with its options. `str(stage)` is how reports show it."""

    name: str
    rule: Rule
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in self.options.items())})"


def stage_of(name: str, rule: Rule, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> Stage:
    """A stage of that rule. Errors: `UsageError` for an option it does not have, or one that is missing."""
    for key in given:
        if key not in defaults:
            raise UnknownName(f"option of {name}", key, [*defaults, *INPUTS])
    options = {**defaults, **given}
    for key, value in options.items():
        if value is REQUIRED:
            raise UsageError(f"{name} needs {key}=; nobody's default fits everybody")
    return Stage(name, rule, options)


def number(name: str, value: Any, least: float = 0.0, most: float = math.inf) -> float:
    """`value` as a float within [least, most]. Errors: `UsageError`."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not least <= float(value) <= most:
        between = f"from {least:g} up" if most == math.inf else f"from {least:g} to {most:g}"
        raise UsageError(f"{name} is {value!r}, wanted a number {between}")
    return float(value)


def band(low: Any, high: Any) -> tuple[float, float]:
    """A band of ratios; None is no bound on that side. Errors: `UsageError`."""
    least = number("low", 0.0 if low is None else low)
    most = number("high", math.inf if high is None else high)
    if least > most:
        raise UsageError(f"low={low} is above high={high}; nothing would be kept")
    return least, most


def choice(name: str, value: Any, known: tuple[str, ...]) -> str:
    """`value` if it is one of `known`. Errors: `UnknownName`."""
    if value not in known:
        raise UnknownName(name, str(value), known)
    return value


def log(x: float) -> float:
    """log x, -inf at 0."""
    return math.log(x) if x > 0 else -math.inf


WEIGHTS = ("one", "token", "sequence", "geometric")


def raw_weights(kind: str, ratio: Ratio, state: State) -> Array | None:
    """Raw weights, never capped: None for "one", the ratio of each token, or of its sequence (product, geometric)."""
    if choice("weight", kind, WEIGHTS) == "one":
        return None
    if kind == "token":
        return ratio.exp(ratio.log_ratio)
    total = ratio.per_row(ratio.log_ratio, state.seen)
    if kind == "geometric":
        total = total / ratio.length(state.seen)
    return ratio.spread(ratio.exp(total, high=math.exp(ratio.ops.limit(ratio.log_ratio) - 1)))
