"""A table for people, on the screen. Its cells may come from a file: they are escaped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onepolicy.report.text import escaped
from onepolicy.types import Listing

#: Rows of a table; the rest are counted.
ROWS = 24
#: A first column of at most so many characters is never broken.
NAME = 40


def listed(listing: Listing) -> Iterator[Any]:
    """For the screen."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from onepolicy.report.sections import heading

    yield heading(escaped(listing.title, 80), escaped(listing.note, 200))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for i, name in enumerate(listing.columns):
        number = name.endswith(":")
        head = escaped(name.removesuffix(":"), 60)
        whole = i == 0 and max((len(row[0]) for row in listing.rows), default=0) <= NAME  # names are copied from here
        table.add_column(head, justify="right" if number else "left", overflow="fold", no_wrap=whole)
    for row in listing.rows[:ROWS]:
        table.add_row(*(Text(escaped(cell, 300)) for cell in row))
    yield Padding(table, (0, 0, 0, 2))
    if len(listing.rows) > ROWS:
        yield Text(f"  and {len(listing.rows) - ROWS} more", style="dim")
