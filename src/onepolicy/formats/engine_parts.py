"""Parts that the answers of several engines share: the request beside them, prompts, routes, weight versions."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from onepolicy.formats.base import Layout, RawColumn
from onepolicy.formats.cells import Row, ids_of, inner
from onepolicy.formats.npy import MAGIC, array_of
from onepolicy.values import quoted

Routes = dict[str, tuple[Any, Layout]]
#: Keys under which the request stands beside its answer.
_REQUEST = ("request", "sampling_params", "params", "request_body")
_MODES = {"raw_logprobs": "raw", "processed_logprobs": "processed"}
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def requests(outer: Row) -> list[Row]:
    """Where a request may stand: beside its answer, or in an object of its own."""
    places = [Row(outer.get(k)) for k in _REQUEST if isinstance(outer.get(k), Mapping)]
    inside = [Row(p.get("sampling_params")) for p in places if isinstance(p.get("sampling_params"), Mapping)]
    return [outer, *places, *inside]


def asked(outer: Row, answer: Row) -> dict[str, Any]:
    """How the reply was drawn, as far as the request stands beside it."""
    out: dict[str, Any] = {}
    for part in requests(outer):
        out |= {key: value for key in _FLOATS if (value := part.number(key)) is not None}
        top_k = part.whole("top_k", 32)
        out |= {} if top_k is None else {"top_k": top_k}
        mode = part.get("logprobs_mode") or answer.get("logprobs_mode")
        if isinstance(mode, str) and mode in _MODES:
            out["logprob_semantics"] = _MODES[mode]
    return out


def prompt_ids(outer: Row, answer: Row, choice: Row) -> NDArray[np.int64] | None:
    """The prompt's ids, from the answer or else from the request."""
    for part in (choice, answer):
        if "prompt_token_ids" in part:
            return part.ids("prompt_token_ids")
    places = [outer, *(Row(outer.get(k)) for k in _REQUEST if isinstance(outer.get(k), Mapping))]
    for part in places:
        for key in ("prompt_token_ids", "input_ids", "prompt_ids", "token_ids", "prompt"):
            found = part.get(key)
            if isinstance(found, list) and found and all(type(x) is int for x in cast(list[Any], found)):
                return ids_of(cast(list[int], found))
    return None


def finish(part: Row) -> str | None:
    """The engine's word, also where it is an object (SGLang)."""
    said = part.get("finish_reason")
    if isinstance(said, Mapping):
        return Row(cast(Any, said)).text("type")
    return part.text("finish_reason")


def versions(choice: Row, n: int) -> RawColumn | None:
    """`weight_versions`: spans of output tokens and the version that drew them. None where versions are no numbers."""
    spans = choice.objects("weight_versions")
    if not spans:
        return None
    values, valid = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=bool)
    for span in spans:
        start, end, version = span.whole("start"), span.whole("end"), span.name("version")
        if start is None or end is None or version is None or not 0 <= start <= end <= n:
            raise ValueError(f"'weight_versions': got {quoted(span.row)}, wanted a span of {n} tokens")
        if not (version.isascii() and version.isdigit() and len(version) < 19):
            return None
        values[start:end], valid[start:end] = int(version), True
    return RawColumn(values, "reply", None if valid.all() else valid)


def routes(said: Any, n: int) -> Routes:
    """`routed_experts` of `n` tokens: `[n - 1, layers, top_k]`, the last token was not run. The row of a token says who
    made the log-prob of the next one, where it is placed.

    Lists, vLLM's base64 of an .npy, or SGLang's base64 of int32. Errors: `ValueError`.
    """
    if said is None:
        return {}
    if isinstance(said, list):
        rows = cast(list[Any], said)
        return _placed([None if x is None else inner(x, 1 << 20) for x in rows], n)
    if not isinstance(said, str):
        raise ValueError(f"'routed_experts': got {quoted(said)}, wanted lists or base64")
    try:
        data = base64.b64decode(said, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("'routed_experts': not base64") from None
    array = _npy(data) if data.startswith(MAGIC) else _int32(data, n)
    return _placed(list(array.reshape(len(array), -1).astype(np.int32)), n)


def _placed(rows: list[Any], n: int) -> Routes:
    """Where the last token was run too, what it chose is about a token that is not there."""
    return {"routed_experts": (rows[:-1] if len(rows) == n else rows, "next")}


def _npy(data: bytes) -> NDArray[Any]:
    try:
        array = array_of(data)
    except ValueError as err:
        raise ValueError(f"'routed_experts': {err}, wanted whole numbers") from None
    if array.dtype.kind not in "iu" or array.ndim < 2 or array.size == 0:
        raise ValueError(f"'routed_experts': an .npy of {array.dtype} {array.shape}, wanted whole numbers")
    return array


def _int32(data: bytes, n: int) -> NDArray[Any]:
    rows = n - 1
    if rows < 1 or len(data) % (4 * rows) or not data:
        raise ValueError(f"'routed_experts': {len(data)} bytes are no int32 for {max(rows, 0)} tokens")
    return np.frombuffer(data, dtype="<i4").reshape(rows, -1)
