"""One side is sharper than the other: log-probs of two temperatures.

Named from distributions (`logit_fit`) or from one side's entropies (`entropy_fit`). Dividing log-probs by T is not
among the fits: it gives no distribution. Chosen log-probs alone do not identify a temperature: the sum that
renormalises differs from context to context, and whatever else bends the logits looks alike.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.profiles.base import Seen
from onepolicy.signatures import declared_temperatures, entropy_fit, logit_fit
from onepolicy.signatures.adding import keep, keep_gram, read, spread
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.declared import numbers
from onepolicy.signatures.entropy_fit import RANGE, Fit
from onepolicy.types import FloatArray

#: A ratio nearer to 1 than this is no difference.
LEAST = 0.01
#: And one nearer than this is not suspected from few tokens.
LEAST_FEW = 0.03
#: Share of the gap's square that the fit must explain, to be named; with few sequences it must be nearly all.
SHARE, SHARE_FEW = 0.5, 0.9
#: z of the slope, with sequences as clusters: far above what a look at every signature and side could reach by chance.
CLEAR, SEQUENCES, TOKENS, FEW_TOKENS = 5.0, 20, 10, 40
#: What rounding to float32 and printing to three decimals may do to a log-prob, and the largest log-odds, nats.
ROUNDING, MOST_ODDS = 2e-3, 12.0
#: A declared temperature this near to the fitted quotient (of logs) speaks for it.
AS_DECLARED = 0.12
#: A side whose log-probs spread less than this is no distribution over contexts (uniform, or one value).
FLAT = 0.05

_NAIVE = "dividing log-probs by the temperature is no fix: it is no distribution"


def look(seen: Seen) -> Counted:
    """Moments of d against a + H of both sides, where entropies are recorded, and against a alone."""
    out = Counted()
    out.count("tokens", len(seen))
    out.count("sequences", int((seen.counts > 0).sum()))
    sums = seen.sums_in_order(lambda at: _moments(seen, at))
    keep(out, **sums)
    parts = {k: sums[f"chosen:{k}"] for k in ("d", "a", "ad", "aa")}
    keep_gram(out, "chosen", parts | {"n": seen.counts.astype(np.float64)})
    _likeliest(out, seen)
    declared_temperatures.look(out, seen)
    for side, values in (("a", seen.a), ("b", seen.b)):
        entropy_fit.look(out, side, values, seen)
    return out


def _likeliest(out: Counted, seen: Seen) -> None:
    """Of tokens that have more than half of the mass on one side, and of the others: how many a side has higher; and
    the log-odds of the first."""
    likely = np.maximum(seen.a, seen.b) >= math.log(0.5)
    top = np.flatnonzero(likely)
    for name, d in (("top", seen.d[top]), ("rest", seen.d[~likely])):
        out.count(f"{name}:above", int(np.count_nonzero(d > ROUNDING)))
        out.count(f"{name}:lower", int(np.count_nonzero(d < -ROUNDING)))
    keep(out, **{f"top:{side}": _log_odds(x[top]) for side, x in (("a", seen.a), ("b", seen.b))})


def _log_odds(x: FloatArray) -> FloatArray:
    held = np.clip(x, -MOST_ODDS, -1e-6)
    return held - np.log(-np.expm1(held))


def _moments(seen: Seen, at: slice) -> dict[str, FloatArray]:
    d, a, b = seen.clipped[at], np.maximum(seen.a[at], -100.0), np.maximum(seen.b[at], -100.0)
    chosen = {"d": d, "a": a, "ad": a * d, "aa": a * a, "dd": d * d}
    return {f"chosen:{k}": x for k, x in chosen.items()} | {"b": b, "bb": b * b}


def judge(evidence: Evidence) -> Answer:
    """Named from distributions or entropies; from chosen log-probs alone at most suspected."""
    seen = evidence.extra.get("temperature")
    if seen is None or evidence.n == 0:
        return Answer("lacks", "no tokens with two log-probs")
    if _flat(seen):
        return Answer("no", "a side's log-probs are all alike: that is no temperature")
    exact = evidence.extra.get("softcap")
    if logit_fit.tokens(exact):
        return _by_distributions(exact, evidence)  # pyright: ignore[reportArgumentType]
    by_request = declared_temperatures.judge(evidence, seen)
    if by_request is not None:
        return by_request
    fits = [fit for side in ("a", "b") if (fit := entropy_fit.fit(seen, side)) is not None]
    if fits:
        return _by_entropy(max(fits, key=lambda f: f.share), evidence, seen)
    return _by_chosen(seen, evidence)


def _flat(seen: Counted) -> bool:
    n = max(1, seen.counts.get("tokens", 0))
    sides = ((read(seen, "chosen:aa"), read(seen, "chosen:a")), (read(seen, "bb"), read(seen, "b")))
    return any(square / n - (mean / n) ** 2 < FLAT**2 for square, mean in sides)


# -- from distributions ------------------------------------------------------------------------------------------------


def _by_distributions(exact: Counted, evidence: Evidence) -> Answer:
    a, b = (logit_fit.temperature(exact, side) for side in ("a", "b"))
    gap = logit_fit.gap(exact)
    share = 1 - (a.rms**2 + b.rms**2) / gap**2 if gap else 0.0
    naive = _divided(exact, evidence, (a, b))
    if naive is not None:
        return naive
    if abs(math.log(b.value / a.value)) < LEAST:
        return Answer("no", f"both sides are the softmax at T = {a.value:.3g}")
    if exact.counts.get("logits", 0):
        caps = [logit_fit.cap(exact, side) for side in ("a", "b")]
        if sum(rms**2 for _, rms in caps) < a.rms**2 + b.rms**2:
            return Answer("no", "soft-caps fit the recorded logits better")
    if share < SHARE:
        return Answer("no", f"no temperature fits the recorded distributions: {max(0.0, share):.0%} explained")
    by = f"distributions of {logit_fit.tokens(exact)} tokens"
    if any(f"source:{name}" in exact.counts for name in evidence.names):  # a side's own tell the quotient alone
        found = _found(evidence, _sides(b.value / a.value, evidence), share, by, False)
        return Answer("fits", "", found, share)
    ours = {name: round(fit.value, 3) for name, fit in zip(evidence.names, (a, b), strict=True)}
    return Answer("fits", "", _found(evidence, ours, share, by, True), share)


def _divided(exact: Counted, evidence: Evidence, plain: tuple[logit_fit.Best, logit_fit.Best]) -> Answer | None:
    """A side whose log-probs were divided by a temperature after the softmax."""
    gap = logit_fit.gap(exact)
    for side, name, softmax in zip("ab", evidence.names, plain, strict=True):
        fit = logit_fit.temperature(exact, side, "divided")
        if abs(math.log(fit.value)) >= LEAST and fit.rms < 0.1 * min(softmax.rms, gap):
            other = plain[1 if side == "a" else 0]
            share = 1 - (fit.rms**2 + other.rms**2) / gap**2
            message = (
                f"{name} holds log-probs that were divided by {fit.value:.3g} after the softmax: they are no "
                "distribution; divide logits, before it"
            )
            more = {"divided": {name: round(fit.value, 3)}, "explained": round(share, 4), "naive_fix_is_valid": False}
            found = finding("temperature-mismatch", message, evidence=more)
            return Answer("fits", "", found, max(share, SHARE))
    return None


# -- from entropies ----------------------------------------------------------------------------------------------------


def _by_entropy(fit: Fit, evidence: Evidence, seen: Counted) -> Answer:
    told = f"the {fit.by} explains {fit.share:.0%} of the gap as a temperature"
    if abs(math.log(fit.ratio)) < LEAST or fit.share < 0.1:
        return Answer("no", told)
    if fit.bent:
        low, high = fit.groups
        return Answer(
            "no", f"contexts of low and high entropy want other quotients ({low:.2f}, {high:.2f}): no temperature"
        )
    many = seen.counts.get("sequences", 0) >= SEQUENCES and fit.z >= CLEAR
    declared = fit.n >= FEW_TOKENS and _as_declared(fit.ratio, evidence)
    if fit.n >= TOKENS and (fit.share >= SHARE_FEW or (fit.share >= SHARE and (many or declared))):
        found = _found(evidence, _sides(fit.ratio, evidence), fit.share, f"{fit.by} at {fit.n} tokens", False)
        return Answer("fits", "", found, fit.share)
    if fit.share >= SHARE and fit.n >= FEW_TOPS and abs(math.log(fit.ratio)) >= LEAST_FEW:
        return Answer("unclear", f"{told}, on {fit.n} tokens: too few", _suspected(evidence, fit), fit.share)
    return Answer("no", told)


def _as_declared(ratio: float, evidence: Evidence) -> bool:
    """Whether the quotient is a declared temperature or its inverse."""
    said = [math.log(t) for t in numbers(evidence, "temperature") if t > 0 and abs(math.log(t)) > AS_DECLARED]
    return any(min(abs(math.log(ratio) - t), abs(math.log(ratio) + t)) < AS_DECLARED for t in said)


def _sides(ratio: float, evidence: Evidence) -> dict[str, float]:
    """Which side has which: by the declared temperature where it is the ratio or its inverse; else the sampler's is
    taken as 1."""
    for declared in numbers(evidence, "temperature"):
        if declared > 0 and abs(math.log(ratio / declared)) < AS_DECLARED:
            return dict(zip(evidence.names, (1.0, round(ratio, 3)), strict=True))
        if declared > 0 and abs(math.log(ratio * declared)) < AS_DECLARED:
            return dict(zip(evidence.names, (round(1 / ratio, 3), 1.0), strict=True))
    return dict(zip(evidence.names, (1.0, round(ratio, 3)), strict=True))


# -- from chosen log-probs ---------------------------------------------------------------------------------------------


def chosen_fit(seen: Counted) -> Fit:
    """The line d = m + c a: its slope as if it were a temperature, and the share of the variance on it."""
    n = seen.counts.get("tokens", 0)
    d, a, dd, ad, aa = (read(seen, f"chosen:{k}") / max(1, n) for k in ("d", "a", "dd", "ad", "aa"))
    var_a, var_d = aa - a * a, dd - d * d
    if var_a <= 0 or dd <= 0:
        return Fit(1.0, 0.0, 0.0, n, "chosen log-probs")
    slope = (ad - a * d) / var_a
    weights = {"ad": 1.0, "d": -a + 0.0, "a": -d + slope * 2 * a, "n": a * d - slope * a * a, "aa": -slope}
    error = spread(seen, "chosen", weights) / (n * var_a)
    share = slope * slope * var_a / dd if var_d > 0 else 0.0
    return Fit(1 / max(1 + slope, 1 / RANGE[1]), share, abs(slope) / error if error > 0 else 0.0, n, "chosen log-probs")


def _by_chosen(seen: Counted, evidence: Evidence) -> Answer:
    fit = chosen_fit(seen)
    told = f"the sampler's log-prob explains {fit.share:.0%} of the gap"
    if abs(math.log(fit.ratio)) < LEAST or fit.share < SUSPECT:
        return _by_signs(seen, evidence) or Answer("no", told)
    fewer = _fewer_sign(evidence)
    if fewer < BOTH_SIGNS:
        return Answer(
            "no", f"{1 - fewer:.0%} of the gaps have one sign; a temperature moves likely tokens the other way"
        )
    many = seen.counts.get("sequences", 0) >= SEQUENCES
    if fit.n < TOKENS or (many and fit.z < CLEAR):
        return Answer("lacks", f"{told}, on {fit.n} tokens; an entropy of one side would tell")
    return Answer("unclear", f"{told}: {_NEEDED}", _suspected(evidence, fit), fit.share)


def _by_signs(seen: Counted, evidence: Evidence) -> Answer | None:
    """A temperature moves every likeliest token to one side, and others to both."""
    above, lower = (seen.counts.get(f"top:{k}", 0) for k in ("above", "lower"))
    n = above + lower
    if n < FEW_TOPS or max(above, lower) < ONE_SIDE * n:
        return None
    others = [seen.counts.get(f"rest:{k}", 0) for k in ("above", "lower")]
    if others[1 if above > lower else 0] < FEW_OTHERS * sum(others):
        return None
    ratio = read(seen, "top:a") / max(read(seen, "top:b"), 1e-9)
    if not RANGE[0] <= ratio <= RANGE[1] or (ratio < 1) != (above > lower) or abs(math.log(ratio)) < LEAST_BY_SIGNS:
        return None
    sharper = evidence.names[1] if above > lower else evidence.names[0]
    looks = (
        f"it is higher at {max(above, lower)} of {n} tokens that are likelier than all others together, as a "
        f"temperature quotient of about {ratio:.2g} would have it"
    )
    fit = Fit(ratio, max(SUSPECT, chosen_fit(seen).share), 0.0, n, "the likeliest tokens")
    return Answer("unclear", f"{sharper}: {looks}; {_NEEDED}", _suspected(evidence, fit, looks), fit.share)


#: Likeliest tokens that a temperature moves to one side (96 to 100%; else 36 to 55%, cut support 90 to 95%); of the
#: others, those on the other side (38 to 75%; cut support under 20%);
#: the quotient (of logs) that noise of both sides does not reach; and the likeliest tokens that are needed.
ONE_SIDE, FEW_OTHERS, LEAST_BY_SIGNS, FEW_TOPS = 0.9, 0.3, 0.08, 24
#: Share of the mean square gap on a line in the sampler's log-prob from which a temperature is suspected: rounding
#: and staleness, which know no direction, stay below a tenth.
SUSPECT = 0.3
#: A temperature raises likely tokens and lowers unlikely ones: the rarer sign has at least this share.
BOTH_SIGNS = 0.15
_NEEDED = "chosen log-probs alone do not identify a temperature"


def _fewer_sign(evidence: Evidence) -> float:
    """Of the tokens that are off by more than rounding, the share of the rarer sign; 1/2 where that is not counted."""
    signs = evidence.extra.get("truncation")
    above, lower = (0 if signs is None else signs.counts.get(f"a:{k}", 0) for k in ("above", "lower"))
    return min(above, lower) / (above + lower) if above + lower else 0.5


# -- findings ----------------------------------------------------------------------------------------------------------


def _found(evidence: Evidence, ours: dict[str, float], share: float, by: str, absolute: bool) -> Any:
    a, b = evidence.names
    declared = numbers(evidence, "temperature")
    said = f", declared is {', '.join(f'{t:g}' for t in declared)}" if declared else ""
    base = "" if absolute else ", their quotient is what is fitted"
    message = (
        f"{a} is at T = {ours[a]:.3g}, {b} at T = {ours[b]:.3g} ({by}{base}){said}; this explains {share:.0%} of the "
        f"gap; {_NAIVE}"
    )
    more = {
        "fitted_temperature": ours,
        "temperature_ratio": round(ours[b] / ours[a], 4),
        "explained": round(share, 4),
        "declared_temperature": declared,
        "range": list(RANGE),
        "naive_fix_is_valid": False,
    }
    told = absolute or _as_declared(ours[b] / ours[a], evidence)
    rivals = () if told else ("logits of another scale on one side (a multiplier of the head)",)
    return finding("temperature-mismatch", message, evidence=more, rivals=rivals)


def _suspected(evidence: Evidence, fit: Fit, looks: str = "") -> Any:
    sharper = evidence.names[1] if fit.ratio < 1 else evidence.names[0]
    needs = "The scorer's entropy and varentropy"
    if fit.by.endswith("entropy"):
        needs = "Its varentropy besides, more sequences"
    if not looks:
        quotient = f"a temperature quotient of about {fit.ratio:.2g}"
        looks = f"by {fit.by}, {fit.share:.0%} of the gap is as {quotient} would make it"
    message = f"{sharper} looks sharper: {looks}. {needs}, or a re-scoring, would decide"
    more = {
        "temperature_ratio_about": round(fit.ratio, 3),
        "explained": round(fit.share, 4),
        "tokens": fit.n,
        "declared_temperature": numbers(evidence, "temperature"),
        "needs": ["old_entropy", "old_varentropy"],
    }
    rivals = (
        "a soft-cap of the logits on one side",
        "logits of another scale",
        "weights that a long training sharpened",
    )
    return finding("temperature-suspected", message, evidence=more, rivals=rivals)


SIGNATURE = Signature(
    "temperature",
    "temperature-mismatch",
    "the two sides' log-probs are of different temperatures",
    judge,
    needs=("sampler_entropy or old_entropy, or distributions",),
    rivals=("softcap",),
    look=look,
)
