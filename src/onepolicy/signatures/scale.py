"""How large the gap is on the token's own scale, by how likely the token is: the shape that rounding has, or has not.

Rounding moves logits, so a log-prob moves by about (1 - p) times that. |d| / (1 - p) then has one size at likely and
at unlikely tokens alike. Noise that is added to log-probs, fill values and single broken tokens do not follow it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onepolicy.counted import SPOTS, Counted, Spot
from onepolicy.profiles.base import Seen
from onepolicy.profiles.bins import steps
from onepolicy.signatures.adding import keep, read
from onepolicy.types import BoolArray, FloatArray, IntArray

#: Upper edges of p, the larger of the two probabilities.
EDGES = (0.1, 0.5, 0.9, 0.99, 0.999)
#: A token is all but certain from this p on, the larger of the two.
CERTAIN = EDGES[3]
#: Bins of the scaled size: halves of an octave, from 2^-32 on.
_LOW, _HIGH = -64, 24
#: |d| from which tokens are counted apart, nats.
BANDS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
#: exp|d| is cut here: above it a float64 ends.
_MOST = 700.0
#: The ratios that count as near 1.
NEAR = (0.9, 1.1)


@dataclass(frozen=True, slots=True)
class Level:
    """Of the tokens of one range of p: how many, and quantiles of |d| / (1 - p + 0.003), within 19%."""

    n: int
    median: float
    q75: float
    p95: float
    p99: float


def look(seen: Seen) -> Counted:
    """Tokens by p and scaled size; those of exactly p = 1 on a side are left out, since cut and filled values end
    there. Of all but certain tokens, those with d above 0. Tokens, sums of |d| and of exp|d| - 1 in each band of
    |d|, with places."""
    out = Counted()
    out.count("tokens", len(seen))
    n = lambda mask: int(np.count_nonzero(mask))
    full = (seen.a == 0) | (seen.b == 0)
    out.count("exactly 1", n(full))
    out.count("zero gap", n(seen.d == 0))
    out.count("below", n(seen.d < np.log(NEAR[0])))
    out.count("over", n(seen.d > np.log(NEAR[1])))
    certain = np.flatnonzero(np.maximum(seen.a, seen.b) >= np.log(CERTAIN))
    out.count("certain", n(seen.d[certain] != 0))
    out.count("certain above", n(seen.d[certain] > 0))
    _histogram(out, seen, ~full)
    _bands(out, seen)
    return out


def _histogram(out: Counted, seen: Seen, inside: BoolArray) -> None:
    """Of the tokens `inside` `[N]`, by range of p and scaled size."""
    width = _HIGH - _LOW + 1
    counts = np.zeros((len(EDGES) + 1) * width, dtype=np.int64)
    for block in seen.blocks:
        at, here = block.tokens, inside[block.tokens]
        key = steps(seen.likely(at)[here], EDGES) * width
        with np.errstate(divide="ignore"):
            code = np.floor(2 * np.log2(seen.scaled[at][here]))
        key += np.clip(code, _LOW, _HIGH).astype(np.int64) - _LOW
        counts += np.bincount(key, minlength=len(counts))
    for at in np.flatnonzero(counts).tolist():
        out.count(f"{at // width}:{at % width + _LOW}", int(counts[at]))


def _bands(out: Counted, seen: Seen) -> None:
    small = seen.size < BANDS[0]
    large = np.flatnonzero(~small)
    if len(large) < len(seen):  # most tokens are in the first band: the others are 0 in its sums
        _keep_band(out, 0, len(seen) - len(large), np.where(small, seen.size, 0.0))
    band = np.searchsorted(BANDS, seen.size[large], side="right")
    for k in np.unique(band).tolist():
        at = large[band == k]
        _keep_band(out, k, len(at), seen.size[at])
        out.spot(f"band {k}", spots(seen, at))


def _keep_band(out: Counted, k: int, n: int, size: FloatArray) -> None:
    out.count(f"band {k}", n)
    keep(out, **{f"abs {k}": size, f"exp {k}": np.expm1(np.minimum(size, _MOST))})


def spots(seen: Seen, at: IntArray) -> list[Spot]:
    """The first of the places `at` by record and place in the reply: the same ones however the dump is split."""
    names = {seen.pairs.record_ids[i]: None for i in np.unique(seen.sequence[at]).tolist()}
    first = set(sorted(names)[:SPOTS])
    found: list[Spot] = []
    for i in np.unique(seen.sequence[at]).tolist():
        if seen.pairs.record_ids[i] in first:
            found += [_spot(seen, i, j) for j in at[seen.sequence[at] == i][:SPOTS].tolist()]
    return found


def _spot(seen: Seen, sequence: int, i: int) -> Spot:
    return Spot(seen.pairs.record_ids[sequence], int(seen.index[i]), f"{seen.a[i]:.4f} and {seen.b[i]:.4f}")


# -- what is read from it ----------------------------------------------------------------------------------------------


def level(counted: Counted, bins: tuple[int, ...]) -> Level:
    """The scaled size over these ranges of p (0: p < 0.1, 5: p >= 0.999)."""
    sizes = np.zeros(_HIGH - _LOW + 1, dtype=np.int64)
    for k in bins:
        for code in range(_LOW, _HIGH + 1):
            sizes[code - _LOW] += counted.counts.get(f"{k}:{code}", 0)
    n = int(sizes.sum())
    at = np.cumsum(sizes)
    of = lambda q: 2.0 ** ((int(np.searchsorted(at, q * n)) + _LOW + 0.5) / 2) if n else float("nan")
    return Level(n, of(0.5), of(0.75), of(0.95), of(0.99))


@dataclass(frozen=True, slots=True)
class Far:
    """The tokens with |d| of at least `least`: how many, their places, and the mean of exp|d| with and without them."""

    least: float
    n: int
    records: tuple[str, ...]
    positions: tuple[int, ...]
    mean_exp_abs: float
    mean_exp_abs_without: float
    mean_abs: float
    mean_abs_without: float


def far(counted: Counted, k: int) -> Far:
    """The tokens of band k and above."""
    every = range(len(BANDS) + 1)
    count = lambda j: counted.counts.get(f"band {j}", 0)
    n, high = sum(count(j) for j in every), sum(count(j) for j in every if j >= k)
    sums = lambda what, bands: sum(read(counted, f"{what} {j}") for j in bands)
    rest = max(1, n - high)
    spots = sorted(s for j in every if j >= k for s in counted.spots.get(f"band {j}", []))[:16]
    return Far(
        BANDS[k - 1], high, tuple(s.record for s in spots), tuple(s.position for s in spots),
        1 + sums("exp", every) / max(1, n), 1 + sums("exp", range(k)) / rest,
        sums("abs", every) / max(1, n), sums("abs", range(k)) / rest,
    )  # fmt: skip
