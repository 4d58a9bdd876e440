"""What a finding code is: its rank in the order of suspicion, its weight, what it says, what to do."""

from __future__ import annotations

from dataclasses import dataclass

from onepolicy.types import Outcome, Severity

FAIL, WARN, INFO = Severity.FAIL, Severity.WARN, Severity.INFO
PASS, DRIFT, OPEN, ERROR = Outcome.PASS, Outcome.DRIFT, Outcome.INCONCLUSIVE, Outcome.ERROR


@dataclass(frozen=True, slots=True)
class Code:
    """One kind of finding. `outcome` is what it makes of the verdict (pass: nothing)."""

    rank: int
    severity: Severity
    outcome: Outcome
    title: str
    advice: str
    withholds: bool = False
