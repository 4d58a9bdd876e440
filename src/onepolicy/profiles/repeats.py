"""How often each token stood before in its own sequence."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onepolicy.profiles.blocks import cut
from onepolicy.types import BoolArray, IntArray

#: From this mean length on, sequences are sorted one by one.
_LONG = 64


def repeats(offsets: IntArray, ids: NDArray[np.int32], drawn: BoolArray) -> tuple[NDArray[np.int32], BoolArray]:
    """(`[T]` how often the token stood drawn before in its sequence, `[T]` whether it stood there undrawn)."""
    times, undrawn = np.zeros(len(ids), dtype=np.int32), np.zeros(len(ids), dtype=bool)
    for part in cut(offsets):
        starts = offsets[part.start : part.stop + 1]
        at = slice(int(starts[0]), int(starts[-1]))
        _count(starts - starts[0], ids[at], drawn[at], times[at], undrawn[at])
    return times, undrawn


def _count(
    offsets: IntArray, ids: NDArray[np.int32], drawn: BoolArray, times: NDArray[np.int32], undrawn: BoolArray
) -> None:
    """`repeats` of some sequences, into `times` and `undrawn`, which are 0."""
    order, same = _sorted_by_id(offsets, ids)
    again = np.flatnonzero(same)
    if not len(again):
        return
    drawn = drawn[order]
    before = np.cumsum(drawn, dtype=np.int32)
    before -= drawn
    # where the run of equal tokens begins: at the last place that is not like the one before it
    head = np.flatnonzero(~same)
    start = np.repeat(head, np.diff(head, append=len(order)) - 1)
    n, at = before[again] - before[start], order[again]
    times[at] = n
    undrawn[at] = again - start > n


def _sorted_by_id(offsets: IntArray, ids: NDArray[np.int32]) -> tuple[IntArray, BoolArray]:
    """(`[T]` places by sequence, id and place; `[T]` whether sequence and id are those of the place before)."""
    n, lengths = len(ids), np.diff(offsets)
    low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
    bits = int(lengths.max(initial=0)).bit_length()
    if low >= 0 and high.bit_length() + bits <= 32 and n >= _LONG * len(lengths):
        return _one_by_one(offsets, ids, bits)
    sequence, wide = np.repeat(np.arange(len(lengths)), lengths), ids.astype(np.int64)
    width, places = high.bit_length(), n.bit_length()
    if low >= 0 and len(lengths).bit_length() + width + places <= 63:
        # one plain sort of all three: several times as fast as `argsort`
        packed = np.sort((sequence << width | wide) << places | np.arange(n))
        return packed & ((1 << places) - 1), _as_before(packed >> places)
    key = sequence * (1 << 32) + wide
    order = np.argsort(key, kind="stable")
    return order, _as_before(key[order])


def _one_by_one(offsets: IntArray, ids: NDArray[np.int32], bits: int) -> tuple[IntArray, BoolArray]:
    """Id and place in the sequence fit into 32 bits, and short lists of those sort fastest."""
    lengths = np.diff(offsets)
    starts = np.repeat(offsets[:-1].astype(np.uint32), lengths)
    packed = ids.astype(np.uint32)
    packed <<= np.uint32(bits)
    packed += np.arange(len(ids), dtype=np.uint32) - starts
    for lo, hi in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        packed[lo:hi].sort()
    same = _as_before(packed >> np.uint32(bits))
    same[offsets[:-1][lengths > 0]] = False
    packed &= np.uint32((1 << bits) - 1)
    packed += starts
    return packed.astype(np.int64), same


def _as_before(key: NDArray[np.generic]) -> BoolArray:
    same = np.zeros(len(key), dtype=bool)
    np.equal(key[1:], key[:-1], out=same[1:])
    return same
