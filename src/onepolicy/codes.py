"""Every finding code: its rank in the order of suspicion, its severity, what it says, what to do.

Rank: 1 integrity of the record, 2 tokens, 3 meaning of the log-probs, 4 staleness, 5 numerics, 6 not decided, 7 notes.
A failing finding that `withholds` leaves the numbers below it unjudged. Each code has a page, `onepolicy explain CODE`.

To add one: a row here and `pages/<code>.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from onepolicy.errors import UnknownName
from onepolicy.types import Finding, Outcome, Severity

_FAIL, _WARN, _INFO = Severity.FAIL, Severity.WARN, Severity.INFO
_PASS, _DRIFT, _OPEN, _ERROR = Outcome.PASS, Outcome.DRIFT, Outcome.INCONCLUSIVE, Outcome.ERROR


@dataclass(frozen=True, slots=True)
class Code:
    """One kind of finding. `outcome` is what it makes of the verdict (pass: nothing)."""

    rank: int
    severity: Severity
    outcome: Outcome
    title: str
    advice: str
    withholds: bool = False


CODES: dict[str, Code] = {
    "engine-died": Code(
        1, _FAIL, _ERROR, "an engine's process ended half way", "Read its log; what was measured before is saved."
    ),
    "engine-failed": Code(
        1, _FAIL, _ERROR, "an engine refused or failed", "Read its message; what was measured before is saved."
    ),
    "nothing-scored": Code(
        1, _FAIL, _ERROR, "no token has finite log-probs on both sides", "Record log-probs on both sides.", True
    ),
    "positive-logprob": Code(
        1,
        _FAIL,
        _ERROR,
        "a log-prob above 0",
        "A probability above one cannot be: look for probabilities, losses or logits stored as log-probs.",
        True,
    ),
    "nonfinite-logprob": Code(
        1,
        _FAIL,
        _ERROR,
        "a log-prob is NaN or +inf",
        "Find the first one in the engine; never fill it with 0.0, which means certainty.",
    ),
    "missing-logprobs": Code(
        1,
        _WARN,
        _OPEN,
        "drawn tokens without a log-prob",
        "Find out why they were not scored; they are left out of every number here, and counted.",
    ),
    "vocabulary-differs": Code(
        2, _FAIL, _DRIFT, "the two engines have vocabularies of different size", "Use one model directory.", True
    ),
    "tokenizer-differs": Code(
        2, _WARN, _PASS, "the two engines' tokenizers have different digests", "Use one tokenizer directory."
    ),
    "semantics-differ": Code(
        3,
        _FAIL,
        _DRIFT,
        "the two sides' log-probs mean different things",
        "Make both raw, or both processed at the same temperature and truncation.",
        True,
    ),
    "support-violation": Code(
        3,
        _FAIL,
        _DRIFT,
        "a drawn token has probability zero on one side only",
        "Sets of top-p, top-k or min-p computed on one side only, or twice with other rounding: replay the sampler's.",
    ),
    "not-drawn-from-reported": Code(
        3,
        _FAIL,
        _DRIFT,
        "the tokens were not drawn from the distribution that is reported",
        "Report the distribution that is sampled (vLLM: processed log-probs), or sample the one that is reported.",
    ),
    "weights-differ": Code(
        4,
        _WARN,
        _PASS,
        "the two engines loaded different weights",
        "A gap between different weights is staleness, not mismatch: load the same checkpoint on both sides.",
    ),
    "ratio-biased": Code(
        5,
        _FAIL,
        _DRIFT,
        "the mean ratio is not 1",
        "Below 1 by a constant: truncated support (top-p, top-k, min-p) on the sampler's side only.",
    ),
    "kl-above-bound": Code(
        5, _FAIL, _DRIFT, "the KL divergence is above its bound", "Repeat in float32 on both sides: a bug stays."
    ),
    "gap-above-bound": Code(
        5, _FAIL, _DRIFT, "the mean gap is above its bound", "Repeat in float32 on both sides: a bug stays."
    ),
    "token-above-bound": Code(
        5,
        _FAIL,
        _DRIFT,
        "a single token's gap is above its bound",
        "Look at the worst tokens: few far outliers are a place to look, many are a precision.",
    ),
    "above-bound": Code(5, _FAIL, _DRIFT, "a metric is above its bound", "See the metric's formula and the gap table."),
    "heavy-ratio-tail": Code(
        5,
        _WARN,
        _PASS,
        "the ratios' tail is too heavy for means of them",
        "Few tokens carry the mean: see the worst tokens; intervals of ratio means are withheld.",
    ),
    "not-measured": Code(
        6, _INFO, _OPEN, "a required metric was not measured", "Record what it needs, or choose bounds without it."
    ),
    "too-few-tokens": Code(6, _INFO, _OPEN, "too few tokens to pass", "Record more tokens."),
    "too-few-clusters": Code(
        6, _INFO, _OPEN, "too few independent prompts for an interval", "Record more prompts, not longer replies."
    ),
    "undecided": Code(6, _INFO, _OPEN, "the interval holds the bound", "Record more tokens."),
    "nonfinite-terms": Code(
        6, _INFO, _OPEN, "some terms of a metric are not finite, so it cannot pass", "See the worst tokens."
    ),
    "kl-withheld": Code(
        7,
        _INFO,
        _PASS,
        "no estimator of KL exists for these tokens",
        "The reported distribution is not the one that was sampled, or neither side drew the tokens.",
    ),
    "semantics-undeclared": Code(
        7, _INFO, _PASS, "what the log-probs mean is not declared", "Set logprob_semantics and the sampling parameters."
    ),
    "not-covered": Code(7, _INFO, _PASS, "a bound was not covered by what was measured", "Nothing, if that is known."),
}


def finding(code: str, message: str, **more: Any) -> Finding:
    """A `Finding` with the code's severity, outcome and advice, unless given otherwise."""
    spec = CODES[code]
    given: dict[str, Any] = {"severity": spec.severity, "outcome": spec.outcome, "advice": spec.advice, **more}
    return Finding(code=code, message=message, **given)


def page(code: str) -> str:
    """The Markdown page of a code. Errors: `UnknownName` (did you mean)."""
    if code not in CODES:
        raise UnknownName("finding code", code, CODES)
    return (resources.files("onepolicy") / "pages" / f"{code}.md").read_text(encoding="utf-8")


def by_rank(findings: list[Finding]) -> list[Finding]:
    """In the order of suspicion: by rank, a failure before a warning; notes that change nothing come last."""
    order: Mapping[Severity, int] = {_FAIL: 0, _WARN: 1, _INFO: 2}

    def place(f: Finding) -> tuple[bool, int, int]:
        return f.severity is _INFO and f.outcome is _PASS, CODES[f.code].rank, order[f.severity]

    return sorted(findings, key=place)
