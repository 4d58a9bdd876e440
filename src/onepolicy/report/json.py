"""A report as JSON and back, lossless: judged again, merged or drawn later without a rerun.

`{"onepolicy_report": 1, ...}`; the rest are the fields of `types.Report`. NaN and infinities are never numbers here:
they are `{"float": "nan"}`, `{"float": "inf"}`, `{"float": "-inf"}`. Integers of the Sums are decimal strings.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

import numpy as np

from onepolicy.codes import CODES
from onepolicy.errors import ContentError
from onepolicy.sums import Sums
from onepolicy.types import Finding, Floor, Gate, LegResult, Listing, Measurement, Outcome, Report
from onepolicy.views import VIEWS

FORMAT = 1
_KIND = "onepolicy_report"


def to_json(report: Report) -> str:
    """The report as JSON text. Equal reports give equal text. Sums stand on one line each: nobody reads them."""
    legs = ",\n".join(f'{_opened(leg)},\n "sums": {_line(leg.sums)}\n}}' for leg in report.legs)
    return f'{_opened(report, **{_KIND: FORMAT})},\n "legs": [{legs}],\n "sums": {_line(report.sums.to_dict())}\n}}'


def _opened(noun: Report | LegResult, **first: Any) -> str:
    """All but the sums and the legs, line by line; the brace is left open."""
    fields = {f.name: getattr(noun, f.name) for f in dataclasses.fields(noun) if f.name not in ("sums", "legs")}
    return json.dumps({**first, **encoded(fields)}, ensure_ascii=True, allow_nan=False, indent=1).removesuffix("\n}")


def _line(sums: Mapping[str, Any] | None) -> str:
    return json.dumps(encoded(sums), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def encoded(value: Any) -> Any:
    """`value` in the types of JSON; NaN and infinities are tagged."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encoded(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): encoded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [encoded(v) for v in value]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.generic):
        return encoded(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def from_json(text: str) -> Report:
    """The report that `to_json` wrote. Errors: `ContentError`, one line, for anything else."""
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as err:
        raise ContentError(f"not a saved report: not JSON: {err}") from None
    if not isinstance(data, dict) or _KIND not in data:
        raise ContentError(f"not a saved report: no key {_KIND!r}; wanted a file that `check -o` wrote")
    if data[_KIND] != FORMAT:
        raise ContentError(f"this report has format {data[_KIND]!r}; this version reads {FORMAT}")
    if not isinstance(data.get("sums"), dict):
        raise ContentError("not a saved report: it has no sums")
    data = _ABSENT | data
    fields = {name: _decoded(hint, data.get(name), name) for name, hint in _FIELDS.items()}
    for found in fields["findings"]:
        if found.code not in CODES:
            raise ContentError(f"this report has a finding {found.code!r}, which this version does not know")
    for i, leg in enumerate(fields["legs"]):
        if leg.sums is not None:
            _sums(leg.sums, f"legs[{i}].sums")
    return Report(sums=_sums(data["sums"], "sums"), **fields)


def _sums(data: Mapping[str, Any], where: str) -> Sums:
    try:
        sums = Sums.from_dict(data)
    except ContentError as err:
        raise ContentError(f"not a saved report: {where}: {err}") from None
    _scalar(typing.Literal, VIEWS, sums.view, f"{where}.view")
    return sums


_FIELDS: dict[str, Any] = {
    "outcome": Outcome,
    "preset": str,
    "findings": tuple[Finding, ...],
    "measurements": Mapping[str, Measurement],
    "fingerprints": Mapping[str, Mapping[str, Any]],
    "gates": tuple[Gate, ...],
    "reply_length": int | None,
    "context": Mapping[str, Any],
    "legs": tuple[LegResult, ...],
    "floor": Floor | None,
    "listings": tuple[Listing, ...],
}
#: What a report had before these fields did.
_ABSENT: dict[str, Any] = {"legs": [], "floor": None, "listings": []}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def _decoded(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type that `hint` describes. Errors: `ContentError` with the place."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _plain(value)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _decoded(args[0], value, where)
    if origin is tuple:
        return _tuple(args, value, where)
    if origin is not None and origin is not typing.Literal:  # a mapping
        items = _wanted(dict, value, where).items()
        return {k: _decoded(args[1], v, f"{where}.{k}") for k, v in items}
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        given, hints = _wanted(dict, value, where), typing.get_type_hints(hint)
        return hint(**{name: _decoded(h, given.get(name), f"{where}.{name}") for name, h in hints.items()})
    return _scalar(hint, args, value, where)


def _tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    items = _wanted(list, value, where)
    hints = [args[0]] * len(items) if args[-1] is ... else list(args)
    if len(hints) != len(items):
        raise ContentError(f"not a saved report: {where} has {len(items)} values, wanted {len(hints)}")
    return tuple(_decoded(h, v, f"{where}[{i}]") for i, (h, v) in enumerate(zip(hints, items, strict=True)))


def _scalar(hint: Any, args: tuple[Any, ...], value: Any, where: str) -> Any:
    if args:  # a Literal
        if value not in args:
            raise ContentError(f"not a saved report: {where} is {value!r}, wanted one of {', '.join(map(str, args))}")
        return value
    if issubclass(hint, enum.Enum):
        return hint(_scalar(typing.Literal, tuple(m.value for m in hint), value, where))
    if hint is float:
        number = _plain(value)
        return float(_wanted((float, int), number, where))
    return _wanted(hint, value, where)


def _wanted(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        names = kind.__name__ if isinstance(kind, type) else "number"
        raise ContentError(f"not a saved report: {where} is a {type(value).__name__}, wanted a {names}")
    return value


def _plain(value: Any) -> Any:
    """JSON's own types, with tagged floats read back."""
    if isinstance(value, dict):
        if value.keys() == {"float"} and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list) else value
