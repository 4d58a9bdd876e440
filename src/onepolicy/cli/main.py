"""`onepolicy VERB ...`: finds the verb, and turns every error into one line and an exit code.

0 pass, 1 drift, 2 usage, 3 inconclusive, 4 error. 1 always means drift: whatever else goes wrong is never 1.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from onepolicy.errors import MissingExtra, OnepolicyError


def main() -> NoReturn:
    """The console script."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a job that is ended keeps what it has, too
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # who reads has seen enough; the verdict stands
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Runs one command line; returns its exit code. Nothing is raised."""
    try:
        return _invoked(list(argv))
    except OnepolicyError as err:
        return _told(str(err), err.exit_code, argv)
    except KeyboardInterrupt:
        return _told("interrupted", 130, argv)
    except (Exception, SystemExit) as err:
        if isinstance(err, BrokenPipeError) or isinstance(err.__context__, BrokenPipeError):
            return _told("a pipe was closed by its reader", 4, argv)
        what = f"{type(err).__name__}: {err}" if str(err) else type(err).__name__
        hint = "please report it; onepolicy --debug ... shows the traceback"
        return _told(f"unexpected {what}; {hint}", 4, argv)


def _told(message: str, code: int, argv: Sequence[str]) -> int:
    """One line on stderr, after the traceback if it was asked for."""
    if "--debug" in argv:
        traceback.print_exc()
    from onepolicy.report.text import escaped

    line, colon, lines = message.partition(":\n    ")  # indented lines below the one: something to copy
    shown = [escaped(f"error: {line}{colon.rstrip()}", 2000), *(escaped(x, 200) for x in f"    {lines}".split("\n"))]
    print("\n".join(shown if colon else [escaped(f"error: {message}", 2000)]), file=sys.stderr)
    return code


def _invoked(argv: list[str]) -> int:
    try:
        import typer
    except ImportError:
        raise MissingExtra("typer", "cli", "the command line") from None
    # typer brings its own copy of click, older ones import it
    click_error: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    try:
        code = command().main(argv, prog_name="onepolicy", standalone_mode=False)
    except click_error as err:
        context = getattr(err, "ctx", None)
        hint = f"; see {context.command_path} --help" if context else ""
        return _told(f"{err.format_message().rstrip('.')}{hint}", 2, argv)
    except typer.Abort:
        code = 130
    return _told("interrupted", 130, argv) if code == 130 else int(code or 0)


def command() -> Any:
    """The whole command line as a click command."""
    import typer

    from onepolicy.cli import (
        audit,
        check,
        compare,
        convert,
        explain,
        horizon,
        judge,
        record,
        root,
        suite,
        tokens,
        watch,
    )

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(root.root)
    for verb in (
        record.record,
        tokens.tokens,
        check.check,
        audit.audit,
        convert.convert,
        compare.compare,
        judge.judge,
        horizon.horizon,
        watch.watch,
        explain.explain,
    ):
        app.command(name=verb.__name__)(verb)
    app.add_typer(suite.suite, name="suite")
    return typer.main.get_command(app)
