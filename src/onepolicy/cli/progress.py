"""Progress on stderr: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from onepolicy.engines.base import Progress

#: Seconds between two plain lines.
_EVERY = 10.0


@contextmanager
def progress(what: str, unit: str) -> Iterator[Progress]:
    """A function to call with (done, of); of 0: nobody knows how many there are."""
    if not sys.stderr.isatty():
        yield _plain(what, unit)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of or None)


def _plain(what: str, unit: str) -> Progress:
    last = time.monotonic()

    def tell(done: int, of: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _EVERY:
            last = time.monotonic()
            count = f"{done} of {of}" if of else f"{done:,}"
            print(f"{what}: {count} {unit}", file=sys.stderr, flush=True)

    return tell


def telling() -> Callable[[str], None]:
    """A function to call with what is being done now: on a terminal at once, elsewhere once that takes long."""
    begun, terminal = time.monotonic(), sys.stderr.isatty()

    def tell(words: str) -> None:
        if terminal or time.monotonic() - begun >= _EVERY:
            print(f"  {words}", file=sys.stderr, flush=True)

    return tell
