"""Nulls, NaN, infinities and values above 0 at tokens that count, side by side and by kind."""

from __future__ import annotations

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.integrity.base import SIDES, Batch, Side, Told
from onepolicy.integrity.places import many, place, places, share, spot_tokens
from onepolicy.types import Finding, FloatArray

#: Nats up to which a value above 0 is still about the other side's log-prob.
NEAR = 1.5
#: Share of the values above 0 that are one function of the other side's.
_MOSTLY = 0.8


def look(batch: Batch) -> Counted:
    out = Counted()
    n = int(np.count_nonzero(batch.live))
    out.count("finite:tokens", n)
    for side, values in batch.side_values.items():
        x = batch.finite[side]
        out.count(f"finite:{side}:finite", len(x))
        if len(x) < n:
            _not_finite(out, batch, side, values)
        out.count(f"finite:{side}:negative", int(np.count_nonzero(x < 0.0)))
        if len(x) and x.max() > 0.0:
            _positive(out, batch, side, values)
    if batch.pair is not None:
        out.count("finite:both", len(batch.pair.a))
    return out


def _not_finite(out: Counted, batch: Batch, side: Side, values: FloatArray) -> None:
    name = batch.a if side == "a" else batch.b
    assert name is not None
    scored = batch.scored(name)
    kinds = {
        "null": ~scored,
        "nan": scored & np.isnan(values),
        "inf": values == np.inf,
        "-inf": values == -np.inf,
    }
    for kind, where in kinds.items():
        at = np.flatnonzero(batch.live & where)
        if len(at):
            out.count(f"finite:{side}:{kind}", len(at))
            spot_tokens(out, f"finite:{side}:{'null' if kind == 'null' else 'bad'}", batch, at, {"value": values[at]})


def _positive(out: Counted, batch: Batch, side: Side, values: FloatArray) -> None:
    with np.errstate(invalid="ignore"):
        at = np.flatnonzero(batch.live & (values > 0.0) & np.isfinite(values))
    x = values[at]
    out.count(f"finite:{side}:positive", len(at))
    out.count(f"finite:{side}:exactly 1", int((x == 1.0).sum()))
    out.count(f"finite:{side}:above 1", int((x > 1.0).sum()))
    record = np.searchsorted(batch.rollouts.offsets, at, side="right") - 1
    here = np.bincount(record, minlength=len(batch.rollouts))[batch.sequence_of()] > 0
    with np.errstate(invalid="ignore"):
        out.count(f"finite:{side}:beside", int((batch.live & here & np.isfinite(values)).sum()))
        out.count(f"finite:{side}:beside, negative", int((batch.live & here & (values < 0.0)).sum()))
    other = batch.side_values.get("b" if side == "a" else "a")
    if other is not None:
        _against(out, side, x, other[at])
    out.greatest(f"finite:{side}:greatest", float(x.max()))
    spot_tokens(out, f"finite:{side}:positive", batch, at, {"value": x})


def _against(out: Counted, side: Side, x: FloatArray, y: FloatArray) -> None:
    """Values `x` above 0 with the other side's `y`: what function of it they are."""
    with np.errstate(invalid="ignore", over="ignore"):
        known = y < 0.0
        out.count(f"finite:{side}:near the other", int((np.abs(x - y) < NEAR).sum()))
        out.count(f"finite:{side}:with the other", int(known.sum()))
        p = np.exp(y)
        out.count(f"finite:{side}:its probability", int((known & (np.abs(x - p) <= 0.02 + 0.1 * p)).sum()))
        out.count(f"finite:{side}:its negative", int((known & (np.abs(x + y) <= 0.05 - 0.15 * y)).sum()))


def judge(total: Counted, told: Told) -> list[Finding]:
    out = [f for side in SIDES for f in (_positive_found(total, told, side), _bad(total, told, side)) if f]
    nothing = _nothing(total, told)
    return [*out, nothing] if nothing else [*out, *(f for side in SIDES if (f := _missing(total, told, side)))]


def _positive_found(total: Counted, told: Told, side: Side) -> Finding | None:
    key = f"finite:{side}:"
    n = total.counts.get(key + "positive", 0)
    ones = total.counts.get(key + "exactly 1", 0)
    if not n or (n == ones and total.counts.get(key + "negative", 0)):
        return None  # 1.0 among log-probs is a fill value
    of, first = total.counts[key + "finite"], total.spots[key + "positive"]
    like = _looks_like(total, key, n, of)
    most = total.most[key + "greatest"]
    message = f"{told.name(side)}: {n:,} of {many(of, 'log-prob')} are above 0, up to {most:.4g}"
    message += f"; they look like {like}" if like else ""
    evidence = {"side": told.name(side), "positive": n, "tokens": of, "share": n / of, "greatest": most,
                "looks_like": like, "places": places(first)}  # fmt: skip
    return finding("positive-logprob", message, place=place(first), evidence=evidence, origin="run")


def _looks_like(total: Counted, key: str, n: int, of: int) -> str | None:
    """By the other side's values, else by the range, of the records that have values above 0; only where these are no
    exception."""
    beside, known = total.counts.get(key + "beside", 0), total.counts.get(key + "with the other", 0)
    if n < 3 or n < min(0.05 * of, 0.5 * beside):
        return None
    if known and total.counts.get(key + "its probability", 0) > _MOSTLY * known:
        return "probabilities"
    if known and total.counts.get(key + "its negative", 0) > _MOSTLY * known:
        return "losses: the sign is turned round"
    if total.counts.get(key + "beside, negative", 0):
        if total.counts.get(key + "near the other", 0) > 0.9 * n:
            return "log-probs to which something was added: the other side has nearly the same value there"
        return "logits, or differences of log-probs, which have both signs"
    if known:
        return "another quantity: no probabilities, and no log-probs with the sign turned round, by the other side"
    return "losses: the sign is turned round" if total.counts.get(key + "above 1", 0) else "probabilities"


def _bad(total: Counted, told: Told, side: Side) -> Finding | None:
    """NaN and +inf; -inf by the sampler too, of a token that it drew."""
    key = f"finite:{side}:"
    kinds = {kind: total.counts.get(key + kind, 0) for kind in ("nan", "inf", "-inf")}
    counted = {k: n for k, n in kinds.items() if n and (k != "-inf" or side == "a")}
    if not counted:
        return None
    n, of, first = sum(counted.values()), total.counts["finite:tokens"], total.spots[key + "bad"]
    says = ", ".join(f"{k}: {v:,}" for k, v in counted.items())
    message = f"{told.name(side)}: {n:,} of {many(of, 'token')} have values that are not finite ({says})"
    if "-inf" in counted:
        message += "; -inf says that a token was impossible which was drawn"
    evidence = {"side": told.name(side), **counted, "tokens": of, "share": share(n, of), "places": places(first)}
    return finding("nonfinite-logprob", message, place=place(first), evidence=evidence, origin="run")


def _missing(total: Counted, told: Told, side: Side) -> Finding | None:
    key = f"finite:{side}:"
    n, of = total.counts.get(key + "null", 0), total.counts.get("finite:tokens", 0)
    if not n:
        return None
    first = total.spots[key + "null"]
    message = f"{told.name(side)}: {n:,} of {many(of, 'token')} that count have no log-prob ({share(n, of):.2%})"
    evidence = {"side": told.name(side), "missing": n, "tokens": of, "share": share(n, of), "places": places(first)}
    return finding("missing-logprobs", message, place=place(first), evidence=evidence, origin="run")


def _nothing(total: Counted, told: Told) -> Finding | None:
    if None in told.names or total.counts.get("finite:both", 0):
        return None
    n = total.counts.get("finite:tokens", 0)
    if not n:
        return None
    message = (
        f"none of the {many(n, 'token')} that count has a finite log-prob of both {told.names[0]} and {told.names[1]}"
    )
    return finding("nothing-scored", message, evidence={"tokens": n}, origin="run")
