"""The one screen: verdict, findings, bounds, what the gap does, legs, positions, the gap, the worst tokens, what next.

Every text that may come from a rollout or a file goes through `escaped`, and rich never reads markup here.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from onepolicy.report.bounds import bounds
from onepolicy.report.findings import findings
from onepolicy.report.gap import answer, gap_table
from onepolicy.report.legs import legs, positions
from onepolicy.report.listing import listed
from onepolicy.report.text import escaped
from onepolicy.report.tokens import worst_tokens
from onepolicy.report.verdict import verdict
from onepolicy.report.words import is_note, withheld
from onepolicy.types import Report


def screen(report: Report, width: int, color: bool) -> str:
    """The report as text. See `text.render`."""
    out = io.StringIO()
    console = Console(
        file=out,
        width=max(60, min(width, 100)),
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    unjudged = withheld(report)
    for part in (
        verdict(report),
        findings(report),
        bounds(report, console.width),
        answer(report, unjudged),
        legs(report, console.width),
        positions(report, console.width, unjudged),
        gap_table(report, console.width, unjudged),
        *(listed(x) for x in report.listings),
        worst_tokens(report, console.width),
        _next(report),
    ):
        for line in part:
            console.print(line)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


_TIGHTER = {"bitwise": None, "strict": "bitwise"}


def _next(report: Report) -> Iterator[RenderableType]:
    """The one command that helps most from here."""
    yield Text("\nNext  ", style="bold").append(_command(report), style="not bold")
    if report.context.get("scores"):
        yield Text(f"      the scores are saved in {escaped(report.context['scores'])}", style="dim")


def _command(report: Report) -> str:
    first = next((f for f in report.findings if not is_note(f)), None)
    if first is not None:
        return f"causes and remedies:  onepolicy explain {first.code}"
    if any(g.metric == "gap_over_floor/rms" for g in report.gates):
        return "what is held against the floor:  onepolicy explain gap_over_floor/rms"
    tighter = _TIGHTER.get(report.preset, "strict")
    if tighter:
        return f"would tighter bounds pass too?  onepolicy judge REPORT --bounds {tighter}"
    return f"what these bounds stand for:  onepolicy explain {escaped(report.preset, 60)}"
