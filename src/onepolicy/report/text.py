"""A report as one screen of terminal text."""

from __future__ import annotations

from onepolicy.errors import MissingExtra
from onepolicy.types import Report


def render(report: Report, width: int = 100, color: bool = False) -> str:
    """The report as text of at most `width` columns (60 to 100 are used), with terminal colours if `color`.

    Errors: `MissingExtra` when rich is not installed.
    """
    try:
        from onepolicy.report.screen import screen
    except ImportError as err:
        raise MissingExtra("rich", "cli", "the report as text") from err
    return screen(report, width, color)


def escaped(text: object, limit: int = 400) -> str:
    """One printable line: control, bidirectional and other invisible characters are escaped, the rest is cut."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text)[: limit + 1])
    return line if len(line) <= limit else line[: limit - 1] + "…"
