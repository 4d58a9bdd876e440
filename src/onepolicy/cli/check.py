"""`onepolicy check`: score the recorded ids again, compare, judge."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from onepolicy.cli import options
from onepolicy.errors import UsageError
from onepolicy.types import Report


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `record` wrote.")],
    scorer: Annotated[str, typer.Option(metavar="ENGINE", help="name:target?key=value, as hf:DIR?dtype=bfloat16.")],
    sampler_side: Annotated[
        str, typer.Option(metavar="NAME", help="Which recorded scoring to compare with.")
    ] = "sampler",
    bounds: options.Bounds = None,
    view: options.View = "drawn",
    reply_length: options.ReplyLength = None,
    output: options.Output = None,
    scores: Annotated[Path | None, typer.Option(metavar="FILE", help="Save rollouts and the scorer's values.")] = None,
    exact: Annotated[bool, typer.Option("--exact", help="Compare full distributions where the engines can.")] = False,
    declare: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="What the file does not say, as temperature=1.")
    ] = None,
    as_json: options.Json = False,
    overwrite: options.Overwrite = False,
) -> int:
    """Score recorded tokens with a scorer, compare, and judge.

    \b
    Example:
      onepolicy check rollouts.parquet --scorer 'hf:MODEL?dtype=bfloat16' -o report.json
    """
    from onepolicy.check import check_file
    from onepolicy.cli.outputs import require_free, show
    from onepolicy.cli.progress import progress
    from onepolicy.gates.bounds import load
    from onepolicy.storage import FORMATS

    require_free(output, overwrite, (".json",))
    require_free(scores, overwrite, FORMATS)
    require_view(view)
    declared = declarations(declare or [])
    if bounds is not None:
        load(bounds)
    with progress("scoring", "sequences") as told, _replacing(scores) as target:
        report = check_file(
            file,
            scorer,
            side=sampler_side,
            bounds=bounds,
            view=view,
            reply_length=reply_length,
            exact=exact,
            declare=declared,
            progress=told,
            save_scores=target,
        )
    return show(_with_scores(report, scores), output, as_json)


def require_view(view: str) -> None:
    """Errors: `UnknownName` (did you mean)."""
    from onepolicy.errors import UnknownName
    from onepolicy.views import VIEWS

    if view not in VIEWS:
        raise UnknownName("view", view, VIEWS)


def declarations(given: Sequence[str]) -> Mapping[str, str]:
    """`key=value` texts as a mapping. Errors: `UsageError` for other texts and for a key given twice."""
    out: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key or key in out:
            raise UsageError(f"--declare {text}: wanted key=value, each key once, as temperature=1")
        out[key] = value
    return out


@contextmanager
def _replacing(path: Path | None) -> Iterator[Path | None]:
    """A free name beside `path`, which takes its place at the end: an old file is lost only to a finished new one."""
    if path is None:
        yield None
        return
    beside = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _with_scores(report: Report, scores: Path | None) -> Report:
    """The report names the file that the scores are in now."""
    return report if scores is None else replace(report, context={**report.context, "scores": str(scores)})
