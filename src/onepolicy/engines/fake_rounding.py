"""Rounding to a declared dtype, exactly, and matrix products whose partial sums are rounded in a declared order.

Values that are bfloat16 or float16 are carried as float32: numpy has no bfloat16, and its float16 arithmetic is slow.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

#: name -> bits of the mantissa that are stored.
DTYPES: dict[str, int] = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}

#: name -> in which order the partial sums of a product are added.
ORDERS: dict[str, str] = {
    "forward": "blocks of 16 along K, first to last",
    "reversed": "blocks of 16 along K, last to first",
    "pairwise": "blocks of 16 along K, neighbours first (a tree)",
    "blocked": "blocks of 8 along K, first to last",
}

#: path -> width of the blocks, of `blocked` in the second place. No path and order sum as another path and order does.
WIDTHS: dict[str, tuple[int, int]] = {"prefill": (16, 8), "decode": (12, 10)}

#: Rows of one matrix product. Always the same shape, so a row has the same bits whatever batch it comes in.
TILE = 32

_BF16_MASK = np.uint32(0xFFFF0000)
_FP16_MASK = np.uint32(0xFFFFE000)
_FP16_LEAST_NORMAL = np.float32(2.0**-14)
_FP16_LIMIT = np.float32(65504.0)
#: Adding it to a float32 below 2^-14 leaves multiples of 2^-24, which is the spacing of float16's subnormals.
_FP16_SHIFT = np.float32(0.75)


def round_to(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    """`x` (any shape) rounded to nearest, ties to even, as IEEE 754 does; subnormals, overflow and NaN included.

    Returns float64 for `float64`, else float32 that holds only values of the dtype. Float64 input is rounded once.
    """
    x = np.asarray(x)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if dtype in ("float64", "float32"):
            return x.astype(dtype)
        if dtype == "float16":
            return x.astype(np.float16).astype(np.float32)
        narrow = np.atleast_1d(_to_odd(x) if x.dtype == np.float64 else x.astype(np.float32))
        nan = np.isnan(narrow)  # its bits do not survive a carry
        return np.where(nan, np.float32(np.nan), round_in_place(narrow, dtype)).reshape(x.shape)


def _to_odd(x: NDArray[np.float64]) -> NDArray[np.float32]:
    """Float64 cut to float32, the last bit set where anything was cut: a second rounding then errs no more."""
    near = np.asarray(x.astype(np.float32))
    cut = np.where(np.abs(near) > np.abs(x), np.nextafter(near, np.float32(0)), near).astype(np.float32)
    return np.where(near == x, near, (cut.view(np.uint32) | np.uint32(1)).view(np.float32))


def round_in_place(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    """`round_to` for a finite, contiguous array that the caller owns, as fast as numpy can; the sign of 0 may go.

    float32 and float64 stay as they are.
    """
    if dtype == "bfloat16":
        _keep_bits(x.view(np.uint32), 16, _BF16_MASK)
    elif dtype == "float16":
        flat, size = x.reshape(-1), np.abs(x).reshape(-1)
        small = np.flatnonzero(size < _FP16_LEAST_NORMAL)
        tiny = (flat[small] + _FP16_SHIFT) - _FP16_SHIFT
        _keep_bits(flat.view(np.uint32), 13, _FP16_MASK)
        flat[small] = tiny
        if size.max(initial=0) > _FP16_LIMIT:
            np.copyto(flat, np.copysign(np.float32(np.inf), flat), where=np.abs(flat) > _FP16_LIMIT)
    return x


def _keep_bits(bits: NDArray[np.uint32], dropped: int, mask: np.uint32) -> None:
    """Half of the last kept place minus one, plus that place's own bit: the carry is round-half-even."""
    carry = bits >> np.uint32(dropped)
    carry &= np.uint32(1)
    carry += np.uint32((1 << (dropped - 1)) - 1)
    bits += carry
    bits &= mask


def kernel_name(order: str, path: str) -> str:
    """How this path adds in this order, in words."""
    plain, here = (str(WIDTHS[p][order == "blocked"]) for p in ("prefill", path))
    return ORDERS[order].replace(plain, here)


class Product:
    """`x @ w` at a dtype and order: each block's sum and each sum of blocks is rounded, as split-K kernels do."""

    def __init__(self, w: NDArray[Any], dtype: str, order: str, path: str = "prefill") -> None:
        """`w`: `[K, N]`, already rounded."""
        width = WIDTHS[path][order == "blocked"]
        self._dtype, self._order = dtype, order
        self._blocks = [(i, np.ascontiguousarray(w[i : i + width])) for i in range(0, len(w), width)]
        if order == "reversed":
            self._blocks.reverse()

    def __call__(self, x: NDArray[Any]) -> NDArray[Any]:
        """`x`: `[tiles, TILE, K]`, returns `[tiles, TILE, N]`."""
        parts = [round_in_place(x[..., i : i + len(w)] @ w, self._dtype) for i, w in self._blocks]
        while self._order == "pairwise" and len(parts) > 1:
            parts = [self._sum(parts[i : i + 2]) for i in range(0, len(parts), 2)]
        return self._sum(parts)

    def _sum(self, parts: list[NDArray[Any]]) -> NDArray[Any]:
        total = parts[0]
        for part in parts[1:]:
            total += part
            round_in_place(total, self._dtype)
        return total
