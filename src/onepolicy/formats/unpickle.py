"""Opens pickled dumps without torch and without running anything: `.pt` (both of torch's file forms), `.pkl`, `.dp`.

    tree = load(file, size, place)

gives dicts, lists, numbers, text, and for the rest inert things: `Opaque` (an object of a listed class), `Tensor`,
`Array`, `Jagged`. `array` makes numpy of them. A name that is on no list is refused before anything is made of it: the
list is in `names`, what it may do, in `instructions`. Bytes of tensors are read when they are asked for, from the open
file, at the place that the archive gives.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from onepolicy.errors import ContentError
from onepolicy.formats.base import Files
from onepolicy.formats.files import guarded, packing
from onepolicy.formats.inert import MAX_DEPTH, Context, Opaque
from onepolicy.formats.instructions import run
from onepolicy.formats.machine import Machine
from onepolicy.formats.storages import Array, DType, Jagged, Storage, StorageType, Tensor

__all__ = ["Array", "Jagged", "Opaque", "Tensor", "array", "load", "loads", "opened", "rows"]

#: First object of torch's older file form.
_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PROTOCOL = 1001
#: Compressed records (a repacked archive) may grow to this many times the file.
_INFLATE = 16


def load(file: BinaryIO, size: int, place: str, export: str = "") -> Any:
    """The value that the file holds; `file` stays open as long as its tensors are read.

    `export`: lines that write the same data as JSON lines where the framework runs, shown with a refusal.

    Errors: `ContentError`, one line, for a file that is damaged, claims more than it has, or names what is on no list.
    """
    return _damage_named(lambda: _load(_Source(file, size), Context(place, size, export)), place)


def loads(data: bytes, place: str, export: str = "") -> Any:
    """`load` of bytes. A batch that a framework has pickled into bytes is read so."""
    return load(io.BytesIO(data), len(data), place, export)


@contextmanager
def opened(path: str, files: Files, export: str = "") -> Iterator[Any]:
    """`load` of a file of a dump, which stays open inside the block. A packed one (`.gz`) is unpacked into memory.

    Errors: `ContentError`, as `load`, and for what unpacks to far more than it is.
    """
    with files.open(path) as file:
        if packing(path) is None:
            value = load(file, files.size(path), path, export)
        else:
            value = loads(_unpacked(path, file, files.size(path)), path, export)
        try:
            yield value
        except Exception as err:  # what a made up file makes fail in a reader
            raise _named(err, path) from None


def _unpacked(path: str, file: BinaryIO, size: int) -> bytes:
    most = _INFLATE * size + (1 << 24)
    data = guarded(path, lambda: file.read(most + 1))
    if len(data) > most:
        raise ContentError(f"{path}: it unpacks to more than {_INFLATE} times its size; not read on")
    return data


def array(value: Any, place: str = "") -> NDArray[Any]:
    """numpy of a tensor, an array or a list of numbers. Errors: `ContentError` for anything else."""
    if isinstance(value, (Tensor, Array)):
        return _damage_named(value.numpy, value.place)
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, (list, tuple)):
        raise ContentError(f"{place}: got {_kind(value)}, wanted numbers".removeprefix(": "))
    return _damage_named(lambda: np.array([np.nan if x is None else x for x in value]), place)


def rows(value: Any, place: str = "") -> list[NDArray[Any]]:
    """A batch as its sequences: rows of a matrix, of a nested tensor, or of a list. Errors: `ContentError`."""
    if isinstance(value, Jagged):
        return _damage_named(value.rows, place)
    if isinstance(value, (list, tuple)):
        if len({id(x) for x in value}) != len(value):
            raise ContentError(f"{place}: damaged or made up: one sequence stands in a column twice")
        return [array(x, place) for x in value]
    return list(array(value, place))


def _kind(value: Any) -> str:
    return repr(value) if isinstance(value, Opaque) else type(value).__name__


def _damage_named(read: Callable[[], Any], place: str) -> Any:
    try:
        return read()
    except Exception as err:  # what damaged bytes make fail; `_named` lets our own errors through
        raise _named(err, place) from None


def _named(err: Exception, place: str) -> ContentError:
    """Whatever a damaged file makes fail, as one line."""
    if isinstance(err, ContentError):
        return err
    if isinstance(err, RecursionError):
        return ContentError(f"{place}: nested too deeply; not read")
    if isinstance(err, MemoryError):
        return ContentError(f"{place}: it claims more than the memory of this machine")
    if isinstance(err, OSError):
        return ContentError(f"{place}: cannot be read: {err.strerror or err}")
    return ContentError(f"{place}: damaged or cut off: {type(err).__name__}: {ascii(str(err))[1:-1][:120]}")


class _Source:
    """Bytes of a file, by place."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size = file, size

    def read(self, context: Context, start: int, n: int) -> bytes:
        if start < 0 or n < 0 or start + n > self.size:
            raise context.fail(f"damaged or cut off: {n} bytes are announced at byte {start}, the file has {self.size}")
        self.file.seek(start)
        data = self.file.read(n)
        if len(data) != n:
            raise context.fail(f"cut off: {n} bytes are announced at byte {start}, {len(data)} are there")
        return data


def _load(source: _Source, context: Context) -> Any:
    context.load_bytes = lambda data: _nested(data, context)
    if source.read(context, 0, min(4, source.size)) == b"PK\x03\x04":
        value = _load_zip(source, context)
    else:
        value = _load_plain(source, context)
    for tensor in context.tensors:
        tensor.check()
    context.tensors.clear()
    context.load_bytes = None  # a ring with the context itself, which would keep the file's bytes
    return value


def _nested(data: bytes, outer: Context) -> Any:
    if outer.depth + 1 > MAX_DEPTH:
        raise outer.fail(f"archives in archives, more than {MAX_DEPTH} around each other; not read")
    outer.spend(len(data))
    inner = Context(outer.place, len(data), outer.export, outer.depth + 1)
    return _load(_Source(io.BytesIO(data), len(data)), inner)


# -- torch's files: a zip archive ------------------------------------------------------------------------------------


def _load_zip(source: _Source, context: Context) -> Any:
    archive = _Zip(source, context)
    pickle = next((n for n in archive.records if n == "data.pkl" or n.endswith("/data.pkl")), None)
    if pickle is None:
        raise context.fail("a zip archive without data.pkl: not written by torch.save")
    root = pickle.removesuffix("data.pkl")
    order = archive.read(f"{root}byteorder") if f"{root}byteorder" in archive.records else b"little"
    if order not in (b"little", b"big"):
        raise context.fail("damaged: the archive's byte order is none")
    made: dict[str, Storage] = {}

    def storage(pid: Any) -> Storage:
        kind, key, numel = _storage_id(context, pid, 5)
        if key not in made:
            made[key] = archive.storage(
                f"{root}data/{key}", DType(kind.name, "<" if order == b"little" else ">"), numel
            )
        if made[key].dtype.name != kind.name or made[key].numel != numel:
            raise context.fail(f"damaged: storage {key!a} is described in two ways")
        return made[key]

    return run(Machine(archive.read(pickle), context, persistent=storage))


def _storage_id(context: Context, pid: Any, length: int) -> tuple[DType, str, int]:
    """`("storage", type, key, device, elements[, view])`."""
    if not isinstance(pid, tuple) or len(pid) != length or pid[0] != "storage" or not isinstance(pid[1], StorageType):
        raise context.refuse("the pickle asks for an object from outside of it that is no storage")
    _, kind, key, _, numel = pid[:5]
    if type(key) is not str or type(numel) is not int or numel < 0:
        raise context.fail("damaged: a storage without a key or a size")
    return kind.dtype, key, numel


class _Zip:
    """Records of an archive. Those that are stored as they are, as torch does, are read at their place."""

    def __init__(self, source: _Source, context: Context) -> None:
        self.source, self.context = source, context
        source.file.seek(0)
        with zipfile.ZipFile(source.file) as archive:
            infos = archive.infolist()
        self.records = {info.filename: info for info in infos}
        if len(self.records) != len(infos):
            raise context.fail("damaged: two records of the archive have one name")
        grown = sum(i.file_size for i in infos if i.compress_type != zipfile.ZIP_STORED)
        if grown > _INFLATE * source.size + (1 << 24):
            raise context.fail(f"packed records of {grown} bytes, more than {_INFLATE} files; not unpacked")
        if sum(i.file_size for i in infos if i.compress_type == zipfile.ZIP_STORED) > source.size:
            raise context.fail("damaged or made up: its records are larger than the file")

    def _start(self, info: zipfile.ZipInfo) -> int:
        header = self.source.read(self.context, info.header_offset, 30)
        if header[:4] != b"PK\x03\x04":
            raise self.context.fail(f"damaged: no record at byte {info.header_offset}")
        return info.header_offset + 30 + sum(struct.unpack_from("<HH", header, 26))

    def read(self, name: str) -> bytes:
        info = self.records[name]
        if info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size:
            return self.source.read(self.context, self._start(info), info.file_size)
        if info.compress_type != zipfile.ZIP_DEFLATED:
            raise self.context.fail(f"a record of the archive is packed by method {info.compress_type}; not read")
        packed = self.source.read(self.context, self._start(info), info.compress_size)
        data = zlib.decompressobj(-15).decompress(packed, max(1, info.file_size))
        if len(data) != info.file_size:
            raise self.context.fail("damaged: a packed record is shorter than the archive says")
        return data

    def storage(self, name: str, dtype: DType, numel: int) -> Storage:
        info, wanted = self.records.get(name), numel * dtype.itemsize
        if info is None or info.file_size < wanted:
            got = 0 if info is None else info.file_size
            raise self.context.fail(f"damaged: storage {name!a} needs {wanted} bytes, the archive has {got}")
        return Storage(self.context.place, dtype, numel, lambda: self.read(name)[:wanted])


# -- plain pickles, and torch's older files --------------------------------------------------------------------------


def _load_plain(source: _Source, context: Context) -> Any:
    data = source.read(context, 0, source.size)
    machine = Machine(data, context)
    value = run(machine)
    return _load_legacy(data, machine.pos, context) if value == _MAGIC and type(value) is int else value


def _load_legacy(data: bytes, pos: int, context: Context) -> Any:
    """After the magic number: the protocol, the writer's machine, the value, the keys, and each storage's bytes."""
    made: dict[str, Storage] = {}

    def storage(pid: Any) -> Storage:
        kind, key, numel = _storage_id(context, pid, 6)
        whole = made.setdefault(key, Storage(context.place, DType(kind.name), numel))
        if whole.dtype.name != kind.name or whole.numel != numel:
            raise context.fail(f"damaged: storage {key!a} is described in two ways")
        return _part(context, whole, pid[5])

    parts: list[Any] = []
    for _ in range(4):
        machine = Machine(data, context, pos, storage)
        parts.append(run(machine))
        pos = machine.pos
    protocol, system, value, keys = parts
    if protocol != _LEGACY_PROTOCOL or not isinstance(system, dict) or not isinstance(keys, list):
        raise context.fail("damaged, or of a version of torch.save that is not known")
    order: Literal["<", ">"] = "<" if system.get("little_endian", True) else ">"
    for key in keys:
        pos = _bind(context, data, pos, made.get(key) if isinstance(key, str) else None, order)
    return value


def _bind(context: Context, data: bytes, pos: int, storage: Storage | None, order: Literal["<", ">"]) -> int:
    """Gives a storage its bytes: eight that say how many elements, then the elements."""
    if storage is None:
        raise context.fail("damaged: bytes of a storage that nothing uses")
    (numel,) = struct.unpack_from(f"{order}q", data, pos)
    size = numel * storage.dtype.itemsize
    if numel != storage.numel or pos + 8 + size > len(data):
        raise context.fail(f"damaged or cut off: a storage of {storage.numel} elements is not there")
    storage.dtype.order = order
    storage.read = lambda start=pos + 8: data[start : start + size]
    return pos + 8 + size


def _part(context: Context, whole: Storage, view: Any) -> Storage:
    """Old files have storages that are a part of another: `(key, first element, elements)`."""
    if view is None:
        return whole
    if not isinstance(view, tuple) or len(view) != 3 or not all(type(x) is int and x >= 0 for x in view[1:]):
        raise context.fail("damaged: a part of a storage that is none")
    _, first, numel = view
    if first + numel > whole.numel:
        raise context.fail(f"damaged: a part of a storage reaches element {first + numel} of {whole.numel}")
    width = whole.dtype.itemsize
    context.spend(numel * width)
    return Storage(whole.place, whole.dtype, numel, lambda: whole.data()[first * width : (first + numel) * width])
