"""What travels between a worker and its parent: a length-prefixed JSON header and raw array buffers.

A frame is `header length (4 bytes), payload length (8 bytes), header, payload`. The header is JSON; arrays stand in it
as `{"$array": k}` and lie one after another in the payload. Nothing is pickled: a frame can hold JSON values, numeric
arrays and the few dataclasses of `TYPES`, and nothing else.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from onepolicy.engines.base import SamplingParams
from onepolicy.errors import EngineError
from onepolicy.rollouts import Rollouts
from onepolicy.types import Lists, Scoring, Values

#: Raised by one whenever a frame or a message changes its meaning.
PROTOCOL = 2

TYPES: dict[str, type[Any]] = {t.__name__: t for t in (Values, Lists, Scoring, Rollouts, SamplingParams)}

_PREFIX = struct.Struct("!IQ")
_MAX_HEADER, _MAX_PAYLOAD = 2**30, 2**36
_NUMERIC = "biuf"


def pack(message: Any) -> list[Any]:
    """The byte buffers of one frame, to be sent in order.

    Errors: `EngineError` for a value of a kind that no frame can hold.
    """
    arrays: list[np.ndarray[Any, Any]] = []
    body = _to_json(message, arrays)
    kinds = [[a.dtype.str, list(a.shape)] for a in arrays]
    header = json.dumps({"body": body, "arrays": kinds}).encode()
    payload = sum(a.nbytes for a in arrays)
    return [_PREFIX.pack(len(header), payload) + header, *(a.reshape(-1).view(np.uint8).data for a in arrays)]


def unpack(read: Callable[[int], bytearray]) -> Any:
    """One message; `read(n)` gives exactly n bytes.

    Errors: `EngineError` for a frame that is malformed or larger than any that is sent.
    """
    n_header, n_payload = _PREFIX.unpack(read(_PREFIX.size))
    if n_header > _MAX_HEADER or n_payload > _MAX_PAYLOAD:
        raise EngineError(f"malformed frame: header of {n_header} bytes, payload of {n_payload}")
    header = json.loads(bytes(read(n_header)))
    payload = read(n_payload)
    arrays, at = [], 0
    for text, shape in header["arrays"]:
        dtype, count = _dtype(text), int(np.prod(shape, dtype=np.int64))
        flat = np.frombuffer(payload, dtype, count, at) if count else np.empty(0, dtype)
        arrays.append(flat.reshape(shape))
        at += count * dtype.itemsize
    return _from_json(header["body"], arrays)


def _dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.kind not in _NUMERIC:
        raise EngineError(f"malformed frame: an array of {text!r}")
    return dtype


def _to_json(value: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in _NUMERIC:
            return {"$objects": [_to_json(v, arrays) for v in value.tolist()]}
        arrays.append(np.ascontiguousarray(value))
        return {"$array": len(arrays) - 1}
    if isinstance(value, list | tuple):
        return [_to_json(v, arrays) for v in value]
    if isinstance(value, Mapping):
        return _mapping(value, arrays)
    if type(value).__name__ in TYPES and dataclasses.is_dataclass(value):
        fields = {f.name: _to_json(getattr(value, f.name), arrays) for f in dataclasses.fields(value)}
        return {"$type": type(value).__name__, "fields": fields}
    raise EngineError(f"a worker cannot carry a value of type {type(value).__name__}")


def _mapping(value: Mapping[Any, Any], arrays: list[np.ndarray[Any, Any]]) -> Any:
    """Keys that look like our own marks (`$...`, hostile or not) are wrapped, so that data never becomes structure."""
    pairs = [(str(k), _to_json(v, arrays)) for k, v in value.items()]
    return {"$pairs": pairs} if any(k.startswith("$") for k, _ in pairs) else dict(pairs)


def _from_json(value: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    if isinstance(value, list):
        return [_from_json(v, arrays) for v in value]
    if not isinstance(value, dict):
        return value
    if "$array" in value:
        return arrays[value["$array"]]
    if "$objects" in value:
        return _objects([_from_json(v, arrays) for v in value["$objects"]])
    if "$pairs" in value:
        return {k: _from_json(v, arrays) for k, v in value["$pairs"]}
    if "$type" in value:
        return TYPES[value["$type"]](**{k: _from_json(v, arrays) for k, v in value["fields"].items()})
    return {k: _from_json(v, arrays) for k, v in value.items()}


def _objects(items: list[Any]) -> np.ndarray[Any, Any]:
    out = np.empty(len(items), dtype=object)
    out[:] = items
    return out
