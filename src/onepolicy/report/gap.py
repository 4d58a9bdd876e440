"""Two sections of the screen: what the gap does to an answer, and the gap itself with its intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from onepolicy.report.numbers import factor, interval, near_one, number, share
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
    from onepolicy.report.screen import heading

    found = report.context.get("answer") or {}
    if not found:
        return
    title = f"What the gap does to a reply of {found['length']:,.0f} tokens"
    yield heading(title, f"per-token sd {number(found['sd'])} nats", unjudged)
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


def gap_table(report: Report, unjudged: bool) -> Iterator[RenderableType]:
    """Size of the gap, in two columns."""
    from onepolicy.report.screen import heading

    cells = [cell for row in _ROWS if (cell := _cell(report, *row)) is not None]
    if not cells:
        return
    yield heading("Gap", "d = scorer - sampler log-prob, nats; one-sided 99% limits [lower, upper]", unjudged)
    half = (len(cells) + 1) // 2
    grid = Table.grid(padding=(0, 1, 0, 0))
    for _ in range(2):
        grid.add_column(no_wrap=True)
        grid.add_column(no_wrap=True, justify="right")
        grid.add_column(no_wrap=True, style="dim")
    for i in range(half):
        right = cells[half + i] if half + i < len(cells) else ("", "", "")
        grid.add_row(f"  {cells[i][0]}", *cells[i][1:], f"  {right[0]}", *right[1:], style="dim" if unjudged else "")
    yield grid


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
