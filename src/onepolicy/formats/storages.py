"""Tensors and arrays of a pickle as numpy, without torch: every size is held against the bytes that are there first."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from onepolicy.errors import ContentError

#: torch's name of a type -> numpy's that holds the same bits. `bfloat16` has none: it becomes float32, exactly.
_TORCH: dict[str, str] = {
    "float64": "f8",
    "float32": "f4",
    "float16": "f2",
    "bfloat16": "u2",
    "int64": "i8",
    "int32": "i4",
    "int16": "i2",
    "int8": "i1",
    "uint64": "u8",
    "uint32": "u4",
    "uint16": "u2",
    "uint8": "u1",
    "bool": "u1",
    "complex64": "c8",
    "complex128": "c16",
}
#: Types whose bytes are counted but whose values are not read.
_UNREAD: dict[str, int] = {
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "complex32": 4,
}
_STORAGES: dict[str, str] = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
}
_NUMPY = re.compile(r"[<>|=]?(b1|\?|[iu][1248]|f[248]|c(8|16)|S\d{1,9}|U\d{1,9}|O8?)")

#: A view may repeat its storage (an expanded tensor); of the file's own size it makes at most so many.
_REPEATS = 8


@dataclass(slots=True)
class DType:
    """An element type: torch's name, or numpy's with its byte order."""

    name: str
    order: Literal["<", ">"] = "<"

    @staticmethod
    def of_numpy(name: str) -> str | None:
        """numpy's name, if arrays of it are read: numbers, text, objects; no structures, no dates."""
        return name if _NUMPY.fullmatch(name) else None

    @staticmethod
    def of_torch(name: str) -> DType | None:
        name = name.removeprefix("torch.")
        return DType(name) if name in _TORCH or name in _UNREAD else None

    @staticmethod
    def torch_names() -> dict[tuple[str, str], DType | StorageType]:
        made: dict[tuple[str, str], DType | StorageType] = {("torch", n): DType(n) for n in (*_TORCH, *_UNREAD)}
        for module in ("torch", "torch.cuda", "torch.storage"):
            made |= {(module, n): StorageType(DType(t)) for n, t in _STORAGES.items()}
        return made

    @property
    def itemsize(self) -> int:
        return _UNREAD.get(self.name) or np.dtype(_TORCH[self.name]).itemsize

    def build(self, place: str, state: Any) -> None:
        """numpy's state of a type: `(version, order, subtype, names, fields, size, alignment, flags)`."""
        if not isinstance(state, tuple) or len(state) < 5 or state[2:5] != (None, None, None):
            raise ContentError(f"{place}: an array of structures, which is not read")
        order = state[1].decode("latin-1") if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "|", "="):
            raise ContentError(f"{place}: damaged pickle: an array's byte order is none")
        self.order = ">" if order == ">" else "<"

    def numpy(self) -> np.dtype[Any]:
        """Of an array's type; of a torch type, the one that holds its bits."""
        return np.dtype(_TORCH.get(self.name, self.name)).newbyteorder("=" if self.name[0] == "O" else self.order)


@dataclass(frozen=True, slots=True)
class StorageType:
    """A class of storages, by the type of its elements."""

    dtype: DType


@dataclass(slots=True)
class Storage:
    """`numel` elements, read when they are asked for. `read` gives the bytes that belong to it."""

    place: str
    dtype: DType
    numel: int
    read: Callable[[], bytes | memoryview] | None = None
    _bytes: bytes | memoryview | None = field(default=None, repr=False)

    def data(self) -> bytes | memoryview:
        """Errors: `ContentError` when the file has fewer bytes than the storage claims."""
        if self._bytes is None:
            if self.read is None:
                raise ContentError(f"{self.place}: damaged: a tensor's storage is not in the file")
            self._bytes = self.read()
        return self._bytes


@dataclass(slots=True)
class Tensor:
    """A view of a storage. `size` and `stride` count elements; `limit`: bytes of the file it came from."""

    place: str
    limit: int
    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: DType | None = None

    @staticmethod
    def of_bytes(place: str, dtype: str, shape: tuple[Any, ...], data: bytes | memoryview) -> Tensor | None:
        """A contiguous tensor of these bytes; None for a type that has no name here. Errors: `ContentError`."""
        kind = DType.of_torch(dtype)
        if kind is None:
            return None
        if not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) * kind.itemsize > len(data):
            raise ContentError(f"{place}: damaged: a tensor of shape {_short(shape)} has {len(data)} bytes")
        steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        held = Storage(place, kind, len(data) // kind.itemsize, lambda: data)
        return Tensor(place, len(data), held, 0, shape, tuple(steps))

    @property
    def of(self) -> DType:
        return self.dtype or self.storage.dtype

    def check(self) -> None:
        """Errors: `ContentError` for a view that reaches beyond its storage, or repeats it without end."""
        held = self.storage.numel * self.storage.dtype.itemsize // self.of.itemsize
        count = math.prod(self.size)
        last = self.offset + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        if (count and last >= held) or self.offset > held:
            raise ContentError(
                f"{self.place}: damaged or made up: a tensor of size {_short(self.size)} reaches element {last} "
                f"of a storage that has {held}"
            )
        if count * self.of.itemsize > _REPEATS * self.limit + (1 << 20):
            raise ContentError(
                f"{self.place}: a tensor of size {_short(self.size)} has more bytes than {_REPEATS} files of this size"
            )

    def numpy(self) -> NDArray[Any]:
        """`[*size]`; bfloat16 as float32 with the same value. Errors: `ContentError`, as `check`."""
        self.check()
        if self.of.name not in _TORCH:
            raise ContentError(f"{self.place}: a tensor of {self.of.name}, which is not read")
        if 0 in self.size:
            return natural(np.zeros(self.size, dtype=_TORCH[self.of.name]), self.of.name)
        kind = self.of.numpy()
        kind = kind.newbyteorder(self.storage.dtype.order)
        data = self.storage.data()
        count = len(data) // kind.itemsize - self.offset  # a storage of bytes may end in a part of an element
        flat = np.frombuffer(data, dtype=kind, count=count, offset=self.offset * kind.itemsize)
        strides = [step * kind.itemsize for step in self.stride]
        return natural(np.lib.stride_tricks.as_strided(flat, self.size, strides, writeable=False), self.of.name)


def natural(bits: NDArray[Any], name: str) -> NDArray[Any]:
    """Values of a torch type from the bits that hold them, in this machine's byte order."""
    if name == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if name == "bool":
        return bits != 0
    return bits.astype(bits.dtype.newbyteorder("="), copy=False)


@dataclass(slots=True)
class Jagged:
    """Rows of unequal length: `values` behind each other, row i from `offsets[i]` to `offsets[i + 1]`, or `lengths[i]`
    values from `starts[i]`."""

    place: str
    values: Any
    offsets: Any
    lengths: Any = None
    starts: Any = None

    def rows(self) -> list[NDArray[Any]]:
        """Errors: `ContentError` for offsets that leave the values."""
        if not isinstance(self.values, Tensor):
            raise ContentError(f"{self.place}: damaged pickle: a nested tensor without its values")
        values = self.values.numpy()
        firsts, counts = self._bounds()
        bounds = list(zip(firsts, counts, strict=True))
        if any(a < 0 or n < 0 or a + n > len(values) for a, n in bounds) or sum(counts) > len(values):
            raise ContentError(f"{self.place}: damaged: rows of a nested tensor leave its {len(values)} values")
        return [values[a : a + n] for a, n in bounds]

    def _bounds(self) -> tuple[list[int], list[int]]:
        if isinstance(self.starts, Tensor) and isinstance(self.lengths, Tensor):
            lengths = self.lengths.numpy()
            if lengths.ndim != 2 or lengths.shape[1] != 1 or lengths.dtype.kind not in "iu":
                raise ContentError(f"{self.place}: a nested tensor of more than one dimension a row, which is not read")
            return self.starts.numpy().reshape(-1).tolist(), lengths[:, 0].tolist()
        if not isinstance(self.offsets, Tensor):
            raise ContentError(f"{self.place}: damaged pickle: a nested tensor without offsets")
        offsets = self.offsets.numpy().reshape(-1)
        if offsets.dtype.kind not in "iu" or len(offsets) == 0:
            raise ContentError(f"{self.place}: damaged pickle: a nested tensor's offsets are no whole numbers")
        if isinstance(self.lengths, Tensor):
            return offsets[:-1].tolist(), self.lengths.numpy().reshape(-1).tolist()
        return offsets[:-1].tolist(), np.diff(offsets).tolist()


@dataclass(slots=True)
class Array:
    """A numpy array of the pickle."""

    place: str
    shape: tuple[int, ...] = ()
    dtype: DType | None = None
    fortran: bool = False
    raw: Any = b""

    def build(self, state: Any) -> None:
        """numpy's state: `([version,] shape, type, fortran, bytes or the list of objects)`."""
        parts = tuple(state)[-4:] if isinstance(state, tuple) and len(state) in (4, 5) else None
        if parts is None or not isinstance(parts[1], DType):
            raise ContentError(f"{self.place}: damaged pickle: an array's state is not numpy's")
        self.shape, self.dtype, self.fortran, self.raw = parts
        if isinstance(self.raw, str):
            self.raw = self.raw.encode("latin-1")
        self.check()

    def check(self) -> None:
        """Errors: `ContentError` when shape and bytes contradict each other."""
        if not isinstance(self.shape, tuple) or len(self.shape) > 32:
            raise ContentError(f"{self.place}: damaged pickle: an array's shape is none")
        if not all(type(n) is int and n >= 0 for n in self.shape):
            raise ContentError(f"{self.place}: damaged pickle: an array's shape is none")
        wanted = math.prod(self.shape)
        if self.dtype is None or not isinstance(self.raw, list if self.dtype.numpy().hasobject else bytes):
            raise ContentError(f"{self.place}: damaged pickle: an array without its values")
        if not self.dtype.numpy().hasobject:
            wanted *= self.dtype.numpy().itemsize
        if len(self.raw) != wanted:
            text = f"an array of shape {_short(self.shape)} needs {wanted}, there are {len(self.raw)}"
            raise ContentError(f"{self.place}: damaged pickle: {text}")

    def numpy(self) -> NDArray[Any]:
        """`[*shape]`; of an object array the elements are as they came."""
        self.check()
        assert self.dtype is not None
        kind, order = self.dtype.numpy(), "F" if self.fortran else "C"
        if not kind.hasobject:
            flat = np.frombuffer(self.raw, dtype=kind) if kind.itemsize else np.zeros(0, dtype=kind)
            flat = flat.view(np.uint8) != 0 if kind.kind == "b" else flat
            return flat.reshape(self.shape, order=order).astype(flat.dtype.newbyteorder("="), copy=False)
        objects = np.empty(len(self.raw), dtype=object)
        for i, x in enumerate(self.raw):
            objects[i] = x
        return objects.reshape(self.shape, order=order)


def array_from_buffer(place: str, raw: Any, dtype: Any, shape: Any, order: Any) -> Array:
    """How protocol 5 writes an array. Errors: `ContentError` when shape and bytes contradict each other."""
    if not isinstance(dtype, DType) or dtype.numpy().hasobject:
        raise ContentError(f"{place}: damaged pickle: an array's state is not numpy's")
    made = Array(place, shape, dtype, order == "F", raw)
    made.check()
    return made


def scalar(place: str, dtype: Any, raw: Any) -> Any:
    """A numpy number as Python's. Errors: `ContentError`."""
    if isinstance(raw, str):
        raw = raw.encode("latin-1")
    if not isinstance(dtype, DType) or dtype.numpy().hasobject or not isinstance(raw, bytes):
        raise ContentError(f"{place}: damaged pickle: a number of no type")
    if len(raw) != dtype.numpy().itemsize or not raw:
        raise ContentError(f"{place}: damaged pickle: a number of {dtype.name} in {len(raw)} bytes")
    return np.frombuffer(raw, dtype=dtype.numpy())[0].item()


def _short(size: Sequence[int]) -> str:
    return str(list(size))[:80]
