"""What a leg is: two scorings of the same ids, one changed factor, one question. Written as data, one factor a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from onepolicy.engines.base import EngineSpec, Switch, options_of
from onepolicy.errors import UsageError
from onepolicy.types import FloatArray, Question, Scoring

Side = Literal["sampler", "scorer", "reference", "floor"]
#: Which tokens a leg scores: all drawn ones; those of some sequences, for what is slow; the suite's fixed texts.
On = Literal["drawn", "some", "texts", "probes"]


@dataclass(frozen=True, slots=True)
class Other:
    """The first of `values` that is not the side's own: another kernel than the one in use."""

    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Want:
    """One scoring that a leg needs. `load`: options that need a start of their own; `using`: live switches, as
    alternatives of which the first that the engine has is taken. `recorded`: the values that came with the draw."""

    side: Side
    load: Mapping[str, Any] = field(default_factory=dict[str, Any])
    using: tuple[Mapping[str, Any], ...] = ({},)
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class Leg:
    """`factor`: what changes, in words. `code`: the finding when it drifts; empty: it informs only. `raw`: scored at
    temperature 1 without truncation, whatever was drawn (the function is the same, and every engine can). `bounds`: a
    preset for this leg alone; else the floor, where it is known, or the absolute bounds of the pair. `only_set`: says
    something only where a temperature, a truncation or a penalty was set for the draw."""

    key: str
    question: Question
    factor: str
    a: Want
    b: Want
    code: str
    on: On = "some"
    raw: bool = False
    bounds: str | None = None
    only_set: bool = False


class CannotRun(Exception):
    """An engine has no such switch or value: the leg is listed as not run, with this as the reason."""


def switches_of(cls: Any, spec: EngineSpec) -> Mapping[str, Switch]:
    return cls.SWITCHES


def using_for(want: Want, name: str, switches: Mapping[str, Switch], current: Mapping[str, Any]) -> dict[str, Any]:
    """The live values of a want for an engine, those that differ from what it does anyway.

    Errors: `CannotRun` when none of the alternatives is possible.
    """
    reasons: list[str] = []
    for choice in want.using:
        try:
            found = {k: _value(k, v, name, switches, current, live=True) for k, v in choice.items()}
        except CannotRun as err:
            reasons.append(str(err))
            continue
        return {k: v for k, v in found.items() if v != current.get(k)}
    raise CannotRun(reasons[0])


def load_for(want: Want, name: str, switches: Mapping[str, Switch], current: Mapping[str, Any]) -> dict[str, Any]:
    """The load options of a want for an engine, those that differ from the user's. Errors: `CannotRun`."""
    found = {k: _value(k, v, name, switches, current, live=False) for k, v in want.load.items()}
    return {k: v for k, v in found.items() if v != current.get(k)}


def _value(
    key: str, value: Any, name: str, switches: Mapping[str, Switch], current: Mapping[str, Any], live: bool
) -> Any:
    switch = switches.get(key)
    if switch is None or (live and not switch.live and current.get(key) != value):
        raise CannotRun(f"engine {name!r} has no {'live ' if live and switch else ''}switch {key!r}")
    if switch.declared:
        if value != current.get(key):
            raise CannotRun(f"engine {name!r}: its {key} is what you declare, it cannot be set")
        return value
    if isinstance(value, Other):
        allowed = [v for v in value.values if v != current.get(key) and (not switch.choices or v in switch.choices)]
        if not allowed:
            raise CannotRun(f"engine {name!r} knows no other {key} than {current.get(key)!r}")
        return allowed[0]
    if switch.choices and value not in switch.choices:
        raise CannotRun(f"engine {name!r}: {key} cannot be {value!r}")
    return value


def written(value: Any) -> str:
    """A switch's value as it stands in an engine's spec."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def with_options(spec: EngineSpec, options: Mapping[str, Any]) -> EngineSpec:
    """The spec with some options set."""
    return EngineSpec(spec.name, spec.target, {**spec.options, **{k: written(v) for k, v in options.items()}})


def current_options(cls: Any, spec: EngineSpec) -> Mapping[str, Any]:
    """Errors: `UnknownName`, `UsageError` for options that the engine does not have."""
    return options_of(cls, spec)


def chosen(table: Mapping[str, Any], only: Sequence[str] | None, skip: Sequence[str]) -> list[Any]:
    """The legs asked for, in the table's order. Errors: `UsageError` (did you mean) for a name that is none."""
    from onepolicy.errors import UnknownName

    for name in [*(only or []), *skip]:
        if name not in table:
            raise UnknownName("leg", name, table)
    if only is not None and set(only) & set(skip):
        raise UsageError(f"leg {sorted(set(only) & set(skip))[0]!r} is both asked for and skipped")
    return [leg for key, leg in table.items() if (only is None or key in only) and key not in skip]


def values_of(scoring: Scoring) -> FloatArray:
    """`[T]` float64, NaN where null."""
    out = np.array(scoring.logprobs.values, dtype=np.float64)
    out[~scoring.logprobs.mask()] = np.nan
    return out
