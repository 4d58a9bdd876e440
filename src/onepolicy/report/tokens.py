"""A section of the screen: the worst tokens in their context. Everything here is hostile text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.cells import cell_len
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from onepolicy.report.sections import heading
from onepolicy.report.text import escaped
from onepolicy.types import Report


def worst_tokens(report: Report, width: int) -> Iterator[RenderableType]:
    """Each worst token between what stands before and after it, with both log-probs."""
    tokens = (report.context.get("tokens") or [])[: 5 if len(report.findings) < 4 and not report.legs else 3]
    if not tokens:
        return
    yield heading("Worst tokens", "largest gap first; log-probs of the token in »«")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("  in context", no_wrap=True, overflow="ellipsis", ratio=1)
    for side in ("sampler", "scorer"):
        table.add_column(side, justify="right", no_wrap=True)
    table.add_column(" record @ position", no_wrap=True)
    places = [f" {_short(row['record'])} @ {row['position']}" for row in tokens]
    room = width - 22 - max(map(len, places))
    for row, where in zip(tokens, places, strict=True):
        table.add_row(_in_context(row, room), f"{row['sampler']:.4f}", f"{row['scorer']:.4f}", Text(where, "dim"))
    yield table


def _in_context(row: dict[str, Any], room: int) -> Text:
    """`…before »token« after…` within about `room` cells; the token keeps its place."""
    token = _clipped(escaped(row["token"], 60), room // 2)
    rest = max(4, room - cell_len(token) - 4)
    before = _clipped(escaped(str(row["before"])[-80:])[::-1], rest * 2 // 3)[::-1]
    after = _clipped(escaped(str(row["after"])[:80]), rest - cell_len(before))
    text = Text(f"  {before}", style="dim")
    text.append(f"»{token}«", style="not dim bold")
    return text.append(after)


def _clipped(text: str, cells: int) -> str:
    """The start of `text` that fits into `cells` terminal cells."""
    if cell_len(text) <= cells:
        return text
    kept = ""
    for c in text:
        if cell_len(kept + c) > cells - 1:
            break
        kept += c
    return kept + "…"


def _short(record: Any) -> str:
    name = escaped(record, 200)
    return name if len(name) <= 18 else f"{name[:8]}…{name[-8:]}"
