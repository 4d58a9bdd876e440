"""A report of the token checks: terminal, Markdown, JUnit, JSON. No number is computed here.

Texts of rollouts, tokenizers and templates are hostile: everything goes through `escaped`, and Markdown's `prose`.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

from onepolicy.codes import CODES
from onepolicy.errors import MissingExtra
from onepolicy.report import junit, markdown, words
from onepolicy.report.json import encoded
from onepolicy.report.listing import listed
from onepolicy.report.text import escaped
from onepolicy.types import Outcome, TokenReport

FORMAT = 1
_KIND = "onepolicy_tokens"


def headline(report: TokenReport) -> str:
    """The verdict in words: the title of the finding that made it, or what was found the same."""
    made_it = [f for f in report.findings if f.outcome is report.outcome]
    if report.outcome is Outcome.PASS or not made_it:
        return report.headline
    return CODES[made_it[0].code].title


def counted(report: TokenReport) -> str:
    """What was looked at, in numbers. Counts of findings stand with the findings."""
    looked = {name: n for name, n in report.counts.items() if name not in CODES}
    return " · ".join(f"{n:,} {escaped(_one_of(name) if n == 1 else name, 60)}" for name, n in looked.items())


def _one_of(name: str) -> str:
    """The name of what is counted, of one of them: `records` -> `record`."""
    word, *rest = name.split(" ")
    return " ".join([word.removesuffix("s"), *rest])


# -- the screen --------------------------------------------------------------------------------------------------------


def render(report: TokenReport, width: int = 100, color: bool = False) -> str:
    """The report as text of at most `width` columns (60 to 100 are used). Errors: `MissingExtra` without rich."""
    try:
        from rich.console import Console
    except ImportError as err:
        raise MissingExtra("rich", "cli", "the report as text") from err
    out = io.StringIO()
    console = Console(
        file=out, width=max(60, min(width, 100)), force_terminal=color, color_system="standard" if color else None,
        no_color=not color, highlight=False, markup=False, emoji=False, legacy_windows=False,
    )  # fmt: skip
    for part in _screen(report):
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _screen(report: TokenReport) -> Iterator[Any]:
    from rich.padding import Padding
    from rich.text import Text

    from onepolicy.report.findings import findings
    from onepolicy.report.sections import STYLE

    head = Text(f" {report.outcome.value.upper()} ", style=f"bold reverse {STYLE[report.outcome]}")
    yield Text.assemble(head, (f" {headline(report)}", "bold"))
    wide = max((len(k) for k in report.subject), default=0) + 2
    for name, said in report.subject.items():
        yield Padding(Text(f"{escaped(name, 20):<{wide}}{escaped(said, 300)}"), (0, 0, 0, 2))
    if report.counts:
        yield Padding(Text(counted(report), style="dim"), (0, 0, 0, 2))
    yield from findings(report)
    for listing in report.listings:
        yield from listed(listing)
    first = next((f for f in report.findings if not words.is_note(f)), None)
    if first is not None:
        yield Text("\nNext  ", style="bold").append(f"causes and remedies:  onepolicy explain {first.code}", "not bold")


# -- Markdown ----------------------------------------------------------------------------------------------------------

_SYMBOL = {Outcome.PASS: "✓", Outcome.DRIFT: "✗", Outcome.INCONCLUSIVE: "?", Outcome.ERROR: "✗"}


def render_markdown(report: TokenReport) -> str:
    """The report as GitHub-flavoured Markdown of at most `markdown.LIMIT` characters."""
    lines = [f"## {_SYMBOL[report.outcome]} onepolicy tokens: {report.outcome.value}, {headline(report)}", ""]
    lines += [
        f"- {markdown.prose(escaped(k, 20))}: {markdown.prose(escaped(v, 300))}" for k, v in report.subject.items()
    ]
    lines += [f"- {markdown.prose(counted(report))}"] if report.counts else []
    lines += ["", *markdown.findings_section(report), ""]
    out = "\n".join(lines)
    for listing in report.listings:
        text = "\n".join(markdown.folded(listing))
        if len(out) + len(text) > markdown.LIMIT - 500:
            return f"{out}\nLeft out, too long: {escaped(listing.title, 80)} and what follows.\n"
        out += f"\n{text}\n"
    return out


# -- JUnit -------------------------------------------------------------------------------------------------------------


def render_junit(report: TokenReport) -> str:
    """JUnit XML: the verdict and every finding that is no note, a case each; plain ASCII."""
    cases = [junit.judged("verdict", "verdict", report.outcome, headline(report))]
    cases += [junit.finding_case(f, report) for f in report.findings if not words.is_note(f)]
    return junit.document(
        "onepolicy tokens", cases, list(_properties(report)), f"{report.outcome.value}: {headline(report)}"
    )


def _properties(report: TokenReport) -> Iterator[tuple[str, str]]:
    yield "outcome", report.outcome.value
    yield from ((escaped(k, 60), escaped(v, 300)) for k, v in report.subject.items())
    yield from ((escaped(k, 60), str(n)) for k, n in report.counts.items())


# -- JSON --------------------------------------------------------------------------------------------------------------


def to_json(report: TokenReport) -> str:
    """`{"onepolicy_tokens": 1, ...}`, the rest as the fields of `types.TokenReport`. NaN and infinities are tagged."""
    fields = {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
    return json.dumps({_KIND: FORMAT, **encoded(fields)}, ensure_ascii=True, allow_nan=False, indent=1)


#: format -> function of a `TokenReport` that gives its text.
TOKEN_RENDERERS: dict[str, Callable[..., str]] = {
    "text": render, "json": to_json, "markdown": render_markdown, "junit": render_junit,
}  # fmt: skip
