"""The floor: the gap that rounding alone predicts, from variants of the trusted side (never from the suspect).

Two scorings of the same tokens by one engine through *distinct kernels* (full forward, KV decode, another attention)
differ by rounding and by nothing else; so do a sampler and a scorer that are sound. The variants' pairwise log-ratios
are pooled into a scale, the RMS gap at a token of this kind, and the pair under test is held against it token by token
(`metrics/floor.py`). A rerun or another batch size is no distinct kernel: it may take the same path bit for bit.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from onepolicy.types import BoolArray, FloatArray, Floor, FloorColumns, FloorVariant

#: Lower edges of the bins of the reference probability. The error of a log-prob follows 1 - p on both sides alike, so
#: a bin has one level and the scale inside it goes with 1 - p + `SHAPE` (`lab/floor_scales.py` compares others).
SHAPE = 0.003
EDGES = (0.0, 0.01, 0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95, 0.99, 0.999)
SCALE_BY = "probability; level x (1 - p + 0.003) nats"
#: A variant this many times further from float32 than the best one (or, without float32, from the others than they are
#: from each other) shows more than rounding; a pair this many times closer than the widest is one kernel by two names.
#: Measured: kernels of one healthy model stand within 3% of each other's error (SmolLM2-135M, three kernels).
OUTLIER = 2.0
#: A bin with fewer variants' values than this is added to its neighbour: its scale would be noise.
LEAST_VALUES = 40


@dataclass(frozen=True, slots=True)
class Variant:
    """One scoring by the trusted side. `kernel` names its path; `emulates`: at the sampler's declared precision.

    `logprobs` `[T]`, NaN where it was not scored. `routes` `[T, L * K]` experts of a mixture model, if known.
    """

    kernel: str
    logprobs: FloatArray
    emulates: bool = True
    routes: FloatArray | None = None


def pairs_of(variants: Sequence[Variant]) -> list[tuple[Variant, Variant]]:
    """The pairs whose gap is rounding as between sampler and scorer: one side at the sampler's precision, the other at
    the scorer's, with distinct kernels. Where both compute alike, that is every pair of kernels."""
    own = [v for v in variants if not v.emulates]
    if not own:
        return [(x, y) for x, y in itertools.combinations(variants, 2) if x.kernel != y.kernel]
    return [(x, y) for x in variants if x.emulates for y in own]


def scale_table(reference: FloatArray, gaps: FloatArray) -> tuple[tuple[float, float, float, int], ...]:
    """Rows (lower edge, upper edge, level, values) by probability of the reference; sparse bins are joined.

    `reference`: `[T]` log-probs of the trusted side (its float32, else the variants' mean), `gaps`: `[P, T]`. The level
    is the RMS of gap / (1 - p + SHAPE).
    """
    p = np.exp(np.minimum(reference, 0.0))
    gaps = gaps / (1 - p + SHAPE)
    at = np.clip(np.searchsorted(EDGES, p, side="right") - 1, 0, len(EDGES) - 1)
    with np.errstate(invalid="ignore"):
        squares = np.nansum(gaps**2, axis=0)
    counts = np.isfinite(gaps).sum(axis=0)
    known = np.isfinite(reference)
    rows: list[tuple[float, float, float, int]] = []
    low, total, n = 0.0, 0.0, 0
    for b in range(len(EDGES)):
        here = known & (at == b)
        total, n = total + float(squares[here].sum()), n + int(counts[here].sum())
        high = EDGES[b + 1] if b + 1 < len(EDGES) else 1.0
        if n >= LEAST_VALUES and total > 0:
            rows.append((low, high, math.sqrt(total / n), n))
            low, total, n = high, 0.0, 0
    return _with_rest(rows, low, total, n)


def _with_rest(
    rows: list[tuple[float, float, float, int]], low: float, total: float, n: int
) -> tuple[tuple[float, float, float, int], ...]:
    """The sparse top is added to the last full bin."""
    if rows and low < 1.0:
        first, _, rms, count = rows[-1]
        rows[-1] = (first, 1.0, math.sqrt((rms**2 * count + total) / (count + n)), count + n)
    elif not rows and n and total > 0:
        rows = [(0.0, 1.0, math.sqrt(total / n), n)]
    return tuple(rows)


def scale_at(table: Sequence[tuple[float, float, float, int]], reference: FloatArray) -> FloatArray:
    """`[T]` nats: the RMS gap that the table predicts at each token, NaN where the reference has no value."""
    if not table:
        return np.full(len(reference), np.nan)
    p = np.exp(np.minimum(reference, 0.0))
    lows = np.array([row[0] for row in table])
    values = np.array([row[2] for row in table])
    at = np.clip(np.searchsorted(lows, np.nan_to_num(p), side="right") - 1, 0, len(table) - 1)
    return np.where(np.isfinite(reference), values[at] * (1 - p + SHAPE), np.nan)


def without_outlier(variants: Sequence[Variant], on: BoolArray) -> tuple[Sequence[Variant], str]:
    """The variants without the one whose gaps to all others are far beyond those between the others, and which it was:
    a kernel that is broken must not raise the floor that it is held against."""
    own = [v for v in variants if v.emulates]
    if len(own) < 3:
        return variants, ""
    gap = lambda x, y: _rms(_difference(x, y, on))[0]
    for odd in own:
        rest = [v for v in own if v is not odd]
        inside = max(gap(x, y) for x, y in itertools.combinations(rest, 2))
        outside = min(gap(odd, v) for v in rest)
        if outside > OUTLIER * inside > 0:
            why = f"{odd.kernel!r} left out: its gaps are {outside / inside:.1f} times those between the others"
            return [v for v in variants if v is not odd], why
    return variants, ""


def sound(variants: Sequence[Variant], reference: FloatArray | None, on: BoolArray) -> tuple[Sequence[Variant], str]:
    """The variants without those that are broken, and which they were, by their own errors against float32: two kernels
    that are nearly one do not make a third look odd, and of two kernels, or of three with two broken, the sound one is
    still told. Without a reference, `without_outlier`."""
    if reference is None:
        return without_outlier(variants, on)
    exact = Variant("float32", reference)
    errors = [_rms(_difference(v, exact, on))[0] if v.emulates else 0.0 for v in variants]
    best = min((e for e in errors if e > 0), default=0.0)
    broken = [(v, e) for v, e in zip(variants, errors, strict=True) if not e <= OUTLIER * best]
    why = "; ".join(f"{v.kernel!r} left out: its error is {e / best:.1f} times the best kernel's" for v, e in broken)
    return ([v for v in variants if all(v is not b for b, _ in broken)], why) if best else (variants, "")


def distinct(pairs: Sequence[tuple[Variant, Variant]], on: BoolArray) -> list[tuple[Variant, Variant]]:
    """The pairs without those that are one kernel under two names: their gap of nothing would halve the floor."""
    sizes = [_rms(_difference(x, y, on))[0] for x, y in pairs]
    widest = max((s for s in sizes if math.isfinite(s)), default=0.0)
    return [pair for pair, size in zip(pairs, sizes, strict=True) if OUTLIER * size >= widest]


def _difference(x: Variant, y: Variant, on: BoolArray) -> FloatArray:
    """`[T]` nats, NaN where one of them has no finite value."""
    with np.errstate(invalid="ignore"):  # -inf on both: outside both kept sets
        return np.where(on, x.logprobs - y.logprobs, np.nan)


def measured(
    variants: Sequence[Variant], reference: FloatArray | None, on: BoolArray, dtype: str
) -> tuple[Floor, FloorColumns | None]:
    """The floor from variants, over the tokens `on` `[T]`. `reference`: the trusted side's float32 log-probs `[T]`.

    `incomplete`, without columns, where there are no two distinct kernels; `assumed` where all but one are broken.
    """
    variants, why = sound(variants, reference, on)
    chosen = distinct(pairs_of(variants), on)
    if not chosen and reference is not None and why:
        floor, columns = assumed(variants[0].logprobs - reference, reference, on, dtype)
        return replace(floor, why=f"{why}; {floor.why}"), columns
    if not chosen:
        return Floor("incomplete", "the trusted side has no two variants with distinct kernels", dtype), None
    gaps = np.array([_difference(x, y, on) for x, y in chosen])
    gaps[~np.isfinite(gaps)] = np.nan
    for row, (x, y) in zip(gaps, chosen, strict=True):
        row[~equal_routes(x.routes, y.routes, len(row))] = np.nan
    with np.errstate(invalid="ignore"):
        known = np.mean([v.logprobs for v in variants], axis=0) if reference is None else reference
    table = scale_table(np.where(on, known, np.nan), gaps)
    if not table:
        return Floor("incomplete", "the variants agree to the bit, so they show no rounding", dtype), None
    columns = FloorColumns(scale_at(table, known), gaps, np.ones(len(on), dtype=bool), digest(table))
    names = [FloorVariant(x.kernel, y.kernel, *_rms(row)) for (x, y), row in zip(chosen, gaps, strict=True)]
    floor = Floor("measured", why, dtype, _rms(gaps.ravel())[0], tuple(names), SCALE_BY, table, columns.digest)
    return floor, columns


def assumed(own_error: FloatArray, reference: FloatArray, on: BoolArray, dtype: str) -> tuple[Floor, FloorColumns]:
    """sqrt(2) times the trusted side's own error `[T]` against its float32, where it has one kernel only.

    As if both sides erred alike and independently; marked `assumed`.
    """
    gaps = np.where(on & np.isfinite(own_error), own_error * math.sqrt(2), np.nan)[None, :]
    table = scale_table(np.where(on, reference, np.nan), gaps)
    columns = FloorColumns(scale_at(table, reference), gaps, np.ones(len(on), dtype=bool), digest(table))
    why = "one kernel only: sqrt(2) times its own error against float32"
    rms, n = _rms(gaps.ravel())
    return Floor(
        "assumed", why, dtype, rms, (FloorVariant("own error x sqrt(2)", "float32", rms, n),), SCALE_BY, table,
        columns.digest,
    ), columns  # fmt: skip


def equal_routes(x: FloatArray | None, y: FloatArray | None, n: int) -> BoolArray:
    """`[T]`: the two scorings took the same experts in every layer (ascending within each, -1 where not known, which
    counts as equal)."""
    if x is None or y is None:
        return np.ones(n, dtype=bool)
    return np.asarray(((x == y) | (x < 0) | (y < 0)).all(axis=-1))


def digest(table: Sequence[tuple[float, ...]]) -> str:
    """A name for a table: sums over one scale must not be added to sums over another."""
    return hashlib.sha256(repr([[float(x).hex() for x in row[:3]] for row in table]).encode()).hexdigest()[:12]


def _rms(x: FloatArray) -> tuple[float, int]:
    good = x[np.isfinite(x)]
    return (math.sqrt(float((good**2).mean())) if len(good) else math.nan), len(good)


def smallest_fault(smallest_ratio: float, healthy_ratio: float, floor_rms: float) -> float:
    """RMS nats of the smallest fault that would have been called: sqrt(r*^2 - r0^2) floors, r* the smallest ratio that
    this data would have called and r0 the ratio without the fault. Assumes that fault and rounding do not covary."""
    return floor_rms * math.sqrt(max(smallest_ratio**2 - healthy_ratio**2, 0.0))


def ownership(gap: float, a_error: float, b_error: float) -> Mapping[str, float]:
    """How much of a gap each side owns, from three measured mean squares (nats^2) over the same tokens: the gap and
    both sides' errors against a third scoring. gap^2 = a^2 + b^2 - 2 cov, so cov is measured, not assumed."""
    cov = (a_error + b_error - gap) / 2
    norm = math.sqrt(a_error * b_error)
    return {
        "covariance": cov,
        "correlation": cov / norm if norm > 0 else math.nan,
        "a_share": (a_error - cov) / gap if gap > 0 else math.nan,
        "b_share": (b_error - cov) / gap if gap > 0 else math.nan,
    }
