"""One Arrow record batch to `Rollouts`: whole columns at a time, no Python loop over tokens.

Any Arrow spelling of a column is read (large lists, fixed-size lists, dictionaries, int64 ids, half floats), and
narrowed to the contract's dtype only if no value changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy import schema
from onepolicy.declared import Header, scorings_of
from onepolicy.errors import ContentError
from onepolicy.records import length_problem, settled_drawn
from onepolicy.rollouts import Rollouts
from onepolicy.types import BoolArray, IntArray, Lists, Values
from onepolicy.values import BadValue, quoted

_WANTED = {
    "bool": "booleans",
    "int32": "whole numbers of 32 bits",
    "int64": "whole numbers of 64 bits",
    "string": "text",
    "json": "JSON text",
}


@dataclass(frozen=True, slots=True)
class _Rows:
    """The sequences of a batch: `offsets` `[S + 1]` of `token_ids`, how to name one, how many tokens were drawn."""

    offsets: IntArray
    where: Callable[[int], str]
    n_drawn: Callable[[int], int]

    def fitted(self, name: str, lengths: IntArray, present: BoolArray) -> None:
        """Errors: `ContentError` for a list that is not as long as the sequence; a null list is all null."""
        bad = np.flatnonzero(present & (lengths != np.diff(self.offsets)))
        if len(bad):
            i = int(bad[0])
            wanted = int(self.offsets[i + 1] - self.offsets[i])
            raise ContentError(f"{self.where(i)}: {length_problem(name, int(lengths[i]), wanted, self.n_drawn(i))}")


def rollouts_of(pa: Any, batch: Any, header: Header, first: int) -> Rollouts:
    """The batch's sequences. `first`: number of records before it in the file, for messages.

    Errors: `ContentError` for a column of the wrong type, a value out of range, lengths that differ.
    """
    arrays = {name: _decoded(pa, batch.column(i)) for i, name in enumerate(batch.schema.names)}
    levels = {name: spec.level for name in arrays if (spec := schema.column(name))}
    where = _labels(arrays.get("record_id"), first)
    records = {n: _record_column(pa, n, arrays[n], where) for n, level in levels.items() if level == "record"}
    offsets, ids = _token_ids(pa, arrays["token_ids"], where)
    rows = _Rows(offsets, where, lambda i: -1)
    given = _token_column(pa, "drawn", arrays["drawn"], rows) if "drawn" in arrays else None
    drawn = settled_drawn(given, records.get("prompt_length"), offsets)
    rows = _Rows(offsets, where, lambda i: int(drawn.values[offsets[i] : offsets[i + 1]].sum()))
    done = ("token_ids", "drawn")
    others = [n for n, level in levels.items() if level == "token" and n not in done]
    columns = {"token_ids": ids, "drawn": drawn} | {n: _token_column(pa, n, arrays[n], rows) for n in others}
    return Rollouts(
        offsets,
        {n: col for n, col in columns.items() if not schema.scoring_column(n)},
        records,
        {n: _list_column(pa, n, arrays[n], rows) for n, level in levels.items() if level.endswith("_list")},
        scorings_of(columns, header, int(offsets[-1])),
    )


def _labels(record_id: Any, first: int) -> Callable[[int], str]:
    def where(i: int) -> str:
        recorded = None if record_id is None else record_id[i].as_py()
        return f"record {first + i + 1}" + ("" if recorded is None else f" ({quoted(recorded)})")

    return where


def _decoded(pa: Any, array: Any) -> Any:
    """Without dictionaries, extension types and list views, also inside lists."""
    kind = _plain_type(pa, array.type)
    return array if kind == array.type else array.cast(kind)


def _plain_type(pa: Any, kind: Any) -> Any:
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(pa, kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _plain_type(pa, kind.value_type)
    if _is_list(pa, kind):
        return pa.large_list(_plain_type(pa, kind.value_type))
    return kind


def _is_list(pa: Any, kind: Any) -> bool:
    names = ("is_list", "is_large_list", "is_fixed_size_list", "is_list_view", "is_large_list_view")
    return any(getattr(pa.types, name)(kind) for name in names if hasattr(pa.types, name))


def _opened(pa: Any, name: str, array: Any, wanted: str) -> tuple[IntArray, BoolArray, Any]:
    """`[N]` lengths (0 where null), `[N]` which rows are not null, and the values of those rows as one flat array."""
    if pa.types.is_null(array.type):
        n = len(array)
        return np.zeros(n, dtype=np.int64), np.zeros(n, dtype=bool), pa.nulls(0)
    if not _is_list(pa, array.type):
        raise ContentError(f"column {name!r} is {array.type}, wanted {wanted}")
    present = array.is_valid().to_numpy(zero_copy_only=False)
    lengths = np.diff(array.offsets.to_numpy(zero_copy_only=False)).astype(np.int64)
    return np.where(present, lengths, 0), present, array.flatten()


def _token_ids(pa: Any, array: Any, where: Callable[[int], str]) -> tuple[IntArray, Values]:
    lengths, present, child = _opened(pa, "token_ids", array, f"a list of {_WANTED['int32']}")
    if not present.all():
        raise ContentError(f"{where(int((~present).argmax()))}: column 'token_ids' is null, which it never is")
    offsets = _offsets(lengths)
    return offsets, _located(pa, "token_ids", child, offsets, where)


def _offsets(lengths: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _record_column(pa: Any, name: str, array: Any, where: Callable[[int], str]) -> Values:
    try:
        return _typed(pa, name, array)
    except BadValue as err:
        raise ContentError(f"{where(err.index)}: column {name!r}: {err.reason}") from None


def _token_column(pa: Any, name: str, array: Any, rows: _Rows) -> Values:
    lengths, present, child = _opened(pa, name, array, f"a list of {_wanted(name)}")
    rows.fitted(name, lengths, present)
    col = _located(pa, name, child, _offsets(lengths), rows.where)
    if name == "drawn" and col.valid is not None and len(col.valid):
        _refuse_null(name, col.valid, _offsets(lengths), rows.where)
    return col if present.all() else _spread(col, np.repeat(present, np.diff(rows.offsets)))


def _refuse_null(name: str, valid: BoolArray, offsets: IntArray, where: Callable[[int], str]) -> None:
    at = int((~valid).argmax())
    i = int(np.searchsorted(offsets, at, side="right")) - 1
    raise ContentError(f"{where(i)}: column {name!r}, position {at - int(offsets[i])}: got null, which it never is")


def _spread(col: Values, scored: BoolArray) -> Values:
    """The values at the True places of `scored`, null elsewhere."""
    values = np.zeros(len(scored), dtype=col.values.dtype)
    valid = np.zeros(len(scored), dtype=bool)
    values[scored], valid[scored] = col.values, col.mask()
    return Values(values, valid)


def _list_column(pa: Any, name: str, array: Any, rows: _Rows) -> Lists:
    """CSR: of the rows for a record list, of the tokens for a token list."""
    of_tokens = schema.COLUMNS[name].level == "token_list"
    owner = np.arange(len(rows.offsets) - 1)
    kept = np.ones(len(owner), dtype=bool)
    if of_tokens:
        lengths, present, array = _opened(pa, name, array, f"a list of lists of {_wanted(name)}")
        rows.fitted(name, lengths, present)
        owner, kept = np.repeat(owner, np.diff(rows.offsets)), np.repeat(present, np.diff(rows.offsets))
    inner, not_null, child = _opened(pa, name, array, f"a list of {'lists of ' * of_tokens}{_wanted(name)}")
    lengths, valid = np.zeros(len(owner), dtype=np.int64), np.zeros(len(owner), dtype=bool)
    lengths[kept], valid[kept] = inner, not_null
    offsets = _offsets(lengths)
    where = lambda k: rows.where(int(owner[k]))
    col = _located(pa, name, child, offsets, where)
    if col.valid is not None and len(col.valid):
        _refuse_null(name, col.valid, offsets, where)
    return Lists(col.values, offsets, None if bool(valid.all()) else valid)


def _located(pa: Any, name: str, child: Any, offsets: IntArray, where: Callable[[int], str]) -> Values:
    try:
        return _typed(pa, name, child)
    except BadValue as err:
        i = int(np.searchsorted(offsets, err.index, side="right")) - 1
        place = f"position {err.index - int(offsets[i])}"
        raise ContentError(f"{where(i)}: column {name!r}, {place}: {err.reason}") from None


def _wanted(name: str) -> str:
    spec = schema.column(name)
    assert spec is not None
    return _WANTED.get(spec.dtype, "floats")


def _typed(pa: Any, name: str, array: Any) -> Values:
    """A flat Arrow array in the contract's dtype. Errors: `ContentError` for the type, `BadValue` for a value."""
    spec = schema.column(name)
    assert spec is not None
    kind, types = array.type, pa.types
    if spec.dtype == "json":
        return _json(pa, name, array)
    if spec.dtype == "string":
        if types.is_integer(kind) or types.is_null(kind):
            array = array.cast(pa.string())
        elif not _is_text(pa, kind):
            raise ContentError(f"column {name!r} is {kind}, wanted {_wanted(name)}")
        return Values(array.to_numpy(zero_copy_only=False).astype(object), _validity(array))
    if types.is_null(kind):
        dtype = {"bool": np.bool_, "int32": np.int32, "int64": np.int64}.get(spec.dtype, np.float64)
        return Values(np.zeros(len(array), dtype=dtype), np.zeros(len(array), dtype=bool))
    values, valid = _numbers(pa, array, name), _validity(array)
    narrow = {"bool": _bools, "int32": _integers, "int64": _integers}.get(spec.dtype, _floats)
    return Values(narrow(name, values, valid, spec.dtype), valid)


def _is_text(pa: Any, kind: Any) -> bool:
    view = getattr(pa.types, "is_string_view", lambda kind: False)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or view(kind)


def _validity(array: Any) -> BoolArray | None:
    return None if array.null_count == 0 else array.is_valid().to_numpy(zero_copy_only=False)


def _numbers(pa: Any, array: Any, name: str) -> NDArray[Any]:
    """A writable copy with 0 under every null."""
    if not (pa.types.is_boolean(array.type) or pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        raise ContentError(f"column {name!r} is {array.type}, wanted {_wanted(name)}")
    if pa.types.is_float16(array.type):  # Arrow fills no half floats, but their bits
        bits = array.view(pa.int16())
        return np.array(bits.fill_null(0).to_numpy(zero_copy_only=False)).view(np.float16)
    zero = False if pa.types.is_boolean(array.type) else 0
    return np.array(array.fill_null(zero).to_numpy(zero_copy_only=False))


def _bools(name: str, values: NDArray[Any], valid: BoolArray | None, dtype: str) -> NDArray[Any]:
    if values.dtype == bool:
        return values
    bad = (values != 0) & (values != 1)
    if bad.any():
        at = int(bad.argmax())
        raise BadValue(name, at, f"got {quoted(values[at])}, wanted true or false (or 1, 0)")
    return values.astype(bool)


def _integers(name: str, values: NDArray[Any], valid: BoolArray | None, dtype: str) -> NDArray[Any]:
    if values.dtype.kind not in "iu":
        raise ContentError(f"column {name!r} holds {values.dtype} values, wanted {_WANTED[dtype]}")
    limits = np.iinfo(np.int32 if dtype == "int32" else np.int64)
    if not np.can_cast(values.dtype, limits.dtype):
        bad = (values < limits.min) | (values > limits.max)
        if bad.any():
            at = int(bad.argmax())
            raise BadValue(name, at, f"got {quoted(values[at])}, wanted a whole number in {limits.bits} bits")
    if name == "token_ids" and valid is not None:
        raise BadValue(name, int((~valid).argmax()), "got null, which it never is")
    return values.astype(limits.dtype, copy=False)


def _floats(name: str, values: NDArray[Any], valid: BoolArray | None, dtype: str) -> NDArray[Any]:
    if values.dtype.kind == "b":
        raise ContentError(f"column {name!r} holds booleans, wanted floats")
    if dtype == "float64" or values.dtype.kind in "iu":
        return values.astype(np.float64)
    return values.astype(np.float32) if values.dtype == np.float16 else values


def _json(pa: Any, name: str, array: Any) -> Values:
    """JSON text is parsed; structs and lists, as other writers have them, become dicts and lists."""
    items = array.to_pylist()
    if _is_text(pa, array.type):
        for i, text in enumerate(items):
            try:
                items[i] = None if text is None else json.loads(text)
            except (ValueError, RecursionError):
                raise BadValue(name, i, f"got {quoted(text)}, wanted JSON text") from None
    elif not (pa.types.is_null(array.type) or pa.types.is_nested(array.type)):
        raise ContentError(f"column {name!r} is {array.type}, wanted {_WANTED['json']}")
    return Values(np.fromiter(items, dtype=object, count=len(items)), _validity(array))
