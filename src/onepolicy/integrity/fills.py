"""Numbers that somebody wrote where a log-prob was missing: 0.0, 1.0, -100, -9999, -1e9, or one number again and again.

An honest 0.0 passes: the other side is near 0 too, or the sampler kept one token alone. Where the two sides lie apart
everywhere (a shift, other weights) nothing is called a fill but what no engine computes.
"""

from __future__ import annotations

import math

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.integrity.base import SIDES, Batch, Pair, Side, Told
from onepolicy.integrity.fill_kinds import count_runs, is_round, say_kind, say_runs
from onepolicy.integrity.places import many, place, places, spot_records, spot_tokens
from onepolicy.integrity.uniform import UNIFORM_ABOVE, UNIFORM_BELOW
from onepolicy.types import BoolArray, Finding, FloatArray, IntArray

#: Written by engines and pipelines for "none" or for minus infinity; no log-softmax gives these exact numbers.
SENTINELS = (-100.0, -999.0, -1000.0, -9999.0, -1e4, -1e5, -1e6, -1e9, -1e10, -1e20)
#: Below this a finite number stands for minus infinity (the least float32, bfloat16 or float64).
_LOWEST = -1e30
#: No log-prob is below this; one of -100 may be.
_IMPOSSIBLE = -5000.0
#: A 0.0 is off when the other side is below `_OFF` nats and this many times the record's usual gap; a record has fills
#: when at least one lies further off.
_OFF, _OFF_SCALES, _FAR, _FAR_SCALES = 0.1, 3.0, 0.7, 8.0
#: Usual gap (nats, each counted up to 1) above which the two sides disagree anyway.
_APART = 0.3
#: A number is repeated improbably: this often, and this share of the record, where the other side differs.
_TIMES, _REPEATED, _DIFFERS = 6, 0.2, 0.1
#: Equal values among the three before, a token: a fifth of a record in one number makes about 0.12.
_MEETINGS = 0.03
#: A record with this usual gap is looked at for repeated numbers.
_LOOK = 0.05
#: Tokens of a record without another side, all of them 0.0.
_LEAST_ALONE = 8
#: A whole number must lie further off than this share of its own size.
_FAR_SHARE = 0.6
#: How often a whole number (-1.0, -10.0) must stand far off before it is called a fill.
_WHOLE = 3


def look(batch: Batch) -> Counted:
    out = Counted()
    if batch.pair is not None and len(batch.pair.a):
        _both_sides(out, batch, batch.pair)
    elif len(batch.side_values) == 1:
        for side in batch.side_values:
            _alone(out, batch, side)
    return out


# -- with another side ----------------------------------------------------------------------------------------------


def _both_sides(out: Counted, batch: Batch, pair: Pair) -> None:
    found: list[IntArray] = []
    for side in SIDES:
        x, y = _both(pair, side)
        out.count(f"fills:{side}:tokens", len(x))
        found += [_sentinels(out, batch, pair.at, x, pair.gap, side), _repeated(out, batch, pair, x, y, side)]
    fills = np.unique(np.concatenate(found))
    for side in SIDES:
        _whole_numbers(out, batch, pair, fills, side)
        zero = _written(pair, pair.of(side))
        if len(zero):
            _zeros(out, batch, pair, np.setdiff1d(zero, fills), fills, side)


def _sentinels(out: Counted, batch: Batch, at: IntArray, x: FloatArray, gap: FloatArray | None, side: Side) -> IntArray:
    """Tokens with a number that no engine computes. The ones that a very unlikely token may have by rounding count
    only where the other side is far off."""
    if not len(x) or (x.min() > SENTINELS[0] and x.max() <= 0.0):
        return np.zeros(0, dtype=np.int64)
    named = (x <= SENTINELS[0]) & (np.isin(x, SENTINELS) | (x <= _LOWEST))
    if gap is not None:
        named &= (x < _IMPOSSIBLE) | (gap > -0.5 * x)
    found = np.flatnonzero((x == 1.0) | named)
    out.count(f"fills:{side}:above 0 but not 1", int(((x > 0) & (x != 1.0)).sum()))
    for value, n in zip(*np.unique(x[found], return_counts=True), strict=True):
        name = "the least float" if value <= _LOWEST else f"{float(value):g}"
        out.count(f"fills:{side}:sentinel:{name}", int(n))
    spot_tokens(out, f"fills:{side}:sentinel", batch, at[found], {"value": x[found]})
    if len(found):
        out.count(f"fills:{side}:sentinel at the end", int(np.isin(at[found], _last_that_count(batch)).sum()))
    return found


def _last_that_count(batch: Batch) -> IntArray:
    """Flat places of the last token of each record that counts."""
    at = np.flatnonzero(batch.live)
    record = np.searchsorted(batch.rollouts.offsets, at, side="right") - 1
    return at[np.append(np.diff(record) != 0, True)] if len(at) else at


def _written(pair: Pair, x: FloatArray) -> IntArray:
    """Tokens with 0.0. -0.0 is a small log-prob that was rounded: nobody writes it, but where a list is negated."""
    zero = x == 0.0
    rounded = zero & np.signbit(x)
    if rounded.any():
        alike = pair.per_record(zero) == pair.lengths
        zero &= ~rounded | np.repeat(alike, pair.lengths)
    return np.flatnonzero(zero)


def _zeros(out: Counted, batch: Batch, pair: Pair, zero: IntArray, fills: IntArray, side: Side) -> None:
    """0.0 where the other side is not near it. `fills`: tokens that are fills already, on either side."""
    x, y = _both(pair, side)
    if not (y[zero] < -_OFF).any():
        return
    scale, others = _usual_gap(pair, np.concatenate([zero, fills]))
    record = np.repeat(np.arange(len(pair.lengths)), pair.lengths)[zero]
    rough = np.maximum(scale, _gap_of_unlikely(pair, x, np.concatenate([zero, fills])))
    alone = _kept_alone(batch)
    off = y[zero] < (-np.maximum(_OFF, _OFF_SCALES * rough) - alone)[record]
    far = y[zero] < (-np.maximum(_FAR, _FAR_SCALES * rough) - alone)[record]
    enough = (others > 1) | (pair.lengths > 2)
    fit = enough & (scale < _APART) & ~_mirrored(pair, x, y, _count(record[off], pair))
    has_far = _count(record[far], pair) > 0
    out.count(f"fills:{side}:doubtful records", int((has_far & ~fit).sum()))
    all_zero = fit & has_far & (_count(record, pair) == pair.lengths)
    filled = (off & (fit & has_far)[record]) | all_zero[record]
    elsewhere = zero[off & fit[record] & ~filled]
    out.count(f"fills:{side}:zero elsewhere", len(elsewhere))
    notes = {"value": x[elsewhere], "other": y[elsewhere]}
    spot_tokens(out, f"fills:{side}:zero elsewhere", batch, pair.at[elsewhere], notes)
    if filled.any():
        out.count(f"fills:{side}:zero records", int((fit & has_far).sum()))
        _count_zeros(out, batch, pair, zero[filled], record[filled], np.flatnonzero(all_zero), side)


def _count_zeros(
    out: Counted, batch: Batch, pair: Pair, at: IntArray, record: IntArray, all_zero: IntArray, side: Side
) -> None:
    """`at`: tokens with a filled 0.0, `record`: theirs; `all_zero`: records with nothing else."""
    x, y = _both(pair, side)
    out.count(f"fills:{side}:zero", len(at))
    out.count(f"fills:{side}:all-zero records", len(all_zero))
    last = at == (pair.starts + pair.lengths - 1)[record]
    out.count(f"fills:{side}:zero at the end", int((last & ~np.isin(record, all_zero)).sum()))
    out.greatest(f"fills:{side}:worst", float(pair.gap[at].max()))
    count_runs(out, batch, pair.at[at], side)
    against = y[at][(y[at] == np.rint(y[at])) & (y[at] > SENTINELS[0])]
    for value, n in zip(*np.unique(against, return_counts=True), strict=True):
        out.count(f"fills:{side}:zero against:{float(value):g}", int(n))
    spot_tokens(out, f"fills:{side}:zero", batch, pair.at[at], {"value": x[at], "other": y[at]})
    spot_records(out, f"fills:{side}:all-zero", batch, all_zero, {"tokens": pair.lengths[all_zero]})


def _whole_numbers(out: Counted, batch: Batch, pair: Pair, fills: IntArray, side: Side) -> None:
    """Tokens with -1.0, -10.0, log 1e-8 and the like where the other side is far off. Rounded values hit such numbers
    too, but where both sides agree. `fills`: tokens that are fills already."""
    x, y = _both(pair, side)
    whole = np.flatnonzero((x < 0.0) & is_round(x))
    whole = whole[(x[whole] > SENTINELS[0]) | (x[whole] != np.rint(x[whole]))]
    whole = whole[y[whole] != 0.0]  # of the two, 0.0 is the fill
    whole = np.setdiff1d(whole, fills)
    if not len(whole):
        return
    scale, _ = _usual_gap(pair, np.union1d(whole, fills))
    record = np.repeat(np.arange(len(pair.lengths)), pair.lengths)[whole]
    least = np.maximum(np.maximum(_FAR, _FAR_SCALES * scale)[record], _FAR_SHARE * -x[whole])
    far = (pair.gap[whole] > least) & (scale < _APART)[record]
    for which, at in (("whole", whole), ("whole far", whole[far])):
        for value, n in zip(*np.unique(x[at], return_counts=True), strict=True):
            out.count(f"fills:{side}:{which}:{float(value):g}", int(n))
    for value in np.unique(x[whole[far]]):
        at = whole[far & (x[whole] == value)]
        spot_tokens(out, f"fills:{side}:whole:{float(value):g}", batch, pair.at[at], {"value": x[at], "other": y[at]})


def _both(pair: Pair, side: Side) -> tuple[FloatArray, FloatArray]:
    """(this side, the other)."""
    return pair.of(side), pair.of("b" if side == "a" else "a")


def _count(record: IntArray, pair: Pair) -> IntArray:
    return np.bincount(record, minlength=len(pair.lengths))


def _usual_gap(pair: Pair, without: IntArray) -> tuple[FloatArray, FloatArray]:
    """`[S]` mean gap of each record's other tokens, each counted up to 1 nat, and how many those are."""
    gap, n = np.minimum(pair.gap, 1.0), np.ones(len(pair.gap))
    gap[without], n[without] = 0.0, 0.0
    others = pair.per_record(n)
    return pair.per_record(gap) / np.maximum(others, 1.0), others


def _gap_of_unlikely(pair: Pair, x: FloatArray, without: IntArray) -> FloatArray:
    """`[S]` mean gap of each record's other tokens below -0.7 on this side, each counted up to 2 nats; 0 without any.

    Noise that grows with the surprisal does not show at the many likely tokens."""
    low = x < -_FAR
    low[without] = False
    n = pair.per_record(low.astype(np.float64))
    return pair.per_record(np.where(low, np.minimum(pair.gap, 2.0), 0.0)) / np.maximum(n, 1.0)


def _mirrored(pair: Pair, x: FloatArray, y: FloatArray, off: IntArray) -> BoolArray:
    """`[S]` records where the other side is as often near 0 while this one is not: other tokens, or another policy."""
    other_way = pair.per_record(((y > -0.05) & (x < -1.0) & (x > SENTINELS[0])).astype(np.float64))
    return other_way > 0.25 * off


def _kept_alone(batch: Batch) -> FloatArray:
    """`[S]` how far (nats) the other side may be from a 0.0 that is the log-prob of a token kept alone."""
    out = np.zeros(len(batch.rollouts))
    top_p = _declared(batch, "top_p", 1.0)
    out += -np.log(np.clip(top_p, 1e-6, 1.0))
    odd = (_declared(batch, "top_k", 0.0) == 1.0) | (_declared(batch, "min_p", 0.0) > 0)
    odd |= _declared(batch, "temperature", 1.0) < 0.3  # nearly greedy: the likeliest token's own is 0.0 to the bit
    out[odd] = np.inf
    return out


def _declared(batch: Batch, name: str, neutral: float) -> FloatArray:
    col = batch.rollouts.records.get(name)
    if col is None:
        return np.full(len(batch.rollouts), neutral)
    return np.where(col.mask(), col.values.astype(np.float64), neutral)


def _repeated(out: Counted, batch: Batch, pair: Pair, x: FloatArray, y: FloatArray, side: Side) -> IntArray:
    """Tokens with one number again and again where the other side has many."""
    mean = pair.per_record(np.minimum(pair.gap, 1.0))
    rows = np.flatnonzero((pair.lengths >= _TIMES) & (mean > _LOOK * pair.lengths))
    rows = rows[_meets_itself(pair, x, rows)]
    hits: list[tuple[int, float, int]] = []
    tokens = [np.zeros(0, dtype=np.int64)]
    for s in rows.tolist():
        at = slice(int(pair.starts[s]), int(pair.starts[s] + pair.lengths[s]))
        values, counts = np.unique(x[at], return_counts=True)
        value, n = float(values[counts.argmax()]), int(counts.max())
        if n < max(_TIMES, _REPEATED * len(x[at])) or value == 0.0 or value == 1.0 or value <= SENTINELS[0]:
            continue
        other = y[at][x[at] == value]
        differs = np.abs(other - value) > _DIFFERS + 0.05 * abs(value)
        if differs.mean() > 0.5 and len(np.unique(other)) > n // 2:
            hits.append((s, value, n))
            tokens.append(np.flatnonzero(x[at] == value) + at.start)
    if hits:
        _count_repeated(out, batch, hits, side)
    return np.concatenate(tokens)


def _meets_itself(pair: Pair, x: FloatArray, rows: IntArray) -> BoolArray:
    """Of those records: whether values equal one of the three before them as often as a repeated number makes them."""
    if not len(rows):
        return np.zeros(0, dtype=bool)
    same = np.zeros(len(x), dtype=np.int8)
    for k in (1, 2, 3):
        same[k:] += x[k:] == x[:-k]
    counts = pair.per_record(same)[rows]
    return counts > _MEETINGS * pair.lengths[rows]


def _count_repeated(out: Counted, batch: Batch, hits: list[tuple[int, float, int]], side: Side) -> None:
    out.count(f"fills:{side}:repeated", sum(n for _, _, n in hits))
    out.count(f"fills:{side}:repeated records", len(hits))
    out.greatest(f"fills:{side}:repeated above", max(v for _, v, _ in hits))
    out.greatest(f"fills:{side}:repeated below", max(-v for _, v, _ in hits))
    notes = {"value": [v for _, v, _ in hits], "times": [n for _, _, n in hits]}
    spot_records(out, f"fills:{side}:repeated", batch, [s for s, _, _ in hits], notes)


# -- one side only ---------------------------------------------------------------------------------------------------


def _alone(out: Counted, batch: Batch, side: Side) -> None:
    values = batch.side_values[side]
    at = np.flatnonzero(batch.live & np.isfinite(values))
    x = values[at]
    out.count(f"fills:{side}:tokens", len(x))
    _sentinels(out, batch, at, x, None, side)
    record = np.searchsorted(batch.rollouts.offsets, at, side="right") - 1
    tokens, zeros = (np.bincount(r, minlength=len(batch.rollouts)) for r in (record, record[x == 0.0]))
    _alike_alone(out, batch, x, tokens, side)
    greedy = np.isinf(_kept_alone(batch))
    rows = np.flatnonzero((tokens >= _LEAST_ALONE) & (zeros == tokens) & ~greedy)
    if len(rows):
        out.count(f"fills:{side}:zero", int(tokens[rows].sum()))
        out.count(f"fills:{side}:zero records", len(rows))
        out.count(f"fills:{side}:all-zero records", len(rows))
        spot_records(out, f"fills:{side}:all-zero", batch, rows, {"tokens": tokens[rows]})


def _alike_alone(out: Counted, batch: Batch, x: FloatArray, tokens: IntArray, side: Side) -> None:
    """Records with one number other than 0.0 at all of their tokens. `x`: the values of each record after another's."""
    rows = np.flatnonzero(tokens >= _LEAST_ALONE)
    first = (np.cumsum(tokens) - tokens)[rows]
    record = np.repeat(np.arange(len(tokens)), tokens)
    again = (np.diff(x) == 0) & (np.diff(record) == 0)
    same = np.bincount(record[1:][again], minlength=len(tokens))
    alike = (same[rows] == tokens[rows] - 1) & (x[first] < 0.0) & (x[first] > SENTINELS[0])
    hits = [(int(s), float(x[i]), int(tokens[s])) for s, i in zip(rows[alike], first[alike], strict=True)]
    if hits:
        _count_repeated(out, batch, hits, side)


# -- judged ----------------------------------------------------------------------------------------------------------


def judge(total: Counted, told: Told) -> list[Finding]:
    return [f for side in SIDES if (f := _judged(total, told, side)) is not None]


def _judged(total: Counted, told: Told, side: Side) -> Finding | None:
    key = f"fills:{side}:"
    of = total.counts.get(key + "tokens", 0)
    kinds = _kinds(total, key)
    n = sum(kinds.values())
    if not n or _constant(total, key, of):
        return None
    named = ["sentinel", "zero", *(f"whole:{v}" for v in kinds), "all-zero", "repeated"]
    named += ["zero elsewhere"] if _elsewhere(total, key) else []
    spots = [s for kind in named for s in total.spots.get(key + kind, [])]
    spots = [s for s in spots if kinds.get("1") or '"value": 1.0' not in s.what]
    says = "; ".join(say_kind(kind, count) for kind, count in kinds.items())
    message = f"{told.name(side)}: {n:,} of {many(of, 'log-prob')} are fill values ({says})"
    all_zero = total.counts.get(key + "all-zero records", 0)
    if all_zero:
        message += f"; in {many(all_zero, 'record')} every value is 0.0"
    at_end = total.counts.get(key + "zero at the end", 0) + total.counts.get(key + "sentinel at the end", 0)
    runs = {part: total.counts.get(f"{key}zero runs {part}", 0) for part in ("at the start", "inside", "at the end")}
    if at_end == n:
        message += "; each is the last token of its reply: one that was appended, not drawn"
    else:
        message += say_runs(runs, n)
    evidence = {
        "side": told.name(side),
        "filled": n,
        "tokens": of,
        "share": n / of,
        "values": kinds,
        "all_zero_records": all_zero,
        "at_the_end": at_end,
        "in_runs": runs,
        "records": _by_record(total, key),
        "places": places(spots),
    }
    worst = total.most.get(key + "worst")
    if worst is not None:
        evidence["worst_factor"] = math.exp(min(worst, 700.0))
    ruled_out = ("honest 0.0: the other side is near 0 there too",) if "0.0" in kinds else ()
    tokens = [s for s in spots if s.position >= 0] or spots
    return finding("filled-logprob", message, place=place(tokens), evidence=evidence, ruled_out=ruled_out, origin="run")


def _kinds(total: Counted, key: str) -> dict[str, int]:
    """Fill values and how often, the commonest first; 1.0 only where nothing else is above 0."""
    out: dict[str, int] = {}
    if total.counts.get(key + "zero records", 0) > total.counts.get(key + "doubtful records", 0):
        # a whole number that is itself the fill, against an honest 0.0
        other = _whole_kinds(total, "fills:b:" if key == "fills:a:" else "fills:a:")
        wrong = sum(total.counts.get(f"{key}zero against:{v}", 0) for v in other)
        out["0.0"] = total.counts[key + "zero"] + _elsewhere(total, key) - wrong
    for name, n in total.counts.items():
        if name.startswith(key + "sentinel:"):
            value = name.removeprefix(key + "sentinel:")
            if value != "1" or not total.counts.get(key + "above 0 but not 1"):
                out[value] = n
    out |= _whole_kinds(total, key)
    if total.counts.get(key + "repeated"):
        out["repeated"] = total.counts[key + "repeated"]
    return dict(sorted(((k, n) for k, n in out.items() if n), key=lambda item: (-item[1], item[0])))


def _whole_kinds(total: Counted, key: str) -> dict[str, int]:
    """Whole numbers that are far off more often than not, three times or more."""
    far = {k.removeprefix(key + "whole far:"): n for k, n in total.counts.items() if k.startswith(key + "whole far:")}
    return {v: n for v, n in far.items() if n >= _WHOLE and n > 0.5 * total.counts[f"{key}whole:{v}"]}


def _elsewhere(total: Counted, key: str) -> int:
    """0.0 that is off by little, in records without a plain one: counted as well unless it is by far the rule, as where
    the sampler kept one token alone and does not say so."""
    n = total.counts.get(key + "zero elsewhere", 0)
    return n if total.counts.get(key + "zero", 0) > 0.05 * n else 0


def _constant(total: Counted, key: str, of: int) -> bool:
    """One number at every token of the dump is another finding: `uniform`."""
    above, below = total.most.get(key + "repeated above"), total.most.get(key + "repeated below")
    alike = above is not None and above == -(below or 0.0) and UNIFORM_ABOVE <= above <= UNIFORM_BELOW
    return alike and total.counts.get(key + "repeated", 0) == of


def _by_record(total: Counted, key: str) -> dict[str, list[int]]:
    """Record -> positions in its reply, of the places that are kept."""
    out: dict[str, list[int]] = {}
    for kind in ("zero", "sentinel", *(f"whole:{v}" for v in _whole_kinds(total, key))):
        for row in places(total.spots.get(key + kind, [])):
            out.setdefault(row["record"], []).append(row["reply_position"])
    return {record: sorted(positions) for record, positions in sorted(out.items())}
