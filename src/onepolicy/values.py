"""Python values to flat columns in the contract's dtypes: strict, with the place of the first value that is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy import schema
from onepolicy.errors import ContentError
from onepolicy.types import Values

_INTEGERS: dict[str, type[np.signedinteger[Any]]] = {"int32": np.int32, "int64": np.int64}
#: JSON has no infinity and no NaN, so they also come as text; keys are lower case.
_NONFINITE = {
    "nan": float("nan"),
    **dict.fromkeys(("inf", "+inf", "infinity", "+infinity"), float("inf")),
    **dict.fromkeys(("-inf", "-infinity"), float("-inf")),
}
_WANTED = {
    "bool": "true or false (or 1, 0)",
    "string": "text",
    "int32": "a whole number in 32 bits",
    "int64": "a whole number in 64 bits",
}


class BadValue(ContentError):
    """A value that a column cannot hold; `index` is its place among the values given, `reason` got and wanted."""

    def __init__(self, name: str, index: int, reason: str) -> None:
        super().__init__(f"column {name!r}, value {index}: {reason}")
        self.index, self.reason = index, reason


def quoted(x: object, limit: int = 60) -> str:
    """`x` as shown in a message: on one line, cut to about `limit` characters."""
    x = _plain(x)
    text = repr(x) if not isinstance(x, (str, bytes)) or len(x) <= limit else repr(x[:limit])[:-1] + "..."
    text = " ".join(text.split())
    return text if len(text) <= limit + 10 else text[:limit] + "..."


def listed(names: Iterable[object], limit: int = 12) -> str:
    """Names joined by commas for a message, the first `limit` of them, each as `quoted` shows it without its quotes."""
    shown = [quoted(str(name), 40).strip("'\"") for name in names]
    return ", ".join(shown[:limit]) + (f" and {len(shown) - limit} more" if len(shown) > limit else "")


def json_text(what: str, x: object) -> str:
    """`x` as JSON; NaN and the infinities as Python writes them. Errors: `ContentError` for what JSON cannot hold."""
    try:
        return json.dumps(x)
    except (TypeError, ValueError, RecursionError) as err:
        raise ContentError(f"{what}: cannot be stored as JSON: {' '.join(str(err).split())}") from None


def column_values(name: str, items: Sequence[Any]) -> Values:
    """A flat column `[N]` from Python values (None is null), in the contract's dtype; floats at full precision.

    Whole floats are read as integers, 0 and 1 as booleans, integers as text, "NaN", "Infinity", "-inf" as floats.
    Errors: `BadValue` for the first value that the column cannot hold.
    """
    spec = schema.column(name)
    assert spec is not None, name
    return typed_values(name, items, spec.dtype)


def typed_values(name: str, items: Sequence[Any], dtype: schema.Dtype) -> Values:
    """`column_values` for a given dtype; `name` is for messages only."""
    kinds: set[type] = set(map(type, items))
    if any(issubclass(kind, np.generic) for kind in kinds):
        items = [_plain(x) for x in items]
        kinds = set(map(type, items))
    has_null = type(None) in kinds
    kinds.discard(type(None))
    valid = np.fromiter((x is not None for x in items), dtype=bool, count=len(items)) if has_null else None
    if dtype == "json":
        return Values(_objects(items), valid)
    if dtype == "string":
        plain = kinds <= {str}
        return Values(_objects(items if plain else [_text(name, i, x) for i, x in enumerate(items)]), valid)
    filled = [0 if x is None else x for x in items] if has_null else items
    convert = {"bool": _bools, "int32": _integers, "int64": _integers}.get(dtype, _floats)
    return Values(convert(name, filled, dtype, kinds), valid)


def _plain(x: Any) -> Any:
    return x.item() if isinstance(x, np.generic) else x  # pyright: ignore[reportUnknownVariableType]


def _objects(items: Sequence[Any]) -> NDArray[Any]:
    """`[N]` of dtype object; assigning a list of equally long lists would make numpy see a matrix."""
    return np.fromiter(items, dtype=object, count=len(items))


def _text(name: str, index: int, x: Any) -> str | None:
    """Ids are often whole numbers in the file; anything else that is not text is refused."""
    if x is None or isinstance(x, str):
        return x
    if isinstance(x, int) and not isinstance(x, bool):
        return str(x)
    raise BadValue(name, index, f"got {quoted(x)}, wanted {_WANTED['string']}")


def _bools(name: str, items: Sequence[Any], dtype: str, kinds: set[type]) -> NDArray[Any]:
    if not kinds <= {bool}:
        for i, x in enumerate(items):
            if not (isinstance(x, (bool, int, float)) and x in (0, 1)):
                raise BadValue(name, i, f"got {quoted(x)}, wanted {_WANTED['bool']}")
    return np.asarray(items, dtype=bool)


def _integers(name: str, items: Sequence[Any], dtype: str, kinds: set[type]) -> NDArray[Any]:
    """`[N]` int32 or int64. The fast path is for plain integers that fit; the slow one finds what does not."""
    least, most = np.iinfo(_INTEGERS[dtype]).min, np.iinfo(_INTEGERS[dtype]).max
    if kinds <= {int}:
        try:
            wide = np.asarray(items, dtype=np.int64)  # numpy 1 wraps around where numpy 2 refuses, but not in 64 bits
        except OverflowError:
            wide = None
        if wide is not None and not ((wide < least) | (wide > most)).any():
            return wide.astype(_INTEGERS[dtype])
    for i, x in enumerate(items):
        whole = isinstance(x, int) or (isinstance(x, float) and x.is_integer())
        if not whole or isinstance(x, bool) or not least <= x <= most:
            raise BadValue(name, i, f"got {quoted(x)}, wanted {_WANTED[dtype]}")
    return np.asarray([int(x) for x in items], dtype=_INTEGERS[dtype])


def _floats(name: str, items: Sequence[Any], dtype: str, kinds: set[type]) -> NDArray[Any]:
    """`[N]` float64, float32 where the contract says so. numpy would read any text as a number, so it sees none."""
    if not kinds <= {float, int}:
        items = [_float(name, i, x) for i, x in enumerate(items)]
    try:
        return np.asarray(items, dtype=np.float32 if dtype == "float32" else np.float64)
    except OverflowError:
        i = next(i for i, x in enumerate(items) if isinstance(x, int) and abs(x) > 1e308)
        raise BadValue(name, i, f"got {quoted(items[i])}, wanted a number that fits a double") from None


def _float(name: str, index: int, x: Any) -> float | int:
    if isinstance(x, str) and x.lower() in _NONFINITE:
        return _NONFINITE[x.lower()]
    if isinstance(x, bool) or not isinstance(x, (float, int)):
        raise BadValue(name, index, f'got {quoted(x)}, wanted a number, null, "NaN", "Infinity" or "-Infinity"')
    return x
