"""The files of a dump: local paths, folders, globs and fsspec URLs, opened the same way, unpacked where packed."""

from __future__ import annotations

import glob
import io
import os
import re
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from onepolicy.errors import ContentError, MissingExtra, UsageError

#: suffix -> how the bytes behind it are packed
PACKED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_BUFFER = 1 << 20
#: What is unpacked ahead of the reader, and lost where a packed file turns out to be cut.
_AHEAD = 1 << 16
_T = TypeVar("_T")
_URL = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]+://")


def is_url(path: str) -> bool:
    """Whether fsspec has to open it."""
    return _URL.match(path) is not None


def packing(path: str) -> str | None:
    """`gzip`, `zstd`, `bz2` by the path's suffix, None for a plain file."""
    return PACKED.get(os.path.splitext(path)[1].lower())


class Files:
    """Opens the files of a dump. Holds nothing open, so it can be handed to other processes."""

    def expand(self, uris: Iterable[str | Path]) -> list[str]:
        """Every file that is meant: folders with all below them, globs, URLs; sorted, each once. `**.parquet` is
        `**/*.parquet`: at any depth.

        Errors: `UsageError` for a path, folder or glob with nothing behind it; `MissingExtra` for a URL without
        fsspec.
        """
        found: set[str] = set()
        for uri in map(_any_depth, map(str, uris)):
            paths = _remote(uri) if is_url(uri) else _local(uri)
            if not paths:
                raise UsageError(f"no such file or folder, and no file matches: {uri}")
            found.update(paths)
        return sorted(found)

    def open(self, path: str) -> BinaryIO:
        """The file's bytes, unpacked, seekable where it is not packed.

        Errors: `ContentError` for a file that cannot be opened, `MissingExtra` for what needs a package.
        """
        raw = guarded(path, lambda: _opened(path))
        packed = packing(path)
        return raw if packed is None else _unpacked(raw, packed)

    def size(self, path: str) -> int:
        """Bytes as stored. Errors: as `open`."""
        if not is_url(path):
            return guarded(path, lambda: os.stat(path).st_size)
        return guarded(path, lambda: int(_filesystem(path)[0].size(_filesystem(path)[1]) or 0))

    def head(self, path: str, n: int) -> bytes:
        """The first `n` bytes, unpacked. Errors: as `open`, and for a file that cannot be unpacked."""
        with self.open(path) as file:
            return guarded(path, lambda: file.read(n))


def guarded(path: str, do: Callable[[], _T]) -> _T:
    """`do()`, with what a file system or an unpacker can raise as one line. Errors: `ContentError`."""
    try:
        return do()
    except (ContentError, MissingExtra):
        raise
    except FileNotFoundError:
        raise ContentError(f"{path}: no such file; it was removed or renamed since the folder was listed") from None
    except PermissionError:
        raise ContentError(f"{path}: no permission to read it") from None
    except IsADirectoryError:
        raise ContentError(f"{path}: it is a folder, wanted a file") from None
    except Exception as err:  # every remote file system and unpacker has errors of its own
        raise ContentError(f"{path}: cannot be read: {one_line(err)}") from None


def one_line(err: BaseException) -> str:
    """An exception's text on one line, or its name."""
    return " ".join(str(err).split())[:200].rstrip(". ") or type(err).__name__


def _local(uri: str) -> list[str]:
    path = os.path.expanduser(uri)
    if os.path.isdir(path):
        return [os.path.join(root, name) for root, _, names in os.walk(path) for name in names]
    if os.path.lexists(path):
        return [path]
    return [p for p in glob.glob(path, recursive=True, include_hidden=True) if not os.path.isdir(p)]


def _any_depth(uri: str) -> str:
    """`**` before more of a name: Python takes it for one `*` and newer fsspec refuses it; people mean any depth."""
    if not is_url(uri) and os.path.lexists(uri):
        return uri
    return re.sub(r"(^|[/\\])\*\*(?=[^/\\*])", r"\1**/*", uri)


def _remote(uri: str) -> list[str]:
    system, path = _filesystem(uri)
    if any(c in path for c in "*?["):
        found = guarded(uri, lambda: system.glob(path))
        kept = [p for p in found if not guarded(uri, lambda p=p: system.isdir(p))]
    elif guarded(uri, lambda: system.isdir(path)):
        kept = guarded(uri, lambda: system.find(path))
    else:
        kept = [path] if guarded(uri, lambda: system.exists(path)) else []
    return [system.unstrip_protocol(p) for p in kept]


def _filesystem(uri: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise MissingExtra("fsspec", "remote", f"reading {uri.split('://')[0]}://...") from None
    try:
        return fsspec.core.url_to_fs(uri)  # pyright: ignore[reportUnknownMemberType]
    except ImportError as err:  # the protocol's own package
        raise UsageError(f"{uri}: {one_line(err)}") from None
    except ValueError as err:  # a protocol that it does not know
        raise UsageError(f"{uri}: {one_line(err)}") from None


def _opened(path: str) -> BinaryIO:
    if not is_url(path):
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would wait for its writer
            raise ContentError(f"{path}: not a file: a folder, pipe or device")
        return open(path, "rb", buffering=_BUFFER)
    system, inside = _filesystem(path)
    # fsspec's own files read a line of any length whole
    return cast(BinaryIO, io.BufferedReader(cast(Any, system.open(inside, "rb")), _BUFFER))


def _unpacked(raw: BinaryIO, packed: str) -> BinaryIO:
    """gzip and bz2 by the standard library, zstd by pyarrow, which knows it."""
    if packed == "gzip":
        import gzip

        file = gzip.GzipFile(fileobj=raw, mode="rb")
        file.myfileobj = cast(Any, raw)  # closes it with itself
        return cast(BinaryIO, io.BufferedReader(cast(Any, file), _AHEAD))
    if packed == "bz2":
        import bz2

        return cast(BinaryIO, io.BufferedReader(cast(Any, bz2.BZ2File(raw, "rb")), _AHEAD))
    try:
        import pyarrow as pa
    except ImportError:
        raise MissingExtra("pyarrow", "cli", "reading .zst") from None
    return cast(BinaryIO, io.BufferedReader(_Unzstd(pa.CompressedInputStream(pa.PythonFile(raw), "zstd")), _AHEAD))


class _Unzstd(io.RawIOBase):
    """pyarrow's stream as one of the standard library's, so that lines can be read from it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self._stream.read(len(buffer))
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()
