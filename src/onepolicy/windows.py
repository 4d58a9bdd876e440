"""Sums of a term by ranges of position, all ranges in one pass.

Positions rise along a sequence, so the tokens of a range stand side by side: the range's sum is that of a run. The
integers are those of the term multiplied by 0 outside the range.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onepolicy.arrays import NUMPY
from onepolicy.grid import MAX_TERMS, SegmentSums, segment_sums
from onepolicy.sums import Term
from onepolicy.types import IntArray
from onepolicy.views import Tokens, Within


def window_sums(
    chunk: Tokens, terms: Mapping[int, Within], starts: IntArray, lengths: IntArray
) -> dict[int, SegmentSums]:
    """Sums over each sequence of `chunk` (its tokens: from `starts` on, `lengths`, `[S]`), by the keys of `terms`."""
    if not terms:
        return {}
    edges = sorted({0, *(w.low for w in terms.values()), *(w.high for w in terms.values() if w.high is not None)})
    bounds = _bounds(chunk, edges, starts, lengths)
    if bounds is None:
        return {i: segment_sums(w(NUMPY, chunk), starts, lengths) for i, w in terms.items()}
    whole: dict[int, SegmentSums] = {}
    out: dict[int, SegmentSums] = {}
    for i, window in terms.items():
        if id(window.term) not in whole:
            whole[id(window.term)] = _of_runs(window.term, chunk, bounds)
        at = edges.index(window.low)
        end = len(edges) if window.high is None else edges.index(window.high)
        out[i] = _range(whole[id(window.term)], range(at, end), len(edges), lengths)
    return out


def _bounds(chunk: Tokens, edges: list[int], starts: IntArray, lengths: IntArray) -> IntArray | None:
    """`[S, E + 1]`: in each sequence, the index of the first token at or behind each edge, then the sequence's end.
    None where positions do not rise, or a float64 cannot hold sequence and position, or a sequence's sum."""
    position = chunk.position
    if len(position) > MAX_TERMS and lengths.max() > MAX_TERMS:  # runs of one sequence may not add to exact floats
        return None
    if not len(position):
        return np.zeros((len(starts), len(edges) + 1), dtype=np.int64)
    most = float(position.max())
    step = 2.0 ** np.ceil(np.log2(max(most, edges[-1]) + 2))
    if not position.min() >= 0 or step * (len(starts) + 1) > 2.0**52:
        return None
    place = np.arange(len(starts)) * step
    key = position + np.repeat(place, lengths)
    if (key[1:] <= key[:-1]).any():
        return None
    near = [e for e in edges if e <= most]  # behind the last token every edge is the end
    out = np.empty((len(starts), len(edges) + 1), dtype=np.int64)
    out[:] = (starts + lengths)[:, None]
    out[:, : len(near)] = np.searchsorted(key, (place[:, None] + np.array(near)).ravel()).reshape(len(starts), -1)
    return out


def _of_runs(term: Term, chunk: Tokens, bounds: IntArray) -> SegmentSums:
    """Sums over all runs, one after the other: run e of sequence s is segment s * E + e. The first edge is 0, so every
    token is in a run."""
    x = term(NUMPY, chunk)
    runs, lengths = bounds[:, :-1].ravel(), np.diff(bounds, axis=1).ravel()
    return segment_sums(x, runs, lengths)


def _range(runs: SegmentSums, chosen: range, n_edges: int, lengths: IntArray) -> SegmentSums:
    """The runs `chosen` of each sequence, added; tokens outside them are zeros, which count as terms."""
    levels = runs.levels.reshape(len(runs.levels), -1, n_edges)[:, :, chosen.start : chosen.stop].sum(axis=2)
    nonfinite = runs.nonfinite.reshape(-1, n_edges)[:, chosen.start : chosen.stop].sum(axis=1)
    large: dict[int, int] = {}
    for i, value in runs.large.items():
        sequence, edge = divmod(i, n_edges)
        if edge in chosen:
            large[sequence] = large.get(sequence, 0) + value
    return SegmentSums(levels, lengths - nonfinite, nonfinite, large)
