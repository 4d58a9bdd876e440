"""numpy and torch, for the few operations that a batch needs besides `onepolicy.arrays`.

Nothing here reads the device: no `.item()`, no boolean indexing, no shape that hangs on values.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from onepolicy.arrays import NUMPY, Array, is_torch, namespace

#: Tokens that are worked on at a time: on a CPU what fits its cache, on a device an eighth of a large batch.
BLOCK_CPU, BLOCK_DEVICE = 1 << 14, 1 << 20


class NumpyKind:
    """numpy arrays, and torch tensors on the CPU, whose memory numpy reads as it is: three times as fast there, and no
    threads that wait for each other."""

    xp = NUMPY

    @staticmethod
    def part(x: Array, rows: slice) -> Array:
        """Some rows, in their own dtype."""
        if not is_torch(x):
            return x[rows]
        x = x.detach()[rows]
        return (x.float() if x.is_floating_point() and x.element_size() < 4 else x).numpy()

    def block(self, tokens: int) -> int:
        return BLOCK_CPU

    def wide(self, x: Array, rows: slice = slice(None)) -> Array:
        return np.ascontiguousarray(self.part(x, rows), dtype=np.float64)

    @staticmethod
    def row_dot(x: Array, y: Array) -> Array:
        """`[B]` sums of x * y over each row, without an array of the products."""
        return np.einsum("ij,ij->i", x, y)

    @staticmethod
    def dot(x: Array, y: Array) -> Array:
        return np.einsum("ij,ij->", x, y)  # not BLAS, whose threads would wait for each other

    @staticmethod
    def greatest(x: Array) -> Array:
        return x.max() if x.size else np.float64(0.0)

    @staticmethod
    def stack(parts: Sequence[Array]) -> Array:
        return np.stack([np.asarray(p, dtype=np.float64) for p in parts])

    @staticmethod
    def join(parts: Sequence[Array]) -> Array:
        return np.concatenate(parts, axis=-1)

    @staticmethod
    def zeros(n: int) -> Array:
        return np.zeros(n)

    @staticmethod
    def full(like: Array, x: float) -> Array:
        return np.full(like.shape, x)

    @staticmethod
    def count(x: Array) -> Array:
        return np.count_nonzero(x)

    @staticmethod
    def first(x: Array) -> Array:
        """`[B, 1]` the first true place of each row, 0 where there is none."""
        return x.argmax(-1)[:, None]

    @staticmethod
    def take(x: Array, at: Array) -> Array:
        """`[B, 1]` of `[B, T]`."""
        return np.take_along_axis(x, at, -1)

    @staticmethod
    def bits(x: Array, shift: int) -> Array:
        with np.errstate(over="ignore", under="ignore"):
            return x.astype(np.float32).view(np.int32) >> shift

    @staticmethod
    def clip(x: Array, low: int, high: int) -> Array:
        return np.clip(x, low, high)

    @staticmethod
    def above(x: Array, edges: Sequence[float]) -> Array:
        """How many of the edges lie at or below x."""
        return np.searchsorted(np.asarray(edges), x, side="right")

    @staticmethod
    def histogram(index: Array, weight: Array, n: int) -> Array:
        return np.bincount(index.ravel(), weights=weight.ravel(), minlength=n)


class TorchKind:
    """torch tensors on one device, which is never waited for."""

    def __init__(self, like: Array) -> None:
        self.xp = namespace(like)
        self._torch = sys.modules["torch"]
        self._device = like.device
        self._edges: dict[tuple[float, ...], Array] = {}

    def block(self, tokens: int) -> int:
        """On a device at least an eighth of the batch at a time: few launches, and about thirteen columns of it."""
        return max(1 << 15, min(BLOCK_DEVICE, tokens // 8))

    @staticmethod
    def part(x: Array, rows: slice) -> Array:
        """Some rows, in their own dtype."""
        return x.detach()[rows]

    def wide(self, x: Array, rows: slice = slice(None)) -> Array:
        return self.part(x, rows).double().contiguous()

    def row_dot(self, x: Array, y: Array) -> Array:
        """`[B]` sums of x * y over each row, without an array of the products."""
        return self._torch.linalg.vecdot(x, y, dim=-1)

    def dot(self, x: Array, y: Array) -> Array:
        return self._torch.dot(x.reshape(-1), y.reshape(-1))

    def greatest(self, x: Array) -> Array:
        return x.amax() if x.numel() else self.zeros(1)[0]

    def stack(self, parts: Sequence[Array]) -> Array:
        return self._torch.stack([p.double() for p in parts])

    def join(self, parts: Sequence[Array]) -> Array:
        return self._torch.cat(list(parts), dim=-1)

    def zeros(self, n: int) -> Array:
        return self._torch.zeros(n, dtype=self._torch.float64, device=self._device)

    def full(self, like: Array, x: float) -> Array:
        return self._torch.full_like(like, x)

    @staticmethod
    def count(x: Array) -> Array:
        return x.sum()

    def first(self, x: Array) -> Array:
        """`[B, 1]` the first true place of each row, 0 where there is none."""
        return x.to(self._torch.uint8).argmax(-1, keepdim=True)

    @staticmethod
    def take(x: Array, at: Array) -> Array:
        """`[B, 1]` of `[B, T]`."""
        return x.gather(-1, at)

    def bits(self, x: Array, shift: int) -> Array:
        return x.float().view(self._torch.int32) >> shift

    @staticmethod
    def clip(x: Array, low: int, high: int) -> Array:
        return x.clamp(low, high)

    def above(self, x: Array, edges: Sequence[float]) -> Array:
        """How many of the edges lie at or below x."""
        return self._torch.bucketize(x, self._on_device(tuple(edges)), right=True)

    def _on_device(self, edges: tuple[float, ...]) -> Array:
        if edges not in self._edges:  # sent once
            self._edges[edges] = self._torch.tensor(edges, dtype=self._torch.float64, device=self._device)
        return self._edges[edges]

    def histogram(self, index: Array, weight: Array, n: int) -> Array:
        return self.zeros(n).scatter_add_(0, index.reshape(-1).long(), weight.reshape(-1))


@contextlib.contextmanager
def plain_tensors() -> Iterator[None]:
    """Without grad, and outside inference mode: what is made here may be added to and multiplied into a loss later."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


_NUMPY = NumpyKind()
_devices: dict[Any, TorchKind] = {}


def kind_of(x: Array) -> Any:
    """The operations for an array's own module and device."""
    if not is_torch(x) or x.device.type == "cpu":
        return _NUMPY
    if x.device not in _devices:
        _devices[x.device] = TorchKind(x)
    return _devices[x.device]
