"""One side's log-probs are the other's times one number: another base of the logarithm, a division after the softmax.

A temperature divides logits, so likely and unlikely tokens move by different factors and no number fits. Here one does,
at tokens of every size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.grid import to_float
from onepolicy.integrity.base import Batch, Pair, Told, total_of
from onepolicy.integrity.places import place, places, spot_records
from onepolicy.types import Finding, FloatArray, IntArray

#: A record is looked at when its mean gap (nats, each counted up to 1) is above this.
_APART = 0.05
#: Tokens that tell a factor are below the first (nats) on one side, below the second on the other; so many a record.
_TELLING, _AT_ALL, _LEAST = -0.1, -2e-3, 8
#: Fewer will do where each of them is so close to a factor that is known: of a base, of the declared temperature.
_FEW, _CLOSE_FEW = 5, 0.05
#: A factor's logarithm is at least this; so close to it (of each token), and so many of the tokens.
_FACTOR, _CLOSE, _MOST = 0.2, 0.1, 0.85
#: Spread of log(-log p) that it takes: tokens of one size have one factor anyway.
_SPREAD = 0.5
#: How close a factor must be to a known one.
_KNOWN = 0.03
#: Share of the records that were looked at.
_SHARE = 0.02
_BASES: Mapping[str, float] = {"base 2": -math.log(math.log(2.0)), "base 10": -math.log(math.log(10.0))}
_SAYS = {
    "base 2": "its logarithms are to base 2 (bits)",
    "base 10": "its logarithms are to base 10",
    "length": "each is divided by the length of its reply",
    "temperature": "each is divided by the temperature, as logits should have been",
}


def look(batch: Batch) -> Counted:
    out = Counted()
    pair = batch.pair
    if pair is None or not len(pair.a):
        return out
    apart = pair.per_record(np.minimum(pair.gap, 1.0)) > _APART * pair.lengths
    telling = (np.minimum(pair.a, pair.b) < _TELLING) & (np.maximum(pair.a, pair.b) < _AT_ALL)
    telling &= np.repeat(apart, pair.lengths)
    record = np.repeat(np.arange(len(pair.lengths)), pair.lengths)[telling]
    counts = np.bincount(record, minlength=len(pair.lengths))
    out.count("rescaled:records", int((pair.lengths >= _FEW).sum()))
    rows = np.flatnonzero(counts >= _FEW)
    if len(rows):
        keep = (counts >= _FEW)[record]
        _looked_at(out, batch, pair, rows, record[keep], np.flatnonzero(telling)[keep])
    return out


def _looked_at(out: Counted, batch: Batch, pair: Pair, rows: IntArray, record: IntArray, at: IntArray) -> None:
    """The telling tokens `at` `[N]` of the sequences `rows` `[R]`; `record` `[N]`: theirs."""
    log = np.log(pair.a[at] / pair.b[at])
    size = np.log(-pair.b[at])
    counts = np.bincount(record, minlength=len(pair.lengths))[rows]
    starts = np.cumsum(counts) - counts
    mean = lambda x: np.add.reduceat(x, starts, dtype=np.float64) / counts
    factor = log[np.lexsort((log, record))][starts + counts // 2]
    close = np.abs(log - np.repeat(factor, counts)) <= _CLOSE
    spread = mean(size * size) - mean(size) ** 2
    good = (mean(close) >= _MOST) & (spread >= _SPREAD**2) & (np.abs(factor) >= _FACTOR)
    kinds = np.array(_kinds(batch, pair, rows, factor))
    known = np.array([k.split(":")[1] in ("temperature", *_BASES) for k in kinds])
    sure = known & (mean(np.abs(log - np.repeat(factor, counts)) <= _CLOSE_FEW) == 1)
    picked = np.flatnonzero(good & ((counts >= _LEAST) | sure))
    if len(picked):
        _count(out, batch, pair, rows[picked], factor[picked], kinds[picked].tolist())


def _count(out: Counted, batch: Batch, pair: Pair, rows: IntArray, factor: FloatArray, kinds: list[str]) -> None:
    every = np.zeros(len(pair.lengths))
    every[rows] = factor
    scale = np.repeat(every, pair.lengths)
    after = pair.per_record(np.abs(pair.a / np.exp(scale) - pair.b))[rows]
    before = pair.per_record(pair.gap)[rows]
    for kind in sorted(set(kinds)):
        of = np.flatnonzero(np.array(kinds) == kind)
        out.count(f"rescaled:kind:{kind}", len(of))
        out.count(f"rescaled:tokens:{kind}", int(pair.lengths[rows[of]].sum()))
        for name, values in (("log", factor), ("before", before), ("after", after)):
            key = f"rescaled:{name}:{kind}"
            out.sums[key] = out.sums.get(key, 0) + total_of(values[of])
        out.greatest(f"rescaled:greatest:{kind}", float(factor[of].max()))
        out.greatest(f"rescaled:least, negative:{kind}", -float(factor[of].min()))
        spot_records(out, f"rescaled:first:{kind}", batch, rows[of], {"factor": np.round(np.exp(factor[of]), 4)})


def _kinds(batch: Batch, pair: Pair, rows: IntArray, factor: FloatArray) -> list[str]:
    """`[R]` "side:what" of each record: the side that holds the wrong numbers, `a` where that is not known."""
    kinds = np.full(len(rows), "a:other", dtype=object)
    col = batch.rollouts.records.get("temperature")
    told = np.ones(len(rows)) if col is None else np.where(col.mask(), col.values, 1.0).astype(np.float64)[rows]
    known: dict[str, FloatArray] = {
        "temperature": -np.log(np.where(told > 0, told, 1.0)),
        "length": -np.log(pair.lengths[rows].astype(np.float64)),
        **{name: np.full(len(rows), log) for name, log in _BASES.items()},
    }
    for name, log in known.items():  # the last one that fits counts: a base is the surest
        for side, sign in (("b", -1.0), ("a", 1.0)):
            kinds[np.abs(factor - sign * log) <= _KNOWN] = f"{side}:{name}"
    return [str(k) for k in kinds]


def judge(total: Counted, told: Told) -> list[Finding]:
    found = {k.removeprefix("rescaled:kind:"): n for k, n in total.counts.items() if k.startswith("rescaled:kind:")}
    of, n = total.counts.get("rescaled:records", 0), sum(found.values())
    if not n or n < _SHARE * of:
        return []
    kind = max(sorted(found), key=lambda k: found[k])
    side, what = kind.split(":")
    wrong, other = ("a", "b") if side == "a" else ("b", "a")
    mean = lambda name, by: to_float(total.sums[f"rescaled:{name}:{kind}"]) / by
    tokens = total.counts[f"rescaled:tokens:{kind}"]
    log = mean("log", found[kind]) * (1.0 if side == "a" else -1.0)
    before, after = mean("before", tokens), mean("after", tokens) * (1.0 if side == "a" else math.exp(log))
    apart = total.most[f"rescaled:greatest:{kind}"] + total.most[f"rescaled:least, negative:{kind}"]
    says = _SAYS.get(what, "no temperature does that: one divides logits, before the softmax")
    factor = f"{math.exp(log):.4g} times" if apart <= 2 * _CLOSE else "for each record another number times"
    names = told.name("a" if wrong == "a" else "b"), told.name("b" if other == "b" else "a")
    message = (
        f"{names[0]} is {factor} {names[1]} at unlikely and likely tokens alike, in {n:,} of {of:,} records: {says}; "
        f"the mean gap is {before:.3g} nats as they stand and {after:.2g} without the factor"
    )
    first = [s for k in sorted(found) for s in total.spots[f"rescaled:first:{k}"]]
    evidence = {
        "side": names[0], "what": what, "factor": math.exp(log), "records": n, "of": of, "share": n / of,
        "mean_abs_as_stored": before, "mean_abs_without_factor": after, "by_kind": dict(sorted(found.items())),
        "places": places(first),
    }  # fmt: skip
    ruled_out = ("a temperature or a soft-cap: they move tokens by factors that change with the probability",)
    return [finding("rescaled-logprob", message, place=place(first), evidence=evidence, ruled_out=ruled_out,
                    origin="run")]  # fmt: skip
