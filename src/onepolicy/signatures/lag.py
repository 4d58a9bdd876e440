"""Staleness: tokens of older weights against tokens of the scorer's own. And versions that run ahead of the scorer."""

from __future__ import annotations

from typing import Any

from onepolicy.codes import finding
from onepolicy.codes.kind import INFO, WARN
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.contrast import SEQUENCES, contrast
from onepolicy.signatures.series import never_updated

#: Older tokens have a gap of at least so many times that of fresh ones; from DOMINATES on it is most of the gap there.
TIMES, DOMINATES = 1.25, 2.0


def staleness(e: Evidence) -> Answer:
    bins = e.profiles.get("lag")
    if bins is None:
        return Answer("lacks", "needs policy_version and scorer_version")
    older = [k for k in bins.labels() if int(k) >= 1]
    if not older:
        return Answer("no", "no token is of older weights than the scorer's")
    held = contrast(bins, ("0",), older)
    if held is None:
        return Answer("unclear", "no token is of the scorer's own version, so mismatch and staleness cannot be split")
    if never_updated(e).verdict == "fits":
        return Answer("no", "the gap grows without end while the lag is bounded: the weights do not arrive")
    if held.ratio < TIMES:
        return Answer("no", f"tokens of lag 0 have as large a gap ({held.abs_base:.2g}; older {held.abs_other:.2g})")
    if not held.clear or held.sequences < SEQUENCES:
        return Answer("unclear", f"older tokens have {held.ratio:.2g} times the gap, by {held.z:.1f} standard errors")
    evidence: dict[str, Any] = held.evidence("lag_0", "stale") | {
        "mean_abs_by_lag": {k: bins.mean(k) for k in bins.labels()}
    }
    large = held.ratio >= DOMINATES
    message = (
        f"tokens of older weights have a mean |d| of {held.abs_other:.2g}, those of lag 0 {held.abs_base:.2g}: "
        f"{held.share:.0%} of the gap is staleness, the rest is mismatch"
    )
    out = finding("staleness", message, severity=WARN if large else INFO, evidence=evidence)
    return Answer("fits", "the gap comes with the lag", out, held.share)


def ahead(e: Evidence) -> Answer:
    """Labels of versions that the scorer has not reached count something else than updates of the weights."""
    bins = e.profiles.get("lag")
    if bins is None:
        return Answer("lacks", "needs policy_version and scorer_version")
    n = bins.n("-1")
    if not n:
        return Answer("no", "no token's version is ahead of the scorer's")
    total = sum(bins.n(k) for k in bins.labels())
    rows = e.rows[e.rows["n"] > 0]
    newest, scorer = int(rows["version_last"].max()), int(rows["scorer_version"].max())
    message = f"{n} of {total} tokens carry a version ahead of the scorer's: up to {newest}, the scorer is at {scorer}"
    rivals = ("a label that counts calls of the weight update, not optimiser steps", "a scorer that runs behind")
    evidence = {"tokens": n, "share": n / total, "newest": newest, "scorer": scorer}
    out = finding("version-ahead", message, evidence=evidence, rivals=rivals)
    return Answer("fits", "versions ahead of the scorer's", out, 0.0)


SIGNATURES = (
    Signature(
        "staleness", "staleness", "older tokens have a larger gap", staleness, ("policy_version", "scorer_version")
    ),
    Signature("ahead", "version-ahead", "versions ahead of the scorer's", ahead, ("policy_version", "scorer_version")),
)
