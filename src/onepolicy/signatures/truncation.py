"""One side is renormalised over the kept set of top-p, top-k or min-p: the other lies lower by the log of its mass.

    d = log S <= 0 at every token (sampler truncated), S the kept mass under the full distribution

so no d is above 0 but for rounding, and the mean ratio is the mean kept mass instead of 1: temperature, penalties and
staleness keep the support and with it a mean ratio of 1. With top-p alone -d is at most -log top_p. Where one token
alone was kept its log-prob is exactly 0 on the truncated side and not on the other. Padded vocabulary rows and other
masses that one side leaves out are one-sided too; without a declaration or exact zeros they are not told apart.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.profiles.base import Seen
from onepolicy.signatures.adding import clipped, keep, keep_gram, read, spread
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.declared import numbers, switched_off, switched_on, told
from onepolicy.types import BoolArray, FloatArray, Outcome, Severity

#: What rounding to float32 and printing to three decimals may do to a log-prob, nats.
ROUNDING = 2e-3
#: Tokens off by more than rounding on one side only: with either sign alike, 20 of them have 2^-20.
FEWEST = 20
#: Where noise lies over the offset: tokens above 0 at most, and z of the mean ratio by sequences.
ABOVE_NOISY, CLEAR, SEQUENCES = 0.25, 5.0, 20
#: Exact zeros from which they are a mark by themselves: no rounding makes one where the other side gives under 0.998.
ZEROS = 5
#: The only kept token has at least so much of the mass: a filled 0.0 stands at any probability.
ALONE = math.log(0.3)
#: Nobody draws with a top_p below this; a mask may leave less.
LEAST_TOP_P = 0.3
#: What keeps tokens and stands in no column.
MASK = ("a mask that keeps tokens on that side (grammar, bad words, allowed ids)",)
#: Bins of -d, nats, for the bound that is seen.
_STEP, _BINS = 0.005, 600
_PARAMETERS = ("top_p", "top_k", "min_p")


def look(seen: Seen) -> Counted:
    """Signs of d beyond rounding, exact zeros, the declared bound, the kept sets' masses where they are known."""
    out = Counted()
    d = seen.clipped
    ratio = np.expm1(d)
    out.count("tokens", len(d))
    out.count("sequences", int((seen.counts > 0).sum()))
    out.count("outside", int(np.count_nonzero(np.abs(ratio) > 0.1)))
    sums = seen.sums_in_order(lambda at: {"d": d[at], "ratio": ratio[at], "back": -ratio[at] / (1 + ratio[at])})
    keep(out, **sums)
    keep_gram(out, "ratio", {"ratio": sums["ratio"], "back": sums["back"], "n": seen.counts.astype(np.float64)})
    bound = _declared_bound(seen)
    for side, lower, own, other in (("a", d, seen.a, seen.b), ("b", -d, seen.b, seen.a)):
        _one_side(out, side, lower, own, other, bound)
    _kept_sets(out, seen)
    return out


def _declared_bound(seen: Seen) -> FloatArray | None:
    """`[N]` log top_p of the token's record, NaN where it is not declared or 1; None without any."""
    col = seen.rollouts.records.get("top_p")
    if col is None:
        return None
    values = np.where(col.mask() & (col.values > 0) & (col.values < 1), col.values, np.nan).astype(np.float64)
    return np.log(values)[seen.sequence]


def _one_side(
    out: Counted, side: str, d: FloatArray, own: FloatArray, other: FloatArray, bound: FloatArray | None
) -> None:
    """Counts for "this side is truncated": d is then the other side minus this one."""
    n = lambda mask: int(np.count_nonzero(mask))
    lower = np.flatnonzero(d < -ROUNDING)
    zero = lower[own[lower] == 0.0]
    alone = n(other[zero] >= ALONE)
    out.count(f"{side}:above", n(d > ROUNDING))
    out.count(f"{side}:lower", len(lower))
    out.count(f"{side}:lower inside", len(lower) - len(zero))
    out.count(f"{side}:alone", alone)
    out.count(f"{side}:zero far", len(zero) - alone)
    told_here = np.zeros(0, dtype=bool) if bound is None else np.isfinite(bound)
    out.count(f"{side}:bounded", n(told_here))
    near = beyond = 0
    if bound is not None and told_here.any():
        with np.errstate(invalid="ignore"):
            beyond = n(d < bound - ROUNDING)
            near = n(told_here & (d < 0.7 * bound) & (d >= bound - ROUNDING))
    out.count(f"{side}:beyond", beyond)
    out.count(f"{side}:near bound", near)
    many = np.bincount(np.minimum((-d[lower] / _STEP).astype(np.int64), _BINS), minlength=1)
    for k in np.flatnonzero(many).tolist():
        out.count(f"{side}:bin:{k}", int(many[k]))


def _kept_sets(out: Counted, seen: Seen) -> None:
    """Recorded kept sets: how many hold one token, and the offset against their log mass in the scorer's eyes."""
    lists = seen.rollouts.lists.get("sampling_mask")
    if lists is None:
        return
    size = np.diff(lists.offsets)[seen.at]
    known = (size > 0) if lists.valid is None else (size > 0) & lists.valid[seen.at]
    out.count("kept sets", int(known.sum()))
    out.count("kept sets of one", int((known & (size == 1)).sum()))
    out.count("kept sets of one at 0", int((known & (size == 1) & (seen.a == 0.0)).sum()))
    table = seen.pairs.b_distributions
    if table is not None:
        _masses(out, seen, table, known)


def _masses(out: Counted, seen: Seen, table: Any, known: BoolArray) -> None:
    lists = seen.rollouts.lists["sampling_mask"]
    rows = np.flatnonzero(known)
    mass = np.array([np.exp(table[at, lists.row(at)]).sum() for at in seen.at[rows].tolist()], dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        left = clipped(np.nan_to_num(seen.d[rows] - np.log(mass), nan=1.0))
    out.count("masses", len(rows))
    keep(out, mass=mass, left=left * left, dd=clipped(seen.d[rows]) ** 2)


# -- judging -----------------------------------------------------------------------------------------------------------


def judge(evidence: Evidence) -> Answer:
    seen = evidence.extra.get("truncation")
    n = 0 if seen is None else seen.counts.get("tokens", 0)
    if seen is None or n == 0:
        return Answer("lacks", "no tokens with two log-probs")
    side = "a" if read(seen, "d") <= 0 else "b"
    c = lambda name: seen.counts.get(f"{side}:{name}", 0)
    on = switched_on(evidence, *_PARAMETERS)
    if _all_zero(c, n) and (told_greedy := _greedy(evidence)):
        return _greedily(evidence, seen, side, on, told_greedy)
    mean_ratio = 1 + read(seen, "ratio" if side == "a" else "back") / n
    if not (_one_sided(c, n) or _zeros_in_noise(c, n) or _one_sided_in_noise(seen, side, mean_ratio)):
        return Answer(
            "no", f"the gap has both signs: {c('above')} of {n} tokens against it, mean ratio {mean_ratio:.4f}"
        )
    if c("zero far") > 0.1 * (c("alone") + c("zero far")) and c("zero far") >= 3:
        return Answer(
            "no", f"{c('zero far')} zeros stand where the other side finds the token unlikely: fills, no sets"
        )
    if c("lower inside") < max(3, 0.02 * c("alone")):
        return Answer("no", "beside exact zeros there is no offset")
    if (on and _within(c)) or c("alone") >= max(3, 0.002 * n):
        return _named(evidence, seen, side, mean_ratio, on)
    if c("lower") < FEWEST:
        return Answer("lacks", f"one-sided at {c('lower')} tokens: too few")
    return _open(evidence, seen, side, on)


def _one_sided(c: Any, n: int) -> bool:
    """Nothing above rounding (one token in a thousand may be), and enough below it."""
    return c("above") <= n // 1000 and c("lower") >= max(8, 0.02 * n)


def _all_zero(c: Any, n: int) -> bool:
    """One side is 0 wherever the two are apart, but for ties: each of its sets holds one token."""
    ties = c("lower inside") + c("above")
    return c("lower") >= FEWEST and ties <= 0.05 * n


def _greedy(evidence: Evidence) -> str:
    """The declaration under which one token is kept everywhere; empty without one."""
    found = {"temperature": (0.0,), "top_k": (1.0,)}
    return next((f"{k} {v[0]:g}" for k, v in found.items() if tuple(numbers(evidence, k)) == v), "")


def _greedily(evidence: Evidence, seen: Counted, side: str, on: dict[str, list[float]], said: str) -> Answer:
    who, other = evidence.names if side == "a" else evidence.names[::-1]
    n = seen.counts["tokens"]
    message = (
        f"{who} is 0.0 wherever one token is kept, which is everywhere (declared is {said}), {other} is not: at "
        f"{seen.counts[f'{side}:lower']} of {n} tokens they are apart, and the mean probability under {other} is "
        f"{1 + _mean(seen, side):.4f}"
    )
    found = finding("truncated-support-mismatch", message, evidence=_told(evidence, seen, side, on))
    return Answer("fits", "", found, 1.0)


def _zeros_in_noise(c: Any, n: int) -> bool:
    """Exact zeros where the other side is not certain, and offsets that are mostly of one sign: from few tokens."""
    return c("alone") >= ZEROS and c("above") <= ABOVE_NOISY * n and c("lower") >= max(FEWEST, 2 * c("above"))


def _one_sided_in_noise(seen: Counted, side: str, mean_ratio: float) -> bool:
    """The mean ratio is below 1 by more than noise could, and few tokens are above."""
    n, s = seen.counts["tokens"], seen.counts.get("sequences", 0)
    error = spread(seen, "ratio", {"ratio" if side == "a" else "back": 1.0, "n": 1 - mean_ratio}) / n
    above = seen.counts.get(f"{side}:above", 0) / n
    many = seen.counts.get(f"{side}:lower", 0) >= max(FEWEST, 0.02 * n)  # not a few tokens of some other fault
    return (
        many
        and s >= SEQUENCES
        and above <= ABOVE_NOISY
        and 1 - mean_ratio > CLEAR * error
        and 1 - mean_ratio > ROUNDING
    )


def _within(c: Any) -> bool:
    """The offset respects the declared top_p, where that is declared for all."""
    return c("beyond") <= 0.01 * max(1, c("bounded"))


def _named(evidence: Evidence, seen: Counted, side: str, mean_ratio: float, on: dict[str, list[float]]) -> Answer:
    n = seen.counts["tokens"]
    c = lambda name: seen.counts.get(f"{side}:{name}", 0)
    who, other = evidence.names if side == "a" else evidence.names[::-1]
    proof = [f"{c('alone')} tokens are exactly 0 on {who} and not on {other}"] if c("alone") else []
    proof += [f"the offset stays within the declared {told(on)}"] if on and c("bounded") and _within(c) else []
    proof += [f"declared is {told(on)}"] if on and not c("bounded") else []
    proof += _masses_told(seen) if side == "a" else []
    if switched_off(evidence, *_PARAMETERS):
        proof.append("top_p, top_k and min_p are declared off, so a mask keeps them, or the declaration is wrong")
    message = (
        f"{who} is renormalised over its kept tokens, {other} over all: {c('above')} of {n} gaps have the other sign, "
        f"and the mean ratio {'' if side == 'a' else '(sampler over scorer) '}is the kept mass, {mean_ratio:.4f}; "
        + "; ".join(proof)
    )
    facts = _told(evidence, seen, side, on)
    found = finding("truncated-support-mismatch", message, evidence=facts, rivals=() if on else MASK)
    return Answer("fits", "", found, 1.0)


def _masses_told(seen: Counted) -> list[str]:
    n = seen.counts.get("masses", 0)
    if not n:
        return []
    share = 1 - read(seen, "left") / max(read(seen, "dd"), 1e-300)
    return [
        f"the recorded sets' mass under the scorer, {read(seen, 'mass') / n:.4f}, explains {max(0.0, share):.0%} of it"
    ]


def _open(evidence: Evidence, seen: Counted, side: str, on: dict[str, list[float]]) -> Answer:
    who, other = evidence.names if side == "a" else evidence.names[::-1]
    seen_bound = bound_seen(seen, side)
    if on:
        why = f"the offset of {who} goes beyond what the declared {told(on)} allows"
    elif switched_off(evidence, *_PARAMETERS):
        why = "one-sided, but top_p, top_k and min_p are declared off"
    elif seen_bound >= LEAST_TOP_P:
        why = f"one-sided, no truncation is declared; as top_p it would be about {seen_bound:.3g}"
    else:
        why = f"one-sided, no truncation is declared; a kept mass of {seen_bound:.2g} is rather a mask than a top_p"
    message = (
        f"{other} is lower than {who} at {seen.counts.get(f'{side}:lower', 0)} of {_off(seen, side)} tokens that are "
        f"off, mean kept mass {1 + _mean(seen, side):.4f}: {why}"
    )
    rivals = (
        "top-p, top-k or min-p on one side, or tokens that it masks (grammar, bad words, allowed ids)",
        "padded vocabulary rows in the other side's softmax",
    )
    if any(t not in (0.0, 1.0) for t in numbers(evidence, "temperature")):
        rivals += (f"log-probs of {other} that were divided by the temperature after the softmax: no distribution",)
    found = finding(
        "truncated-support-mismatch",
        message,
        severity=Severity.WARN,
        outcome=Outcome.INCONCLUSIVE,
        evidence=_told(evidence, seen, side, on),
        rivals=rivals,
    )
    return Answer("unclear", why, found, 1.0)


def _off(seen: Counted, side: str) -> int:
    return seen.counts.get(f"{side}:lower", 0) + seen.counts.get(f"{side}:above", 0)


def _mean(seen: Counted, side: str) -> float:
    return read(seen, "ratio" if side == "a" else "back") / seen.counts["tokens"]


def bound_seen(seen: Counted, side: str) -> float:
    """The least kept mass that is seen: e to the minus of the 99% quantile of the offset."""
    bins = sorted((int(k.rsplit(":", 1)[1]), n) for k, n in seen.counts.items() if k.startswith(f"{side}:bin:"))
    rank, passed = 0.99 * sum(n for _, n in bins), 0
    for k, n in bins:
        passed += n
        if passed >= rank:
            return math.exp(-(k + 0.5) * _STEP)
    return 1.0


def _told(evidence: Evidence, seen: Counted, side: str, on: dict[str, list[float]]) -> dict[str, Any]:
    n = seen.counts["tokens"]
    facts: dict[str, Any] = {
        "side": evidence.names[0 if side == "a" else 1],
        "mean_ratio": 1 + read(seen, "ratio") / n,
        "positive_deltas" if side == "a" else "negative_deltas": seen.counts.get(f"{side}:above", 0),
        "mean_kept_mass": 1 + _mean(seen, side),
        "fraction_outside_0.9_1.1": seen.counts.get("outside", 0) / n,
        "exact_zeros": seen.counts.get(f"{side}:alone", 0),
        "least_kept_mass_seen": round(bound_seen(seen, side), 4),
        "declared": on,
    }
    masses = seen.counts.get("masses", 0)
    if masses and side == "a":
        facts["recorded_kept_mass"] = read(seen, "mass") / masses
        facts["delta_equals_log_kept_mass"] = math.sqrt(read(seen, "left") / masses) <= 2 * ROUNDING
    return facts


SIGNATURE = Signature(
    "truncation",
    "truncated-support-mismatch",
    "one side is renormalised over the tokens that top-p, top-k or min-p kept",
    judge,
    rivals=("padded_rows",),
    look=look,
)
