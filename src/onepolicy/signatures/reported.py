"""A number that the run itself reported, made again from what it saved: which definition gives it.

    reported = Reported({"kl": -0.86}); reported.add(rollouts); reported.findings()

Batches are added, totals merged, as everywhere. A number that its name's own definition gives over the trained tokens
has no finding. The definitions of sampler and scorer are those of `dialects`; a KL to the reference is held against
`definitions`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.dialects import key_of
from onepolicy.dialects.accumulate import Accumulator
from onepolicy.dialects.definitions import DEFINITIONS, Match, Meanings, masked
from onepolicy.dialects.view import View
from onepolicy.rollouts import Rollouts
from onepolicy.signatures import definitions
from onepolicy.types import Finding

#: Parts of a metric's name -> the definitions that such a name may stand for, the usual ones first, by the start of
#: their key. The first row that holds a part of the name counts.
FAMILIES: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("kl", "k1", "k2", "k3"), ("k1/", "k3/", "k2/", "k1_", "k3_")),
    (("mult_prob", "prob_error"), ("mult_error/",)),
    (("prob",), ("prob_abs/", "prob_diff/", "prob_opposite/", "prob_pearson")),
    (("ratio", "is_weight", "is_mean", "tis"), ("ratio/", "ratio_")),
    (("chi2",), ("chi2/",)),
    (("ppl", "perplexity"), ("ppl_",)),
    (("logp", "diff", "gap", "delta"), ("abs/", "k1_opposite/", "k1/", "prob_abs/")),
)
#: Of a family, what its name means without another word.
PROPER = ("k1/token", "k2/token", "k3/token", "abs/token", "abs/max", "ratio/token", "mult_error/token")
PROPER += ("prob_abs/token", "prob_abs/max", "prob_diff/token", "prob_pearson/r", "chi2/token", "ppl_sampler/sequence")
PROPER += ("ratio/max", "ratio/geometric", "ppl_scorer/sequence")
_MASKS = {
    "trained": "over the trained tokens",
    "drawn": "over all drawn tokens, trained or not",
    "reply": "over the whole reply, also what the sampler did not draw",
}
#: Relative difference up to which a number is found again, and definitions that are told where none gives it.
NEAR, NEAREST = 1e-4, 3


@dataclass
class Reported:
    """`numbers`: name -> value, as the run told them. `dialect`: whose names they are, if that is known."""

    numbers: Mapping[str, Any]
    dialect: str | None = None
    _meanings: Meanings | None = None
    _proper: Accumulator | None = None
    _reference: Counted = field(default_factory=Counted)

    def __post_init__(self) -> None:
        numbers = {k: float(v) for k, v in self.numbers.items() if _is_number(v)}
        self.numbers = {k: v for k, v in numbers.items() if family(k) or key_of(k) is not None}
        known = next((found[0].name for found in map(key_of, self.numbers) if found is not None), None)
        self._meanings = Meanings(self.dialect or known)
        self._proper = Accumulator(DEFINITIONS, {"scorer": "old", "precision": "float64"})

    def add(self, rollouts: Rollouts, names: tuple[str, str] = ("sampler", "old")) -> None:
        """One batch. A dump without a sampler's or scorer's log-probs has its reference KL only."""
        assert self._meanings is not None and self._proper is not None
        if not self.numbers:
            return
        if all(n in rollouts.scorings for n in names) and names[0] == "sampler":
            views: dict[str, View] = masked(rollouts, old=names[1])
            self._meanings.add(views)
            self._proper.add(views["trained"])
        self._reference.add(definitions.count(rollouts))

    def merge(self, other: Reported) -> None:
        assert self._meanings is not None and self._proper is not None
        assert other._meanings is not None and other._proper is not None
        self._meanings.merge(other._meanings)
        self._proper.merge(other._proper)
        self._reference.add(other._reference)

    def findings(self) -> list[Finding]:
        """One for each number that is not what its name says."""
        assert self._meanings is not None
        found = self._meanings.matches(self.numbers, tolerance=NEAR)
        made = [self._one(name, value, found.get(name, [])) for name, value in sorted(self.numbers.items())]
        return [f for f in made if f is not None]

    def _one(self, name: str, value: float, found: list[Match]) -> Finding | None:
        starts = family(name) or ()
        fitting = [m for m in found if m.as_named or m.definition.startswith(starts)]
        reference = self._to_reference(name, value)
        proper = self._recomputed(starts)
        if any(m.as_named or (m.mask == "trained" and m.definition in PROPER) for m in fitting):
            return None
        if any(r.weight == "plain" and r.mask == "trained" for r in reference):
            return None
        facts: dict[str, Any] = {"reported": {name: value}, "recomputed": proper}
        if fitting:
            return _explained(name, value, fitting, facts)
        if reference:
            facts |= {"matches": [r.says for r in reference[:NEAREST]], "reported_matches": reference[0].weight}
            message = f"{name} = {value:g} is {reference[0].says}"
            return finding("reported-metric-explained", message, evidence=facts)
        return _unexplained(name, value, proper, facts)

    def _to_reference(self, name: str, value: float) -> list[definitions.ReferenceKL]:
        if "kl" not in name.lower():
            return []
        tolerance = max(NEAR * abs(value), _last_digit(value), 1e-12)
        return [r for r in definitions.values(self._reference) if abs(r.value - value) <= tolerance]

    def _recomputed(self, starts: tuple[str, ...]) -> dict[str, float]:
        """What a name of that family should give over the trained tokens."""
        assert self._proper is not None
        made = self._proper.numbers()
        keys = [k for k in PROPER if k.startswith(starts)] if starts else []
        return {k: round(v, 9) for k in keys if (v := made.get(k)) is not None}


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


def _last_digit(value: float) -> float:
    """Half a unit of the last digit of a number that was rounded for print; 0 for one of many digits."""
    shown = f"{value!r}".partition("e")[0].partition(".")[2]
    return 0.5 * 10.0 ** -len(shown) * (1 + 1e-9) if 1 < len(shown) <= 7 and "e" not in repr(value) else 0.0


def family(name: str) -> tuple[str, ...] | None:
    """Starts of the definitions that a metric of that name may stand for; None for a name that says nothing."""
    low = name.lower()
    return next((starts for parts, starts in FAMILIES if any(p in low for p in parts)), None)


def _explained(name: str, value: float, fitting: list[Match], facts: dict[str, Any]) -> Finding:
    order = list(_MASKS)
    best = min(fitting, key=lambda m: (m.definition not in PROPER, order.index(m.mask), m.policy != "old", m.relative))
    said = [_words(m) for m in sorted(fitting, key=lambda m: m is not best)]
    facts |= {"matches": said[:NEAREST], "reported_matches": _short(best)}
    told = ", ".join(f"{k.split('/')[0]} {v:.4g}" for k, v in list(facts["recomputed"].items())[:3])
    message = f"{name} = {value:g} is {said[0]}" + (f"; over the trained tokens: {told}" if told else "")
    unmasked = best.mask != "trained"
    return finding("kl-includes-unsampled-tokens" if unmasked else "reported-metric-explained", message, evidence=facts)


def _words(m: Match) -> str:
    policy = "" if m.policy == "old" else f" (of {m.policy})"
    return f"{m.says}{policy}, {_MASKS[m.mask]}"


def _short(m: Match) -> str:
    """In a word, what is unusual."""
    if m.mask != "trained":
        return "unmasked"
    term, _, mean = m.definition.partition("/")
    for part, word in (
        ("opposite", "opposite"),
        ("swapped", "opposite"),
        ("inverse", "opposite"),
        ("clamped", "clamped"),
    ):
        if part in term:
            return word
    return "current" if m.policy == "current" else mean if mean != "token" else term


def _unexplained(name: str, value: float, proper: Mapping[str, float], facts: dict[str, Any]) -> Finding | None:
    """A dump that gives nothing of that name says nothing of the number."""
    if not proper:
        return None
    told = ", ".join(f"{k.split('/')[0]} {v:.4g}" for k, v in list(proper.items())[:NEAREST])
    message = f"{name} = {value:g} is no known definition over what was saved; over the trained tokens: {told}"
    return finding("reported-metric-unexplained", message, evidence=facts)


def of_rollouts(
    rollouts: Rollouts, reported: Mapping[str, Any], names: tuple[str, str] = ("sampler", "old")
) -> list[Finding]:
    """The findings of one batch."""
    one = Reported(reported)
    one.add(rollouts, names)
    return one.findings()
