"""One side's list is late or early: value t of one side is value t + k of the other's.

A record is looked at closely where its two sides lie far apart; it is called shifted when one lag other than 0 fits,
no further lag fits nearly as well (as in constant or repetitive text), and the values vary enough to tell. Replies too
short to tell alone are pooled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.grid import GRID_BITS, to_float
from onepolicy.integrity.base import Batch, Pair, Told, total_of
from onepolicy.integrity.places import place, places, spot_records
from onepolicy.integrity.shift_far import look_far
from onepolicy.integrity.shift_inside import TELLING, Part, look_inside, near, shifted
from onepolicy.integrity.shift_turns import look_turns
from onepolicy.types import BoolArray, Finding, FloatArray, IntArray

LAGS = (-2, -1, 0, 1, 2)
#: A record is looked at when its mean gap (nats, each counted up to 1) is above this.
_APART = 0.15
#: Tokens for a record of its own; tokens of shorter ones together.
_LEAST, _POOL = 8, 40
#: Fewer pairs will do where the lag leaves next to nothing of the gap.
_FEWEST, _SHARE_FEW = 4, 0.05
#: The lag that fits has a mean gap under the first share of lag 0's, the next best one above the second; and this
#: correlation, so much above lag 0's.
_SHARE, _RIVAL, _CORRELATED, _BETTER = 0.25, 0.4, 0.9, 0.3
#: Values that tell lags apart, at least, and the share of them that fits.
_TELL, _FIT = 4, 0.7
#: Share of the records that a lag of more than two tokens explains.
_FAR_SHARE = 0.02
#: Spread (nats) below which any lag fits.
_SPREAD = 0.2
#: A gap is counted up to this, so that a fill value does not decide.
_CAP = 20.0


@dataclass(frozen=True, slots=True)
class Lagged:
    """`[S]` of each record at one lag: pairs, sums of the gap and of both values and their products, largest gap;
    values that tell lags apart, and those of them that fit."""

    n: FloatArray
    gap: FloatArray
    most: FloatArray
    a: FloatArray
    b: FloatArray
    aa: FloatArray
    bb: FloatArray
    ab: FloatArray
    telling: FloatArray
    fit: FloatArray

    @property
    def mean(self) -> FloatArray:
        return np.where(self.n > 0, self.gap / np.maximum(self.n, 1), np.inf)

    @property
    def correlation(self) -> FloatArray:
        n = np.maximum(self.n, 1)
        cov = self.ab / n - self.a / n * self.b / n
        va, vb = self.aa / n - (self.a / n) ** 2, self.bb / n - (self.b / n) ** 2
        good = (va > 1e-12) & (vb > 1e-12)
        return np.where(good, cov / np.sqrt(np.where(good, va * vb, 1.0)), 0.0)


def look(batch: Batch) -> Counted:
    out = Counted()
    pair = batch.pair
    if pair is None or not len(pair.a):
        return out
    out.count("shifts:records", int((pair.lengths > 0).sum()))
    apart = batch.usual_gap > _APART
    short = (pair.lengths < _LEAST) & (pair.lengths > 2)
    if short.any():
        _pool(out, pair, short)
        spot_records(out, "shifts:short", batch, np.flatnonzero(short & apart), {})
    rows = np.flatnonzero(apart & (pair.lengths >= _LEAST))
    if len(rows):
        _looked_at(out, batch, pair, rows)
    return out


def _looked_at(out: Counted, batch: Batch, pair: Pair, rows: IntArray) -> None:
    chosen, starts, lengths = _selected(pair, rows)
    a, b, at = pair.a[chosen], pair.b[chosen], pair.at[chosen]
    lagged = {k: _at_lag(a, b, at, k, starts, lengths) for k in LAGS}
    best = _best(lagged)
    found = best != 0
    part = Part(a, b, at, starts, lengths, rows)
    inside = look_inside(out, batch, part, ~found)
    turns = look_turns(out, batch, part, ~found & ~inside)
    look_far(out, batch, part, ~found & ~inside & ~turns)
    if not found.any():
        return
    for k in LAGS:
        if k:
            out.count(f"shifts:lag:{k}", int((best == k).sum()))
    picked = np.flatnonzero(found)
    _add_sums(out, lagged, best, picked)
    each = [lagged[int(k)] for k in best[picked]]
    notes = {
        "best_lag": best[picked],
        "pairs": [int(x.n[i]) for x, i in zip(each, picked, strict=True)],
        "corr_lag0": np.round(lagged[0].correlation[picked], 6),
        "corr_best": [round(float(x.correlation[i]), 6) for x, i in zip(each, picked, strict=True)],
        "mean_abs_lag0": np.round(lagged[0].mean[picked], 6),
        "mean_abs_best": [round(float(x.mean[i]), 6) for x, i in zip(each, picked, strict=True)],
        "max_abs_after_shift": [round(float(x.most[i]), 6) for x, i in zip(each, picked, strict=True)],
    }
    spot_records(out, "shifts:first", batch, rows[picked], notes)


def _selected(pair: Pair, rows: IntArray) -> tuple[BoolArray, IntArray, IntArray]:
    """Tokens of those records, and where each record's stand after the others are left out."""
    chosen = np.zeros(len(pair.lengths), dtype=bool)
    chosen[rows] = True
    lengths = pair.lengths[rows]
    return np.repeat(chosen, pair.lengths), np.cumsum(lengths) - lengths, lengths


def _at_lag(a: FloatArray, b: FloatArray, at: IntArray, k: int, starts: IntArray, lengths: IntArray) -> Lagged:
    """Each token of `a` with the token of `b` that stands k places later in the same record."""
    x, y, there = shifted(a, b, at, k, starts, lengths)
    add = lambda v: np.add.reduceat(np.where(there, v, 0.0), starts)
    gap = np.minimum(np.abs(x - y), _CAP)
    most = np.maximum.reduceat(np.where(there, gap, 0.0), starts)
    telling, fit = x < TELLING, near(x, y)
    x, y = np.maximum(x, -_CAP), np.maximum(y, -_CAP)
    sums = (np.ones(len(x)), gap, x, y, x * x, y * y, x * y, telling, telling & fit)
    n, total_gap, *rest = (add(v) for v in sums)
    return Lagged(n, total_gap, most, *rest)


def _best(lagged: dict[int, Lagged]) -> IntArray:
    """`[S]` the lag that explains a record, 0 where none does."""
    means = np.stack([lagged[k].mean for k in LAGS])
    order = np.sort(means, axis=0)
    which = means.argmin(axis=0)
    rows = np.arange(means.shape[1])
    pick = lambda x: np.stack([x(lagged[k]) for k in LAGS])[which, rows]
    corr, n = pick(lambda s: s.correlation), pick(lambda s: s.n)
    spread = pick(lambda s: s.aa / np.maximum(s.n, 1) - (s.a / np.maximum(s.n, 1)) ** 2)
    good = (order[0] < _SHARE * lagged[0].mean) & (order[1] > _RIVAL * lagged[0].mean) & (n >= _LEAST - 2)
    telling, fit = pick(lambda s: s.telling), pick(lambda s: s.fit)
    good &= (telling >= _TELL) & (fit >= _FIT * telling)  # not a correlation that one large value makes
    good &= (corr > _CORRELATED) & (corr - lagged[0].correlation > _BETTER) & (spread > _SPREAD**2)
    return np.where(good, np.array(LAGS)[which], 0)


_PARTS = ("n", "gap", "a", "b", "aa", "bb", "ab")


def _add_sums(out: Counted, lagged: dict[int, Lagged], best: IntArray, picked: IntArray) -> None:
    """Sums at lag 0 and at the best lag, of each kind of shift; a record's sums are rounded to the grid once."""
    for k in sorted({int(x) for x in best[picked]}):
        rows = picked[best[picked] == k]
        for lag in (0, k):
            for part in _PARTS:
                values = getattr(lagged[lag], part)[rows]
                key = f"shifts:{k}:{lag}:{part}"
                out.sums[key] = out.sums.get(key, 0) + total_of(values)
        out.greatest(f"shifts:{k}:most", float(lagged[k].most[rows].max()))


def _pool(out: Counted, pair: Pair, short: BoolArray) -> None:
    inside, starts, lengths = _selected(pair, np.flatnonzero(short))
    a, b, at = pair.a[inside], pair.b[inside], pair.at[inside]
    for k in LAGS:
        x, y, there = shifted(a, b, at, k, starts, lengths)
        gap = np.minimum(np.abs(x - y)[there], _CAP)
        out.count(f"shifts:short:{k}", len(gap))
        out.sums[f"shifts:short:{k}"] = out.sums.get(f"shifts:short:{k}", 0) + total_of(gap)


def judge(total: Counted, told: Told) -> list[Finding]:
    found = {k: total.counts.get(f"shifts:lag:{k}", 0) for k in LAGS if k}
    if not any(found.values()):
        return _by_turn(total, told) or _inside(total, told) or _far(total, told) or _pooled(total, told)
    lag = max(found, key=lambda k: (found[k], -abs(k)))
    n, of = sum(found.values()), total.counts["shifts:records"]
    first = total.spots["shifts:first"]
    corr0, corr = _correlation(total, lag, 0), _correlation(total, lag, lag)
    most = total.most[f"shifts:{lag}:most"]
    means = [_mean(total, lag, x) for x in (0, lag)]
    message = (
        f"{_words(lag, told)} in {n:,} of {of:,} records: the mean gap is {means[0]:.3g} nats as they stand and "
        f"{means[1]:.2g} after the shift (correlation {corr0:.2f} and {corr:.4f})"
    )
    evidence = {
        "best_lag": lag, "records": n, "of": of, "share": n / of, "by_lag": {str(k): v for k, v in found.items() if v},
        "corr_lag0": corr0, f"corr_lag{lag}": corr, "mean_abs_lag0": means[0], "mean_abs_best": means[1],
        "max_abs_after_shift": most, "places": places(first),
    }  # fmt: skip
    ruled_out = ("constant or repeating values: no other lag fits", "noise: it does not go away with a shift")
    return [finding("shift-by-one", message, place=place(first), evidence=evidence, ruled_out=ruled_out, origin="run")]


def _inside(total: Counted, told: Told) -> list[Finding]:
    """Lists that fit up to some token, and with a lag behind it."""
    found = {k: total.counts.get(f"shifts:inside:{k}", 0) for k in LAGS if k}
    n, of = sum(found.values()), total.counts.get("shifts:records", 0)
    if not n:
        return []
    lag = max(found, key=lambda k: (found[k], -abs(k)))
    first = total.spots["shifts:inside"]
    message = f"from some token on {_words(lag, told)}, in {n:,} of {of:,} records; before it both sides agree"
    evidence = {
        "best_lag": lag, "records": n, "of": of, "share": n / of, "by_lag": {str(k): v for k, v in found.items() if v},
        "places": places(first),
    }  # fmt: skip
    advice = "One value was lost, doubled or put in at that place: look for chunk ends, and for ids encoded again."
    return [finding("shift-by-one", message, place=place(first), evidence=evidence, advice=advice, origin="run")]


def _by_turn(total: Counted, told: Told) -> list[Finding]:
    """Each turn with a lag of its own; only where that explains more records than one place in each does."""
    n, of = total.counts.get("shifts:turns", 0), total.counts.get("shifts:records", 0)
    if not n or n < _FAR_SHARE * of or n < sum(total.counts.get(f"shifts:inside:{k}", 0) for k in LAGS):
        return []
    first = total.spots["shifts:turns"]
    lags = sorted({row["best_lag"] for row in places(first)}, key=lambda k: (abs(k), k))
    says = ", ".join(_words(k, told).split(" (")[0] for k in lags[:2]) + (", ..." if len(lags) > 2 else "")
    message = f"the turns lie apart by lags of their own ({says}), in {n:,} of {of:,} records"
    evidence = {"best_lag": lags[0], "lags": lags, "records": n, "of": of, "share": n / of, "places": places(first)}
    advice = (
        "At each boundary values were lost or put in (stop tokens, tool output): keep one for each id of the reply."
    )
    return [finding("shift-by-one", message, place=place(first), evidence=evidence, advice=advice, origin="run")]


def _far(total: Counted, told: Told) -> list[Finding]:
    """Lists that lie apart by the prompt, or by more than two tokens."""
    found = {
        k.removeprefix("shifts:far:"): n for k, n in sorted(total.counts.items()) if k.startswith("shifts:far:") and n
    }
    n, of = sum(found.values()), total.counts.get("shifts:records", 0)
    if not n or n < _FAR_SHARE * of:
        return []
    name = max(found, key=lambda k: found[k])
    longest, first = int(total.most["shifts:far longest"]), total.spots["shifts:far"]
    a, b = told.name("a"), told.name("b")
    late, early = (b, a) if name == "-prompt" or name.isdigit() else (a, b)
    by = f"{name.strip('-')} tokens" if "prompt" not in name else "as many tokens as the prompt has"
    message = f"{late} is late against {early} by {by} (or {early} early), in {n:,} of {of:,} records"
    message += ": as a list that begins with the prompt and was cut to the reply" if "prompt" in name else ""
    lag = {"prompt": -longest, "-prompt": longest}[name] if "prompt" in name else int(name)
    evidence = {"best_lag": lag, "longest": longest, "records": n, "of": of, "share": n / of,
                "by_lag": found, "places": places(first)}  # fmt: skip
    return [finding("shift-by-one", message, place=place(first), evidence=evidence, origin="run")]


def _words(lag: int, told: Told) -> str:
    a, b = told.name("a"), told.name("b")
    by = "one token" if abs(lag) == 1 else f"{abs(lag)} tokens"
    late, early = (b, a) if lag > 0 else (a, b)
    return f"{late} is {by} late against {early} (or {early} {by} early)"


def _mean(total: Counted, kind: int, lag: int) -> float:
    n = to_float(total.sums[f"shifts:{kind}:{lag}:n"])
    return to_float(total.sums[f"shifts:{kind}:{lag}:gap"]) / n


def _correlation(total: Counted, kind: int, lag: int) -> float:
    """Over all tokens of the shifted records; the sums are exact, so is the cancelling."""
    n, _, a, b, aa, bb, ab = (total.sums[f"shifts:{kind}:{lag}:{part}"] for part in _PARTS)
    one = 1 << GRID_BITS
    cov, va, vb = n * ab - a * b, n * aa - a * a, n * bb - b * b
    if va <= 0 or vb <= 0:
        return 0.0
    return round((cov / one**2) / ((va / one**2) ** 0.5 * (vb / one**2) ** 0.5), 6)


def _pooled(total: Counted, told: Told) -> list[Finding]:
    n = {k: total.counts.get(f"shifts:short:{k}", 0) for k in LAGS}
    if min(n.values()) < _FEWEST:
        return []
    fits = _SHARE if min(n.values()) >= _POOL else _SHARE_FEW
    means = {k: to_float(total.sums[f"shifts:short:{k}"]) / n[k] for k in LAGS}
    lag = min(LAGS, key=lambda k: means[k])
    second = min(v for k, v in means.items() if k != lag)
    if lag == 0 or means[0] < 2 * _APART or means[lag] > fits * means[0] or second < _RIVAL * means[0]:
        return []
    first = total.spots.get("shifts:short", [])
    message = (
        f"{_words(lag, told)} in the short replies: their mean gap is {means[0]:.3g} nats as they stand and "
        f"{means[lag]:.2g} after the shift"
    )
    evidence = {"best_lag": lag, "mean_abs_by_lag": {str(k): v for k, v in means.items()}, "pairs": n[lag],
                "records": total.counts["shifts:records"], "places": places(first)}  # fmt: skip
    return [finding("shift-by-one", message, place=place(first), evidence=evidence, origin="run")]
