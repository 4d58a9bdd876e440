"""What the sections of the screen share: a heading and the colours of outcomes."""

from __future__ import annotations

from rich.text import Text

from onepolicy.types import Outcome

STYLE = {Outcome.PASS: "green", Outcome.DRIFT: "red", Outcome.INCONCLUSIVE: "yellow", Outcome.ERROR: "magenta"}


def heading(title: str, note: str = "", unjudged: bool = False) -> Text:
    """An empty line and a section's title."""
    text = Text(f"\n{title}", style="bold")
    if unjudged:
        text.append("  unjudged", style="yellow")
    return text.append(f"  {note}" if note else "", style="not bold dim")
