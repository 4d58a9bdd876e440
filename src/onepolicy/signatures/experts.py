"""Mixture models: is the gap where the two sides took other experts?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onepolicy.codes import finding
from onepolicy.codes.kind import OPEN, WARN
from onepolicy.counted import Counted
from onepolicy.profiles.base import Bins, Seen
from onepolicy.profiles.bins import expert_rows
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.contrast import Contrast, contrast
from onepolicy.signatures.scale import spots
from onepolicy.types import IntArray

SAME, OTHER = "same experts", "other experts"
#: The largest gaps stand at the tokens with other experts by chance once in so many small dumps.
CHANCE = 1e-4
#: Then their mean gap is at least this many times that of the others.
LARGER = 3.0
#: And what is described, and not decided: two or three such tokens that hold all of the gap.
CHANCE_FEW, LARGER_FEW = 1e-3, 10.0


def look(seen: Seen) -> Counted:
    """Tokens with other experts and their places; how many layers differ, for each number of experts a layer may have.

    Both for the experts at the token (`0 ...`) and at the one before it (`1 ...`).
    """
    out = Counted()
    for before in (0, 1):
        rows = expert_rows(seen, before)
        if rows is not None:
            _count(out, seen, rows, before)
    return out


def _count(out: Counted, seen: Seen, rows: tuple[IntArray, IntArray], before: int) -> None:
    ours, theirs = rows
    known = (ours >= 0).any(axis=1) & (theirs >= 0).any(axis=1)
    other = known & (np.sort(ours, axis=1) != np.sort(theirs, axis=1)).any(axis=1)
    out.count(f"{before} known", int(known.sum()))
    out.count(f"{before} other", int(other.sum()))
    out.spot(f"{before} other", spots(seen, np.flatnonzero(other)))
    width = ours.shape[1]
    if known.any():
        first = np.flatnonzero(known & (seen.index < 8))
        for k in (k for k in range(1, width + 1) if width % k == 0):
            out.count(f"{before} repeats {width} {k}", _repeats(ours[first], k))
            out.count(f"{before} layers {width} {k}", _layers(ours[other], theirs[other], k))


def _repeats(rows: IntArray, k: int) -> int:
    """Groups of k that name an expert twice: then k is no layer's number of experts."""
    groups = np.sort(rows.reshape(-1, k), axis=1)
    return int((groups[:, 1:] == groups[:, :-1]).any(axis=1).sum())


def _layers(ours: IntArray, theirs: IntArray, k: int) -> int:
    a, b = (np.sort(x.reshape(-1, k), axis=1) for x in (ours, theirs))
    return int((a != b).any(axis=1).sum())


def judge(e: Evidence) -> Answer:
    """At the token or the one before it, whichever explains more."""
    answers = [_judge(e, before) for before in (0, 1)]
    return max(answers, key=lambda a: (a.verdict == "fits", a.strength, a.verdict == "no"))


def _judge(e: Evidence, before: int) -> Answer:
    bins, counted = e.profiles.get("routes before" if before else "routes"), e.extra.get("experts")
    if bins is None or counted is None:
        return Answer("lacks", "needs routed_experts and scorer_routed_experts")
    if not bins.n(OTHER):
        return Answer("no", "both sides took the same experts at every token")
    held = contrast(bins, (SAME,), (OTHER,))
    if held is None:
        return Answer("unclear", "the experts differ at every token, so there is nothing to hold them against")
    chance = by_chance(bins)
    small = chance < CHANCE and held.abs_other > LARGER * held.abs_base
    few = chance < CHANCE_FEW and held.abs_other > LARGER_FEW * held.abs_base
    if not small and not few and not (held.larger and held.enough):
        if held.n_other < 5 or not held.enough:
            return Answer("unclear", f"the experts differ at {held.n_other} tokens, too few to hold their gap against")
        return Answer("no", f"the gap is the same where the experts differ ({held.abs_other:.2g}, {held.abs_base:.2g})")
    evidence = _evidence(counted, held, before) | {"chance": chance}
    message = (
        f"the gap is where the two sides took other experts: mean |d| {held.abs_other:.3g} at these "
        f"{held.n_other} tokens ({evidence['share_tokens']:.1%}), {held.abs_base:.2g} at the others"
    )
    gone = ("rounding alone: tokens with equal experts keep a small gap",)
    if not small and not (held.larger and held.enough):
        message += "; not decided: so few tokens may meet the largest gaps by chance"
        out = finding(
            "expert-routing-mismatch", message, severity=WARN, outcome=OPEN, evidence=evidence, ruled_out=gone
        )
        return Answer("fits", "the few tokens with other experts hold the gap", out, _raw_share(bins))
    out = finding("expert-routing-mismatch", message, evidence=evidence, ruled_out=gone)
    return Answer("fits", "the gap is where the experts differ", out, _raw_share(bins))


def _evidence(counted: Counted, held: Contrast, before: int) -> dict[str, Any]:
    width, k = layout(counted, before)
    found = counted.spots.get(f"{before} other", [])
    known = counted.counts.get(f"{before} known", 0)
    layers = width // k if k else None
    share = counted.counts[f"{before} layers {width} {k}"] / (known * layers) if layers and known else None
    return {
        "tokens_differing": [s.position for s in found], "records": [s.record for s in found],
        "share_tokens": held.n_other / (held.n_other + held.n_base), "share_token_layers": share, "layers": layers,
        "experts_a_layer": k or None, "mean_abs_differing": held.abs_other, "mean_abs_same": held.abs_base,
        "share_of_gap": held.share, "experts_of": "the token before" if before else "the token",
    }  # fmt: skip


def _raw_share(bins: Bins) -> float:
    total = bins.get(SAME, "abs") + bins.get(OTHER, "abs")
    more = max(0.0, bins.mean(OTHER) - bins.mean(SAME)) * bins.n(OTHER) * 2.0**32
    return min(1.0, more / total) if total else 0.0


def layout(counted: Counted, before: int = 0) -> tuple[int, int]:
    """(experts named a token, experts a layer): the largest group in which no expert comes twice. (0, 0): not known."""
    head = f"{before} repeats "
    sizes = [tuple(map(int, key.removeprefix(head).split())) for key in counted.counts if key.startswith(head)]
    widths = {w for w, _ in sizes}
    if len(widths) != 1:
        return 0, 0
    width = next(iter(widths))
    return width, max((k for w, k in sizes if not counted.counts[f"{head}{w} {k}"]), default=0)


def by_chance(bins: Bins) -> float:
    """Probability that as many of the largest gaps stand at tokens with other experts, were they like the rest.

    Of n tokens, k with other experts; o of them among the k largest: the hypergeometric tail, ties against it.
    """
    other, same = bins.sizes.get(OTHER, {}), bins.sizes.get(SAME, {})
    k, n = sum(other.values()), sum(other.values()) + sum(same.values())
    taken, hit = 0, 0
    for code in sorted({*other, *same}, reverse=True):
        taken += same.get(code, 0) + other.get(code, 0)
        if taken > k:
            break
        hit += other.get(code, 0)
    term = lambda i: math.lgamma(k + 1) - math.lgamma(i + 1) - math.lgamma(k - i + 1) + _choose(n - k, k - i)
    logs = [term(i) - _choose(n, k) for i in range(hit, k + 1) if k - i <= n - k]
    return min(1.0, sum(math.exp(x) for x in logs))


def _choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


SIGNATURE = Signature(
    "experts",
    "expert-routing-mismatch",
    "the gap is where the two sides took other experts",
    judge,
    needs=("routed_experts", "scorer_routed_experts"),
    look=look,
)
