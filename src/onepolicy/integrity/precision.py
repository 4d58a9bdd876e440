"""Values that were rounded when they were stored: all of a side's log-probs lie on the grid of bfloat16, float16 or of
eight bits (e4m3, e5m2).

An engine that computes in bfloat16 takes its log-softmax in float32, so its values are not on that grid; one value in
65,536 is by chance. Round numbers (0, -0.5, -1.25) are on any grid and say nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.integrity.base import SIDES, Batch, Side, Told
from onepolicy.integrity.places import many
from onepolicy.types import BoolArray, Finding, FloatArray

#: Share of a side's telling values that are on a grid, and how many it takes.
_ON_GRID, _LEAST = 0.99, 12
#: Bits that are 0 in a number of three bits of mantissa, of bfloat16, of float16 (its subnormals aside).
_SHORT, _BF16, _FP16 = np.uint32(0x001FFFFF), np.uint32(0xFFFF), np.uint32(0x1FFF)
_LEAST_NORMAL = np.float32(2.0**-14)
#: Bits that are 0 in a number of eight bits, by format; values that are no short decimals, and how many it takes.
_EIGHT = {"e5m2": np.uint32(0x001FFFFF), "e4m3": np.uint32(0x000FFFFF)}
_DECIMALS, _LEAST_ODD = 1000.0, 6
#: Values are held against grids in blocks that stay in the cache.
_BLOCK = 1 << 16


def look(batch: Batch) -> Counted:
    out = Counted()
    for side in batch.side_values:
        x = batch.pair.of(side) if batch.pair is not None else batch.finite[side]
        for start in range(0, len(x), _BLOCK):
            for kind, n in _on_grids(x[start : start + _BLOCK]).items():
                out.count(f"precision:{side}:{kind}", n)
        if len(x):
            out.greatest(f"precision:{side}:greatest", float(x.max()) + 0.0)
            out.greatest(f"precision:{side}:least, negative", 0.0 - float(x.min()))
    return out


def _on_grids(x: FloatArray) -> dict[str, int]:
    """How many of the telling values (more than three bits of mantissa) are exact in each format."""
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    bits = near.view(np.uint32)
    whole = near == x
    telling = (bits & _SHORT) != 0
    telling |= ~whole
    single = whole & telling
    eight = {kind: whole & ((bits & mask) == 0) & (near != 0) for kind, mask in _EIGHT.items()}
    scaled = x * _DECIMALS  # -0.625 and -1.5 are short decimals as well, and say nothing
    odd = eight["e4m3"] & (np.abs(scaled - np.rint(scaled)) > 1e-6)
    return {
        "not zero": int(np.count_nonzero(x)),
        "odd": int(np.count_nonzero(odd)),
        **{kind: int(np.count_nonzero(on)) for kind, on in eight.items()},
        "telling": int(np.count_nonzero(telling)),
        "float32": int(np.count_nonzero(single)),
        "bf16": int(np.count_nonzero(single & ((bits & _BF16) == 0))),
        "fp16": int(np.count_nonzero(single & _fp16(near, bits))),
    }


def _fp16(near: NDArray[np.float32], bits: NDArray[np.uint32]) -> BoolArray:
    """Eleven bits of mantissa from 2^-14 to 65504, multiples of 2^-24 below."""
    out = (bits & _FP16) == 0
    small = np.flatnonzero(near > -_LEAST_NORMAL)
    scaled = near[small] * np.float32(2.0**24)
    out[small] = scaled == np.rint(scaled)
    return out & (near >= -65504.0)


def judge(total: Counted, told: Told) -> list[Finding]:
    return [f for side in SIDES if (f := _judged(total, told, side)) is not None]


def _judged(total: Counted, told: Told, side: Side) -> Finding | None:
    key = f"precision:{side}:"
    if total.most.get(key + "greatest", 0.0) == -total.most.get(key + "least, negative", 0.0):
        return None
    eight = _eight_bits(total, told, side)
    if eight is not None:
        return eight
    n = total.counts.get(key + "telling", 0)
    if n < _LEAST:
        return None
    on = {kind: total.counts.get(key + kind, 0) for kind in ("bf16", "fp16", "float32")}
    kind = next((k for k in ("bf16", "fp16") if on[k] >= _ON_GRID * n), None)
    if kind is None:
        return None
    word = {"bf16": "bfloat16", "fp16": "float16"}[kind]
    half = {"bf16": 2.0**-8, "fp16": 2.0**-11}[kind]
    message = f"{told.name(side)}: {on[kind]:,} of {many(n, 'log-prob')} are {word} numbers exactly"
    message += f"; storing them so moved each by up to {half:.2%} of its size"
    evidence = {"side": told.name(side), "tokens": n, f"share_exact_{kind}": on[kind] / n,
                "on_grid": on, "largest_relative_rounding": half}  # fmt: skip
    ruled_out = (f"an engine that computes in {word}: its log-softmax is float32, off this grid",)
    return finding(f"stored-as-{kind}", message, evidence=evidence, ruled_out=ruled_out, origin="run")


def _eight_bits(total: Counted, told: Told, side: Side) -> Finding | None:
    key = f"precision:{side}:"
    n, odd = total.counts.get(key + "not zero", 0), total.counts.get(key + "odd", 0)
    kind = next((k for k in _EIGHT if total.counts.get(key + k, 0) >= _ON_GRID * n), None)
    if kind is None or n < _LEAST or odd < _LEAST_ODD:
        return None
    half = {"e5m2": 2.0**-3, "e4m3": 2.0**-4}[kind]
    on = total.counts[key + kind]
    message = f"{told.name(side)}: {on:,} of {many(n, 'log-prob')} other than 0 are {kind} numbers (eight bits) exactly"
    message += f"; storing them so moved each by up to {half:.3g} of its size"
    evidence = {"side": told.name(side), "tokens": n, "format": kind, "share_exact_fp8": on / n,
                "largest_relative_rounding": half}  # fmt: skip
    ruled_out = ("an engine that computes in eight bits: its log-softmax is float32, off this grid",)
    return finding("stored-as-fp8", message, evidence=evidence, ruled_out=ruled_out, origin="run")
