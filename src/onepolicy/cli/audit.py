"""`onepolicy audit`: what a run has saved, from any framework: what is wrong, where, why, what to do."""

from __future__ import annotations

from typing import Annotated

import typer

from onepolicy.cli import options

Dump = Annotated[
    list[str], typer.Argument(metavar="DUMP...", help="Files, folders, globs ('s3://bucket/run7/**.parquet').")
]
SideA = Annotated[str | None, typer.Option("--a", metavar="NAME", help="The side that drew. Default: sampler.")]
SideB = Annotated[
    str | None, typer.Option("--b", metavar="NAME", help="The side it is held against. Default: old, else current.")
]
Workers = Annotated[int | None, typer.Option(min=1, metavar="N", help="Processes. Default: one a core.")]
On = Annotated[str, typer.Option("--on", metavar="WHERE", help="local, ray, or ray://HOST:PORT.")]


def audit(
    dump: Dump,
    a: SideA = None,
    b: SideB = None,
    view: options.View = "drawn",
    bounds: options.Bounds = None,
    reply_length: options.ReplyLength = None,
    workers: Workers = None,
    on: On = "local",
    output: options.Outputs = None,
    as_json: options.Json = False,
    overwrite: options.Overwrite = False,
) -> int:
    """Audit what a run has saved: any framework's dump, no torch, constant memory.

    \b
    Example:
      onepolicy audit dumps/step_0120/ -o report.json
      onepolicy audit 's3://bucket/run7/**.parquet'
    """
    from onepolicy.audit import Choices
    from onepolicy.audit import audit as run
    from onepolicy.cli.outputs import require_free, show
    from onepolicy.cli.progress import progress
    from onepolicy.gates.bounds import load

    require_free(output or [], overwrite)
    if bounds is not None:
        load(bounds)
    choices = Choices((a, b), view, bounds, reply_length, workers, on)
    with progress("auditing", "shards") as told:
        report = run(dump, choices, told)
    return show(report, output, as_json)
