"""A few tokens that hold most of the mean of exp|d|, while everything else is rounding."""

from __future__ import annotations

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.rounding import EVERY
from onepolicy.signatures.scale import BANDS, Far, far, level

#: At most this share of the tokens, or three of them, are few.
FEW = 1e-3
#: An outlier is at least this many times the median |d| / (1 - p) off. Healthy bf16 reaches 60 at one token in 10,000.
FAR = 15.0
#: Octaves of |d| below the outliers that hold no token.
ALONE = 2


def judge(e: Evidence) -> Answer:
    counted = e.extra.get("rounding")
    if counted is None or not e.n:
        return Answer("lacks", "needs the gap by size")
    least = FAR * level(counted, EVERY).median
    found = _isolated(counted, least, e.n)
    if found is None:
        return Answer("no", f"no few tokens beyond {least:.2g} nats hold half of the mean of exp|d|")
    places = ", ".join(f"{r}:{p}" for r, p in zip(found.records[:3], found.positions[:3], strict=True))
    message = (
        f"{found.n} of {e.n} tokens ({places}) make the mean of exp|d| {found.mean_exp_abs:.4g}; without "
        f"{'it' if found.n == 1 else 'them'} it is {found.mean_exp_abs_without:.4g}"
    )
    evidence = {
        "tokens": found.n, "positions": list(found.positions), "records": list(found.records), "least": found.least,
        "mean_exp_abs": found.mean_exp_abs, "mean_exp_abs_without": found.mean_exp_abs_without,
        "mean_abs": found.mean_abs, "mean_abs_without": found.mean_abs_without,
        "median_abs": _median(e),
    }  # fmt: skip
    out = finding("single-outlier", message, place=places, evidence=evidence)
    return Answer("fits", f"{found.n} tokens hold most of the mean of exp|d|", out, 0.5)


def _isolated(counted: Counted, least: float, n: int) -> Far | None:
    """Few tokens far off, with nothing in the two octaves below them: a tail that thins out has no such hole."""
    for k in range(ALONE + 1, len(BANDS) + 1):
        found = far(counted, k)
        if BANDS[k - 1] >= least and far(counted, k - ALONE).n == found.n and _few(found, n):
            return found
    return None


def _few(found: Far, n: int) -> bool:
    if not 0 < found.n <= max(3, FEW * n):
        return False
    whole = (found.mean_exp_abs - 1) * n
    return whole - (found.mean_exp_abs_without - 1) * (n - found.n) > 0.5 * whole


def _median(e: Evidence) -> float | None:
    m = e.measurements.get("abs_log_ratio/p50")
    return None if m is None else m.value


SIGNATURE = Signature(
    "outlier", "single-outlier", "a few tokens hold most of the mean of exp|d|", judge, ("log-probs of both sides",)
)
