"""An array of numpy's `.npy` from its bytes, without pickles: a header can claim any size, so the bytes are counted."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = b"\x93NUMPY"


def array_of(data: bytes) -> NDArray[Any]:
    """Errors: `ValueError` for Python objects, and for bytes that are fewer or more than the header says."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except Exception as err:  # a header is parsed as Python text: errors of many kinds
        raise ValueError(f"no .npy: {' '.join(str(err).split())[:100]}") from None
    if dtype.hasobject:
        raise ValueError(f"an .npy of Python objects {shape}, which are pickles and are not read; wanted numbers")
    rest = data[file.tell() :]
    size = 1
    for k in shape:
        size *= int(k)
    if size * dtype.itemsize != len(rest) or min(shape, default=0) < 0:
        raise ValueError(f"an .npy of {dtype} {shape} in {len(rest)} bytes")
    return np.frombuffer(rest, dtype=dtype).reshape(shape, order="F" if fortran else "C")
