"""`onepolicy compare`: two scorings that are recorded already."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onepolicy.cli import options


def compare(
    a: Annotated[Path, typer.Argument(metavar="FILE", help="Rollouts with the first scoring.")],
    b: Annotated[Path | None, typer.Argument(metavar="OTHER", help="With the second. Default: FILE itself.")] = None,
    first: Annotated[
        str, typer.Option("--a", metavar="NAME", help="The first scoring: the side that drew the tokens.")
    ] = "sampler",
    second: Annotated[str, typer.Option("--b", metavar="NAME", help="The second scoring.")] = "old",
    bounds: options.Bounds = None,
    view: options.View = "drawn",
    reply_length: options.ReplyLength = None,
    output: options.Output = None,
    as_json: options.Json = False,
    overwrite: options.Overwrite = False,
) -> int:
    """Compare two recorded scorings of the same tokens, and judge. No engine is started.

    \b
    Example:
      onepolicy compare dump.parquet --a sampler --b old
      onepolicy compare a.parquet b.parquet --a sampler --b scorer
    """
    from onepolicy.check import compare_rollouts
    from onepolicy.cli.check import require_view
    from onepolicy.cli.outputs import require_free, show
    from onepolicy.gates.bounds import load
    from onepolicy.storage import read

    require_free(output, overwrite, (".json",))
    require_view(view)
    if bounds is not None:
        load(bounds)
    left = read(a)
    right = None if b is None or (b.exists() and b.samefile(a)) else read(b)  # a file named twice is one file
    report = compare_rollouts(left, right, (first, second), bounds=bounds, view=view, reply_length=reply_length)
    return show(report, output, as_json)
