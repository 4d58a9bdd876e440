"""What a monitor may be told when it is built: checked there, not in the loop."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

from onepolicy.errors import UsageError
from onepolicy.gates.bounds import Preset, load


def preset_of(bounds: Any) -> Preset:
    """Errors: `UsageError`, `UnknownName`."""
    if isinstance(bounds, Preset):
        return bounds
    if not isinstance(bounds, str):
        raise UsageError(f"bounds is {bounds!r}, wanted a preset's name, a TOML file, or a Preset")
    return load(bounds)


def clip_of(clip: Any) -> tuple[float, float]:
    """(below, above) 1. Errors: `UsageError`."""
    pair: tuple[Any, ...] = tuple(clip) if isinstance(clip, (list, tuple)) else (clip, clip)
    if len(pair) != 2 or not all(_real(x) and x >= 0 for x in pair):
        raise UsageError(f"clip is {clip!r}, wanted one number or two, 0 or more: below and above 1, as (0.2, 0.28)")
    return float(pair[0]), float(pair[1])


def whole(name: str, value: Any, least: int) -> int:
    """Errors: `UsageError`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise UsageError(f"{name} is {value!r}, wanted a whole number from {least} up")
    return int(value)


def step_zero_of(value: Any) -> bool | float:
    """Errors: `UsageError`."""
    if isinstance(value, bool):
        return value
    if not _real(value) or value < 0:
        raise UsageError(f"step_zero is {value!r}, wanted True, False, or the largest mean |d| allowed, in nats")
    return float(value)


def sinks_of(sinks: Any) -> list[Any]:
    """One or several, as a list; None is none. Errors: `UsageError`."""
    if sinks is None:
        return []
    if isinstance(sinks, str) or hasattr(sinks, "write"):
        return [sinks]
    if not isinstance(sinks, Sequence):
        raise UsageError(f"sinks is {sinks!r}, wanted a list of 'name:target' or of what has write(row) and close()")
    return list(sinks)


def positive(name: str, value: Any) -> float:
    """Errors: `UsageError`."""
    if not _real(value) or not value > 0:
        raise UsageError(f"{name} is {value!r}, wanted a number above 0")
    return float(value)


def _real(x: Any) -> bool:
    """A number that is one: not True, not NaN."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool) and x == x
