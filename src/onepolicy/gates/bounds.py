"""Bounds and presets: read from TOML, refused when they make no sense."""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal, cast

from onepolicy.errors import UnknownName, UsageError
from onepolicy.gates import PRESETS
from onepolicy.metrics import metric

#: Coarser last: the default preset is that of the coarser of the two declared dtypes.
DTYPES = ("float64", "float32", "float16", "bfloat16")
_TOP_KEYS = ("about", "dtype", "bound")
_DEFAULT = {"float64": "fp32", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound: `metric` (or its absolute value) at most `at_most`; `otherwise` stands in when it is not measured.

    `when`: `required` to pass; `if_measured`: judged where it is; `alarm`: it can only make drift, nothing hangs on it
    otherwise.
    """

    metric: str
    at_most: float
    when: Literal["required", "if_measured", "alarm"]
    source: str
    date: str
    otherwise: str | None = None
    absolute: bool = False
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Preset:
    """A named set of bounds. `dtype`: the precision it is meant for, empty for any."""

    name: str
    about: str
    dtype: str
    bounds: tuple[Bound, ...]


def joined(*presets: Preset) -> Preset:
    """All bounds of several presets as one; its name joins theirs by ` + `."""
    about = " ".join(p.about for p in presets)
    return Preset(" + ".join(p.name for p in presets), about, "", tuple(b for p in presets for b in p.bounds))


def load(name: str) -> Preset:
    """The preset of that name, or the TOML file of the user's own bounds at that path; several joined by ` + `.

    Errors: `UnknownName` (did you mean), `UsageError` for a file that is no set of bounds.
    """
    if " + " in name:
        return joined(*(load(part) for part in name.split(" + ")))
    if name in PRESETS:
        text = (resources.files("onepolicy.gates") / "presets" / PRESETS[name]).read_text(encoding="utf-8")
        return parse(text, name)
    if name.endswith(".toml"):
        return parse(_read(Path(name)), name)
    raise UnknownName("preset", name, PRESETS)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise UsageError(f"bounds {str(path)!r} cannot be read: {err}") from None


def parse(text: str, name: str) -> Preset:
    """A preset from TOML text. Errors: `UsageError` naming the bound and what is wrong with it."""
    try:
        data: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        raise UsageError(f"bounds {name!r} are not TOML: {err}") from None
    tables: Any = data.get("bound", [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in cast(list[Any], tables)):
        raise UsageError(f"bounds {name!r}: 'bound' is no list of tables; each bound starts with [[bound]]")
    if not tables:
        raise UsageError(f"bounds {name!r} hold no [[bound]]; a preset without bounds would pass everything")
    for key in data:
        if key not in _TOP_KEYS:
            raise UsageError(f"bounds {name!r}: {UnknownName('key', key, _TOP_KEYS)}")
    bounds = tuple(_bound(table, f"{name}, bound {i}") for i, table in enumerate(cast(list[dict[str, Any]], tables), 1))
    return Preset(name, str(data.get("about", "")), str(data.get("dtype", "")), bounds)


def _bound(table: Mapping[str, Any], where: str) -> Bound:
    known = [f.name for f in fields(Bound)]
    for key in table:
        if key not in known:
            raise UsageError(f"{where}: {UnknownName('key', key, known)}")
    for key in ("metric", "at_most", "when", "source", "date"):
        if key not in table:
            raise UsageError(f"{where}: no {key!r}; every bound has metric, at_most, when, source and date")
    at_most = table["at_most"]
    if isinstance(at_most, bool) or not isinstance(at_most, (int, float)) or not 0 <= at_most < float("inf"):
        raise UsageError(f"{where}: at_most is {at_most!r}, wanted a number from 0 up")
    if table["when"] not in ("required", "if_measured", "alarm"):
        raise UsageError(f"{where}: when is {table['when']!r}, wanted 'required', 'if_measured' or 'alarm'")
    _refuse_kinds(table, where)
    names = [metric(table["metric"]).key, *([metric(table["otherwise"]).key] if "otherwise" in table else [])]
    if names[0] == "kl_sampler_scorer_k1/mean":
        raise UsageError(f"{where}: k1 may be negative and is never gated; use kl_sampler_scorer_k3/mean")
    date = table["date"]
    return Bound(
        names[0],
        float(at_most),
        table["when"],
        str(table["source"]),
        date.isoformat() if isinstance(date, datetime.date) else str(date),
        names[1] if len(names) > 1 else None,
        table.get("absolute", names[0].startswith("surprisal_")),
        table.get("min_tokens", 0),
    )


def _refuse_kinds(table: Mapping[str, Any], where: str) -> None:
    """Errors: `UsageError` for a name that is no text, and for options of another kind."""
    for key in ("metric", "otherwise"):
        if not isinstance(table.get(key, ""), str):
            raise UsageError(f"{where}: {key} is {table[key]!r}, wanted the name of a metric")
    least, absolute = table.get("min_tokens", 0), table.get("absolute", False)
    if isinstance(least, bool) or not isinstance(least, int) or least < 0:
        raise UsageError(f"{where}: min_tokens is {least!r}, wanted a whole number from 0 up")
    if not isinstance(absolute, bool):
        raise UsageError(f"{where}: absolute is {absolute!r}, wanted true or false")


def default_preset(dtypes: list[str | None]) -> str:
    """The preset for a pair of declared dtypes: that of the coarser. Errors: `UsageError` if one is not declared."""
    if any(d not in DTYPES for d in dtypes):
        raise UsageError(
            f"no default bounds for dtypes {dtypes}: both sides must declare one of {', '.join(DTYPES)}; "
            f"or pass --bounds ({', '.join(PRESETS)})"
        )
    return _DEFAULT[max((d for d in dtypes if d), key=DTYPES.index)]
