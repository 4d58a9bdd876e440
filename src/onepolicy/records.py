"""Rollouts from and to records: one JSON-able mapping a sequence, the form that people write by hand.

Keys are the names of `schema.COLUMNS` (and `<leg>_logprobs`, `<leg>_entropy`, `<leg>_varentropy`); token columns are
lists as long as `token_ids`. Two more keys describe the whole file; `to_records` writes them into the first record:

- `scorings`: `{name: {"semantics", "dtype", "fingerprint", "scoring_id"}}`, what is declared of each scoring;
- `float32`: names of the token columns that are held in single precision. JSON carries doubles, so a column that is
  not named is read as float64; either way no bit is lost.

They are read from any record and must agree. Keys that start with `x_` are the user's own and are left alone.

Missing is null or an absent key; for a token column that means null at every token. Non-finite numbers are written as
"NaN", "Infinity", "-Infinity" and read from those, from "inf" and "-inf", and from Python's own (bare `NaN`, as it is
written inside free JSON: `prompt_messages`, fingerprints). `drawn` that is not given is `position >= prompt_length`;
without that either, nothing is drawn. It is always written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from onepolicy import schema
from onepolicy.declared import Header, declarations, scorings_of
from onepolicy.errors import ContentError, UnknownName
from onepolicy.rollouts import Rollouts, scoring_extras
from onepolicy.types import BoolArray, IntArray, Lists, Values
from onepolicy.values import BadValue, quoted, typed_values

Record = Mapping[str, Any]
FIRST_IS_NULL = "token 0 has no context: a value stands at the index of its own token"
#: Keys of a record that speak of the whole file.
HEADER_KEYS = ("scorings", "float32")


# reading


def from_records(
    items: Iterable[Record], *, header: Header | None = None, places: Sequence[str] | None = None
) -> Rollouts:
    """Rollouts of the records, in order.

    `header` carries what earlier records of the same file declared, and is added to. `places`: where each record
    stands (`file:line`), for messages; else they are counted from 1.

    Errors: `ContentError` naming the record, for a key that the contract does not have (with the nearest one), a token
    column that is not exactly as long as `token_ids`, or a value that its column cannot hold.
    """
    rows = list(items)
    where = _labels(rows, places)
    header = Header() if header is None else header
    names = _read_keys(rows, header, where)
    offsets = _offsets(rows, where)
    records = {n: _record_column(n, rows, where) for n in names if _level(n) == "record"}
    columns = {n: _token_column(n, rows, offsets, where) for n in names if _level(n) == "token"}
    columns = {n: _narrowed(col) if n in header.float32 else col for n, col in columns.items()}
    columns["drawn"] = _drawn(rows, columns.get("drawn"), records.get("prompt_length"), offsets, where)
    columns.setdefault("token_ids", Values(np.zeros(0, dtype=np.int32)))
    return Rollouts(
        offsets,
        {n: col for n, col in columns.items() if n in schema.COLUMNS and not schema.scoring_column(n)},
        records,
        {n: _list_column(n, rows, offsets, where) for n in names if _level(n) in ("token_list", "record_list")},
        scorings_of(columns, header, int(offsets[-1])),
    )


def refuse_unknown(names: Iterable[Any]) -> None:
    """Errors: `ContentError` for a name that is neither a column nor the user's own (`x_...`)."""
    for name in names:
        if not isinstance(name, str) or not (schema.column(name) or name in HEADER_KEYS or name.startswith("x_")):
            unknown = UnknownName("column", str(name), (*schema.COLUMNS, *HEADER_KEYS))
            hint = f"did you mean {unknown.suggestion!r}?" if unknown.suggestion else "see docs/columns.md"
            raise ContentError(f"unknown column {quoted(name)}; {hint} (columns of your own start with x_)")


def length_problem(name: str, got: int, n_tokens: int, n_drawn: int) -> str:
    """What to say of a token column with `got` values where the sequence has `n_tokens`."""
    text = f"column {name!r}: too {'few' if got < n_tokens else 'many'} values: got {got}, wanted {n_tokens}"
    if schema.scoring_column(name) and got == n_tokens - 1:
        return f"{text}; the value of token 0 seems to be left out: index 0 is null, put a null first"
    if schema.scoring_column(name) and got == n_drawn:
        return f"{text}; {got} tokens are drawn: a value stands at its token's index, put null at the others"
    return f"{text}, one for each of token_ids"


def settled_drawn(given: Values | None, prompt_length: Values | None, offsets: IntArray) -> Values:
    """`[T]` bool without nulls: `given` where valid, else `position >= prompt_length`, else False."""
    lengths = np.diff(offsets)
    start = lengths if prompt_length is None else np.where(prompt_length.mask(), prompt_length.values, lengths)
    position = np.arange(int(offsets[-1])) - np.repeat(offsets[:-1], lengths)
    reply = position >= np.repeat(start, lengths)
    return Values(reply if given is None else np.where(given.mask(), given.values, reply))


def _labels(rows: Sequence[Any], places: Sequence[str] | None) -> Callable[[int], str]:
    def where(i: int) -> str:
        recorded: Any = cast(Record, rows[i]).get("record_id") if isinstance(rows[i], Mapping) else None
        place = f"record {i + 1}" if places is None else places[i]
        return place if recorded is None else f"{place}: record {quoted(recorded)}"

    return where


def _level(name: str) -> str:
    spec = schema.column(name)
    return spec.level if spec else ""


def _read_keys(rows: Sequence[Any], header: Header, where: Callable[[int], str]) -> list[str]:
    """All columns, in the order of first sight; declarations go into the header."""
    seen: dict[str, None] = {}
    for i, row in enumerate(rows):
        try:
            if not isinstance(row, Mapping):
                raise ContentError(f"got {quoted(row)}, wanted an object with the columns of one sequence")
            new = [name for name in cast(Record, row) if name not in seen]
            refuse_unknown(new)
            seen.update(dict.fromkeys(new))
            _read_declarations(cast(Record, row), header)
        except ContentError as err:
            raise ContentError(f"{where(i)}: {err}") from None
    return [name for name in seen if schema.column(name)]


def _read_declarations(row: Record, header: Header) -> None:
    if row.get("scorings") is not None:
        header.add(row["scorings"])
    single: Any = row.get("float32")
    if single is not None:
        if not isinstance(single, list) or not all(isinstance(x, str) for x in cast(list[Any], single)):
            raise ContentError(f"float32: got {quoted(cast(object, single))}, wanted a list of column names")
        refuse_unknown(cast(list[str], single))
        header.float32.update(cast(list[str], single))


def _narrowed(col: Values) -> Values:
    with np.errstate(over="ignore"):  # a double that is no single in a column said to be single: rounds, as said
        return Values(col.values.astype(np.float32), col.valid) if col.values.dtype == np.float64 else col


def _offsets(rows: Sequence[Record], where: Callable[[int], str]) -> IntArray:
    lengths: list[int] = []
    for i, row in enumerate(rows):
        if row.get("token_ids") is None:
            raise ContentError(f"{where(i)}: no 'token_ids'; it is the one column that is required")
        lengths.append(len(_cells("token_ids", row["token_ids"], where(i))))
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _cells(name: str, x: Any, place: str) -> Sequence[Any]:
    """The values of one record's list."""
    if isinstance(x, np.ndarray) and cast(NDArray[Any], x).ndim == 1:
        return cast(NDArray[Any], x).tolist()
    if not isinstance(x, (list, tuple)):
        raise ContentError(f"{place}: column {name!r}: got {quoted(cast(object, x))}, wanted a list")
    return cast(Sequence[Any], x)


def _record_column(name: str, rows: Sequence[Record], where: Callable[[int], str]) -> Values:
    spec = schema.COLUMNS[name]
    try:
        return typed_values(name, [row.get(name) for row in rows], spec.dtype)
    except BadValue as err:
        raise ContentError(f"{where(err.index)}: column {name!r}: {err.reason}") from None


def _token_column(name: str, rows: Sequence[Record], offsets: IntArray, where: Callable[[int], str]) -> Values:
    flat: list[Any] = []
    for i, (row, n) in enumerate(zip(rows, np.diff(offsets).tolist(), strict=True)):
        x = row.get(name)
        if x is None:
            flat.extend([None] * n)
            continue
        cells = _cells(name, x, where(i)) if type(x) is not list else cast(list[Any], x)
        if len(cells) != n:
            raise ContentError(f"{where(i)}: {length_problem(name, len(cells), n, _n_drawn(row, n))}")
        flat.extend(cells)
    spec = schema.column(name)
    assert spec is not None
    col = _located(name, flat, spec.dtype, offsets, where)
    if name == "token_ids" and col.valid is not None:
        _refuse_null(name, ~col.valid, offsets, where)
    if schema.scoring_column(name):
        _refuse_first(name, col, offsets, where)
    return col


def _refuse_first(name: str, col: Values, offsets: IntArray, where: Callable[[int], str]) -> None:
    """The first token has no context, so a value there means that the column is shifted or filled."""
    rows = np.flatnonzero(np.diff(offsets))
    bad = rows[col.mask()[offsets[rows]]]
    if len(bad):
        got = quoted(col.values[offsets[bad[0]]].item())
        raise ContentError(
            f"{where(int(bad[0]))}: column {name!r}, position 0: got {got}, wanted null; {FIRST_IS_NULL}"
        )


def _located(
    name: str, flat: Sequence[Any], dtype: schema.Dtype, offsets: IntArray, where: Callable[[int], str]
) -> Values:
    """The flat column; a value that is refused is told by record and position."""
    try:
        return typed_values(name, flat, dtype)
    except BadValue as err:
        i = int(np.searchsorted(offsets, err.index, side="right")) - 1
        place = f"position {err.index - int(offsets[i])}"
        raise ContentError(f"{where(i)}: column {name!r}, {place}: {err.reason}") from None


def _refuse_null(name: str, is_null: BoolArray, offsets: IntArray, where: Callable[[int], str]) -> None:
    at = int(is_null.argmax())
    if is_null.any():
        i = int(np.searchsorted(offsets, at, side="right")) - 1
        raise ContentError(f"{where(i)}: column {name!r}, position {at - int(offsets[i])}: got null, which it never is")


def _n_drawn(row: Record, n: int) -> int:
    drawn: Any = row.get("drawn")
    if isinstance(drawn, list):
        return sum(x in (True, 1) for x in cast(list[Any], drawn))
    prompt: Any = row.get("prompt_length")
    return n - prompt if isinstance(prompt, int) else -1


def _drawn(
    rows: Sequence[Record],
    given: Values | None,
    prompt_length: Values | None,
    offsets: IntArray,
    where: Callable[[int], str],
) -> Values:
    if given is not None and given.valid is not None:
        has = np.repeat([row.get("drawn") is not None for row in rows], np.diff(offsets))
        _refuse_null("drawn", has & ~given.valid, offsets, where)
    return settled_drawn(given, prompt_length, offsets)


def _list_column(name: str, rows: Sequence[Record], offsets: IntArray, where: Callable[[int], str]) -> Lists:
    """CSR of a list a token or a list a sequence; null lists are rows that are not valid."""
    cells: list[Any] = [row.get(name) for row in rows]
    if schema.COLUMNS[name].level == "token_list":
        cells = []
        for i, (row, n) in enumerate(zip(rows, np.diff(offsets).tolist(), strict=True)):
            x = row.get(name)
            lists = [None] * n if x is None else _cells(name, x, where(i))
            if len(lists) != n:
                raise ContentError(f"{where(i)}: {length_problem(name, len(lists), n, -1)}")
            cells.extend(lists)
    owner = np.arange(len(rows)) if len(cells) == len(rows) else np.repeat(np.arange(len(rows)), np.diff(offsets))
    filled = [() if x is None else _cells(name, x, where(int(owner[k]))) for k, x in enumerate(cells)]
    inner = np.concatenate([[0], np.cumsum([len(x) for x in filled])]).astype(np.int64)
    flat = [x for cell in filled for x in cell]
    col = _located(name, flat, schema.COLUMNS[name].dtype, inner, lambda k: where(int(owner[k])))
    if col.valid is not None:
        _refuse_null(name, ~col.valid, inner, lambda k: where(int(owner[k])))
    valid = np.array([x is not None for x in cells], dtype=bool)
    return Lists(col.values, inner, None if bool(valid.all()) else valid)


# writing


def to_records(rollouts: Rollouts) -> Iterator[dict[str, Any]]:
    """One JSON-able dict a sequence, made one at a time; the first one carries `scorings` and `float32` as well."""
    floats = float_columns(rollouts)
    cells = {n: _record_cells(n, col) for n, col in rollouts.records.items()}
    cells |= {n: _token_cells(col, rollouts.offsets) for n, col in token_columns(rollouts).items()}
    cells |= {n: _list_cells(n, lists, rollouts.offsets) for n, lists in rollouts.lists.items()}
    single = sorted(n for n, col in floats.items() if col.values.dtype != np.float64)
    head = {"scorings": declarations(rollouts)} if rollouts.scorings else {}
    head |= {"float32": single} if single else {}
    for i in range(len(rollouts)):
        yield {name: cell(i) for name, cell in cells.items()} | (head if i == 0 else {})


def token_columns(rollouts: Rollouts) -> dict[str, Values]:
    """All `[T]` columns under their names in a file: the tokens' own, `drawn`, and those of every scoring."""
    own = dict(rollouts.tokens) | {"drawn": Values(rollouts.drawn)}
    return own | {
        f"{name}_{what}": col
        for name, scoring in rollouts.scorings.items()
        for what, col in (("logprobs", scoring.logprobs), *scoring_extras(scoring))
    }


def float_columns(rollouts: Rollouts) -> dict[str, Values]:
    """Those of `token_columns` that hold floats."""
    return {n: col for n, col in token_columns(rollouts).items() if col.values.dtype.kind == "f"}


def _jsonable(values: NDArray[Any], valid: BoolArray | None) -> list[Any]:
    """Python values of a short array: None for null, text for what JSON cannot say."""
    out: list[Any] = values.tolist()
    odd = ~np.isfinite(values) if values.dtype.kind == "f" else np.zeros(len(values), dtype=bool)
    for at in np.flatnonzero(odd):
        out[at] = "NaN" if np.isnan(values[at]) else "Infinity" if values[at] > 0 else "-Infinity"
    for at in () if valid is None else np.flatnonzero(~valid):
        out[at] = None
    return out


def _record_cells(name: str, col: Values) -> Callable[[int], Any]:
    def cell(i: int) -> Any:
        return _jsonable(col.values[i : i + 1], None if col.valid is None else col.valid[i : i + 1])[0]

    return cell


def _token_cells(col: Values, offsets: IntArray) -> Callable[[int], Any]:
    """A list; None where every token is null, which reads the same."""

    def cell(i: int) -> Any:
        at = slice(int(offsets[i]), int(offsets[i + 1]))
        valid = None if col.valid is None else col.valid[at]
        return None if valid is not None and len(valid) and not valid.any() else _jsonable(col.values[at], valid)

    return cell


def _list_cells(name: str, lists: Lists, offsets: IntArray) -> Callable[[int], Any]:
    def one(row: int) -> Any:
        return None if lists.valid is not None and not lists.valid[row] else lists.row(row).tolist()

    if schema.COLUMNS[name].level == "record_list":
        return one
    return lambda i: [one(row) for row in range(int(offsets[i]), int(offsets[i + 1]))]
