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
As = Annotated[
    str | None,
    typer.Option("--as", metavar="FRAMEWORK[?k=v]", help="Its metrics, computed its way: verl?rollout_is=token."),
]
Tokenizer = Annotated[
    str | None, typer.Option(metavar="TOKENIZER", help="For token checks, kinds of token and texts: a model directory.")
]
Filler = Annotated[
    str | None, typer.Option("--scorer", metavar="ENGINE", help="Computes the side that the dump lacks, as hf:DIR.")
]
WhatIf = Annotated[bool, typer.Option("--what-if/--no-what-if", help="Replay every correction.")]
On = Annotated[str, typer.Option("--on", metavar="WHERE", help="local, ray, or ray://HOST:PORT.")]


def audit(
    dump: Dump,
    a: SideA = None,
    b: SideB = None,
    view: options.View = "drawn",
    bounds: options.Bounds = None,
    reply_length: options.ReplyLength = None,
    as_: As = None,
    tokenizer: Tokenizer = None,
    scorer: Filler = None,
    declare: options.Declare = None,
    what_if: WhatIf = True,
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
    from onepolicy.cli.check import declarations
    from onepolicy.cli.outputs import require_free, show
    from onepolicy.cli.progress import progress
    from onepolicy.errors import UsageError
    from onepolicy.gates.bounds import load

    require_free(output or [], overwrite)
    if bounds is not None:
        load(bounds)
    if declare and scorer is None:
        raise UsageError("--declare is for a --scorer: it says how the tokens that it scores were drawn")
    said = declarations(declare or [])
    choices = Choices(
        (a, b), view, bounds, reply_length, workers, on, what_if, dialect_of(as_), tokenizer, scorer, said
    )
    with progress("auditing", "shards") as told:
        report = run(dump, choices, told)
    return show(report, output, as_json)


def dialect_of(text: str | None) -> tuple[str, dict[str, str]] | None:
    """`verl?rollout_is=token&precision=float64` as a name and options. Errors: `UsageError`, `UnknownName`."""
    from onepolicy.dialects import of
    from onepolicy.errors import UsageError

    if text is None:
        return None
    name, _, rest = text.partition("?")
    options: dict[str, str] = {}
    for pair in filter(None, rest.split("&")):
        key, equals, value = pair.partition("=")
        if not equals or key in options:
            raise UsageError(f"--as {text}: got {pair!r}, wanted key=value, each key once")
        options[key] = value
    of(name).resolve(options)
    return name, options
