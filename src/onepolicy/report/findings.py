"""A section of the screen: the findings, in the order of suspicion."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from onepolicy.report.sections import heading
from onepolicy.report.text import escaped
from onepolicy.report.words import is_note
from onepolicy.types import Finding, Report, Severity, TokenReport

_MARK = {Severity.FAIL: ("✗", "red"), Severity.WARN: ("!", "yellow"), Severity.INFO: ("·", "dim")}
#: Kinds of findings shown whole; more are named in one line.
_SHOWN = 5


def findings(report: Report | TokenReport) -> Iterator[RenderableType]:
    """Each kind of finding with its place, rivals and advice."""
    if not report.findings:
        return
    yield heading("Findings", "most suspicious first")
    groups = [list(g) for _, g in groupby(report.findings, key=lambda f: (f.code, f.outcome))]
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=2)
    grid.add_column(ratio=1)
    said: set[str] = set()
    for group in groups[:_SHOWN]:
        mark, style = _MARK[group[0].severity]
        grid.add_row(Text(f" {mark}", style=style), _finding(group, said))
        if isinstance(report, TokenReport):  # a record may have several faults: each shows where it is
            said.discard(group[0].place)
    yield grid
    if len(groups) > _SHOWN:
        more = ", ".join(dict.fromkeys(g[0].code for g in groups[_SHOWN:]))
        yield Text(f"   and {len(groups) - _SHOWN} more: {more}", style="dim")


def _finding(group: list[Finding], said: set[str]) -> Text:
    """One kind of finding: its messages, then place, rivals and advice once. `said`: what stands above already."""
    first = group[0]
    note = is_note(first)
    text = Text(style="dim" if note else "")
    text.append(first.code, style="" if note else "bold")
    text.append("  " + "\n".join(escaped(f.message) for f in group))
    more = [("at ", first.place)]
    if not note:
        rivals = [("ruled out: ", "; ".join(first.ruled_out)), ("or: ", "; ".join(first.rivals))]
        more += [*rivals, ("→ ", first.advice)]
    for label, line in more:
        if line and line not in said:
            said.add(line)
            text.append(f"\n{label}{escaped(line)}", style="dim" if label == "at " else "")
    return text
