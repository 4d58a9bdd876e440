"""One batch's tokens added up by bin. A sequence's tokens of a bin, a cell, come first: sequences are the clusters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from onepolicy.profiles.base import BITS, FIELDS, SCALED_UNIT, SQUARE_BITS, Bins, Profile, Seen
from onepolicy.profiles.blocks import Block
from onepolicy.types import FloatArray, IntArray

#: The sum of d, or of |d|, of one cell is cut here, nats, which is counted in `cut`.
_MOST_SUM = 2.0**8
#: Keys below this are sorted in linear time, as 16-bit integers.
_SMALL = 1 << 16
#: Tables of counts have at most so many places, or four for each token.
_ROOM = 1 << 16

#: The keys of the cells that there are `[C]`, their tokens `[C]`, and sums over these: `[N]` -> `[C]`.
Cells = tuple[IntArray, IntArray, Callable[[FloatArray], FloatArray]]


def profiled(seen: Seen, profile: Profile) -> Bins | None:
    """One batch's bins; None where the dump does not tell what the profile is about."""
    found = profile.bins(seen)
    if found is None:
        return None
    bins, labels = found
    made = (_by_sequence if profile.level == "record" else _by_token)(seen, bins, labels)
    return made.cut(profile.most)


def _by_token(seen: Seen, bins: IntArray, labels: Sequence[str]) -> Bins:
    parts = [_sums(seen, bins, block, len(labels)) for block in seen.blocks]
    each = {k: np.concatenate([sums[k] for _, sums in parts]) for k in (*seen.units, "n")}
    return _totals(each, np.concatenate([cells for cells, _ in parts]), _sizes(seen, bins, labels), labels)


def _sums(seen: Seen, bins: IntArray, block: Block, width: int) -> tuple[IntArray, dict[str, FloatArray]]:
    """The bins of a block's cells, and the cells' sums."""
    at, size = block.tokens, width * (block.sequences.stop - block.sequences.start)
    bins, key = bins[at], seen.sequence[at] - block.sequences.start
    inside = np.flatnonzero(bins >= 0) if bins.min(initial=0) < 0 else slice(None)
    key = key[inside] * width
    key += bins[inside]
    cells, n, add = _cells(key, size, seen.exact)
    return cells % width, {k: add(v[at][inside]) for k, v in seen.units.items()} | {"n": n.astype(np.float64)}


def _by_sequence(seen: Seen, bins: IntArray, labels: Sequence[str]) -> Bins:
    """All tokens of a sequence are in one bin: a sequence is a cell. `bins` `[S]`."""
    use = np.flatnonzero(bins >= 0)
    each = {k: v[use] for k, v in seen.unit_sums.items()} | {"n": seen.counts[use].astype(np.float64)}
    if seen.sequence_sizes is None:
        sizes = _sizes(seen, np.repeat(bins, seen.counts), labels)
    else:
        order = use[np.argsort(bins[use], kind="stable")]
        starts = _starts(bins[order])
        table = np.add.reduceat(seen.sequence_sizes[order], starts, axis=0)
        at, code = np.nonzero(table)
        sizes = _named(bins[order][starts][at], seen.sizes[0][code], table[at, code], labels)
    return _totals(each, bins[use], sizes, labels)


def _cells(key: IntArray, size: int, exact: bool) -> Cells:
    """`key` `[N]` from 0 to `size`. Exact sums may be made in any order: along runs of one key where these are long,
    else sorted by key. Others are made in the order of the tokens, so that they do not depend on the batch."""
    starts = _starts(key)
    if exact and 4 * len(starts) <= len(key):
        cells, _, add = _in_order(key[starts], size)
        n = add(np.diff(starts, append=len(key)).astype(np.float64))
        return cells, n.astype(np.int64), lambda x: add(np.add.reduceat(x, starts))
    if exact and size <= _SMALL:
        small = key.astype(np.uint16)
        order = np.argsort(small, kind="stable")
        small, room = small[order], np.empty(len(key))
        starts = _starts(small)
        add = lambda x: np.add.reduceat(np.take(x, order, out=room, mode="clip"), starts)
        return small[starts].astype(np.int64), np.diff(starts, append=len(key)), add
    return _in_order(key, size)


def _in_order(key: IntArray, size: int) -> Cells:
    """The terms of a cell are added one after the other."""
    if (key[1:] > key[:-1]).all():
        return key, np.ones(len(key), dtype=np.int64), lambda x: x
    if size > max(4 * len(key), _ROOM):
        there, at, n = np.unique(key, return_inverse=True, return_counts=True)
        return there, n, lambda x: np.bincount(at, x, len(there)).astype(np.float64)
    n = np.bincount(key, minlength=size)
    there = np.flatnonzero(n)
    return there, n[there], lambda x: np.bincount(key, x, size)[there].astype(np.float64)


def _starts(key: NDArray[np.generic]) -> IntArray:
    """Where runs of one key begin."""
    return np.flatnonzero(np.concatenate([np.ones(min(1, len(key)), dtype=bool), key[1:] != key[:-1]]))


def _sizes(seen: Seen, bins: IntArray, labels: Sequence[str]) -> dict[str, dict[int, int]]:
    """How many tokens of each bin have a |d| of each code. `bins` `[N]`."""
    codes, code = seen.sizes
    width = max(len(codes), 1)
    if len(labels) * width <= _ROOM:
        # one more bin, for tokens that are in none
        counts = np.zeros((len(labels) + 1) * width, dtype=np.int64)
        for block in seen.blocks:
            key = (bins[block.tokens] + 1) * width
            key += code[block.tokens]
            counts += np.bincount(key, minlength=len(counts))
        counts = counts[width:]
        key = np.flatnonzero(counts)
        counts = counts[key]
    else:
        inside = bins >= 0
        key, counts = np.unique(bins[inside] * width + code[inside], return_counts=True)
    return _named(key // width, codes[key % width], counts, labels)


def _named(bins: IntArray, codes: IntArray, counts: IntArray, labels: Sequence[str]) -> dict[str, dict[int, int]]:
    """`[K]` counts by bin and code, sorted by them."""
    out: dict[str, dict[int, int]] = {}
    starts = _starts(bins)
    for lo, hi in zip(starts.tolist(), np.append(starts, len(bins))[1:].tolist(), strict=True):
        out[labels[int(bins[lo])]] = dict(zip(codes[lo:hi].tolist(), counts[lo:hi].tolist(), strict=True))
    return out


def _totals(
    each: Mapping[str, FloatArray], bins: IntArray, sizes: dict[str, dict[int, int]], labels: Sequence[str]
) -> Bins:
    """`[C]` sums of each term, in units, of the cells, and the `[C]` bins these are in, into one integer a bin."""
    n, d, a = each["n"], each["d"] / 2.0**BITS, each["abs"] / 2.0**BITS
    cut = (np.abs(d) > _MOST_SUM) | (a > _MOST_SUM)
    d, a = np.clip(d, -_MOST_SUM, _MOST_SUM), np.minimum(a, _MOST_SUM)
    s = np.minimum(each["scaled"] / 2.0**BITS / SCALED_UNIT, _MOST_SUM)
    counts = {"n": n, "sequences": (n > 0).astype(np.float64), "nn": n * n, "cut": cut.astype(np.float64)}
    counts |= {k: each[k] for k in ("d", "abs", "ratio", "above", "scaled", "square")}
    squares = {"dd": d * d, "nd": n * d, "aa": a * a, "na": n * a, "ss": s * s, "ns": n * s}
    fold = lambda x: np.bincount(bins, x, len(labels)).astype(np.float64)
    rows = {k: _whole(x, fold) for k, x in counts.items()} | {k: _squares(x, fold) for k, x in squares.items()}
    there = [i for i, n_of in enumerate(rows["n"]) if n_of]
    return Bins({labels[i]: [rows[name][i] for name in FIELDS] for i in there}, sizes)


#: Sums over the cells of each bin: `[C]` -> `[bins]`, exact for whole numbers.
Fold = Callable[[FloatArray], FloatArray]


def _whole(x: FloatArray, fold: Fold) -> list[int]:
    """Sums of whole numbers below 2^53 each, exact: high and low halves are added apart."""
    high = np.floor(x / 2.0**26)
    low = x - high * 2.0**26
    return [(int(h) << 26) + int(v) for h, v in zip(fold(high).tolist(), fold(low).tolist(), strict=True)]


def _squares(x: FloatArray, fold: Fold) -> list[int]:
    """Sums of squares of nats, each rounded once to 2^-SQUARE_BITS."""
    high = np.floor(x * 2.0 ** (SQUARE_BITS - 30))
    low = np.rint((x - high * 2.0 ** (30 - SQUARE_BITS)) * 2.0**SQUARE_BITS)
    return [(int(h) << 30) + int(v) for h, v in zip(fold(high).tolist(), fold(low).tolist(), strict=True)]
