"""One small row a sequence, for causes that show only across records. Every number is made from that sequence alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.profiles.base import MOST_SCALED, Seen
from onepolicy.types import BoolArray, FloatArray, IntArray

#: name -> dtype, in order. Missing integers are -1 << 62, missing floats NaN.
COLUMNS: dict[str, Any] = {
    "id": np.uint64,  # hash of the record's id
    "content": np.uint64,  # hash of token ids and sampler log-probs
    "cluster": np.uint64,
    "group": np.uint64,  # hash of group_id, 0 where it is not recorded
    "sample": np.int64,  # number of the sample, as far as it is one
    "tokens": np.int64,  # all tokens of the sequence
    "n": np.int64,  # tokens that are compared
    "step": np.int64,
    "turn": np.int64,
    "version_first": np.int64,  # weights that drew the first and the last compared token
    "version_last": np.int64,
    "scorer_version": np.int64,
    "reward": np.float64,
    "padding": np.int64,
    "cached": np.int64,
    "d": np.float64,  # sums over the compared tokens, nats
    "abs": np.float64,
    "d2": np.float64,
    "most": np.float64,  # largest |d|
    "scaled": np.float64,  # sum of |d| on each token's own scale (`profiles.base`)
    "surprisal": np.float64,  # sum of -sampler log-prob
    "change_at": np.int64,  # place among the compared tokens where the size of the gap changes most; -1: too short
    "change": np.float64,  # how clearly: max |CUSUM| / (sd sqrt n) of log |d|, 1.63 is passed by 1% without a change
    # (lower where the tokens that are not all but certain do not show it)
    "rms_before": np.float64,
    "rms_after": np.float64,
}
MISSING = -(1 << 62)
#: A reply shorter than this has no change point.
LEAST = 16
#: Tokens that both sides give more than this probability have no gap to speak of, whatever scored them: a forced head,
#: a template or a loop of them is no change. The other tokens alone show one by this share of how clear it is with all
#: of them; from `LOOKED` on they are looked at.
CERTAIN, ALONE, LOOKED = 0.99, 0.75, 1.5

Rows = NDArray[Any]


def dtype() -> np.dtype[Any]:
    return np.dtype(list(COLUMNS.items()))


def joined(parts: Sequence[Rows]) -> Rows:
    """All rows, sorted by id and content, so that the order of files does not show."""
    out = np.concatenate([np.zeros(0, dtype()), *parts])
    return out[np.lexsort((out["content"], out["id"]))]


def rows_of(seen: Seen, contents: Sequence[str], names: Sequence[str], clusters: Sequence[str]) -> Rows:
    """`[S]` rows of one batch. `contents`: `Rollouts.content_ids`-like hashes; `names`: record ids."""
    size = len(seen.rollouts)
    out = np.zeros(size, dtype())
    for column, words in (("id", names), ("content", contents), ("cluster", clusters)):
        out[column] = [_hash(w) for w in words]
    out["tokens"], out["n"] = seen.rollouts.lengths, seen.counts
    for column, name in (("step", "step"), ("turn", "turn"), ("scorer_version", "scorer_version")):
        out[column] = _integers(seen, name)
    out["padding"], out["cached"] = _integers(seen, "padding_length"), _integers(seen, "cached_prefix_length")
    reward = seen.rollouts.records.get("reward")
    out["reward"] = np.nan if reward is None else np.where(reward.mask(), reward.values, np.nan)
    _group(out, seen)
    _versions(out, seen)
    if len(seen):
        _sums(out, seen)
        _change_points(out, seen)
    return out


def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")


def _integers(seen: Seen, name: str) -> IntArray:
    col = seen.rollouts.records.get(name)
    if col is None:
        return np.full(len(seen.rollouts), MISSING, dtype=np.int64)
    return np.where(col.mask(), col.values.astype(np.int64), MISSING)


def _group(out: Rows, seen: Seen) -> None:
    out["sample"] = MISSING
    for column, name in (("group", "group_id"), ("sample", "sample_id")):
        col = seen.rollouts.records.get(name)
        if col is None:
            continue
        for i in np.flatnonzero(col.mask()).tolist():
            word = str(col.values[i])
            if column == "group":
                out[column][i] = _hash(word)
            elif word.isascii() and word.isdigit() and len(word) < 18:
                out[column][i] = int(word)


def _versions(out: Rows, seen: Seen) -> None:
    drew = seen.rollouts.tokens.get("policy_version")
    out["version_first"] = out["version_last"] = MISSING
    if drew is None or not len(seen):
        return
    values = np.where(drew.mask(), drew.values, MISSING)[seen.at]
    has = seen.counts > 0
    starts = seen.starts[has]
    out["version_first"][has] = values[starts]
    out["version_last"][has] = values[starts + seen.counts[has] - 1]


def _sums(out: Rows, seen: Seen) -> None:
    """Each sequence's terms are added by themselves, so a row does not depend on its batch."""
    for column, x in (("d", seen.d), ("d2", seen.d * seen.d), ("scaled", np.minimum(seen.scaled, MOST_SCALED))):
        out[column] = seen.per_sequence(x)
    out["surprisal"] = 0.0 - seen.per_sequence(seen.a)
    out["abs"] = seen.sums_in_order(lambda at: {"abs": seen.size[at]})["abs"]  # change points hang on its last bit
    has = seen.counts > 0
    out["most"][has] = np.maximum.reduceat(seen.size, seen.starts[has])


def _change_points(out: Rows, seen: Seen) -> None:
    mean, found = out["abs"] / np.maximum(seen.counts, 1), np.full((4, len(out)), np.nan)
    found[0] = -1
    for block in seen.blocks:
        at, some = block.tokens, block.sequences
        level = scaled_size(seen.size[at], seen.a[at], np.repeat(mean[some], seen.counts[some]))
        sure = np.minimum(seen.a[at], seen.b[at]) > math.log(CERTAIN)
        for i in (some.start + np.flatnonzero(seen.counts[some] >= LEAST)).tolist():
            lo, n = int(seen.starts[i]), int(seen.counts[i])
            here = slice(lo - at.start, lo - at.start + n)
            k, change = change_point(level[here])
            if change > LOOKED and sure[here].any():
                change = min(change, _open_change(level[here], sure[here]))
            both = seen.d[lo : lo + n] * seen.d[lo : lo + n]
            found[:, i] = k, change, math.sqrt(_mean(both[:k])), math.sqrt(_mean(both[k:]))
    for column, x in zip(("change_at", "change", "rms_before", "rms_after"), found, strict=True):
        out[column] = x


def _open_change(level: FloatArray, sure: BoolArray) -> float:
    """How clear a change the tokens that are not all but certain leave of it."""
    rest = level[~sure]
    return change_point(rest)[1] / ALONE if len(rest) > 1 else 0.0


def _mean(x: FloatArray) -> float:
    """What `x.mean()` gives, in a fourth of the time for a short list."""
    return float(np.add.reduce(x)) / len(x)


def scaled_size(size: FloatArray, a: FloatArray, mean: FloatArray) -> FloatArray:
    """`[N]` log of |d| on the scale that rounding gives a token of the sampler's probability (1 - p), so that a stretch
    of likely tokens is no change. `a`: the sampler's log-probs; `mean`: mean |d| of the token's sequence, of which a
    little is added, since a gap of almost 0 says nothing about the size of the others."""
    likely = np.exp(np.minimum(a, 0.0))
    scale = 1.0 - likely + 1e-3
    return np.log(size / scale + 0.03 * mean + 1e-12)


def change_point(level: FloatArray) -> tuple[int, float]:
    """(first token after the change, how clear it is) of a sequence's `scaled_size` `[n]`.

    CUSUM: max |S_k| / (sd sqrt n) follows Kolmogorov's law without a change: 1.63 at 1%, 1.95 at 0.1%.
    """
    y = level - _mean(level)
    sd = math.sqrt(_mean(y * y))
    if not sd > 0.0:
        return 1, 0.0
    walk = np.abs(np.add.accumulate(y)[:-1])
    k = int(walk.argmax())
    return k + 1, float(walk[k]) / (sd * math.sqrt(len(y)))
