"""What a signature reads and what it answers.

A dump has no legs: nothing can be run again, so a cause is read from the shape of the data. A signature is one module
with a `Signature` in `SIGNATURES`. It names its cause only when the data fits and says what was ruled out; where it
lacks data it says what it needs; where another cause fits alike, `weigh` lets both abstain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from onepolicy.counted import Counted
from onepolicy.profiles.base import Bins
from onepolicy.rows import Rows
from onepolicy.sums import Sums
from onepolicy.types import Finding, Measurement


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that was added up from a dump.

    `names`: the two scorings, sampler's first. `sums`, `measurements`: of the main pair, None if there is none.
    `profiles`: key of `PROFILES` -> its bins, absent where the dump does not tell. `extra`: what signatures counted
    themselves (`Signature.look`), by signature. `rows`: one a sequence. `facts`: what the dump declares: name of a
    column -> sorted list of the values seen (`temperature`, `top_p`, `logprob_semantics`, `dtypes`, `versions`, ...).
    `above`: codes of findings of a higher rank.
    """

    names: tuple[str, str]
    sums: Sums
    measurements: Mapping[str, Measurement]
    profiles: Mapping[str, Bins]
    rows: Rows
    extra: Mapping[str, Counted] = field(default_factory=dict[str, Counted])
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    above: tuple[str, ...] = ()

    @property
    def n(self) -> int:
        """Tokens that are compared."""
        return self.sums.counts.get("scored", 0)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a signature says. `fits`: the finding is the cause's; `no`: the data speaks against it, `why` says what;
    `unclear`: it neither fits nor is ruled out (too few tokens, rivals alike); `lacks`: the dump does not tell what it
    needs. `strength`: how well it fits, as the share of the gap (mean |d|) that it explains, 0 to 1."""

    verdict: Literal["fits", "no", "unclear", "lacks"]
    why: str
    finding: Finding | None = None
    strength: float = 0.0


@dataclass(frozen=True, slots=True)
class Signature:
    """One cause. `code`: its finding; `needs`: profiles and columns it cannot do without; `rivals`: signatures that
    leave the same mark, so that both abstain unless one is ruled out; `look`: what it counts of a batch itself (a
    `Seen` and the batch's pairs), where profiles and rows are not enough. `last`: asked only if none with a smaller
    number fits (1: what is left is described; 2: what is left is rounding)."""

    key: str
    code: str
    says: str
    judge: Callable[[Evidence], Answer]
    needs: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()
    look: Callable[[Any], Counted] | None = None
    last: int = 0
