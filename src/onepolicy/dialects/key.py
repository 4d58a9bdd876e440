"""`Part`, `Key`, `Option`, `Dialect`: how one framework's metric keys are written down."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from onepolicy.dialects.view import View
from onepolicy.errors import UnknownName, UsageError

Options = Mapping[str, Any]
#: What a part adds up: `[N]`, `[S]` or any other number of values.
Term = Callable[[View, Options], Any]


@dataclass(frozen=True, slots=True)
class Part:
    """What merges over shards: the sum, the greatest or the least of `term`'s values."""

    name: str
    reduce: Literal["sum", "max", "min"]
    term: Term


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a dashboard, computed its framework's way.

    `says`: what it is, one sentence with its formula; d is log p_scorer - log p_sampler, r = e^d. `value(options,
    *totals)` makes the number of the parts' totals; None where there are no tokens. `needs`: columns of the view, or
    what gives them for the options; `scorer` is the policy that the option of that name chooses. `ours`: our metric's
    key, the same number if `same`. `when`: the options under which the framework has the key at all. `also`: further
    names of it.
    """

    name: str
    says: str
    parts: tuple[Part, ...]
    value: Callable[..., float | None]
    needs: tuple[str, ...] | Callable[[Options], tuple[str, ...]] = ("scorer",)
    direction: str = ""
    quirks: str = ""
    ours: str = ""
    same: bool = False
    when: Callable[[Options], bool] | None = None
    also: tuple[str, ...] = ()

    def columns(self, options: Options) -> tuple[str, ...]:
        """The columns of the view that it needs under these options."""
        return self.needs(options) if callable(self.needs) else self.needs

    def shown(self, options: Options) -> bool:
        """Whether the framework logs it under these options."""
        return self.when is None or bool(self.when(options))


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a dialect, under the framework's own name. `kind`: float, bool or word; `none`: may be none."""

    default: Any
    says: str
    kind: Literal["float", "bool", "word"] = "float"
    choices: tuple[str, ...] = ()
    none: bool = False

    def read(self, name: str, given: Any) -> Any:
        """The value of text or of a typed value. Errors: `UsageError`, `UnknownName`."""
        text = str(given).strip().lower()
        if self.none and text in ("none", "null", ""):
            return None
        if self.kind == "bool":
            if text in ("true", "1", "yes", "false", "0", "no"):
                return text in ("true", "1", "yes")
            raise UsageError(f"{name}={given}: wanted true or false")
        if self.kind == "float":
            return _number(name, given)
        if self.choices and str(given) not in self.choices:
            raise UnknownName(name, str(given), self.choices)
        return str(given)


def _number(name: str, given: Any) -> float:
    try:
        out = float(given)
    except (TypeError, ValueError):
        out = math.nan
    if isinstance(given, bool) or math.isnan(out):
        raise UsageError(f"{name}={given}: wanted a number")
    return out


#: Every dialect has these two besides its own.
def common(scorer: str) -> dict[str, Option]:
    """`scorer`: the policy the framework compares by default; `precision`: its own arithmetic, or exact sums."""
    return {
        "scorer": Option(scorer, "which policy is the scorer", "word", ("old", "current")),
        "precision": Option(
            "float32",
            "arithmetic of each term: float32 as the framework, so that its rounding is copied, or float64",
            "word",
            ("float32", "float64"),
        ),
    }


@dataclass(frozen=True)
class Dialect:
    """A framework's keys. `read`: the version its formulas were read in; `checked`: against what they are tested."""

    name: str
    title: str
    read: str
    checked: str
    keys: Mapping[str, Key]
    options: Mapping[str, Option]
    note: str = ""
    names: Mapping[str, str] = field(default_factory=dict[str, str])

    def resolve(self, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """All options with their values. Errors: `UnknownName` (did you mean), `UsageError`."""
        out = {k: option.default for k, option in self.options.items()}
        for name, value in (given or {}).items():
            if name not in self.options:
                raise UnknownName(f"option of {self.name}", name, self.options)
            out[name] = self.options[name].read(f"{self.name}?{name}", value)
        return out

    def key(self, name: str) -> Key:
        """The key of that name or of another spelling of it. Errors: `UnknownName`."""
        if name not in self.names:
            raise UnknownName(f"key of {self.name}", name, self.names)
        return self.keys[self.names[name]]


def dialect(
    name: str,
    title: str,
    *,
    scorer: str,
    read: str,
    checked: str,
    keys: Sequence[Key],
    options: Mapping[str, Option] | None = None,
    note: str = "",
) -> Dialect:
    """A dialect of these keys, with the common options."""
    table = {key.name: key for key in keys}
    names = {spelling: key.name for key in keys for spelling in (key.name, *key.also)}
    return Dialect(name, title, read, checked, table, {**(options or {}), **common(scorer)}, note, names)
