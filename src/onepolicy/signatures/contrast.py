"""Two kinds of tokens held against each other: is the gap larger at one of them, and how sure is that?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from onepolicy.codes import finding
from onepolicy.codes.kind import OPEN, WARN
from onepolicy.intervals import t_quantile
from onepolicy.profiles.base import Bins
from onepolicy.types import Finding

#: Standard errors between two means before they differ, and the chance that each comparison may err by. Some 20
#: signatures look at a dump, two ways each: all of them together stay below 1 false alarm in 1,000.
SURE, CHANCE = 5.0, 2.5e-5
#: And how much larger: what rounding does by itself differs between kinds of tokens by a third or so.
RATIO = 1.5
#: Sequences on each side; with fewer a shape is described and nothing is decided (`CORE.md`: 20 effective clusters).
SEQUENCES = 20


@dataclass(frozen=True, slots=True)
class Contrast:
    """`base`, `other`: mean |d| on the tokens' own scale; `abs_*`: in nats. `z`: standard errors between them.
    `share`: how much of the whole gap is what `other` has more. `sequences`: on the smaller side."""

    n_base: int
    n_other: int
    base: float
    other: float
    abs_base: float
    abs_other: float
    z: float
    share: float
    sequences: int

    @property
    def ratio(self) -> float:
        return self.other / self.base if self.base > 0 else math.inf if self.other > 0 else 1.0

    @property
    def larger(self) -> bool:
        """The gap is larger at `other`, beyond chance and by more than rounding differs."""
        return self.clear and self.ratio >= RATIO

    @property
    def clear(self) -> bool:
        """Beyond chance."""
        return self.z >= needed(self.sequences)

    @property
    def enough(self) -> bool:
        return self.sequences >= SEQUENCES

    def evidence(self, base: str, other: str) -> dict[str, Any]:
        """JSON-able, by the two kinds' names."""
        return {
            f"mean_abs_{other}": self.abs_other, f"mean_abs_{base}": self.abs_base, f"tokens_{other}": self.n_other,
            f"tokens_{base}": self.n_base, "ratio_on_token_scale": _finite(self.ratio), "std_errors": _finite(self.z),
            "share_of_gap": self.share,
        }  # fmt: skip


@lru_cache(maxsize=256)
def needed(sequences: int) -> float:
    """Standard errors that are beyond chance where the error itself comes from so many sequences (Student's t)."""
    return max(SURE, t_quantile(1 - CHANCE, sequences - 1)) if sequences >= 2 else math.inf


def _finite(x: float) -> float | None:
    return x if math.isfinite(x) else None


def contrast(bins: Bins | None, base: Sequence[str], other: Sequence[str]) -> Contrast | None:
    """The gap at the bins `other` against that at `base`; None where one of them has no tokens."""
    if bins is None:
        return None
    x, y = bins.merged(base, "x"), bins.merged(other, "x")
    if not x.n("x") or not y.n("x"):
        return None
    mean, more = x.mean("x", "scaled"), y.mean("x", "scaled")
    error = math.hypot(*(0.0 if math.isnan(e) else e for e in (x.std_error("x", "scaled"), y.std_error("x", "scaled"))))
    sequences = min(x.get("x", "sequences"), y.get("x", "sequences"))
    sure = error > 0 and sequences >= 2
    n, m = x.n("x"), y.n("x")
    total = mean * n + more * m
    return Contrast(
        n, m, mean, more, x.mean("x"), y.mean("x"), (more - mean) / error if sure else 0.0,
        max(0.0, (more - mean) * m / total) if total else 0.0, sequences,
    )  # fmt: skip


def told(code: str, message: str, sure: bool, **more: Any) -> Finding:
    """A finding as its code has it, or, from too few sequences, one that decides nothing."""
    if sure:
        return finding(code, message, **more)
    few = f"; not decided: that takes {SEQUENCES} sequences that show it clearly"
    return finding(code, message + few, severity=WARN, outcome=OPEN, **more)
