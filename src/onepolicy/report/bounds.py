"""A section of the screen: the bounds, each with its value, limit and outcome."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from onepolicy.report.numbers import count, number
from onepolicy.report.sections import STYLE, heading
from onepolicy.report.text import escaped
from onepolicy.report.words import gate_word, silent
from onepolicy.types import Gate, Outcome, Report

#: Narrower than this, what could have been seen is left out.
_ROOM = 72
#: Alarms that are rows; more of them are counted.
_ALARMS = 3


def bounds(report: Report, width: int) -> Iterator[RenderableType]:
    """Every bound but the alarms that were not raised; on a long screen what was not covered is a finding alone."""
    shown = [g for g in report.gates if not silent(g) and not (report.legs and gate_word(g) == "not covered")]
    alarms = [g for g in shown if g.when == "alarm"]
    gates = [g for g in shown if g not in alarms[_ALARMS:]]
    if not gates:
        return
    yield heading("Bounds", "to pass, the one-sided 99% limit must be within the bound")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("  metric", no_wrap=True)
    for name in ("value", "99% limit", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    if width >= _ROOM:
        table.add_column("sees | needs", justify="right", no_wrap=True)
    for gate in gates:
        row = _row(gate, "/" if width >= _ROOM else "\n    /")
        table.add_row(*row[: len(table.columns)], style="" if _judged(gate) else "dim")
    yield table
    if len(alarms) > _ALARMS:
        yield Text(f"  alarms at {len(alarms) - _ALARMS} more stretches of positions: see below", style="dim")
    if width >= _ROOM:
        yield Text("  sees: smallest true value found 9 times in 10 | needs: tokens to decide", style="dim")


def _judged(gate: Gate) -> bool:
    return gate_word(gate) in list(Outcome)


def _row(gate: Gate, slash: str) -> tuple[str | Text, ...]:
    word = Text(gate_word(gate), style=STYLE[gate.outcome] if _judged(gate) else "dim")
    figures = (number(gate.value), number(gate.limit), number(gate.bound))
    return f"  {escaped(gate.metric, 60).replace('/', slash)}", *figures, word, _seen(gate)


def _seen(gate: Gate) -> str:
    if gate.outcome is Outcome.INCONCLUSIVE and gate.would_decide:
        return f"{count(gate.would_decide[0])} tokens"
    return number(gate.smallest_seen)
