"""A table for people, on the screen. Its cells may come from a file: they are escaped."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from onepolicy.report.text import escaped
from onepolicy.types import Listing

#: Rows of a table; the rest are counted.
ROWS = 24
#: A first column of at most so many characters is never broken.
NAME = 40
#: A head of numbers of at most so many characters, its colon with it, is never broken.
HEAD = 9
#: Columns of a table that has room for names in one line.
WIDE = 7


def listed(listing: Listing) -> Iterator[Any]:
    """For the screen."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from onepolicy.report.sections import heading

    yield heading(escaped(listing.title, 80), escaped(listing.note, 200))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for i, name in enumerate(listing.columns):
        _add_column(table, i, escaped(name, 60), [row[i] for row in listing.rows], len(listing.columns))
    for row in listing.rows[:ROWS]:
        table.add_row(*(Text(escaped(cell, 300)) for cell in row))
    yield Padding(table, (0, 0, 0, 2))
    if len(listing.rows) > ROWS:
        yield Text(f"  and {len(listing.rows) - ROWS} more", style="dim")


def _add_column(table: Any, i: int, name: str, cells: list[str], columns: int) -> None:
    """Numbers stay in one line, and so do names, since they are copied from here; a wide table breaks names at spaces
    and heads of numbers where they are longer than the numbers."""
    longest = max(map(len, cells), default=0)
    if name.endswith(":"):
        words = name.removesuffix(":").split(" ")
        width = max(longest, *map(len, words)) if len(name) > HEAD else HEAD
        table.add_column("\n".join(wrap(" ".join(words), width)), justify="right", no_wrap=True)
    else:
        table.add_column(name, overflow="fold", no_wrap=i == 0 and longest <= NAME and columns <= WIDE)
