"""Presets: what each framework applies, under its own option names, as data (`presets/*.toml`) made a `Composition`.

A file says framework, version, date, the origin's file and how the presets were checked. A preset has `options` (the
framework's names and defaults), stages of our corrections, and `note`: what the origin does otherwise. Its known bugs
are told there and not copied; where a stage has `like_origin`, `preset(name, like_origin=True)` copies them on purpose.
A stage's value is plain, or "$option" (its value), "$option.low" and ".high" (of "0.5_2.0", [0.5, 2.0], or u for 1 / u
to u), ".over_low", ".over_high" (1 over these), ".minus". "none" is no bound. `when` lists options that must be set,
or "$option=word": else the stage is left out.
"""

from __future__ import annotations

import datetime
import math
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from onepolicy.corrections.composition import Composition, as_stage
from onepolicy.corrections.correction import Correct
from onepolicy.errors import UnknownName, UsageError

FILES: dict[str, str] = {
    "verl": "verl.toml",
    "trl": "trl.toml",
    "nemo_rl": "nemo_rl.toml",
    "slime": "slime.toml",
    "openrlhf": "openrlhf.toml",
    "prime_rl": "prime_rl.toml",
    "areal": "areal.toml",
    "skyrl": "skyrl.toml",
    "roll": "roll.toml",
    "swift": "swift.toml",
    "open_instruct": "open_instruct.toml",
    "tunix": "tunix.toml",
}


@cache
def tables() -> dict[str, dict[str, Any]]:
    """`framework:name` -> its table, with what the file says of all of them."""
    out: dict[str, dict[str, Any]] = {}
    for framework, file in FILES.items():
        data = tomllib.loads((resources.files("onepolicy.corrections") / "presets" / file).read_text(encoding="utf-8"))
        shared = {k: v for k, v in data.items() if k != "preset"}
        for name, table in data["preset"].items():
            notes = [x.strip() for x in (table.get("note", ""), shared.get("note", "")) if x]
            out[f"{framework}:{name}"] = {**shared, **table, "note": " ".join(notes)}
    return out


def build(
    name: str, options: Mapping[str, Any], known: Mapping[str, Correct], like_origin: bool = False
) -> Composition:
    """The preset of that name with these options. Errors: `UnknownName`, `UsageError`."""
    if name not in tables():
        raise UnknownName("correction preset", name, tables())
    table = tables()[name]
    for key in options:
        if key not in table.get("options", {}):
            raise UnknownName(f"option of {name}", key, table.get("options", {}))
    for key, value in options.items():
        _check(key, value, table, name)
    chosen = {k: _none(v) for k, v in {**table.get("options", {}), **options}.items()}
    stages = [_resolved(x, chosen, like_origin, name) for x in table["stage"] if _wanted(x, chosen)]
    date = table["date"]
    return Composition(
        tuple(as_stage(x, known) for x in stages),
        table.get("sees", "kept"),
        table.get("denominator", "all"),
        table.get("mode", ""),
        table.get("behind", "sampler"),
        name,
        f"{table['framework']} {table['version']}, {table['file']}",
        date.isoformat() if isinstance(date, datetime.date) else str(date),
        table["note"],
        chosen,
    )


def _check(key: str, value: Any, table: Mapping[str, Any], name: str) -> None:
    """Also of options that no stage looks at as things stand: a mode with a typing mistake would correct nothing."""
    default = table["options"][key]
    conditions = (c.removeprefix("$").partition("=") for stage in table["stage"] for c in stage.get("when", ()))
    words = {word for option, _, word in conditions if option == key and word}
    if words:
        if str(value) not in words and not (_none(value) is None and _none(default) is None):
            raise UnknownName(f"{key} of {name}", str(value), words)
    elif isinstance(default, bool):
        if not isinstance(value, bool):
            raise UsageError(f"{name}: {key}={value!r}, wanted True or False")
    elif _none(value) is not None:
        parts = value.split("_") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
        if not all(isinstance(n := _number(p, key, name), (int, float)) and not math.isnan(n) for p in parts):
            raise UsageError(f"{name}: {key}={value!r}, wanted a number")


def _none(x: Any) -> Any:
    return None if isinstance(x, str) and x == "none" else x


def _wanted(stage: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    for condition in stage.get("when", ()):
        key, _, word = condition.removeprefix("$").partition("=")
        value = options[key]
        if (word and str(value) != word) or (not word and value in (None, False)):
            return False
    return True


def _resolved(stage: Mapping[str, Any], options: Mapping[str, Any], like_origin: bool, name: str) -> dict[str, Any]:
    table = {k: v for k, v in stage.items() if k not in ("when", "like_origin")}
    if like_origin:
        table.update(stage.get("like_origin", {}))
    return {k: _value(v, options, name) for k, v in table.items()}


def _value(value: Any, options: Mapping[str, Any], name: str) -> Any:
    if not isinstance(value, str) or not value.startswith("$"):
        return _none(value)
    key, _, part = value[1:].partition(".")
    given = options[key]
    if not part:
        return _number(given, key, name)
    if part == "minus":
        return None if given is None else -_number(given, key, name)
    low, high = _band(given, key, name)
    return {"low": low, "high": high, "over_low": 1 / low if low else None, "over_high": 1 / high}[part]


def _number(x: Any, key: str, name: str) -> Any:
    """A number, as number or text; None stays."""
    if x is None or (isinstance(x, (int, float)) and not isinstance(x, bool)):
        return x
    try:
        return float(x)
    except (TypeError, ValueError):
        raise UsageError(f"{name}: {key}={x!r}, wanted a number") from None


def _band(x: Any, key: str, name: str) -> tuple[float, float]:
    """(low, high) of "low_high", [low, high] or a number u: 1 / u to u."""
    parts = x.split("_") if isinstance(x, str) else x if isinstance(x, (list, tuple)) else [x]
    numbers = [_number(part, key, name) for part in parts]
    if len(numbers) not in (1, 2) or any(n is None or n < 0 for n in numbers) or not numbers[-1]:
        raise UsageError(f"{name}: {key}={x!r}, wanted 'low_high', [low, high] or one number above 0")
    return (1 / numbers[0], numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
