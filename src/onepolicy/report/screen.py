"""The one screen: verdict, findings, gates, what the gap does, the gap, the worst tokens, what next.

Every text that may come from a rollout or a file goes through `escaped`, and rich never reads markup here.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from onepolicy.codes import CODES
from onepolicy.report.gap import answer, gap_table
from onepolicy.report.numbers import count, number
from onepolicy.report.text import escaped
from onepolicy.report.tokens import worst_tokens
from onepolicy.types import Finding, Gate, Outcome, Report, Severity

_STYLE = {Outcome.PASS: "green", Outcome.DRIFT: "red", Outcome.INCONCLUSIVE: "yellow", Outcome.ERROR: "magenta"}
_MARK = {Severity.FAIL: ("✗", "red"), Severity.WARN: ("!", "yellow"), Severity.INFO: ("·", "dim")}
#: Kinds of findings shown whole; more are named in one line.
_SHOWN = 5


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
    unjudged = _withheld(report)
    for part in (
        _verdict(report),
        _findings(report),
        _gates(report),
        answer(report, unjudged),
        gap_table(report, unjudged),
        worst_tokens(report, console.width),
        _next(report),
    ):
        for line in part:
            console.print(line)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _withheld(report: Report) -> bool:
    """Whether a failing finding leaves the numbers below it unjudged."""
    return any(CODES[f.code].withholds and f.severity is Severity.FAIL for f in report.findings)


# -- verdict -----------------------------------------------------------------------------------------------------------


def _verdict(report: Report) -> Iterator[RenderableType]:
    style = _STYLE[report.outcome]
    head = Text(no_wrap=False)
    head.append(f" {report.outcome.value.upper()} ", style=f"bold reverse {style}")
    head.append(f" {_sentence(report)}", style="bold")
    yield head
    for name, fingerprint in report.fingerprints.items():
        dtype = (report.context.get("dtypes") or {}).get(name)
        yield Padding(Text(f"{escaped(name, 16):<9}{_engine(fingerprint, dtype)}"), (0, 0, 0, 2))
    yield Padding(Text(f"bounds   {escaped(report.preset, 60)}"), (0, 0, 0, 2))
    yield Padding(Text(_counted(report), style="dim"), (0, 0, 0, 2))


def _sentence(report: Report) -> str:
    """The verdict in words: the title of the finding that made it."""
    made_it = [f for f in report.findings if f.outcome is report.outcome]
    title = CODES[made_it[0].code].title if made_it else ""
    return "the two sides agree within every bound" if report.outcome is Outcome.PASS else title


_PACKAGE = {"hf": "transformers", "fake": "onepolicy", "callable": "onepolicy"}


def _engine(fingerprint: Any, dtype: Any) -> str:
    """Engine, version, model, precision, device: what a person needs to tell two set-ups apart."""
    name = fingerprint.get("engine")
    if not name:
        return f"engine not recorded · {escaped(dtype or 'dtype not declared', 20)}"
    package = _PACKAGE.get(str(name), str(name))
    version = (fingerprint.get("versions") or {}).get(package)
    said = f"{name} {version}" if package in (name, "onepolicy") else f"{name} ({package} {version})"
    kv = fingerprint.get("kv_cache_dtype")
    parts = [
        said if version else name,
        fingerprint.get("model") or fingerprint.get("function"),
        dtype or fingerprint.get("dtype") or "dtype not declared",
        f"KV cache {kv}" if kv and kv != fingerprint.get("dtype") else None,
        fingerprint.get("quantization"),
        fingerprint.get("device"),
        f"fault {fingerprint['fault']}" if fingerprint.get("fault") not in (None, "none") else None,
    ]
    return " · ".join(escaped(p, 48) for p in parts if p)


def _counted(report: Report) -> str:
    counts, m = report.sums.counts, report.measurements.get("abs_log_ratio/mean")
    n, viewed = counts.get("scored", 0), counts.get("viewed", 0)
    of = "" if n == viewed else f" of {viewed:,}"
    kind = {"drawn": "drawn tokens", "loss": "tokens under the loss mask", "fixed": "tokens of fixed text"}
    clusters = f"{m.effective_clusters:.3g} effective clusters (by {report.sums.cluster_unit})" if m else "no clusters"
    tokens = f"{n:,}{of} {kind.get(report.sums.view, 'tokens')}"
    return f"{tokens} · {counts.get('viewed_sequences', 0):,} sequences · {clusters}"


# -- findings ----------------------------------------------------------------------------------------------------------


def _findings(report: Report) -> Iterator[RenderableType]:
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
    yield grid
    if len(groups) > _SHOWN:
        more = ", ".join(dict.fromkeys(g[0].code for g in groups[_SHOWN:]))
        yield Text(f"   and {len(groups) - _SHOWN} more: {more}", style="dim")


def _is_note(f: Finding) -> bool:
    """Shown, but it changes nothing."""
    return f.severity is Severity.INFO and f.outcome is Outcome.PASS


def _finding(group: list[Finding], said: set[str]) -> Text:
    """One kind of finding: its messages, then place, rivals and advice once. `said`: what stands above already."""
    first = group[0]
    note = _is_note(first)
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


# -- gates -------------------------------------------------------------------------------------------------------------


def _gates(report: Report) -> Iterator[RenderableType]:
    if not report.gates:
        return
    yield heading("Bounds", "to pass, the one-sided 99% limit must be within the bound")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("  metric", no_wrap=True)
    for name in ("value", "99% limit", "bound"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    table.add_column("sees | needs", justify="right", no_wrap=True)
    for gate in report.gates:
        word = _word(gate)
        table.add_row(
            f"  {gate.metric}",
            number(gate.value),
            number(gate.limit),
            number(gate.bound),
            Text(word, style=_STYLE[gate.outcome] if word in list(Outcome) else "dim"),
            _seen(gate),
            style="dim" if word not in list(Outcome) else "",
        )
    yield table
    yield Text("  sees: smallest true value found 9 times in 10 | needs: tokens to decide", style="dim")


def _word(gate: Gate) -> str:
    """The outcome, or why there is none."""
    for start, word in (
        ("unjudged", "unjudged"),
        ("not measured", "not covered"),
        ("significant, explained", "explained"),
        ("informs", "informs only"),
    ):
        if gate.why.startswith(start):
            return word if gate.outcome is Outcome.PASS else "not measured"
    return gate.outcome.value


def _seen(gate: Gate) -> str:
    if gate.outcome is Outcome.INCONCLUSIVE and gate.would_decide:
        return f"{count(gate.would_decide[0])} tokens"
    return number(gate.smallest_seen)


# -- what next ---------------------------------------------------------------------------------------------------------


_TIGHTER = {"bitwise": None, "strict": "bitwise"}


def _next(report: Report) -> Iterator[RenderableType]:
    first = next((f for f in report.findings if not _is_note(f)), None)
    tighter = _TIGHTER.get(report.preset, "strict")
    if first is not None:
        said = f"causes and remedies:  onepolicy explain {first.code}"
    elif tighter:
        said = f"would tighter bounds pass too?  onepolicy judge REPORT --bounds {tighter}"
    else:
        said = f"what these bounds stand for:  onepolicy explain {escaped(report.preset, 60)}"
    yield Text("\nNext  ", style="bold").append(said, style="not bold")
    if report.context.get("scores"):
        yield Text(f"      the scores are saved in {escaped(report.context['scores'])}", style="dim")


def heading(title: str, note: str = "", unjudged: bool = False) -> Text:
    """An empty line and a section's title."""
    text = Text(f"\n{title}", style="bold")
    if unjudged:
        text.append("  unjudged", style="yellow")
    return text.append(f"  {note}" if note else "", style="not bold dim")
