"""Log-probs joined in another order than their tokens: one side's values of a record fit the other side's of another.

A batch was sorted by length, cut into micro-batches, shuffled or gathered from ranks, and the order was not restored.
Which side moved the values do not tell. A record is looked at when its own two sides lie far apart and do not follow
each other; of such records a small sketch of both sides is kept, and the sketches of the whole dump are compared at the
end, so that records of different files and batches find each other. A match is taken when both sides fit far better
than the record's own two; a finding needs a share of all that was looked at. Replies under 16 tokens, values without
spread, and lists that moved inside their record as well decide nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import LIMITS, SPOTS, Counted, Spot
from onepolicy.formats.base import RawColumn, RawRecord
from onepolicy.integrity.base import Batch, Told
from onepolicy.integrity.exchange_order import pattern
from onepolicy.integrity.places import many, place, places, spot
from onepolicy.types import BoolArray, Finding, FloatArray, IntArray

#: A sketch has the means of these many tokens, one stretch after another from the first token that is compared on:
#: single ones for short replies, longer ones that reach beyond a beginning which all replies share.
SIZES = np.array([1] * 8 + [2] * 8 + [4] * 8 + [16] * 8)
_ENDS = np.cumsum(SIZES)
_WIDTH, _LEAST = int(_ENDS[-1]), 16
#: Stretches that two sketches must have in common; of those of one side below `_TELLS` nats a token, at least.
_COMMON, _TELLING, _TELLS = 12, 6, -0.1
#: A record is looked at when its mean gap (nats, each counted up to 1) is above the first, its correlation below the
#: second.
_APART, _FOLLOWS = 0.05, 0.85
#: Spread (nats a token) below which everything fits.
_SPREAD = 0.2
#: A match: this correlation, and this share of telling stretches near.
_CORRELATED, _FIT = 0.9, 0.7
#: (share of the record's own root mean square gap, nats and share of a value within which a stretch is near): with few
#: stretches in common; with so many that correlation is no chance, so that another fault may be there besides.
_MANY = 20
_STRICT, _LOOSE = (0.25, 0.05, 0.15), (0.4, 0.1, 0.45)
#: Another record that fits within this factor is no worse: which one it is stays open (equal replies of a group).
_AS_WELL = 2.0
#: Records that match, at least, and as a share of those looked at: a few of some thousand match by chance.
_RECORDS, _OF_LOOKED = 2, 0.25
#: A value is counted up to this, so that a fill value does not decide.
_CAP = 20.0
#: Sketches that are compared at a time.
_AT_A_TIME = 256
_KEPT = "exchanged:sketches"
#: `file:line` or `file[index]`.
_PLACE = re.compile(r"(.*)[:\[](\d+)\]?")


@dataclass(frozen=True, slots=True)
class Sketches:
    """Of S records: both sides `[S, 32]`, NaN where the reply does not reach; `tokens` `[S]` of each reply; `order`
    `[S]` where each stands in the dump, -1 where unknown; names, groups (empty: unknown) and places."""

    a: FloatArray
    b: FloatArray
    tokens: IntArray
    order: IntArray
    names: tuple[str, ...]
    groups: tuple[str, ...]
    places: tuple[str, ...]


def look(batch: Batch) -> Counted:
    out = Counted()
    kept = [*_of_pairs(out, batch), *_of_other_lengths(out, batch)]
    if kept:
        out.spot(_KEPT, kept)
    return out


def _of_pairs(out: Counted, batch: Batch) -> Iterator[Spot]:
    """Sketches of records whose two sides do not belong together."""
    pair = batch.pair
    if pair is None or not len(pair.a):
        return
    long = pair.lengths >= _LEAST
    out.count("exchanged:records", int(np.count_nonzero(long)))
    rows, left = np.flatnonzero(long & (batch.usual_gap > _APART)), LIMITS[_KEPT]
    if batch.order is not None:
        rows = rows[np.argsort(batch.order[rows], kind="stable")]
    for some in np.array_split(rows, -(-len(rows) // 1024)) if len(rows) else []:
        index = pair.starts[some, None] + np.arange(_WIDTH)
        index = np.minimum(index, len(pair.a) - 1)
        inside = np.arange(_WIDTH) < pair.lengths[some, None]
        # up to the first gap: what the mask takes out differs from record to record, and so would the places behind it
        inside &= np.logical_and.accumulate(pair.at[index] - pair.at[index[:, :1]] == np.arange(_WIDTH), axis=1)
        a, b = (_means(x[index], inside) for x in (pair.a, pair.b))
        found = np.flatnonzero(_does_not_follow(a, b))
        out.count("exchanged:apart", len(found))
        for i in found[: left if batch.order is not None else None].tolist():
            yield _spot(batch, int(some[i]), a[i], b[i])
        left = max(0, left - len(found))


def _means(x: FloatArray, inside: BoolArray) -> FloatArray:
    """`[R, 32]` means over the stretches of `x` `[R, 184]`; NaN where not all of a stretch is inside."""
    sums = np.add.reduceat(np.where(inside, np.maximum(x, -_CAP), 0.0), _ENDS - SIZES, axis=1)
    return np.where(inside.sum(axis=1)[:, None] >= _ENDS, sums / SIZES, np.nan)


def _does_not_follow(a: FloatArray, b: FloatArray) -> BoolArray:
    """`[R]` records with spread on both sides of which one does not follow the other."""
    both = np.isfinite(a) & np.isfinite(b)
    w = np.where(both, SIZES, 0.0)
    x, y = np.where(both, a, 0.0), np.where(both, b, 0.0)
    n = np.maximum(w.sum(axis=1), 1.0)
    mean = lambda v: (w * v).sum(axis=1) / n
    va, vb, cov = mean(x * x) - mean(x) ** 2, mean(y * y) - mean(y) ** 2, mean(x * y) - mean(x) * mean(y)
    # the mean of a stretch of n has a variance n times smaller: weighted so, these are variances of one token
    spread = np.minimum(va, vb) * n > _SPREAD**2 * both.sum(axis=1)
    return (both.sum(axis=1) >= _COMMON) & spread & (cov < _FOLLOWS * np.sqrt(np.maximum(va * vb, 0.0)))


def _spot(batch: Batch, s: int, a: FloatArray, b: FloatArray) -> Spot:
    group = batch.rollouts.records.get("group_id")
    named = "" if group is None or not group.mask()[s] else str(group.values[s])
    at = slice(int(batch.rollouts.offsets[s]), int(batch.rollouts.offsets[s + 1]))
    order = -1 if batch.order is None else int(batch.order[s])
    return _kept(order, batch.names[s], int(batch.live[at].sum()), a, b, named, batch.places[s])


def _kept(order: int, name: str, tokens: int, a: FloatArray, b: FloatArray, group: str, at: str) -> Spot:
    """Sorted by its place in the dump, so that of too many the first ones stay, neighbours together."""
    key = f"{order:020d} {name}" if order >= 0 else f"? {name}"
    return Spot(key, tokens, f"{np.concatenate([a, b]).astype('<f4').tobytes().hex()} {group}", at)


def _of_other_lengths(out: Counted, batch: Batch) -> Iterator[Spot]:
    """Sketches of records that were set aside because a list has another length: whole lists that changed places."""
    for raw, faults in batch.settled.aside if batch.settled is not None else ():
        if not isinstance(raw, RawRecord) or not any(f.kind == "length" for f in faults):
            continue
        sides = [_reply_values(raw.columns.get(f"{name}_logprobs")) for name in batch.asked]
        if any(len(x) < _LEAST for x in sides):
            continue
        out.count("exchanged:records", 1)
        a, b = (_means(np.where(inside, x, 0.0), inside) for x, inside in map(_cut, sides))
        if _does_not_follow(a, b)[0]:
            out.count("exchanged:apart", 1)
            name = str(raw.facts.get("record_id") or "")
            group = raw.facts.get("group_id")
            n = len(raw.token_ids) - (raw.prompt_length or 0)
            yield _kept(-1, name, n, a[0], b[0], "" if group is None else str(group), raw.place)


def _reply_values(col: RawColumn | None) -> FloatArray:
    """The values of a list that has the reply's tokens alone, up to the first that is null or not finite."""
    if col is None or col.layout != "reply":
        return np.zeros(0)
    x = np.array(col.values, dtype=np.float64)
    good = np.isfinite(x) if col.valid is None or len(col.valid) != len(x) else np.isfinite(x) & col.valid
    return x[: len(x) if good.all() else int(good.argmin())]


def _cut(x: FloatArray) -> tuple[FloatArray, BoolArray]:
    """`[1, 184]` the first values, and which there are."""
    out, n = np.zeros((1, _WIDTH)), min(len(x), _WIDTH)
    out[0, :n] = x[:n]
    return out, np.arange(_WIDTH)[None] < n


# -- judged ----------------------------------------------------------------------------------------------------------


def judge(total: Counted, told: Told) -> list[Finding]:
    spots = total.spots.get(_KEPT, [])
    if len(spots) < _RECORDS:
        return []
    seen = _read(spots)
    found = matched(seen)
    n = len(found.rows)
    if n < max(_RECORDS, _OF_LOOKED * len(spots)):
        return []
    of, apart = total.counts["exchanged:records"], total.counts["exchanged:apart"]
    names = told.name("a"), told.name("b")
    how = pattern(found.rows, found.other, seen.order, seen.tokens, seen.groups, found.sure)
    looked = f" (of {apart:,} that do not fit, the first {len(spots):,} were looked at)" if apart > len(spots) else ""
    (a, b), own, corr = names, float(np.median(found.own)), float(np.median(found.corr))
    message = (
        f"{a}'s values of one record fit {b}'s of another in {n:,} of {many(of, 'record')}{looked}: {how} (correlation "
        f"{own:.2f} with {b}'s of the same record, {corr:.3f} with the other's); which side moved, values do not tell"
    )
    first = _first(seen, found, names)
    evidence = {
        "records": n, "of": of, "share": n / of, "apart": apart, "looked_at": len(spots), "pattern": how,
        "open_which": n - int(found.sure.sum()), "corr_own": own, "corr_fits": corr,
        "rms_own": float(np.median(found.gap_own)), "rms_fits": float(np.median(found.gap)), "places": places(first),
    }  # fmt: skip
    ruled_out = ("temperature, other weights, noise: none of them makes another record's values fit",
                 "values moved inside their record: another record's fit token by token")  # fmt: skip
    return [
        finding("exchanged-logprobs", message, place=place(first), evidence=evidence, ruled_out=ruled_out, origin="run")
    ]


def _read(spots: list[Spot]) -> Sketches:
    both = np.array([np.frombuffer(bytes.fromhex(s.what.split(" ", 1)[0]), "<f4") for s in spots], dtype=np.float64)
    keys = [s.record.split(" ", 1) for s in spots]
    order = np.array([-1 if k == "?" else int(k) for k, _ in keys], dtype=np.int64)
    groups = tuple(s.what.split(" ", 1)[1] for s in spots)
    tokens = np.array([s.position for s in spots], dtype=np.int64)
    half = len(SIZES)
    names, at = tuple(name for _, name in keys), tuple(s.place for s in spots)
    return Sketches(both[:, :half], both[:, half:], tokens, _ordered(order, at), names, groups, at)


def _ordered(order: IntArray, at: tuple[str, ...]) -> IntArray:
    """Where the records stand, by file and line where not all of them know it."""
    found = [_PLACE.fullmatch(p) for p in at] if (order < 0).any() else []
    known = [m for m in found if m is not None]
    if not known or len(known) < len(found):
        return order
    files = {file: i for i, file in enumerate(sorted({m[1] for m in known}))}
    return np.array([(files[m[1]] << 32) + int(m[2]) for m in known], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Matched:
    """`[N]` records `rows` and the record `other` whose second side fits the first side of each. `sure`: no further
    record fits as well. Correlations and root mean square gaps (nats) of the own two sides and of those that fit."""

    rows: IntArray
    other: IntArray
    sure: BoolArray
    own: FloatArray
    corr: FloatArray
    gap_own: FloatArray
    gap: FloatArray


def matched(seen: Sketches) -> Matched:
    """Each record's best fit among the others."""
    parts: list[tuple[Any, ...]] = []
    for lo in range(0, len(seen.a), _AT_A_TIME):
        rows = np.arange(lo, min(lo + _AT_A_TIME, len(seen.a)))
        square, corr, common = _compared(seen.a[rows], seen.b)
        own, own_corr = square[rows - lo, rows].copy(), corr[rows - lo, rows].copy()
        square[rows - lo, rows] = np.inf
        square = np.where((common >= _COMMON) & (corr > _CORRELATED), np.round(square, 9), np.inf)
        best = square.argmin(axis=1)
        least = square[rows - lo, best]
        as_well = (square <= _AS_WELL**2 * least[:, None] + 1e-9).sum(axis=1) > 1
        share, *near = np.where((common[rows - lo, best] < _MANY)[:, None], _STRICT, _LOOSE).T
        good = np.isfinite(least) & (least <= share**2 * own) & _near(seen.a[rows], seen.b[best], *near)
        gaps = np.sqrt(own), np.sqrt(least)
        parts.append(tuple(x[good] for x in (rows, best, ~as_well, own_corr, corr[rows - lo, best], *gaps)))
    return Matched(*(np.concatenate(x) for x in zip(*parts, strict=True)))


def _compared(a: FloatArray, b: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """`[R, S]` mean square gap a token, correlation and stretches in common, of every row of `a` with every one of
    `b`."""
    has_a, has_b = np.isfinite(a).astype(np.float64), np.isfinite(b).astype(np.float64)
    x, y = np.where(has_a > 0, a, 0.0), np.where(has_b > 0, b, 0.0)
    w = SIZES.astype(np.float64)
    n = np.maximum((has_a * w) @ has_b.T, 1.0)
    mx, my = (x * w) @ has_b.T / n, (has_a * w) @ y.T / n
    xx, yy, xy = (x * x * w) @ has_b.T / n, (has_a * w) @ (y * y).T / n, (x * w) @ y.T / n
    vx, vy = xx - mx * mx, yy - my * my
    good = (vx > 1e-9) & (vy > 1e-9)
    corr = np.where(good, (xy - mx * my) / np.sqrt(np.where(good, vx * vy, 1.0)), 0.0)
    return np.maximum(xx + yy - 2 * xy, 0.0), corr, has_a @ has_b.T


def _near(x: FloatArray, y: FloatArray, nats: FloatArray, share: FloatArray) -> BoolArray:
    """`[N]` whether enough of the telling stretches of `x` and `y` `[N, 32]` are alike, not one large value alone."""
    telling = np.isfinite(x) & np.isfinite(y) & (np.fmin(x, y) < _TELLS)
    near = np.abs(x - y) <= nats[:, None] + share[:, None] * np.abs(x)
    n = telling.sum(axis=1)
    return (n >= _TELLING) & ((telling & near).sum(axis=1) >= _FIT * n)


def _first(seen: Sketches, found: Matched, names: tuple[str, str]) -> list[Spot]:
    """The first records in the dump's order, and which record's values fit theirs."""
    out: list[Spot] = []
    for k in range(min(len(found.rows), SPOTS)):
        i, j = int(found.rows[k]), int(found.other[k])
        where = {"place": seen.places[j]} if seen.places[j] else {}
        note = {
            "fits": {"record": seen.names[j], "side": names[1], **where}, "sure": bool(found.sure[k]),
            "corr_own": round(float(found.own[k]), 4), "corr_fits": round(float(found.corr[k]), 4),
        }  # fmt: skip
        out.append(spot(seen.names[i], seen.places[i], note))
    return out
