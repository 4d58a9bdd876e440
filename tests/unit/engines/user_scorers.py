"""Functions that users might bring as `callable:user_scorers:name`."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

not_a_function = 3


def good(ids: list[np.ndarray]) -> list[Any]:
    return [-x.astype(np.float32) / 8 for x in ids]


def how_many(ids: list[np.ndarray]) -> list[Any]:
    """Each value is minus the number of sequences in the call."""
    return [np.full(len(x), -float(len(ids))) for x in ids]


def sorted_by_ids(ids: list[np.ndarray]) -> list[Any]:
    """Sorts as a dynamic batcher does, and does not sort back."""
    return good(sorted(ids, key=lambda x: (len(x), x.tolist())))


def lists_with_nan(ids: list[np.ndarray]) -> list[Any]:
    return [[float("nan")] * len(x) for x in ids]


def one_short(ids: list[np.ndarray]) -> list[Any]:
    return [np.zeros(len(x) - 1) for x in ids]


def padded(ids: list[np.ndarray]) -> list[Any]:
    return [np.zeros(64) for _ in ids]


def square(ids: list[np.ndarray]) -> list[Any]:
    return [np.zeros((len(x), 2)) for x in ids]


def fewer(ids: list[np.ndarray]) -> list[Any]:
    return [np.zeros(len(x)) for x in ids[1:]]


def texts(ids: list[np.ndarray]) -> list[Any]:
    return [["-1.0"] * len(x) for x in ids]


def nones(ids: list[np.ndarray]) -> list[Any]:
    return [[None] * len(x) for x in ids]


def null_first(ids: list[np.ndarray]) -> list[Any]:
    return [[None] + [-1.0] * (len(x) - 1) for x in ids]


def exiting(ids: list[np.ndarray]) -> list[Any]:
    raise SystemExit(0)


def nothing(ids: list[np.ndarray]) -> None:
    return None


def raising(ids: list[np.ndarray]) -> list[Any]:
    raise RuntimeError("out of memory\nwith a second line")


def changes_its_input(ids: list[np.ndarray]) -> list[Any]:
    for x in ids:
        x[:] = 0
    return good(ids)


def leaves(sequences):
    """Ends its whole process, as if all were well."""
    os._exit(0)


def crashes(sequences):
    """Is killed by the system, as by a fault in a kernel."""
    os.kill(os.getpid(), signal.SIGSEGV)
