"""A section of the screen: the verdict, its sentences, and what was compared."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from onepolicy.report import words
from onepolicy.report.sections import STYLE
from onepolicy.report.sentences import sentences
from onepolicy.report.text import escaped
from onepolicy.types import Report


def verdict(report: Report) -> Iterator[RenderableType]:
    """The outcome in one line, then what it means, then both engines, the bounds, the floor and the counts."""
    head = Text(no_wrap=False)
    head.append(f" {report.outcome.value.upper()} ", style=f"bold reverse {STYLE[report.outcome]}")
    head.append(f" {words.headline(report)}", style="bold")
    yield head
    for said in sentences(report):
        yield _indented(Text(said))
    for label, said in _compared(report):
        yield _indented(Text(f"{label:<9}{said}"))
    if report.measurements:
        yield _indented(Text(words.counted(report), style="dim"))


def _compared(report: Report) -> Iterator[tuple[str, str]]:
    yield from words.sides(report)
    yield "bounds", escaped(report.preset, 60)
    if report.floor is not None and report.floor.source != "incomplete":
        yield "floor", words.floor_words(report.floor)
    if said := words.suite_words(report):
        yield "suite", said
    if said := words.dump_words(report):
        yield "dump", said


def _indented(text: Text) -> Padding:
    return Padding(text, (0, 0, 0, 2))
