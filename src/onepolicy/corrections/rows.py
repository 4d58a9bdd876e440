"""How tokens belong to sequences: padded `[B, T]`, or packed `[T]` with an id per token. Sums are float64."""

from __future__ import annotations

from typing import Any, Protocol

from onepolicy.arrays import Array


class Rows(Protocol):
    """Sums over sequences and back. `n`: how many sequences there are (an upper bound for ids without a count)."""

    n: int

    def total(self, x: Array) -> Array:
        """`[n]`: sum over each sequence; trues are counted."""
        ...

    def most(self, x: Array) -> Array:
        """`[n]`: the largest value of each sequence, -inf for one without tokens."""
        ...

    def spread(self, x: Array) -> Array:
        """`[n]` values as something that broadcasts to the tokens."""
        ...

    def begins(self) -> Array | None:
        """`[T]`, packed: true where a token begins a sequence; None for padded, where the column says it."""
        ...


class PaddedRows:
    def __init__(self, ops: Any, n: int) -> None:
        self.ops, self.n = ops, n

    def total(self, x: Array) -> Array:
        return self.ops.row_total(x)

    def most(self, x: Array) -> Array:
        return self.ops.row_most(x)

    def spread(self, x: Array) -> Array:
        return x[:, None]

    def begins(self) -> Array | None:
        return None


class PackedRows:
    def __init__(self, ops: Any, ids: Array, n: int) -> None:
        self.ops, self.ids, self.n = ops, ids, n

    def total(self, x: Array) -> Array:
        return self.ops.scatter_total(x, self.ids, self.n)

    def most(self, x: Array) -> Array:
        return self.ops.scatter_most(x, self.ids, self.n)

    def spread(self, x: Array) -> Array:
        return self.ops.take(x, self.ids)

    def begins(self) -> Array | None:
        return self.ops.joined([self.ids[:1] >= 0, self.ids[1:] != self.ids[:-1]])


def segments(ops: Any, rows: Rows, mask: Array) -> PackedRows:
    """The runs of true in `mask`, each a row of its own, over the flattened tokens (false tokens: any row)."""
    before = mask[..., :-1] & mask[..., 1:]
    same = ops.joined([mask[..., :1] & ~mask[..., :1], before])
    begins = rows.begins()
    starts = mask & ~(same if begins is None else same & ~begins)
    flat = starts.reshape(-1)
    ids = ops.clip(ops.cumsum(flat) - 1, 0, max(0, flat.shape[0] - 1))
    return PackedRows(ops, ids, max(1, flat.shape[0]))
