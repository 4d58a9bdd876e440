"""Where results go: files that are never replaced unasked, and the terminal."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from onepolicy.errors import UsageError
from onepolicy.types import Report, TokenReport

#: suffix of an output -> the renderer that writes it.
SUFFIXES: dict[str, str] = {".json": "json", ".md": "markdown", ".xml": "junit"}

Outputs = Path | Sequence[Path] | None


def require_free(paths: Outputs, overwrite: bool, suffixes: Iterable[str] = tuple(SUFFIXES)) -> None:
    """Asked before any engine starts: can the results be written there? Errors: `UsageError`."""
    several = _listed(paths)
    for path in several:
        _require_free(path, overwrite, suffixes)
    places = [p.resolve() for p in several]
    for i, place in enumerate(places):
        if place in places[:i]:
            raise UsageError(f"output {several[i]} is named twice")


def _listed(paths: Outputs) -> list[Path]:
    return [] if paths is None else [paths] if isinstance(paths, Path) else list(paths)


def _require_free(path: Path, overwrite: bool, suffixes: Iterable[str]) -> None:
    if path.suffix.lower() not in suffixes:
        raise UsageError(f"output {path}: got the suffix {path.suffix!r}, wanted one of {', '.join(suffixes)}")
    if path.is_dir() or (path.exists() and not overwrite):
        what = "is a folder" if path.is_dir() else "exists; --overwrite replaces it"
        raise UsageError(f"output {path} {what}")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"output {path}: {path.parent} is not a folder that can be written to")


def show(report: Report, outputs: Outputs, as_json: bool) -> int:
    """Saves the report in the format of each output's suffix, prints it, and gives its exit code."""
    from onepolicy.report import RENDERERS

    for path in _listed(outputs):
        save(RENDERERS[SUFFIXES.get(path.suffix.lower(), "json")](report).rstrip("\n"), path)
    if as_json:
        say(RENDERERS["json"](report))
    else:
        width = shutil.get_terminal_size((100, 40)).columns
        say(RENDERERS["text"](report, width=width, color=coloured()).rstrip("\n"))
    return report.outcome.exit_code


def show_tokens(report: TokenReport, outputs: Outputs, as_json: bool) -> int:
    """`show` for a report of the token checks."""
    from onepolicy.report.fidelity import TOKEN_RENDERERS

    for path in _listed(outputs):
        save(TOKEN_RENDERERS[SUFFIXES.get(path.suffix.lower(), "json")](report).rstrip("\n"), path)
    if as_json:
        say(TOKEN_RENDERERS["json"](report))
    else:
        width = shutil.get_terminal_size((100, 40)).columns
        say(TOKEN_RENDERERS["text"](report, width=width, color=coloured()).rstrip("\n"))
    return report.outcome.exit_code


def save(text: str, path: Path) -> None:
    """Writes the file whole or not at all. Errors: `UsageError`."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as err:
        raise UsageError(f"cannot write {path}: {err.strerror or err}") from err
    finally:
        temporary.unlink(missing_ok=True)


def say(text: str) -> None:
    """To stdout. A reader that has gone changes no verdict."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def coloured() -> bool:
    """Colours only on a terminal that wants them (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
