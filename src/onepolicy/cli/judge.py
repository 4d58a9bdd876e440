"""`onepolicy judge`: a saved report under other bounds, from its sums."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onepolicy.cli import options
from onepolicy.errors import ContentError, UsageError
from onepolicy.types import Report


def judge(
    report: Annotated[Path, typer.Argument(metavar="REPORT.json", help="What `check -o` or `compare -o` wrote.")],
    bounds: options.SavedBounds = None,
    output: options.Output = None,
    as_json: options.Json = False,
    overwrite: options.Overwrite = False,
) -> int:
    """Judge a saved report again, under other bounds. Nothing is measured again.

    \b
    Example:
      onepolicy judge report.json --bounds strict
    """
    from onepolicy.check import rejudge
    from onepolicy.cli.outputs import require_free, show

    require_free(output, overwrite, (".json",))
    saved = read_report(report)
    return show(rejudge(saved, bounds or saved.preset), output, as_json)


def read_report(path: Path) -> Report:
    """Errors: `UsageError` for a file that cannot be read, `ContentError` for one that is no report."""
    from onepolicy.report.json import from_json

    try:
        return from_json(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise UsageError(f"report {path} cannot be read: {err.strerror or err}") from None
    except UnicodeDecodeError:
        raise ContentError(f"{path}: not a saved report: not UTF-8 text") from None
    except ContentError as err:
        raise ContentError(f"{path}: {err}") from None
