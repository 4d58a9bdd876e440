"""Bytes for tests of the unpickler: what torch and pickle write, and pickles put together by hand."""

from __future__ import annotations

import functools
import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import torch

from onepolicy.formats.unpickle import loads

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def saved(value: Any, zipped: bool = True, protocol: int = 2) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    return buffer.getvalue()


def read(data: bytes) -> Any:
    return loads(data, "f.pt")


WRITERS: dict[str, Callable[[Any], bytes]] = {
    "torch": saved,
    "torch, protocol 4": lambda v: saved(v, protocol=4),
    "torch, legacy": lambda v: saved(v, zipped=False),
    **{f"pickle {p}": functools.partial(pickle.dumps, protocol=p) for p in PROTOCOLS},
}


def archive(records: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as out:
        for name, data in records.items():
            out.writestr(name, data)
    return buffer.getvalue()


def records_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as whole:
        return {n: whole.read(n) for n in whole.namelist()}


class Reduces:
    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def global_(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data
