"""Two sections of the screen: the legs by question, and the gap by position."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Literal

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from onepolicy.report.rows import LegRow, PositionRow, found_lines, leg_rows, not_run, position_rows
from onepolicy.report.sections import STYLE, heading
from onepolicy.report.sentences import ownership
from onepolicy.types import Outcome, Ran, Report

#: Narrower than this, what a leg compares is left out: its name says it.
_ROOM = 84

Cells = list[str | Text]
_HEAD = ("positions", "tokens", "RMS", "floors", "")
_SIDE: dict[str, Literal["left"]] = {"positions": "left", "": "left"}


def legs(report: Report, width: int) -> Iterator[RenderableType]:
    """The legs that were run, by question; those that were not in one line a reason; who owns the gap."""
    if not report.legs:
        return
    yield heading("Legs", "one factor changed; floors: gap / predicted rounding")
    groups = list(leg_rows(report))
    if groups:
        yield _leg_table(groups, width)
        said_already = {f.place for f in report.findings}
        for row in (row for _, rows in groups for row in rows):
            if row.note and row.note not in said_already:
                yield _indented(Text(f"{row.key}: {row.note}", style="yellow"))
    for said in found_lines(report):
        yield _indented(Text(said))
    if said := ownership(report):
        yield _indented(Text(f"whose gap: {said}"))
    for ran, style in ((Ran.FAILED, "yellow"), (Ran.NOT, "dim")):
        if groups := not_run(report, ran):
            said = "; ".join(f"{', '.join(keys)} ({why})" for why, keys in groups)
            yield _indented(Text(f"{ran.value}: {said}", style=style))


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, 2))


def _leg_table(groups: list[tuple[str, list[LegRow]]], width: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", expand=width >= _ROOM)
    table.add_column("  leg", no_wrap=True)
    if width >= _ROOM:
        table.add_column("what is compared", no_wrap=True, overflow="ellipsis", ratio=1, style="dim")
    for name in ("tokens", "RMS", "max", "floors"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    for question, rows in groups:
        table.add_row(Text(f"  {question}", style="dim italic"))
        for row in rows:
            compared = [row.compared.split(": ")[-1]] if width >= _ROOM else []
            figures = (row.tokens, row.rms, row.largest, row.over_floor)
            table.add_row(f"    {row.key}", *compared, *figures, _outcome(row.outcome))
    return table


def _outcome(outcome: Outcome | None) -> Text:
    return Text("–") if outcome is None else Text(outcome.value, style=STYLE[outcome])


def positions(report: Report, width: int, unjudged: bool) -> Iterator[RenderableType]:
    """The gap by stretches of positions against the floor; in two columns, read down, where there is room.

    Without a floor the sizes are a line of the gap's own section.
    """
    rows = position_rows(report)
    if not any(row.limits for row in rows):
        return
    yield heading("Gap by position", "RMS in nats; floors with 99% limits", unjudged)
    half = -(-len(rows) // 2)
    left, right = ([_position(row, gap) for row in part] for part, gap in ((rows[:half], "  "), (rows[half:], "   ")))
    if len(rows) > 2 and _fits(left, right, width):
        body = [[*x, *y] for x, y in zip_longest(left, right, fillvalue=())]
    else:
        body = [_position(row, "  ") for row in rows]
    yield _position_table(body, unjudged)


def _position_table(body: list[Cells], unjudged: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for i in range(len(body[0]) // len(_HEAD)):
        for name in _HEAD:
            indent = "   " if i else "  "
            table.add_column(
                indent + name if name == _HEAD[0] else name, justify=_SIDE.get(name, "right"), no_wrap=True
            )
    for cells in body:
        table.add_row(*cells, style="dim" if unjudged else "")
    return table


def _fits(left: list[Cells], right: list[Cells], width: int) -> bool:
    """Whether the two halves stand side by side."""
    return sum(max(len(cells[i]) + 1 for cells in part) for part in (left, right) for i in range(len(_HEAD))) < width


def _position(row: PositionRow, indent: str) -> Cells:
    style = STYLE[row.outcome] if row.outcome is Outcome.DRIFT else ""
    floors, limits = Text(row.over_floor, style=style), Text(row.limits, style="dim")
    return [f"{indent}{row.positions}", row.tokens, row.rms, floors, limits]
