"""Staleness: tokens of older weights against tokens of the scorer's own. And versions that run ahead of the scorer."""

from __future__ import annotations

from typing import Any

from onepolicy.codes import finding
from onepolicy.codes.kind import INFO, OPEN, WARN
from onepolicy.profiles.base import Bins
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.contrast import SEQUENCES, Contrast, contrast
from onepolicy.signatures.series import never_updated
from onepolicy.types import Finding

#: Older tokens have a gap of at least so many times that of fresh ones; from DOMINATES on it is most of the gap there.
TIMES, DOMINATES = 1.25, 2.0
#: Tokens of a lag before its mean counts, and the gap of older tokens, on the tokens' own scale, that few can show:
#: below it both are finer than half precision.
LEAST, SEEN = 20, 0.02


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
    evidence: dict[str, Any] = held.evidence("lag_0", "stale") | {
        "mean_abs_by_lag": {k: bins.mean(k) for k in bins.labels()}
    }
    large = held.ratio >= DOMINATES
    if not held.clear or held.sequences < SEQUENCES:
        why = f"older tokens have {held.ratio:.2g} times the gap, by {held.z:.1f} standard errors"
        few = _from_few(held, bins, evidence) if large else None
        return Answer("unclear", why, few, held.share if few else 0.0)
    message = (
        f"tokens of older weights have a mean |d| of {held.abs_other:.2g}, those of lag 0 {held.abs_base:.2g}: "
        f"{held.share:.0%} of the gap is staleness, the rest is mismatch"
    )
    out = finding("staleness", message, severity=WARN if large else INFO, evidence=evidence)
    return Answer("fits", "the gap comes with the lag", out, held.share)


def _from_few(held: Contrast, bins: Bins, evidence: dict[str, Any]) -> Finding | None:
    """Described where the gap rises with every lag and most of it is at older tokens; few sequences decide nothing."""
    lags = [k for k in bins.labels() if int(k) >= 0 and bins.n(k) >= LEAST]
    sizes = [bins.mean(k, "scaled") for k in lags]
    if len(lags) < 2 or lags[0] != "0" or sizes != sorted(sizes) or held.share < 0.5 or held.other < SEEN:
        return None
    by_lag = ", ".join(f"{bins.mean(k):.2g} at lag {k}" for k in lags[:6])
    message = (
        f"the gap rises with the age of the weights (mean |d| {by_lag}): most of it looks like staleness; not decided: "
        f"that takes {SEQUENCES} sequences that show it clearly"
    )
    return finding("staleness", message, severity=INFO, outcome=OPEN, evidence=evidence)


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
