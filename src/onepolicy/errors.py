"""Every error that onepolicy raises on purpose, and the exit code it maps to.

    OnepolicyError                4
    ├── UsageError                2   command line, configuration, preset
    │   ├── UnknownName           2   a name that no table has; says the nearest one
    │   └── MissingExtra          2   a package that is not installed; also an ImportError
    ├── ContentError              4   data that breaks the contract; also a ValueError
    │   ├── AlignmentError        4   two scorings that are not of the same tokens
    │   └── MergeError            4   two Sums that may not be added
    └── EngineError               4   an engine that failed; also a RuntimeError
        ├── EngineDied            4   its process ended half way
        └── EngineTimeout         4   it did not answer in time

A message is one line: what, where, got, wanted, what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OnepolicyError(Exception):
    """Base of all errors raised on purpose. `exit_code` is what the command line returns."""

    exit_code = 4


class UsageError(OnepolicyError):
    """The command line, the configuration or a preset asks for something that cannot be."""

    exit_code = 2


class UnknownName(UsageError):
    """A name that is in none of our tables."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
        super().__init__(f"unknown {kind} {name!r}; {hint}")
        self.kind, self.name, self.suggestion = kind, name, near[0] if near else None


class MissingExtra(UsageError, ImportError):
    """A third-party package that this feature needs is not installed."""

    def __init__(self, package: str, extra: str, why: str) -> None:
        super().__init__(f"{why} needs the package {package!r}: pip install 'onepolicy[{extra}]'")
        self.package, self.extra = package, extra


class ContentError(OnepolicyError, ValueError):
    """Data that breaks the column contract."""


class AlignmentError(ContentError):
    """Two scorings that cannot be compared token by token."""


class MergeError(ContentError):
    """Two Sums that were not made the same way and may not be added."""


class EngineError(OnepolicyError, RuntimeError):
    """An engine refused, failed, or gave something that is not what it promised."""


class EngineDied(EngineError):
    """The engine's process ended before it had answered."""


class EngineTimeout(EngineError):
    """The engine's process did not answer within its time limit."""
