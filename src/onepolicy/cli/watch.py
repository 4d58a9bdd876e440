"""`onepolicy watch`: a monitor's rows in the terminal, while the run goes on."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onepolicy.errors import ContentError, UsageError
from onepolicy.types import Outcome

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

#: Rows that trends are drawn of, and the widest trend.
KEPT, TREND = 2_000, 40
#: Shown where the run has them, with the bound if there is one: name -> what it says.
SHOWN: dict[str, str] = {
    "abs_log_ratio/mean": "mean |d|, nats",
    "abs_log_ratio/p99.9": "p99.9 of |d|",
    "kl_sampler_scorer_k3/mean": "KL sampler to scorer",
    "ratio_bias/mean": "mean ratio - 1",
    "ess_token/share": "effective share of tokens",
    "over_two/share": "ratios above 2",
    "wrong_decisions/share": "clip decisions that flip",
    "lag/mean": "versions behind",
    "lag_0.kl_k3/mean": "KL, the scorer's version",
    "stale.kl_k3/mean": "KL, older versions",
    "corrected.ess/share": "effective share, corrected",
    "corrected.kept/share": "tokens kept",
    "missing/share": "missing log-probs",
}
_BARS = "▁▂▃▄▅▆▇█"
_SECONDS = 1.0


def watch(
    file: Annotated[Path, typer.Argument(metavar="MONITOR.jsonl", help="What a monitor's sink jsonl:PATH writes.")],
    once: Annotated[bool, typer.Option("--once", help="Print what is there now, and end.")] = False,
) -> int:
    """Follow a run's monitor: numbers against their bounds, trends, and alarms. Ctrl-C ends it.

    The exit code is that of the worst alarm in the file: 1 where one failed, 3 where no step is judged yet.

    \b
    Example:
      onepolicy watch monitor.jsonl
    """
    followed = Followed(file)
    followed.read()
    if once:
        _print(followed)
    else:
        _live(followed)
    return followed.outcome.exit_code


@dataclass
class Followed:
    """A file that grows: what is read of it so far."""

    path: Path
    header: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rows: deque[Mapping[str, Any]] = field(default_factory=lambda: deque[Mapping[str, Any]](maxlen=KEPT))
    judged: int = 0
    unreadable: int = 0
    #: finding code -> (first step, last step, steps, the last finding)
    alarms: dict[str, tuple[int, int, int, Mapping[str, Any]]] = field(default_factory=dict)
    #: codes of the last row
    on: frozenset[str] = frozenset()
    worst: Outcome = Outcome.PASS
    _at: int = 0
    _head: bytes = b""

    def read(self) -> bool:
        """Takes the whole lines that are new; whether there were any. Errors: `UsageError`, `ContentError`."""
        try:
            with self.path.open("rb") as stream:
                head = stream.read(len(self._head))  # holds the time at which the run began
                if head != self._head or os.fstat(stream.fileno()).st_size < self._at:
                    vars(self).update(vars(Followed(self.path)))  # a new run has taken the file's place
                stream.seek(self._at)
                text = stream.read()
        except OSError as err:
            raise UsageError(f"{self.path} cannot be read: {err.strerror or err}") from None
        whole = text[: text.rfind(b"\n") + 1]
        self._head = self._head or whole[:64]
        self._at += len(whole)
        for line in whole.splitlines():
            self._take(line)
        if whole and not self.header:
            raise ContentError(f"{self.path}: not a monitor's rows; wanted what the sink jsonl:PATH writes")
        return bool(whole)

    def _take(self, line: bytes) -> None:
        try:
            row = json.loads(line)
            if "onepolicy_monitor" in row:
                self.header = row
            elif self.header:
                self._add(row)
        except (ValueError, TypeError, KeyError, AttributeError):
            self.unreadable += 1

    def _add(self, row: Mapping[str, Any]) -> None:
        step = int(row["step"])
        numbers = {str(k): float(v) if v is not None else None for k, v in row["numbers"].items()}
        self.on = frozenset(str(f["code"]) for f in row["findings"])
        for f in row["findings"]:
            code, outcome = str(f["code"]), Outcome(f["outcome"])
            first, _, steps, _ = self.alarms.get(code, (step, step, 0, f))
            self.alarms[code] = (first, step, steps + 1, f)
            self.worst = max(self.worst, outcome, key=_ORDER.index)
        self.rows.append({"step": step, "time": row.get("time"), "numbers": numbers})
        self.judged += 1

    @property
    def outcome(self) -> Outcome:
        """The worst alarm's; inconclusive before a step is judged."""
        return self.worst if self.judged or self.worst is not Outcome.PASS else Outcome.INCONCLUSIVE

    @property
    def last(self) -> Mapping[str, Any]:
        return self.rows[-1] if self.rows else {"step": None, "numbers": {}}

    def column(self, name: str) -> list[float]:
        """A number over the rows that are kept, where it was measured."""
        return [x for r in self.rows if (x := r["numbers"].get(name)) is not None]


_ORDER = (Outcome.PASS, Outcome.INCONCLUSIVE, Outcome.DRIFT, Outcome.ERROR)


def _live(followed: Followed) -> None:
    from rich.live import Live

    console = _console()
    with Live(_screen(followed), console=console, auto_refresh=False, screen=False) as live:
        try:
            while True:
                if followed.read():
                    live.update(_screen(followed), refresh=True)
                time.sleep(_SECONDS)
        except KeyboardInterrupt:
            live.update(_screen(followed), refresh=True)


def _print(followed: Followed) -> None:
    _console().print(_screen(followed))


def _console() -> Any:
    import shutil

    from rich.console import Console

    from onepolicy.cli.outputs import coloured

    width = min(shutil.get_terminal_size((100, 40)).columns, 110)
    return Console(
        file=sys.stdout, width=width, no_color=not coloured(), highlight=False, markup=False, emoji=False,
        legacy_windows=False,
    )  # fmt: skip


def _screen(followed: Followed) -> RenderableType:
    from rich.console import Group

    return Group(*_lines(followed))


def _lines(followed: Followed) -> Iterator[RenderableType]:
    from onepolicy.report.text import escaped

    yield _verdict(followed)
    yield from _alarms(followed)
    yield ""
    yield _table(followed)
    left = followed.header.get("not_covered")
    if isinstance(left, list) and left:
        yield f"not covered in a loop: {escaped(', '.join(map(str, left)), 200)}"
    if followed.unreadable:
        yield f"{followed.unreadable:,} lines could not be read"


def _verdict(followed: Followed) -> Text:
    from rich.text import Text

    from onepolicy.report.text import escaped

    colour = {Outcome.PASS: "black on green", Outcome.INCONCLUSIVE: "black on yellow"}
    outcome, numbers = followed.outcome, followed.last["numbers"]
    line = Text(f" {outcome.upper()} ", style=colour.get(outcome, "white on red"))
    about = f"  {escaped(followed.path.name, 60)}, bounds {escaped(followed.header.get('preset', ''), 40)}: "
    if not followed.rows:
        return line.append(f"{about}no step is judged yet", style="default")
    ranks, tokens = numbers.get("monitor/ranks") or 1, numbers.get("tokens") or 0
    about += f"step {followed.last['step']:,}, {tokens:,.0f} tokens, {ranks:.0f} rank{'s' if ranks != 1 else ''}"
    return line.append(about + _ago(followed), style="default")


def _ago(followed: Followed) -> str:
    when = followed.last.get("time")
    if not isinstance(when, (int, float)) or time.time() - when < 60:
        return ""
    return f", {(time.time() - when) / 60:,.0f} min ago"


def _alarms(followed: Followed) -> Iterator[RenderableType]:
    """Failing ones first; what is over is dimmed."""
    from rich.table import Table
    from rich.text import Text

    from onepolicy.report.text import escaped

    order = sorted(followed.alarms.items(), key=lambda item: (item[1][3].get("severity") != "fail", item[1][0]))
    grid = Table.grid(padding=(0, 1))
    for code, (first, last, steps, f) in order:
        failing, over = f.get("severity") == "fail", code not in followed.on
        mark, style = ("✗", "red") if failing else ("!", "yellow")
        since = f"step {first:,}" if steps == 1 else f"{steps:,} steps from {first:,}"
        state = f"{since} to {last:,}, over" if over else f"{since} on"
        line = Text(escaped(code, 60), style="dim" if over else f"bold {style}")
        line.append(f"  {state}: {escaped(f.get('message', ''), 300)}", style="dim" if over else "not bold default")
        grid.add_row(Text(f" {mark}", style="dim" if over else style), line)
        if not over and f.get("advice"):
            grid.add_row("", Text(f"→ {escaped(f['advice'], 300)}", style="dim"))
    if order:
        yield grid


def _table(followed: Followed) -> RenderableType:
    from rich.table import Table

    from onepolicy.report.numbers import number

    limits = {b["metric"]: b["at_most"] for b in followed.header.get("bounds", []) if isinstance(b, dict)}
    table = Table(box=None, pad_edge=False, show_edge=False, header_style="dim")
    for name, justify in (("", "left"), ("now", "right"), ("bound", "right"), ("start", "right"), ("trend", "left")):
        table.add_column(name, justify=justify, no_wrap=True)  # pyright: ignore[reportArgumentType]
    now = followed.last["numbers"]
    for key, words in SHOWN.items():
        values = followed.column(key)
        if not values:
            continue
        limit = limits.get(key)
        above = limit is not None and abs(now.get(key) or 0.0) > limit
        start = sum(values[:8]) / len(values[:8])
        style = "red" if above else None
        cells = (number(now.get(key)), "" if limit is None else number(limit), number(start), trend(values))
        table.add_row(words, *cells, style=style)
    return table


def trend(values: list[float], width: int = TREND) -> str:
    """The values as bars, each the greatest of its stretch; the lowest bar is the least value."""
    if len(values) > width:
        edges = [len(values) * i // width for i in range(width + 1)]
        values = [max(values[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(values), max(values)
    if not high - low > 1e-12 * abs(high):
        return _BARS[0] * len(values)
    return "".join(_BARS[min(int((x - low) / (high - low) * len(_BARS)), len(_BARS) - 1)] for x in values)
