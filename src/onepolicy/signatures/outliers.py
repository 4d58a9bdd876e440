"""A few tokens that hold most of the mean of exp|d|, while everything else is rounding."""

from __future__ import annotations

from onepolicy.codes import finding
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.rounding import EVERY
from onepolicy.signatures.scale import BANDS, Far, far, level

#: At most this share of the tokens, or three of them, are few.
FEW = 1e-3
#: An outlier is at least this many times the median |d| / (1 - p) off. Healthy bf16 reaches 60 at one token in 10,000.
FAR = 15.0


def judge(e: Evidence) -> Answer:
    counted = e.extra.get("rounding")
    if counted is None or not e.n:
        return Answer("lacks", "needs the gap by size")
    least = max(1.0, FAR * level(counted, EVERY).median)
    found = next((f for k, edge in enumerate(BANDS, 1) if edge >= least and _few(f := far(counted, k), e.n)), None)
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
    return Answer("fits", f"{found.n} tokens hold most of the mean of exp|d|", out, _share(found, e.n))


def _few(found: Far, n: int) -> bool:
    if not 0 < found.n <= max(3, FEW * n):
        return False
    whole = (found.mean_exp_abs - 1) * n
    return whole - (found.mean_exp_abs_without - 1) * (n - found.n) > 0.5 * whole


def _share(found: Far, n: int) -> float:
    return 1 - found.mean_abs_without * (n - found.n) / max(found.mean_abs * n, 1e-300)


def _median(e: Evidence) -> float | None:
    m = e.measurements.get("abs_log_ratio/p50")
    return None if m is None else m.value


SIGNATURE = Signature(
    "outlier", "single-outlier", "a few tokens hold most of the mean of exp|d|", judge, ("log-probs of both sides",)
)
