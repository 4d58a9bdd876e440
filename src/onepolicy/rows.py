"""One small row a sequence, for causes that show only across records. Every number is made from that sequence alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.profiles.base import MOST_SCALED, Seen
from onepolicy.types import FloatArray, IntArray

#: name -> dtype, in order. Missing integers are -1 << 62, missing floats NaN.
COLUMNS: dict[str, Any] = {
    "id": np.uint64,  # hash of the record's id
    "content": np.uint64,  # hash of token ids and sampler log-probs
    "cluster": np.uint64,
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
    "rms_before": np.float64,
    "rms_after": np.float64,
}
MISSING = -(1 << 62)
#: A reply shorter than this has no change point.
LEAST = 16

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
    _versions(out, seen)
    starts = np.cumsum(seen.counts) - seen.counts
    for i in range(size):
        _sequence(out, i, seen, slice(int(starts[i]), int(starts[i] + seen.counts[i])))
    return out


def _hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big")


def _integers(seen: Seen, name: str) -> IntArray:
    col = seen.rollouts.records.get(name)
    if col is None:
        return np.full(len(seen.rollouts), MISSING, dtype=np.int64)
    return np.where(col.mask(), col.values.astype(np.int64), MISSING)


def _versions(out: Rows, seen: Seen) -> None:
    drew = seen.rollouts.tokens.get("policy_version")
    out["version_first"] = out["version_last"] = MISSING
    if drew is None or not len(seen):
        return
    values = np.where(drew.mask(), drew.values, MISSING)[seen.at]
    has = seen.counts > 0
    starts = (np.cumsum(seen.counts) - seen.counts)[has]
    out["version_first"][has] = values[starts]
    out["version_last"][has] = values[starts + seen.counts[has] - 1]


def _sequence(out: Rows, i: int, seen: Seen, at: slice) -> None:
    d, a = seen.d[at], seen.a[at]
    out["change_at"][i], out["change"][i] = -1, np.nan
    out["rms_before"][i] = out["rms_after"][i] = np.nan
    if not len(d):
        return
    size = np.abs(d)
    out["d"][i], out["abs"][i], out["d2"][i], out["most"][i] = d.sum(), size.sum(), (d * d).sum(), size.max()
    out["surprisal"][i] = -a.sum()
    out["scaled"][i] = np.minimum(seen.scaled[at], MOST_SCALED).sum()
    if len(d) >= LEAST:
        k, stat = change_point(size, a)
        out["change_at"][i], out["change"][i] = k, stat
        out["rms_before"][i] = np.sqrt((d[:k] ** 2).mean())
        out["rms_after"][i] = np.sqrt((d[k:] ** 2).mean())


def change_point(size: FloatArray, a: FloatArray) -> tuple[int, float]:
    """(first token after the change, how clear it is) of |d| `[n]`, the sampler's log-probs `a` `[n]` held against it.

    CUSUM of log |d|, on the scale that rounding gives a token of that probability (1 - p), so that a stretch of likely
    tokens is no change. max |S_k| / (sd sqrt n) follows Kolmogorov's law without a change: 1.63 at 1%, 1.95 at 0.1%.
    """
    with np.errstate(over="ignore"):
        likely = np.exp(np.minimum(a, 0.0))
    y = np.log(size + 1e-9) - np.log(1.0 - likely + 1e-3)
    y = np.clip(y, *np.quantile(y, (0.05, 1.0)))  # a gap of exactly 0 says little about the size of the others
    y = y - y.mean()
    sd = float(y.std())
    if sd == 0.0:
        return 1, 0.0
    walk = np.abs(np.cumsum(y))[:-1]
    k = int(walk.argmax())
    return k + 1, float(walk[k] / (sd * np.sqrt(len(y))))
