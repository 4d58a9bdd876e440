"""The gap stands at one replica, environment or turn, and the others have none of it.

Replicas of one sampler have the same weights and settings and take requests as they come, so a gap at one of them is
that engine's: weights that it missed, another build or cache. Environments and turns have texts of their own, so
more is asked of them, and an environment decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from onepolicy.codes import finding
from onepolicy.codes.kind import OPEN, WARN
from onepolicy.intervals import t_quantile
from onepolicy.profiles.base import OTHERS, Bins
from onepolicy.signatures import records
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.contrast import CHANCE, SEQUENCES, SURE, Contrast, contrast
from onepolicy.types import Finding

#: Profile -> what its bins are, and the least quotient of the gap there and elsewhere, on the tokens' own scale.
KINDS: dict[str, tuple[str, float]] = {
    "replica": ("replica", 2.0),
    "turn": ("turn", 3.0),
    "env": ("environment", 3.0),
}
#: And the least mean gap on that scale: below it both are finer than half precision.
LEAST = 0.02
RIVALS: dict[str, tuple[str, ...]] = {
    "replica": ("a weight update that did not reach it", "another build, kernel or cache on that replica"),
    "turn": ("a prefix that the two sides see otherwise (template, tool output, positions)", "a cache kept over turns"),
    "env": ("a prompt format that one side renders otherwise", "sampling parameters of its own"),
}


@dataclass(frozen=True, slots=True)
class Group:
    """The groups that stand out: `labels` of profile `kind`; `but`: all others do, and these do not."""

    kind: str
    labels: tuple[str, ...]
    but: bool
    held: Contrast


def judge(e: Evidence) -> Answer:
    told = {k: e.profiles[k] for k in KINDS if k in e.profiles and len(_labels(e.profiles[k])) > 1}
    if not told:
        return Answer("lacks", "needs replica_id, turn or env_id, more than one of them")
    found = [g for kind, bins in told.items() if (g := _standing_out(kind, bins)) is not None]
    if not found:
        return Answer("no", f"no {' or '.join(KINDS[k][0] for k in told)} has a gap that the others have not")
    if any(a.verdict == "fits" for a in (records.cache(e), records.stale(e), records.padding(e))):
        return Answer("no", "the gap comes with cached prefixes or padding, which groups have more or less of")
    best = max(found, key=lambda g: (g.held.enough, g.held.share))
    return Answer("fits", f"the gap is at one {KINDS[best.kind][0]}", _found(e, best), best.held.share)


def _labels(bins: Bins) -> list[str]:
    return [k for k in bins.labels() if k != OTHERS]


def _standing_out(kind: str, bins: Bins) -> Group | None:
    """Each group against all others: those with a larger gap, or else the one without it."""
    labels = _labels(bins)
    rest = lambda label: [k for k in bins.labels() if k != label]
    high = [k for k in labels if _clear(kind, contrast(bins, rest(k), (k,)), len(labels))]
    if high:
        held = contrast(bins, [k for k in bins.labels() if k not in high], high)
        return None if held is None else Group(kind, tuple(high), False, held)
    for label in labels if len(labels) > 2 else ():
        held = contrast(bins, (label,), rest(label))
        if held is not None and _clear(kind, held, len(labels)):
            return Group(kind, (label,), True, held)
    return None


def _clear(kind: str, held: Contrast | None, groups: int) -> bool:
    """Beyond chance, though the group was picked out of so many."""
    if held is None or held.sequences < 3 or held.ratio < KINDS[kind][1] or held.other < LEAST:
        return False
    return held.z >= max(SURE, t_quantile(1 - CHANCE / groups, held.sequences - 1))


def _found(e: Evidence, group: Group) -> Finding:
    what, held = KINDS[group.kind][0], group.held
    names = ", ".join(group.labels[:4]) + (f" and {len(group.labels) - 4} more" if len(group.labels) > 4 else "")
    where = f"every {what} but {names}" if group.but else f"{what} {names}"
    message = (
        f"at {where} mean |d| is {held.abs_other:.2g}, elsewhere {held.abs_base:.2g}; at equal probability of the "
        f"tokens that is {held.ratio:.2g} times as much"
    )
    bins = e.profiles[group.kind]
    each = {k: bins.mean(k) for k in _labels(bins)[:64]}
    evidence = {"by": group.kind, "groups": list(group.labels), "all_but_these": group.but, "mean_abs_by_group": each}
    evidence |= held.evidence("elsewhere", "there")
    gone = ("rounding and staleness, which do not choose a group",) if group.kind == "replica" else ()
    more = {"evidence": evidence, "rivals": RIVALS[group.kind], "ruled_out": gone}
    if held.enough and group.kind != "env":
        return finding("one-group-differs", message, **more)
    few = "" if held.enough else f"; not decided: that takes {SEQUENCES} sequences on each side"
    return finding("one-group-differs", message + few, severity=WARN, outcome=OPEN, **more)


SIGNATURE = Signature(
    "one_group",
    "one-group-differs",
    "the gap is at one replica, environment or turn",
    judge,
    needs=("replica_id, turn or env_id",),
)
