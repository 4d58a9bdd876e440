"""What is declared of the sampler's log-probs against what they are: `raw`, `temperature` or `processed`.

The data can contradict a declaration without doubt: whole-vocabulary log-probs are not exactly 0 where the other side
gives the token less than all; renormalised ones are 0 wherever one token alone has the declared top_p. Declarations
can contradict each other, or be no parameters at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.profiles.base import Seen
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.declared import switched_off, switched_on, told, words
from onepolicy.types import BoolArray, IntArray

#: A log-prob that is exactly 0 is certainty; in float32 it also stands for 1 - p under 6e-8.
CERTAIN = -1e-3
#: The only kept token has at least this log-prob on the other side; fills stand at any.
ALONE = float(np.log(0.3))
#: How far beyond top_p the scorer's probability must be for the set to hold one token whatever rounding does.
MARGIN = 0.02
FEWEST, SHARE = 5, 0.9
#: Nearly certain tokens: common in a whole softmax, rare after a renormalisation, which makes most of them certain.
NEARLY, RARE = -0.01, 0.25
_TRUNCATION = ("top_p", "top_k", "min_p")
#: A parameter -> (does its value make sense, what would).
SENSIBLE: dict[str, tuple[Any, str]] = {
    "temperature": (lambda x: 0 <= x < 100, "0 to 100"),
    "top_p": (lambda x: 0 < x <= 1, "above 0, at most 1"),
    "top_k": (lambda x: x >= -1, "-1, 0 or more"),
    "min_p": (lambda x: 0 <= x < 1, "0 to below 1"),
    "repetition_penalty": (lambda x: 0 < x < 100, "above 0"),
    "presence_penalty": (lambda x: -10 <= x <= 10, "-10 to 10"),
    "frequency_penalty": (lambda x: -10 <= x <= 10, "-10 to 10"),
}
SEMANTICS = ("raw", "temperature", "processed")


def look(seen: Seen) -> Counted:
    """Exact zeros and certain tokens, by the declared semantics of their record; parameters that make no sense."""
    out = Counted()
    codes = _semantics(seen)
    zero, alone = np.flatnonzero((seen.a == 0.0) & (seen.b < CERTAIN)), np.flatnonzero(_alone(seen))
    for k in np.unique(codes).tolist():
        _of_semantics(out, (*SEMANTICS, "undeclared")[k], np.repeat(codes == k, seen.counts), seen, zero, alone)
    _parameters(out, seen)
    _scoring_semantics(out, seen, codes)
    return out


def _of_semantics(out: Counted, name: str, here: BoolArray, seen: Seen, zero: IntArray, alone: IntArray) -> None:
    """Counts of the tokens `here` `[N]`. `zero`, `alone`: places of exact zeros and of tokens kept alone."""
    n = lambda mask: int(np.count_nonzero(mask))
    zero, alone = zero[here[zero]], alone[here[alone]]
    far = n(seen.b[zero] < ALONE)
    out.count(f"{name}:tokens", n(here))
    out.count(f"{name}:zero", len(zero) - far)
    out.count(f"{name}:zero far", far)
    certain = n(here & (seen.a >= -1e-6))
    out.count(f"{name}:certain", certain)
    out.count(f"{name}:nearly", n(here & (seen.a > NEARLY)) - certain)
    out.count(f"{name}:alone", len(alone))
    out.count(f"{name}:alone not 0", n(seen.a[alone] < CERTAIN))
    out.count(f"{name}:alone as the scorer", n(seen.size[alone] < 0.3 * np.abs(seen.b[alone])))


def _semantics(seen: Seen) -> Any:
    """`[S]` index into `SEMANTICS`, 3 for undeclared or unknown words."""
    found = seen.record("logprob_semantics")
    if found is None:
        return np.full(len(seen.rollouts), 3)
    code, labels = found
    table = np.array([SEMANTICS.index(w) if w in SEMANTICS else 3 for w in labels] + [3])
    return table[code]


def _alone(seen: Seen) -> BoolArray:
    """`[N]`: the scorer gives this token more than the declared top_p, so it was the only one kept."""
    col = seen.rollouts.records.get("top_p")
    if col is None:
        return np.zeros(len(seen), dtype=bool)
    values = np.where(col.mask(), col.values, 1.0)
    if not (values < 1.0).any():
        return np.zeros(len(seen), dtype=bool)
    values = values[seen.sequence]
    with np.errstate(over="ignore"):
        p = np.exp(seen.b)
    return (values < 1.0) & (p > values + MARGIN) & (p < 1 - MARGIN)


def _parameters(out: Counted, seen: Seen) -> None:
    for name, (good, wanted) in SENSIBLE.items():
        col = seen.rollouts.records.get(name)
        for x in () if col is None else np.unique(col.values[col.mask()]).tolist():
            if not good(x):
                out.count(f"senseless:{name} {x:g}, wanted {wanted}", 1)


def _scoring_semantics(out: Counted, seen: Seen, codes: Any) -> None:
    """The record and the sampler's scoring each declare what its log-probs mean."""
    scoring = seen.rollouts.scorings.get(seen.pairs.names[0])
    said = None if scoring is None else scoring.semantics
    if said in SEMANTICS:
        differ = int(((codes != 3) & (codes != SEMANTICS.index(said))).sum())
        if differ:
            out.count(f"differs:{said}", differ)


def judge(evidence: Evidence) -> Answer:
    seen = evidence.extra.get("raw_processed")
    if seen is None:
        return Answer("lacks", "nothing was looked at")
    for check in (_senseless, _two_declarations, _zeros, _not_processed):
        found = check(seen, evidence)
        if found is not None:
            message, facts = found
            return Answer("fits", "", finding("semantics-contradicted", message, evidence=facts))
    if not words(evidence, "logprob_semantics"):
        return Answer("lacks", "what the sampler's log-probs mean is not declared")
    return Answer("no", "nothing contradicts the declared semantics")


_Found = tuple[str, dict[str, Any]] | None


def _senseless(seen: Counted, evidence: Evidence) -> _Found:
    odd = sorted(k.removeprefix("senseless:") for k in seen.counts if k.startswith("senseless:"))
    return (f"declared is {'; '.join(odd)}: nothing can be drawn with that", {"senseless": odd}) if odd else None


def _two_declarations(seen: Counted, evidence: Evidence) -> _Found:
    odd = {k.split(":")[1]: n for k, n in seen.counts.items() if k.startswith("differs:")}
    neutral = switched_off(evidence, "temperature", *_TRUNCATION)
    if not odd or neutral:
        return None
    said, n = sorted(odd.items())[0]
    records = words(evidence, "logprob_semantics")
    message = f"{evidence.names[0]} is declared {said!r} for the file and {', '.join(records)} in {n} records"
    return message, {"scoring": said, "records": records, "differing_records": n}


def _zeros(seen: Counted, evidence: Evidence) -> _Found:
    """Declared over the whole vocabulary, yet exactly 0 where the scorer is not certain."""
    names = ["raw", "temperature"]
    if switched_off(evidence, *_TRUNCATION):
        names += ["processed", "undeclared"]
    zero, far, n = (sum(seen.counts.get(f"{s}:{what}", 0) for s in names) for what in ("zero", "zero far", "tokens"))
    if zero < max(FEWEST, 0.001 * n) or far > 0.1 * (zero + far):
        return None
    said = ", ".join(words(evidence, "logprob_semantics")) or "no truncation"
    message = (
        f"declared is {said}, but {zero} of {n} {evidence.names[0]} log-probs are exactly 0 where {evidence.names[1]} "
        "is not certain: they are renormalised over a kept set of one token"
    )
    return message, {"exact_zeros": zero, "tokens": n, "declared": said, "really": "processed"}


def _not_processed(seen: Counted, evidence: Evidence) -> _Found:
    """Declared renormalised, yet not 0 where the kept set has one token.

    A scorer that replays the sets is renormalised too, and gives more than top_p to tokens that were not alone: then
    nearly certain values are rare on the sampler's side.
    """
    c = lambda what: seen.counts.get(f"processed:{what}", 0)
    alone, not_zero, equal = c("alone"), c("alone not 0"), c("alone as the scorer")
    if alone < 2 * FEWEST or not_zero < SHARE * alone or equal < SHARE * alone:
        return None
    if c("nearly") < max(FEWEST, RARE * c("certain")):
        return None
    on = told(switched_on(evidence, *_TRUNCATION))
    message = (
        f"declared is processed with {on}, but at {alone} tokens that have more than that alone, where processed "
        f"log-probs are 0, {not_zero} are not, and {equal} equal {evidence.names[1]}'s: they are not renormalised"
    )
    return message, {"kept_alone": alone, "not_zero": not_zero, "as_the_scorer": equal, "really": "raw or temperature"}


SIGNATURE = Signature(
    "raw_processed",
    "semantics-contradicted",
    "what is declared of the log-probs is not what they are",
    judge,
    needs=("logprob_semantics",),
    look=look,
)
