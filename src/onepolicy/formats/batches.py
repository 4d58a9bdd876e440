"""Padded batches as sequences: what verl, ROLL and SkyRL pickle is one matrix a column, padded to the longest.

Rows are cut by their attention mask, which must be one run of ones. What a mask leaves out is counted as
`padding_length`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.errors import ContentError
from onepolicy.formats.base import BrokenRecord, Layout, RawColumn, RawRecord, floats
from onepolicy.formats.inert import Opaque
from onepolicy.formats.unpickle import Array, Jagged, Tensor, array, loads, rows
from onepolicy.types import BoolArray

_TENSORDICT = ("_rebuild_tensordict_files", "_rebuild_tensordict_files_shared")


class Batch:
    """Columns of one file, made into rows when they are asked for.

    `tensors`: token-level columns as they lie in the file. `objects`: one Python value a sequence. `about`: what is
    said of the whole batch.
    """

    def __init__(self, place: str, tensors: Mapping[str, Any], objects: Any = None, about: Any = None) -> None:
        given: Any = objects if isinstance(objects, dict) else {}
        self.place, self.tensors = place, tensors
        self.objects = {k: x for k, v in given.items() if isinstance(k, str) and (x := _listed(v)) is not None}
        self.about: Mapping[str, Any] = about if isinstance(about, dict) else {}
        self._rows: dict[str, list[NDArray[Any]]] = {}

    def has(self, name: str) -> bool:
        return self.tensors.get(name) is not None

    def rows(self, name: str) -> list[NDArray[Any]]:
        """Errors: `ValueError` for a column that the batch does not have; `ContentError` for one that is not read."""
        if not self.has(name):
            raise ValueError(f"the batch has no {name!r}; it has {', '.join(sorted(self.tensors))[:200] or 'nothing'}")
        if name not in self._rows:
            self._rows[name] = rows(self.tensors[name], self.place)
        return self._rows[name]

    def row(self, name: str, i: int) -> NDArray[Any]:
        """Errors: `ValueError`, as `rows`, and for a column that ends before."""
        found = self.rows(name)
        if i >= len(found):
            raise ValueError(f"column {name!r} has {len(found)} rows; this is the one after")
        return wide(np.asarray(found[i]))

    def object(self, name: str, i: int) -> Any:
        values = self.objects.get(name)
        return values[i] if values is not None and i < len(values) else None


def _listed(value: Any) -> list[Any] | None:
    if isinstance(value, Array):
        return list(value.numpy().tolist())
    return value if isinstance(value, list) else None


# -- the pickled forms of a TensorDict -------------------------------------------------------------------------------


def fields(value: Any, place: str) -> dict[str, Any]:
    """Its leaves by name; bytes, also those of a `BytesIO`, are opened first.

    Errors: `ContentError` for a form that is not read.
    """
    if isinstance(value, Opaque) and value.name == "BytesIO" and isinstance(value.state, tuple) and value.state:
        value = value.state[0]
    if isinstance(value, bytes):
        value = loads(value, place)
    if isinstance(value, dict):
        return {k: v for k, v in value.items() if isinstance(k, str)}
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], dict):
        return {k: _numpy_leaf(v, place) for k, v in value[2].items()}
    if isinstance(value, Opaque) and value.name == "_make_td" and len(value.args) == 2:
        return _of_state(value.args[1], place)
    if isinstance(value, Opaque) and value.name in _TENSORDICT and value.args and isinstance(value.args[0], dict):
        return {"/".join(k) if isinstance(k, tuple) else str(k): v for k, v in value.args[0].items()}
    if isinstance(value, Opaque) and value.name == "_rebuild_tensordict_files_consolidated":
        return _consolidated(value, place)
    if isinstance(value, Opaque) and value.name == "TensorDict":
        return _of_state(value.state, place)
    raise ContentError(f"{place}: a batch of the form {value!r}, which is not read"[:300])


def _of_state(state: Any, place: str) -> dict[str, Any]:
    held: Any = state.get("_tensordict") if isinstance(state, dict) else None
    if isinstance(held, Opaque):
        held = held.items
    if not isinstance(held, dict):
        raise ContentError(f"{place}: a TensorDict without its tensors")
    return {k: v for k, v in held.items() if isinstance(k, str)}


def _consolidated(value: Opaque, place: str) -> dict[str, Any]:
    """All leaves in one tensor of bytes; `leaves`: name -> `(type, shape, first byte, end, padding)`."""
    about: Any = value.args[0] if len(value.args) == 2 else None
    leaves: Any = about.get("leaves") if isinstance(about, dict) else None
    if not isinstance(leaves, dict):
        raise ContentError(f"{place}: a TensorDict without its tensors")
    data = array(value.args[1], place)
    if data.dtype != np.uint8:
        raise ContentError(f"{place}: a TensorDict whose bytes are {data.dtype}")
    flat = np.ascontiguousarray(data.reshape(-1)).data
    return _joined({k: _leaf(k, leaf, flat, place) for k, leaf in leaves.items() if isinstance(k, str)}, place)


def _leaf(name: str, leaf: Any, flat: memoryview, place: str) -> Tensor | None:
    if not isinstance(leaf, (tuple, list)) or len(leaf) < 4:
        return None  # the marks of a nested tensor have no bytes
    parts = [x for i, x in enumerate(leaf) if i != 2 or type(x) is int]  # some versions tell the device in between
    dtype, shape, first, end = parts[:4] if len(parts) >= 4 else (None, None, None, None)
    if not isinstance(shape, (tuple, list)) or type(first) is not int or type(end) is not int:
        raise ContentError(f"{place}: damaged: where {name!a} lies in the batch is not told")
    if not 0 <= first <= end <= len(flat):
        raise ContentError(f"{place}: damaged: {name!a} lies outside the batch")
    return _from_bytes(str(dtype), shape, flat[first:end], name, place)


def _from_bytes(dtype: str, shape: Any, data: bytes | memoryview, name: str, place: str) -> Tensor:
    tensor = Tensor.of_bytes(place, dtype, tuple(shape), data)
    if tensor is None:
        raise ContentError(f"{place}: {name!a} is of {dtype[:40]!a}, which is not read")
    return tensor


def _joined(leaves: dict[str, Tensor | None], place: str) -> dict[str, Any]:
    """Nested leaves lie in parts: their values and their offsets, under marked names."""
    out: dict[str, Any] = {k: v for k, v in leaves.items() if v is not None and not k.startswith("<")}
    for mark in ("<NJT_VALUES>", "<NJT>"):
        for key, values in leaves.items():
            name = key.removeprefix(mark)
            offsets = leaves.get(f"<NJT_OFFSETS>{name}")
            if key.startswith(mark) and values is not None and offsets is not None and name not in out:
                out[name] = Jagged(place, values, offsets, leaves.get(f"<NJT_LENGTHS>{name}"))
    return out


def _numpy_leaf(leaf: Any, place: str) -> Any:
    """verl's own form: `(type, shape, bytes)`, or `(layout, [such])` of a nested one."""
    if isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[1], list):
        return [_numpy_leaf(x, place) for x in leaf[1]]
    if not isinstance(leaf, tuple) or len(leaf) != 3 or not isinstance(leaf[1], tuple):
        raise ContentError(f"{place}: damaged: a tensor of the batch is not told")
    data = leaf[2] if isinstance(leaf[2], bytes) else array(leaf[2], place).tobytes()
    return _from_bytes(str(leaf[0]), leaf[1], data, "a tensor", place)


# -- one sequence ----------------------------------------------------------------------------------------------------


def run_of_ones(mask: NDArray[Any], name: str = "attention_mask") -> slice:
    """Where a mask is one. Errors: `ValueError` when that is not one piece."""
    at = np.flatnonzero(mask)
    if len(at) == 0:
        raise ValueError(f"{name} is 0 at every position")
    if at[-1] - at[0] + 1 != len(at):
        raise ValueError(f"{name} has a hole at position {int(np.flatnonzero(mask[at[0] :] == 0)[0] + at[0])}")
    return slice(int(at[0]), int(at[-1]) + 1)


def wide(values: NDArray[Any]) -> NDArray[Any]:
    """Half precision as single, which columns have; the values stay on the grid of their type."""
    return values.astype(np.float32) if values.dtype == np.float16 else values


def whole_numbers(ids: NDArray[Any], name: str = "token ids") -> NDArray[Any]:
    """Errors: `ValueError` for ids that are something else."""
    if ids.dtype.kind not in "iu" or ids.ndim != 1:
        raise ValueError(f"{name}: got {ids.ndim} dimensions of {ids.dtype}, wanted whole numbers")
    return ids


def step_of(value: Any) -> int | None:
    """A step as it is stored; None for what no step is."""
    return value if type(value) is int and abs(value) < 2**62 else None


def scored(values: NDArray[Any], layout: Layout, mask: NDArray[Any] | None) -> RawColumn:
    """Log-probs; 0.0 at a token that is not the policy's own is how these frameworks write "none": it is null."""
    col = floats(values, layout)
    if mask is None or len(mask) != len(col.values):
        return col
    valid: BoolArray = ~((np.asarray(mask) == 0) & (col.values == 0))
    return col if valid.all() else RawColumn(col.values, layout, valid)


def own_tokens(loss_mask: NDArray[Any] | None, logprobs: NDArray[Any] | None, layout: Layout) -> RawColumn | None:
    """The tokens that the policy drew, where the dump has a loss mask only: a token that is masked *and* has 0.0 for
    its log-prob was put there by a tool or the environment. None: not told."""
    if loss_mask is None or logprobs is None or len(loss_mask) != len(logprobs):
        return None
    own = ~((np.asarray(loss_mask) == 0) & (np.asarray(logprobs) == 0))
    return RawColumn(own, layout) if own.any() else None


def put(columns: dict[str, RawColumn], name: str, col: RawColumn | None) -> None:
    if col is not None:
        columns[name] = col


def each(batch: Batch, n: int, make: Callable[[Batch, int], RawRecord]) -> Iterator[RawRecord | BrokenRecord]:
    """`make` of the first `n` sequences; what it cannot read is a `BrokenRecord`."""
    for i in range(n):
        place = f"{batch.place}[{i}]"
        try:
            record = make(batch, i)
        except ContentError as err:
            yield BrokenRecord(place, str(err).removeprefix(f"{batch.place}: "))
        except (ValueError, TypeError, IndexError, KeyError, OverflowError) as err:
            yield BrokenRecord(place, str(err)[:300])
        else:
            yield record
