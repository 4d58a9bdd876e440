"""The array operations that corrections need besides `onepolicy.arrays`, once for numpy and once for torch.

Nothing here reads the device: no `.item()`, no boolean indexing, no shape that hangs on values. Sums are made in
float64 (float32 on a device that has no float64), in slices, so that no second copy of a `[B, T]` array is made.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from onepolicy.arrays import Array, is_torch

#: exp of at most this fits the dtype; a log ratio above float32's limit is counted as overflow whatever the dtype.
EXP_LIMIT = {"float32": 88.72, "float64": 709.78}
#: Elements that are widened to float64 at a time: what a CPU's cache holds; few launches elsewhere.
SLICE, DEVICE_SLICE = 1 << 16, 1 << 22


class NumpyOps:
    """numpy."""

    exp, expm1, log, log1p, abs = np.exp, np.expm1, np.log, np.log1p, np.abs
    isfinite, isnan, sqrt = np.isfinite, np.isnan, np.sqrt
    where = staticmethod(np.where)

    def tracking(self, grad: bool) -> contextlib.AbstractContextManager[Any]:
        return np.errstate(over="ignore", invalid="ignore", divide="ignore", under="ignore")

    def floats(self, x: Any) -> Array:
        """`x` as float32 or float64; None becomes NaN."""
        x = np.asarray(x, dtype=None if isinstance(x, np.ndarray) and x.dtype != object else np.float64)
        return x if x.dtype in (np.float32, np.float64) else x.astype(np.float32 if x.dtype == np.float16 else float)

    def limit(self, x: Array) -> float:
        return EXP_LIMIT[x.dtype.name]

    def bools(self, x: Any) -> Array:
        return np.asarray(x) != 0

    def integers(self, x: Any, like: Array) -> Array:
        return np.asarray(x).astype(np.int64)

    def on_host(self, x: Array) -> Array | None:
        """`x` as numpy where that costs nothing, else None."""
        return x

    def as_like(self, x: Any, like: Array) -> Array:
        return np.asarray(x, dtype=like.dtype)

    def wide(self, x: Array) -> Array:
        return np.asarray(x, dtype=np.float64)

    def detach(self, x: Array) -> Array:
        return x

    def clip(self, x: Array, low: float, high: float) -> Array:
        return np.clip(x, low, high)

    def exp_between(self, x: Array, logs: tuple[float, float], bounds: tuple[float, float]) -> Array:
        """exp of x held in `logs`, held in `bounds`; one new array."""
        out = np.array(np.clip(x, *logs))
        return np.clip(np.exp(out, out=out), *bounds, out=out)

    def kept(self, x: Array, keep: Array) -> Array:
        """`x`, 0 where `keep` is false; in place where it can be, so `x` must be nobody else's."""
        if x.shape != keep.shape or not x.flags.writeable:
            return np.where(keep, x, x.dtype.type(0))
        np.copyto(x, 0, where=~keep)
        return x

    def slices(self, *arrays: Array) -> Iterator[tuple[Array, ...]]:
        """Views of whole rows of all of them, about SLICE elements each."""
        return _slices(SLICE, arrays)

    def total(self, x: Array) -> Array:
        return np.sum(x, dtype=np.float64)

    def count(self, x: Array) -> Array:
        return np.float64(np.count_nonzero(x))

    def row_total(self, x: Array) -> Array:
        return np.sum(x, axis=-1, dtype=np.float64)

    def row_most(self, x: Array) -> Array:
        return np.max(x, axis=-1, initial=-math.inf).astype(np.float64)

    def most(self, x: Array) -> Array:
        return np.float64(np.max(x, initial=-math.inf))

    def least(self, x: Array) -> Array:
        return np.float64(np.min(x, initial=math.inf))

    def scatter_total(self, x: Array, ids: Array, n: int) -> Array:
        return np.bincount(ids, weights=x, minlength=n).astype(np.float64)  # whole numbers if there is no token

    def scatter_most(self, x: Array, ids: Array, n: int) -> Array:
        out = np.full(n, -math.inf)
        np.maximum.at(out, ids, x)
        return out

    def take(self, x: Array, ids: Array) -> Array:
        return x[ids]

    def sort(self, x: Array) -> Array:
        return np.sort(x)

    def argsort(self, x: Array) -> Array:
        return np.argsort(x, kind="stable")

    def cumsum(self, x: Array) -> Array:
        return np.cumsum(x, dtype=np.int64 if x.dtype == bool else np.float64)

    def arange(self, n: int, like: Array) -> Array:
        return np.arange(n)

    def ids_of_offsets(self, offsets: Array, n: int) -> Array:
        return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))

    def joined(self, parts: list[Array]) -> Array:
        return np.concatenate(parts, axis=-1)

    def stack(self, numbers: list[Array]) -> Array:
        return np.array(numbers, dtype=np.float64)


class TorchOps:
    """torch on any device."""

    def __init__(self) -> None:
        self.torch: Any = sys.modules["torch"]
        for name in ("exp", "expm1", "log", "log1p", "abs", "isfinite", "isnan", "sqrt", "where"):
            setattr(self, name, getattr(self.torch, name))

    def tracking(self, grad: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if grad else self.torch.no_grad()

    def floats(self, x: Array) -> Array:
        return x.float() if x.dtype in (self.torch.float16, self.torch.bfloat16) else x

    def limit(self, x: Array) -> float:
        return EXP_LIMIT[str(x.dtype).removeprefix("torch.")]

    def bools(self, x: Array) -> Array:
        return x if x.dtype == self.torch.bool else x != 0

    def integers(self, x: Any, like: Array) -> Array:
        return x.to(self.torch.int64) if is_torch(x) else self.torch.tensor(np.asarray(x), device=like.device).long()

    def on_host(self, x: Array) -> Array | None:
        """`x` as numpy where that costs nothing, else None: a device is not waited for."""
        return x.numpy() if type(x) is self.torch.Tensor and x.device.type == "cpu" else None

    def as_like(self, x: Any, like: Array) -> Array:
        return x.to(dtype=like.dtype) if is_torch(x) else self.torch.tensor(x, dtype=like.dtype, device=like.device)

    def wide(self, x: Array) -> Array:
        return x.to(self.torch.float32 if x.device.type == "mps" else self.torch.float64)

    def detach(self, x: Array) -> Array:
        return x.detach()

    def clip(self, x: Array, low: float, high: float) -> Array:
        return x.clamp(low, high)

    def exp_between(self, x: Array, logs: tuple[float, float], bounds: tuple[float, float]) -> Array:
        """exp of x held in `logs`, held in `bounds`; one new array, unless gradients need more."""
        if x.requires_grad and self.torch.is_grad_enabled():
            return x.clamp(*logs).exp().clamp(*bounds)
        return x.clamp(*logs).exp_().clamp_(*bounds)

    def kept(self, x: Array, keep: Array) -> Array:
        """`x`, 0 where `keep` is false; in place where it can be, so `x` must be nobody else's."""
        if x.shape != keep.shape or (x.requires_grad and self.torch.is_grad_enabled()):
            return self.torch.where(keep, x, 0.0)
        return x.masked_fill_(~keep, 0.0)

    def slices(self, *arrays: Array) -> Iterator[tuple[Array, ...]]:
        """Views of whole rows of all of them, about a slice of elements each."""
        return _slices(SLICE if arrays[0].device.type == "cpu" else DEVICE_SLICE, arrays)

    def total(self, x: Array) -> Array:
        bools = x.dtype == self.torch.bool  # their sum is made of int64 copies
        parts = [(part if bools else self.wide(part)).sum() for (part,) in self.slices(x)]
        return self.wide(parts[0] if len(parts) == 1 else self.torch.stack(parts).sum())

    def count(self, x: Array) -> Array:
        return self.total(x)

    def row_total(self, x: Array) -> Array:
        bools = x.dtype == self.torch.bool
        parts = [(part if bools else self.wide(part)).sum(-1) for (part,) in self.slices(x)]
        return self.wide(parts[0] if len(parts) == 1 else self.torch.cat(parts))

    def row_most(self, x: Array) -> Array:
        return self.wide(x.amax(-1)) if x.shape[-1] else self.wide(x.sum(-1)) - math.inf

    def most(self, x: Array) -> Array:
        return self.wide(x.max() if x.numel() else x.new_full((), -math.inf))

    def least(self, x: Array) -> Array:
        return self.wide(x.min() if x.numel() else x.new_full((), math.inf))

    def scatter_total(self, x: Array, ids: Array, n: int) -> Array:
        out = self.wide(x.new_zeros(n, dtype=self.torch.float32))
        for part, at in self.slices(x, ids):
            out = out.index_add(0, at, self.wide(part))
        return out

    def scatter_most(self, x: Array, ids: Array, n: int) -> Array:
        out = x.new_full((n,), -math.inf).scatter_reduce(0, ids, x, "amax")
        return self.wide(out)

    def take(self, x: Array, ids: Array) -> Array:
        return x.index_select(0, ids)

    def sort(self, x: Array) -> Array:
        return x.sort().values

    def argsort(self, x: Array) -> Array:
        return x.argsort(stable=True)

    def cumsum(self, x: Array) -> Array:
        return x.cumsum(0) if x.dtype in (self.torch.bool, self.torch.int64) else self.wide(x).cumsum(0)

    def arange(self, n: int, like: Array) -> Array:
        return self.torch.arange(n, device=like.device)

    def ids_of_offsets(self, offsets: Array, n: int) -> Array:
        return self.torch.searchsorted(offsets, self.arange(n, offsets), right=True) - 1

    def joined(self, parts: list[Array]) -> Array:
        return self.torch.cat(parts, dim=-1)

    def stack(self, numbers: list[Array]) -> Array:
        return self.torch.stack(numbers)


def _slices(size: int, arrays: tuple[Array, ...]) -> Iterator[tuple[Array, ...]]:
    first = arrays[0]
    rows = size if first.ndim == 1 else max(1, size // max(1, first.shape[-1]))
    for i in range(0, max(1, first.shape[0]), rows):
        yield tuple(x[i : i + rows] for x in arrays)


NUMPY = NumpyOps()
_torch_ops: list[TorchOps] = []


def ops_of(x: object) -> Any:
    """The operations for an array, by its own module; torch is never imported here."""
    if not is_torch(x):
        return NUMPY
    if not _torch_ops:
        _torch_ops.append(TorchOps())
    return _torch_ops[0]
