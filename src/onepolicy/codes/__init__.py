"""Every finding code: its rank in the order of suspicion, its severity, what it says, what to do.

Rank: 1 integrity of the record, 2 tokens, 3 meaning of the log-probs, 4 staleness, 5 numerics, 6 not decided, 7 notes.
A failing finding that `withholds` leaves the numbers below it unjudged. Each code has a page, `onepolicy explain CODE`.

To add one: a row in `numbers.py`, `tokens.py`, `loop.py` or `audit.py`, and `pages/<code>.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

from onepolicy.codes.audit import AUDIT
from onepolicy.codes.dump import DUMP
from onepolicy.codes.kind import FAIL, INFO, PASS, WARN, Code
from onepolicy.codes.loop import LOOP
from onepolicy.codes.numbers import NUMBERS
from onepolicy.codes.tokens import TOKENS
from onepolicy.errors import UnknownName
from onepolicy.types import Finding, Severity

__all__ = ["CODES", "Code", "by_rank", "finding", "page"]

CODES: dict[str, Code] = {**NUMBERS, **TOKENS, **LOOP, **AUDIT, **DUMP}


def finding(code: str, message: str, **more: Any) -> Finding:
    """A `Finding` with the code's severity, outcome and advice, unless given otherwise."""
    spec = CODES[code]
    given: dict[str, Any] = {"severity": spec.severity, "outcome": spec.outcome, "advice": spec.advice, **more}
    return Finding(code=code, message=message, **given)


def page(code: str) -> str:
    """The Markdown page of a code. Errors: `UnknownName` (did you mean)."""
    if code not in CODES:
        raise UnknownName("finding code", code, CODES)
    return (resources.files("onepolicy") / "pages" / f"{code}.md").read_text(encoding="utf-8")


def by_rank(findings: list[Finding]) -> list[Finding]:
    """In the order of suspicion: by rank, a failure before a warning; notes that change nothing come last."""
    order: Mapping[Severity, int] = {FAIL: 0, WARN: 1, INFO: 2}

    def place(f: Finding) -> tuple[bool, int, int]:
        return f.severity is INFO and f.outcome is PASS, CODES[f.code].rank, order[f.severity]

    return sorted(findings, key=place)
