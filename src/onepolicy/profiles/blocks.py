"""Whole sequences at a time, as many as a processor's cache holds the columns of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onepolicy.types import FloatArray, IntArray

#: A block begins with each sequence that holds a multiple of so many tokens.
TOKENS = 1 << 15
#: Places in a block of at most so many are 16-bit integers.
_SMALL = 1 << 16
#: From this mean length on sequences are taken in turns.
_LONG = 64


@dataclass(frozen=True, slots=True)
class Block:
    """Some sequences and their tokens, one after another.

    `sequence` `[n]`: of each token, counted from the block's first. Where sequences are long, the tokens are taken in
    turns, one of each sequence: `order` `[n]`, and `sequence` is by it. Sums of neighbours then do not wait for each
    other, which makes `bincount` four times as fast, and the terms of a sequence keep their order.
    """

    sequences: slice
    tokens: slice
    sequence: NDArray[np.uint16] | IntArray
    order: NDArray[np.uint16] | None


def cut(offsets: IntArray) -> list[slice]:
    """Sequences by block. `offsets` `[S + 1]`: where their tokens begin, and the end of all."""
    at = np.arange(0, int(offsets[-1]), TOKENS)
    # the last sequence that begins at or before the place
    first = np.unique(np.searchsorted(offsets[:-1], at, side="right") - 1) if len(at) else np.zeros(1, dtype=np.int64)
    first[0] = 0
    return [slice(lo, hi) for lo, hi in zip(first.tolist(), [*first[1:].tolist(), len(offsets) - 1], strict=True)]


def blocks(counts: IntArray) -> list[Block]:
    """Blocks of sequences with so many tokens `[S]`."""
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return [_block(counts[part], part, int(offsets[part.start])) for part in cut(offsets)]


def _block(counts: IntArray, sequences: slice, start: int) -> Block:
    n = int(counts.sum())
    tokens, sequence = slice(start, start + n), np.repeat(np.arange(len(counts)), counts)
    if n > _SMALL or n < _LONG * len(counts):
        return Block(sequences, tokens, sequence, None)
    index = np.arange(n) - np.repeat(np.cumsum(counts) - counts, counts)
    order = np.argsort(index.astype(np.uint16), kind="stable")
    return Block(sequences, tokens, sequence[order].astype(np.uint16), order.astype(np.uint16))


def sums_in_order(
    parts: list[Block], size: int, columns: Callable[[slice], Mapping[str, FloatArray]]
) -> dict[str, FloatArray]:
    """`[S]` sums over sequences of each of the columns that `columns` makes for a slice of tokens: terms one after the
    other, so that they are the same in any block."""
    out: dict[str, FloatArray] = {}
    for part in parts:
        n, sequence = part.sequences.stop - part.sequences.start, part.sequence.astype(np.int64, copy=False)
        order = None if part.order is None else part.order.astype(np.int64)
        for name, x in columns(part.tokens).items():
            total = out.setdefault(name, np.zeros(size))
            total[part.sequences] = np.bincount(sequence, x if order is None else x.take(order), n)
    return out
