"""A gap that comes with how a record was computed: from a cached prefix, or beside padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.profiles.base import Seen
from onepolicy.profiles.bins import reused
from onepolicy.rows import MISSING, Rows
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.contrast import SURE, Contrast, contrast, needed, told
from onepolicy.signatures.scale import spots
from onepolicy.types import FloatArray, IntArray

_CACHED, _FRESH = ("cached prefix",), ("not cached",)
#: Tokens whose gap is in a cached prefix and nowhere else, to name the cache without statistics.
FEWEST = 4


def look(seen: Seen) -> Counted:
    """Places inside cached prefixes where the two scorings differ by more than any rounding in float32."""
    out = Counted()
    binned = reused(seen)
    if binned is not None:
        inside = np.flatnonzero((binned[0] == 0) & (seen.size > 1e-3))
        out.count("inside", len(inside))
        out.spot("inside", spots(seen, inside))
    return out


def cache(e: Evidence) -> Answer:
    """The gap is larger after, or only inside, a cached prefix, whatever version drew the reply."""
    exact = _only_inside(e)
    if exact is not None:
        return exact
    held = contrast(e.profiles.get("cached"), _FRESH, _CACHED)
    if held is None:
        return Answer("lacks", "needs replies with a cached prefix and without one (cached_prefix_length)")
    if not held.larger:
        return Answer("no", f"with a cached prefix the gap is {held.ratio:.2g} times that without one")
    if _since(e) is not None:
        return Answer("no", "the first version's cached prefixes show no gap: they are stale, not broken")
    message = (
        f"replies after a cached prefix have a mean |d| of {held.abs_other:.2g}, the others {held.abs_base:.2g}; "
        "at equal probability of the tokens that is " + f"{held.ratio:.2g} times as much"
    )
    rivals = ("a cache that is not reset when weights change", "a cache of another precision", "a shared long prompt")
    out = told("depends-on-cache", message, held.enough, evidence=held.evidence("fresh", "cached"), rivals=rivals)
    return Answer("fits", "the gap comes with cached prefixes", out, held.share)


def _only_inside(e: Evidence) -> Answer | None:
    """The prompt's own log-probs differ inside the cached part, and everything else agrees to the bit or nearly."""
    bins = e.profiles.get("reused")
    if bins is None or bins.n("in it") < FEWEST:
        return None
    outside = bins.merged(("after it", "no cached prefix"), "x")
    inside, worst = bins.merged(("in it",), "x"), outside.quantile("x", 1.0)
    if not outside.n("x") or inside.quantile("x", 0.75) < 1e-4 or inside.mean("x") < 100 * max(outside.mean("x"), 1e-9):
        return None
    rows, counted = e.rows[e.rows["cached"] > 0], e.extra["cache"]
    found = counted.spots.get("inside", [])
    evidence = {
        "tokens": counted.counts["inside"], "records": [s.record for s in found],
        "score_positions": [s.position for s in found],
        "mean_abs_cached": inside.mean("x"), "max_abs": float(rows["most"].max()), "mean_abs_fresh": outside.mean("x"),
        "max_abs_fresh": worst, "shared_prefix_tokens": sorted({int(c) for c in rows["cached"]}),
    }  # fmt: skip
    message = (
        f"log-probs of tokens inside a cached prefix are off by up to {evidence['max_abs']:.2g}; outside of it the "
        f"two scorings agree to {worst:.1g}"
    )
    out = finding("depends-on-cache", message, evidence=evidence)
    return Answer("fits", "the gap is inside cached prefixes only", out, 1.0)


def stale(e: Evidence) -> Answer:
    """Cached prefixes show a gap, but not at the first version of the weights that the dump has."""
    held = contrast(e.profiles.get("cached"), _FRESH, _CACHED)
    if held is None:
        return Answer("lacks", "needs replies with a cached prefix and without one (cached_prefix_length)")
    if not held.larger:
        return Answer("no", f"with a cached prefix the gap is {held.ratio:.2g} times that without one")
    since = _since(e)
    if since is None:
        return Answer("no", "the gap is at cached prefixes of the first version too, or versions are not told")
    message = (
        f"from {since[0]} {since[1]} on, replies after a cached prefix have a gap ({held.abs_other:.2g}; others "
        f"{held.abs_base:.2g}), and none before: the cache holds what older weights computed"
    )
    gone = ("ordinary staleness: replies of the same version without a cached prefix have no gap",
            "a cache that is broken from the start")  # fmt: skip
    evidence = held.evidence("fresh", "cached") | {f"first_{since[0]}": since[1]}
    out = told("stale-prefix-cache", message, held.enough, evidence=evidence, ruled_out=gone)
    return Answer("fits", "a gap at cached prefixes, after the first version", out, held.share)


def _since(e: Evidence) -> tuple[str, int] | None:
    """("version" or "step", the first one whose cached prefixes have a gap); None if the first has one already, or if
    it has too few replies to say that it has none."""
    for name, column in (("version", "scorer_version"), ("version", "version_last"), ("step", "step")):
        rows = e.rows[(e.rows["n"] > 0) & (e.rows["cached"] != MISSING) & (e.rows[column] != MISSING)]
        values = np.unique(rows[column])
        if len(values) >= 2:
            first = _first_with_gap(rows, rows[column], values)
            return None if first is None else (name, first)
    return None


def _first_with_gap(rows: Rows, column: IntArray, values: IntArray) -> int | None:
    """The first value from which on cached prefixes have a gap, where those before it have less than a third of it."""
    for value in values[1:].tolist():
        before, after = _difference(rows[column < value]), _difference(rows[column >= value])
        now = _difference(rows[column == value])
        if before is None or after is None or now is None or now[0] < 0.5 * after[0]:
            continue
        clear = after[0] >= needed(int((column >= value).sum()) // 2) * after[1]
        return value if clear and before[0] + 3 * before[1] < after[0] / 3 else None
    return None


def _difference(rows: Rows) -> tuple[float, float] | None:
    """Mean gap of replies with a cached prefix less that of those without one, and its standard error."""
    x, y = (rows["scaled"][inside] / rows["n"][inside] for inside in (rows["cached"] > 0, rows["cached"] == 0))
    if min(len(x), len(y)) < 3:
        return None
    error = float(np.sqrt(x.var(ddof=1) / len(x) + y.var(ddof=1) / len(y)))
    return float(x.mean() - y.mean()), error


def padding(e: Evidence) -> Answer:
    """The gap is larger beside padding, at equal length of the reply."""
    bins = e.profiles.get("padding")
    held = _any_padding(e)
    if bins is None or held is None:
        return Answer("lacks", "needs padding_length")
    if not held.larger:
        return Answer("no", f"beside padding the gap is {held.ratio:.2g} times that of little or none")
    if not _at_equal_length(e):
        return Answer("no", "at equal length padding makes no difference: shorter replies have both")
    message = (
        f"sequences scored beside padding have a mean |d| of {held.abs_other:.2g}, those with none or little "
        f"{held.abs_base:.2g}"
    )
    rivals = ("positions that count the padding", "a mask that lets padding through")
    out = told("depends-on-padding", message, held.enough, evidence=held.evidence("little", "padded"), rivals=rivals)
    return Answer("fits", "the gap comes with padding", out, held.share)


def _any_padding(e: Evidence) -> Contrast | None:
    """None against some padding, or the least against the most, whichever is told apart more clearly."""
    bins = e.profiles.get("padding")
    labels = ["none", "up to 1/4", "up to 1/2", "up to 3/4", "more"]
    cuts: Sequence[tuple[list[str], list[str]]] = [(labels[:k], labels[k:]) for k in (1, 2, 3)]
    found = [c for low, high in cuts if (c := contrast(bins, low, high)) is not None]
    return max(found, key=lambda c: (c.enough, c.z), default=None)


def _at_equal_length(e: Evidence) -> bool:
    """Whether padding, or more of it, goes with a larger gap among replies of one length (half octaves of it)."""
    rows = e.rows[(e.rows["n"] > 0) & (e.rows["padding"] != MISSING)]
    if len(rows) < 8:
        return True
    gap = np.log(rows["scaled"] / rows["n"] + 1e-12)
    octave = np.floor(2 * np.log2(rows["n"]))
    share = rows["padding"] / (rows["padding"] + rows["tokens"])
    slopes = [_slope(gap, x, octave) for x in (share, (rows["padding"] > 0).astype(np.float64))]
    # where padding says nothing but the length, the two cannot be told apart, and the finding names both
    return any(z is None or z > SURE / 2 for z in slopes)


def _slope(y: FloatArray, x: FloatArray, group: FloatArray) -> float | None:
    """The slope of y on x within the groups, in standard errors; None where x is one value in each group."""
    y, x = y.copy(), x.copy()
    for value in np.unique(group).tolist():
        inside = group == value
        y[inside] -= y[inside].mean()
        x[inside] -= x[inside].mean()
    square = float((x * x).sum())
    if square < 1e-9:
        return None
    slope = float((y * x).sum()) / square
    error = float(np.sqrt(((y - slope * x) ** 2).sum() / len(y) / square))
    return slope / error if error > 0 else 0.0


SIGNATURES = (
    Signature("cache", "depends-on-cache", "the gap comes with cached prefixes", cache, ("cached_prefix_length",),
              look=look),
    Signature(
        "stale_cache", "stale-prefix-cache", "a gap at cached prefixes since the weights changed", stale,
        ("cached_prefix_length", "scorer_version or policy_version"),
    ),
    Signature("padding", "depends-on-padding", "the gap comes with padding", padding, ("padding_length",)),
)  # fmt: skip
