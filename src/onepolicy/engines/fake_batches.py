"""How the fake engine lays sequences out: batches, packed rows, padding; and the faults that only these bring out.

In health none of it changes a bit: each position is computed alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.types import IntArray

Ids = NDArray[np.int32]


def firsts(n: int, live: Mapping[str, Any]) -> IntArray:
    """`[S]`: for each of n sequences the one that its batch, or its packed row, begins with."""
    size = live["batch_size"] or n
    if live["packing"] == "packed" and size == 1:
        size = n
    return np.arange(n) // max(size, 1) * size


def neighbours(token_ids: Ids, offsets: IntArray, live: Mapping[str, Any]) -> Ids:
    """`[T]`: the last token of the sequence before in the same batch or row, -1 in the first of each."""
    sequence = np.arange(len(offsets) - 1)
    before = offsets[:-1] - 1
    last = token_ids[np.maximum(before, 0)] if len(token_ids) else np.zeros(len(sequence), dtype=np.int32)
    inside = (firsts(len(sequence), live) < sequence) & (before >= 0)
    return np.repeat(np.where(inside, last, -1), np.diff(offsets)).astype(np.int32)


def padding(offsets: IntArray, live: Mapping[str, Any]) -> IntArray:
    """`[T]`: how many places of padding stand before each token's sequence when it is padded on the left."""
    lengths = np.diff(offsets)
    if live["padding_side"] != "left" or live["packing"] == "packed":
        return np.zeros(int(offsets[-1]), dtype=np.int64)
    begin = firsts(len(lengths), live)
    longest = np.zeros(len(lengths), dtype=np.int64)
    np.maximum.at(longest, begin, lengths)
    return np.repeat(longest[begin] - lengths, lengths)
