"""Mixture models: is the gap where the two sides took other experts?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.profiles.base import Bins, Seen
from onepolicy.profiles.bins import expert_rows
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.contrast import contrast
from onepolicy.signatures.scale import spots
from onepolicy.types import IntArray

SAME, OTHER = "same experts", "other experts"
#: The largest gaps stand at the tokens with other experts by chance once in so many small dumps.
CHANCE = 1e-4
#: Then their mean gap is at least this many times that of the others.
LARGER = 3.0


def look(seen: Seen) -> Counted:
    """Tokens with other experts and their places; how many layers differ, for each number of experts a layer may have."""
    out = Counted()
    rows = expert_rows(seen)
    if rows is None:
        return out
    ours, theirs = rows
    known = (ours >= 0).any(axis=1) & (theirs >= 0).any(axis=1)
    other = known & (np.sort(ours, axis=1) != np.sort(theirs, axis=1)).any(axis=1)
    out.count("known", int(known.sum()))
    out.count("other", int(other.sum()))
    out.spot("other", spots(seen, other))
    width = ours.shape[1]
    if known.any():
        first = np.flatnonzero(known & (seen.index < 8))
        for k in (k for k in range(1, width + 1) if width % k == 0):
            out.count(f"repeats {width} {k}", _repeats(ours[first], k))
            out.count(f"layers {width} {k}", _layers(ours[other], theirs[other], k))
    return out


def _repeats(rows: IntArray, k: int) -> int:
    """Groups of k that name an expert twice: then k is no layer's number of experts."""
    groups = np.sort(rows.reshape(-1, k), axis=1)
    return int((groups[:, 1:] == groups[:, :-1]).any(axis=1).sum())


def _layers(ours: IntArray, theirs: IntArray, k: int) -> int:
    a, b = (np.sort(x.reshape(-1, k), axis=1) for x in (ours, theirs))
    return int((a != b).any(axis=1).sum())


def judge(e: Evidence) -> Answer:
    bins, counted = e.profiles.get("routes"), e.extra.get("experts")
    if bins is None or counted is None:
        return Answer("lacks", "needs routed_experts and scorer_routed_experts")
    if not bins.n(OTHER):
        return Answer("no", "both sides took the same experts at every token")
    held = contrast(bins, (SAME,), (OTHER,))
    if held is None:
        return Answer("unclear", "the experts differ at every token, so there is nothing to hold them against")
    chance = by_chance(bins)
    small = chance < CHANCE and held.abs_other > LARGER * held.abs_base
    if not small and not (held.larger and held.enough):
        if held.n_other < 5 or not held.enough:
            return Answer("unclear", f"the experts differ at {held.n_other} tokens, too few to hold their gap against")
        return Answer("no", f"the gap is the same where the experts differ ({held.abs_other:.2g}, {held.abs_base:.2g})")
    width, k = layout(counted)
    layers = width // k if k else None
    evidence: dict[str, Any] = {
        "tokens_differing": [s.position for s in counted.spots.get("other", [])],
        "records": [s.record for s in counted.spots.get("other", [])],
        "share_tokens": held.n_other / (held.n_other + held.n_base),
        "share_token_layers": _share(counted, width, k), "layers": layers, "experts_a_layer": k or None,
        "mean_abs_differing": held.abs_other, "mean_abs_same": held.abs_base, "chance": chance,
        "share_of_gap": held.share,
    }  # fmt: skip
    message = (
        f"the gap is where the two sides took other experts: mean |d| {held.abs_other:.3g} at these "
        f"{held.n_other} tokens ({evidence['share_tokens']:.1%}), {held.abs_base:.2g} at the others"
    )
    gone = ("rounding alone: tokens with equal experts keep a small gap",)
    out = finding("expert-routing-mismatch", message, evidence=evidence, ruled_out=gone)
    return Answer("fits", "the gap is where the experts differ", out, _raw_share(bins))


def _raw_share(bins: Bins) -> float:
    total = bins.get(SAME, "abs") + bins.get(OTHER, "abs")
    more = max(0.0, bins.mean(OTHER) - bins.mean(SAME)) * bins.n(OTHER) * 2.0**32
    return min(1.0, more / total) if total else 0.0


def _share(counted: Counted, width: int, k: int) -> float | None:
    known = counted.counts.get("known", 0)
    return counted.counts.get(f"layers {width} {k}", 0) / (known * (width // k)) if k and known else None


def layout(counted: Counted) -> tuple[int, int]:
    """(experts named a token, experts a layer): the largest group in which no expert comes twice. (0, 0): not known."""
    sizes = [tuple(map(int, key.split()[1:])) for key in counted.counts if key.startswith("repeats ")]
    widths = {w for w, _ in sizes}
    if len(widths) != 1:
        return 0, 0
    width = next(iter(widths))
    return width, max((k for w, k in sizes if not counted.counts[f"repeats {w} {k}"]), default=0)


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
