"""`onepolicy convert`: any framework's dump as one canonical file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onepolicy.cli import options
from onepolicy.cli.audit import Dump

Output = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Rollouts: .parquet or .jsonl.")]


def convert(dump: Dump, output: Output, overwrite: options.Overwrite = False) -> int:
    """Write a dump of any framework as one Parquet or JSON lines file, which every other command reads.

    Exit code 3: some records did not fit their tokens and were left out.

    \b
    Example:
      onepolicy convert dumps/step_0120/ -o rollouts.parquet
    """
    from onepolicy.cli.outputs import say
    from onepolicy.cli.progress import progress
    from onepolicy.convert import convert as run
    from onepolicy.report.text import escaped

    with progress("converting", "shards") as told:
        done = run(dump, output, told, overwrite)
    sides = ", ".join(done.scorings) or "no log-probs"
    say(f"{_counted(done.records, 'record')}, {done.tokens:,} tokens, scorings: {sides}; saved in {output}")
    for why in (*done.reasons, *done.unreadable):
        say(f"left out: {escaped(why, 300)}")
    if done.texts:
        say(f"left out: {_counted(done.texts, 'record')} of text only: no token ids")
    if done.undeclared:
        say(f"not declared, since the files differ in it: {escaped(', '.join(done.undeclared), 300)}")
    more = done.left_out - len(done.reasons)
    if more > 0:
        say(f"left out: {_counted(more, 'more record')}")
    return 3 if done.left_out or done.unreadable or done.texts else 0


def _counted(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"
