"""Scorers that test_worker_elsewhere.py runs in another Python environment."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time

import numpy as np
from numpy.typing import NDArray

_calls = [0]


def tell(ids: list[NDArray[np.int32]]) -> list[NDArray[np.float64]]:
    """Minus the id; who it was stands in the file that ELSEWHERE names."""
    with open(os.environ["ELSEWHERE"], "w") as f:
        print(sys.prefix, os.getpid(), importlib.util.find_spec("torch"), file=f)
    return [-row.astype(np.float64) for row in ids]


def die(ids: list[NDArray[np.int32]]) -> list[NDArray[np.float64]]:
    """Good once, then killed."""
    _calls[0] += 1
    if _calls[0] > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return tell(ids)


def hang(ids: list[NDArray[np.int32]]) -> list[NDArray[np.float64]]:
    """Good once, then silent."""
    _calls[0] += 1
    if _calls[0] > 1:
        time.sleep(600)
    return tell(ids)


def needs_torch(ids: list[NDArray[np.int32]]) -> list[NDArray[np.float64]]:
    import torch  # pyright: ignore[reportUnusedImport]  # noqa: F401

    return tell(ids)
