"""`onepolicy audit`: what a run has saved, from any framework: what is wrong, where, why, what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from onepolicy.cli import options

Dump = Annotated[
    list[str], typer.Argument(metavar="DUMP", help="Files, folders, globs ('s3://bucket/run7/**.parquet').")
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
Reported = Annotated[
    Path | None,
    typer.Option(metavar="FILE.json", help="Numbers that the run reported, {key: value}: which definition gives them."),
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
    reported: Reported = None,
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
    from onepolicy.pool import keep_memory

    require_free(output or [], overwrite)
    if bounds is not None:
        load(bounds)
    if declare and scorer is None:
        raise UsageError("--declare is for a --scorer: it says how the tokens that it scores were drawn")
    said = declarations(declare or [])
    numbers = {} if reported is None else numbers_of(reported)
    choices = Choices(
        (a, b), view, bounds, reply_length, workers, on, what_if, dialect_of(as_), tokenizer, scorer, said, numbers
    )
    keep_memory()  # a command is a process of its own
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


def numbers_of(path: Path) -> dict[str, float]:
    """The numbers of a JSON object of keys and values. Errors: `UsageError`, `ContentError`."""
    import json

    from onepolicy.errors import ContentError, UsageError

    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise UsageError(f"--reported {path}: {err.strerror or err}") from None
    except (ValueError, RecursionError) as err:
        raise ContentError(f"--reported {path}: not JSON: {' '.join(str(err).split())[:200]}") from None
    if not isinstance(found, dict):
        raise ContentError(f"--reported {path}: wanted an object of keys and numbers")
    numbers = {str(k): float(v) for k, v in found.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    if not numbers:
        raise ContentError(f"--reported {path}: no numbers in it; wanted {{key: value}} as your logger saved them")
    return numbers
