"""One record of a dump with typed getters: each says which key is wrong, where, and what was wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from onepolicy.formats.base import Layout, RawColumn, flags, floats
from onepolicy.values import quoted

_T = TypeVar("_T")
_INT64 = 1 << 63


class Row:
    """A mapping. A key that is absent or null gives None; a value of the wrong type raises `ValueError`."""

    def __init__(self, row: Any) -> None:
        if not isinstance(row, Mapping):
            raise ValueError(f"got {quoted(cast(object, row))}, wanted an object with one sequence")
        self.row = cast(Mapping[str, Any], row)

    def __contains__(self, key: str) -> bool:
        return self.row.get(key) is not None

    def get(self, key: str) -> Any:
        return self.row.get(key)

    def first(self, *keys: str) -> str:
        """The first of the keys that is not null; the first one if none is."""
        return next((key for key in keys if self.row.get(key) is not None), keys[0])

    def list(self, key: str) -> list[Any] | None:
        x = self.row.get(key)
        if x is None:
            return None
        if isinstance(x, np.ndarray):
            x = cast(Any, x).tolist()
        if not isinstance(x, list):
            raise ValueError(f"{key!r}: got {quoted(x)}, wanted a list")
        return cast(list[Any], x)

    def ids(self, key: str) -> NDArray[np.int64] | None:
        """`[T]` token ids."""
        x = self.list(key)
        return None if x is None else _named(key, lambda: ids_of(x))

    def floats(self, key: str, layout: Layout, at_zero: bool = True) -> RawColumn | None:
        x = self.list(key)
        return None if x is None else _named(key, lambda: floats(x, layout, at_zero))

    def flags(self, key: str, layout: Layout) -> RawColumn | None:
        x = self.list(key)
        return None if x is None else _named(key, lambda: flags(x, layout))

    def lists(self, key: str, most: int = 1 << 31) -> list[Any] | None:
        """A list a token, None where null; inner lists of any depth are flattened. `most`: an id is below it."""
        x = self.list(key)
        return None if x is None else _named(key, lambda: [None if c is None else inner(c, most) for c in x])

    def whole(self, key: str, bits: int = 64) -> int | None:
        x = self.row.get(key)
        if isinstance(x, float) and x.is_integer() and abs(x) < 2**53:
            x = int(x)
        if x is None:
            return None
        if type(x) is not int or not -(1 << (bits - 1)) <= x < 1 << (bits - 1):
            raise ValueError(f"{key!r}: got {quoted(x)}, wanted a whole number")
        return x

    def number(self, key: str) -> float | None:
        x = self.row.get(key)
        return None if x is None else _named(key, lambda: float(floats([x], "whole").values[0]))

    def text(self, key: str) -> str | None:
        x = self.row.get(key)
        if x is None:
            return None
        if not isinstance(x, str):
            raise ValueError(f"{key!r}: got {quoted(x)}, wanted text")
        return unicode(key, x)

    def name(self, key: str) -> str | None:
        """Text, or a number as text: groups and samples are named by either."""
        x = self.row.get(key)
        if type(x) is int or isinstance(x, float):
            return str(x)
        return self.text(key)

    def object(self, key: str) -> Row | None:
        x = self.row.get(key)
        return None if x is None else _named(key, lambda: Row(x))

    def objects(self, key: str) -> list[Row]:
        return [_named(f"{key}[{i}]", lambda x=x: Row(x)) for i, x in enumerate(self.list(key) or ())]


def _named(key: str, do: Callable[[], _T]) -> _T:
    try:
        return do()
    except (ValueError, TypeError, OverflowError) as err:
        text = str(err)
        raise ValueError(text if text.startswith("'") else f"{key!r}: {text}") from None


def unicode(key: str, text: str) -> str:
    """Errors: `ValueError` for half of a surrogate pair, which nothing can store."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{key!r}: half of a surrogate pair stands in the text, so it is not Unicode") from None
    return text


def ids_of(values: Sequence[Any]) -> NDArray[np.int64]:
    """`[T]`. Errors: `ValueError` for what is no integer of 64 bits, with its position."""
    if set(map(type, values)) <= {int}:
        try:
            return np.array(values, dtype=np.int64)
        except OverflowError:
            pass
    for i, x in enumerate(values):
        if type(x) is not int or not -_INT64 <= x < _INT64:
            raise ValueError(f"position {i}: got {quoted(x)}, wanted a token id")
    return np.array(values, dtype=np.int64)


def inner(x: Any, most: int) -> NDArray[np.int32]:
    """`[n]` int32 of a list of whole numbers, nested or not. Errors: `ValueError`."""
    array: NDArray[Any] = np.array(x) if not isinstance(x, np.ndarray) else cast(NDArray[Any], x)
    if array.size == 0:
        return np.zeros(0, dtype=np.int32)
    if array.dtype.kind not in "iu" or int(array.min()) < -1 or int(array.max()) >= most:
        raise ValueError(f"got {quoted(x)}, wanted lists of whole numbers")
    return array.reshape(-1).astype(np.int32)


def drawn_by(mask: RawColumn | None, sampler: RawColumn | None) -> NDArray[np.bool_] | None:
    """`[T]`: the token is trained on, or its engine log-prob is neither null nor the exact 0.0 that frameworks put
    where nothing was sampled. None where the two cannot be compared."""
    if mask is None or sampler is None or len(mask.values) != len(sampler.values):
        return None
    sampled = sampler.values != 0.0
    return mask.values | (sampled if sampler.valid is None else sampled & sampler.valid)


def unfilled(sampler: RawColumn, drawn: NDArray[np.bool_]) -> RawColumn:
    """The column with null where nothing was drawn and 0.0 stands: that format's filler, no log-prob."""
    filler = ~drawn & (sampler.values == 0.0)
    if not filler.any():
        return sampler
    valid = ~filler if sampler.valid is None else sampler.valid & ~filler
    return RawColumn(sampler.values, sampler.layout, valid, sampler.at_zero)


def prompt_of(drawn: NDArray[np.bool_]) -> int:
    """Tokens before the first that was drawn."""
    at = int(drawn.argmax()) if len(drawn) else 0
    return at if len(drawn) and drawn[at] else len(drawn)


def present(**columns: RawColumn | None) -> dict[str, RawColumn]:
    """Those that are there."""
    return {name: column for name, column in columns.items() if column is not None}


def joined(prompt: NDArray[Any] | None, reply: NDArray[Any]) -> NDArray[Any]:
    return reply if prompt is None else np.concatenate([prompt, reply])
