"""Probability that the scorer gives to tokens the sampler cannot draw: the mean ratio is below 1, at every token alike.

Between two distributions over one vocabulary the mean ratio is 1, whatever temperature, staleness or rounding do. It
falls below 1 by the mass that the scorer puts where the sampler puts none: rows beyond the vocabulary that stand in
the softmax, or sets cut by top-p, top-k or min-p on the sampler's side.
"""

from __future__ import annotations

from typing import Any

from onepolicy.codes import finding
from onepolicy.profiles.base import Bins
from onepolicy.profiles.bins import PROBABILITIES
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.contrast import SEQUENCES, SURE

#: Least share of the mass that is missed before it counts.
LOST = 0.01
#: Tokens that a range of probability needs before its mean counts.
LEAST = 50
#: What cuts the sampler's support and stands in no column.
MASKS = ("tokens that the sampler masks (grammar, bad words, allowed ids)",)
#: Declarations that cut nothing.
WHOLE = {"top_p": ("1.0",), "top_k": ("0", "-1"), "min_p": ("0.0",)}


def judge(e: Evidence) -> Answer:
    bins, ratio = e.profiles.get("probability"), e.measurements.get("ratio/mean")
    if bins is None or ratio is None or ratio.value is None:
        return Answer("lacks", "needs tokens that the sampler drew from what it reports")
    lost, error = 1 - ratio.value, ratio.std_error
    if lost < LOST:
        return Answer("no", f"the mean ratio is {ratio.value:.4f}: no mass is missed")
    ranges = [name for _, name in PROBABILITIES if bins.n(name) >= LEAST]
    up = [name for name in ranges if bins.mean(name, "d") > 0.1 * bins.mean(name)]
    if up or len(ranges) < 3:
        return Answer("no", "likely and unlikely tokens do not move to one side")
    if error is None or lost < SURE * error or ratio.clusters < SEQUENCES:
        return Answer("unclear", f"the mean ratio is {ratio.value:.3f}, within chance of 1")
    if not _falls(bins):
        return Answer("no", "the offset does not shrink where a token is certain")
    cut = [k for k, values in WHOLE.items() if not set(e.facts.get(k, ("null",))) <= {*values, "null"}]
    if cut:
        return Answer("no", f"{', '.join(cut)} is declared, which would do that")
    return Answer("fits", "the scorer's mass is partly elsewhere", *_found(e, bins, ratio.value, ranges))


def _falls(bins: Bins) -> bool:
    """The offset is larger where many tokens share the mass."""
    open_, certain = bins.merged(("0.01 - 0.1", "0.1 - 0.5"), "x"), bins.merged(("0.9 - 0.99", "0.99 - 0.999"), "x")
    return not certain.n("x") or open_.mean("x", "d") < 2 * certain.mean("x", "d")


def _everywhere(bins: Bins) -> bool:
    """Rows that are always there take some mass of every open context and little of a likely token's; a mask takes most
    of some contexts, likely tokens' too, and nothing of others."""
    open_, likely = bins.merged(("0.01 - 0.1", "0.1 - 0.5"), "x"), bins.merged(("0.5 - 0.9", "0.9 - 0.99"), "x")
    return not likely.n("x") or likely.quantile("x", 0.99) <= open_.quantile("x", 0.95)


def _found(e: Evidence, bins: Bins, mean_ratio: float, ranges: list[str]) -> tuple[Any, float]:
    by = {name: bins.mean(name, "d") for name in ranges}
    evidence = {"mean_ratio": mean_ratio, "lost_mass": 1 - mean_ratio, "mean_log_ratio_by_probability": by}
    gone = ("rounding, temperature, staleness: with one vocabulary the mean ratio stays 1",)
    off = all(set(e.facts.get(name, ())) <= set(values) and e.facts.get(name) for name, values in WHOLE.items())
    if off and _everywhere(bins):
        message = (
            f"the scorer gives {1 - mean_ratio:.1%} of its mass to tokens that the sampler cannot draw, more where the "
            "distribution is open, and no truncation is declared: rows beyond the vocabulary are in its softmax"
        )
        gone += ("top-p, top-k, min-p: declared off",)
        return finding("padded-rows-in-softmax", message, evidence=evidence, ruled_out=gone, rivals=MASKS), _strength(
            bins
        )
    message = (
        f"the scorer's log-probs are lower at likely and unlikely tokens alike: {1 - mean_ratio:.1%} of its mass is on "
        "tokens that the sampler cannot draw"
    )
    rivals = (
        "top-p, top-k or min-p on the sampler's side only",
        "padded vocabulary rows in the scorer's softmax",
        *MASKS,
    )
    # what could cut the support is not declared, so this explains half at most
    return finding("one-sided-gap", message, evidence=evidence, ruled_out=gone, rivals=rivals), _strength(bins) / 2


def _strength(bins: Bins) -> float:
    """How much of |d| is one-sided."""
    total, signed = (sum(bins.get(k, what) for k in bins.labels()) for what in ("abs", "d"))
    return min(1.0, abs(signed) / total) if total else 0.0


SIGNATURE = Signature(
    "padded_rows", "padded-rows-in-softmax", "the scorer's mass is partly on tokens that cannot be drawn", judge,
    ("log-probs of drawn tokens",), ("truncation",),
)  # fmt: skip
