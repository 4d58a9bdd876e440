"""Two sections of the screen: what the gap does to an answer, and the gap itself with its intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from onepolicy.report import words
from onepolicy.report.numbers import factor, interval, near_one, number, share
from onepolicy.report.rows import position_rows
from onepolicy.report.sections import heading
from onepolicy.types import Report

#: label, metric, how its value is written. Two columns, read down.
_ROWS: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("mean |d|", "abs_log_ratio/mean", number),
    ("p50  |d|", "abs_log_ratio/p50", number),
    ("p95  |d|", "abs_log_ratio/p95", number),
    ("p99  |d|", "abs_log_ratio/p99", number),
    ("max  |d|", "abs_log_ratio/max", number),
    ("KL k3", "kl_sampler_scorer_k3/mean", number),
    ("KL exact", "kl_sampler_scorer_exact/mean", number),
    ("mean ratio", "ratio/mean", near_one),
    ("bit-equal", "bit_equal/share", share),
)


def answer(report: Report, unjudged: bool) -> Iterator[RenderableType]:
    """What the gap does at the user's reply length: the normalised form, and the textbook walk beside it."""
    found = words.answer(report)
    if not found:
        return
    title = f"What the gap does to a reply of {found['length']:,.0f} tokens"
    yield heading(title, f"per-token sd {number(found['sd'])} nats", unjudged)
    if report.legs:  # a long screen: the sentence above has said the first of them
        yield from _short_answer(found)
        return
    rows = (
        (
            "whole-answer log-ratio",
            f"{number(found['drift'], 2)} ± {number(found['spread'], 2)}",
            "nats, drift ± spread (normalised)",
        ),
        ("median answer's ratio", factor(found["median_ratio"]), "e^drift (normalised)"),
        ("  by the textbook walk", f"×{number(found['walk_factor'])}", "either way: e^spread, no drift"),
        ("effective answers", share(found["ess_share"]), "ESS of sequence weights"),
        ("clip decisions at risk", share(found.get("outside_clip_share")), "tokens with ratio outside 1 ± 0.2"),
    )
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(style="dim")
    for label, value, note in rows:
        grid.add_row(f"  {label}", value, note, style="dim" if unjudged else "")
    yield grid
    yield Text("  normalised: mean ratio stays 1, so answers drift; the walk leaves that out", style="dim")


def _short_answer(found: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The same in one line, or two."""
    median = f"median ratio {factor(found['median_ratio'])} (textbook walk ×{number(found['walk_factor'])})"
    risk = found.get("outside_clip_share")
    at_risk = "" if risk is None else f" · clip decisions at risk {share(risk)}"
    said = f"{median} · effective answers {share(found['ess_share'])}{at_risk}"
    yield Padding(Text(said), (0, 0, 0, 2))


def gap_table(report: Report, width: int, unjudged: bool) -> Iterator[RenderableType]:
    """Size of the gap, in two columns where there is room, read down."""
    cells = [cell for row in _ROWS if (cell := _cell(report, *row)) is not None]
    if not cells:
        return
    yield heading("Gap", "d = scorer - sampler log-prob, nats; one-sided 99% limits [lower, upper]", unjudged)
    columns = 2 if width >= 76 else 1
    rows = -(-len(cells) // columns)
    grid = Table.grid(padding=(0, 1, 0, 0))
    for _ in range(columns):
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True, justify="right")
        grid.add_column(no_wrap=True, style="dim")
    for i in range(rows):
        row = [text for label, *more in cells[i::rows] for text in (f"  {label}", *more)]
        grid.add_row(*row, style="dim" if unjudged else "")
    yield grid
    positions = position_rows(report)
    if positions and not any(row.limits for row in positions):
        said = " · ".join(f"{row.positions}: {row.rms}" for row in positions)
        yield Padding(Text(f"RMS at positions {said}", style="dim"), (0, 0, 0, 2))


def _cell(report: Report, label: str, key: str, write: Callable[[float | None], str]) -> tuple[str, str, Text] | None:
    m = report.measurements.get(key)
    if m is None or (m.value is None and "exact" in key):
        return None
    if m.value is None:
        return label, "–", Text("not measured")
    if m.lower is None or m.upper is None:
        return label, write(m.value), Text("interval withheld" if m.why else "")
    limits = interval(m.lower, m.upper) if write is number else f"[{write(m.lower)}, {write(m.upper)}]"
    return label, write(m.value), Text(limits)
