"""`onepolicy check`: two engines on the same tokens, the legs between them, one verdict."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from onepolicy.cli import options
from onepolicy.errors import ContentError, UsageError
from onepolicy.types import Report


@options.expanded
def check(
    file: options.RolloutsFile = None,
    scorer: options.Scorer = ...,  # pyright: ignore[reportArgumentType]
    sampler: options.Sampler = None,
    reference: options.Reference = None,
    floor: options.FloorEngine = None,
    legs: options.Legs = None,
    skip: options.Skip = None,
    sampler_side: options.SamplerSide = "sampler",
    suite: options.SuiteSize = "default",
    prompts: options.Prompts = None,
    draws: options.Draws = options.DRAWS,
    bounds: options.Bounds = None,
    view: options.View = "drawn",
    reply_length: options.ReplyLength = None,
    output: options.Outputs = None,
    scores: options.Scores = None,
    exact: options.Exact = False,
    declare: options.Declare = None,
    timeout: options.Timeout = 600.0,
    resume: options.Resume = None,
    as_json: options.Json = False,
    overwrite: options.Overwrite = False,
) -> int:
    """Compare a sampler and a scorer on the same tokens, leg by leg, and judge.

    \b
    Example:
      onepolicy check --sampler vllm:MODEL --scorer hf:MODEL
      onepolicy check rollouts.parquet --scorer callable:my.trainer:logprobs -o report.md
    """
    from onepolicy.check import Choices
    from onepolicy.cli.outputs import show

    _require_outputs(output, scores, overwrite)
    declared = _require_tokens(file, sampler, declare)
    _require_bounds(bounds, view)
    params = draws.params()
    with _kept(resume) as keep, _replacing(scores) as target:
        given = options.suite_of(suite, prompts)
        choices = Choices(_names(legs), tuple(_names(skip) or ()), reference, floor, given, params, keep, timeout)
        more = {"bounds": bounds, "view": view, "reply_length": reply_length, "exact": exact, "choices": choices}
        report = _report(file, sampler, scorer, sampler_side, declared, target, more)
    return show(_with_scores(report, scores), output, as_json)


def _require_outputs(output: list[Path] | None, scores: Path | None, overwrite: bool) -> None:
    from onepolicy.cli.outputs import require_free
    from onepolicy.storage import FORMATS

    require_free(output or [], overwrite)
    require_free(scores, overwrite, FORMATS)


def _require_bounds(bounds: str | None, view: str) -> None:
    """Errors: `UnknownName`, `UsageError`, `ContentError` for bounds or a view that cannot be judged by."""
    from onepolicy.gates.bounds import load

    require_view(view)
    if bounds is not None:
        load(bounds)


def _require_tokens(file: str | None, sampler: str | None, declare: list[str] | None) -> Mapping[str, str]:
    """What is declared of FILE's tokens. Errors: `UsageError` when there are none, or nothing to declare."""
    if file is None and sampler is None:
        raise UsageError("nothing to compare: give a FILE that `record` wrote, or --sampler ENGINE to draw first")
    declared = declarations(declare or [])
    if declared and file is None:
        raise UsageError("--declare is for a FILE; tokens that are drawn here are declared by their sampler")
    return declared


def _report(
    file: str | None, sampler: str | None, scorer: str, side: str, declared: Mapping[str, str], target: Path | None,
    more: dict[str, Any],
) -> Report:  # fmt: skip
    from onepolicy.check import check_engines, check_file
    from onepolicy.cli.progress import progress, telling
    from onepolicy.storage import write

    with progress("scoring", "sequences") as told:
        more |= {"progress": told, "told": telling()}
        if file is not None:
            path, side = _file_of(file, side)
            return check_file(path, scorer, side=side, sampler=sampler, declare=declared, save_scores=target, **more)
        assert sampler is not None
        report, scored = check_engines(sampler, scorer, **more)
        if target is not None:
            write(scored, target)
        return report


def _file_of(file: str, side: str) -> tuple[Path, str]:
    """(path, side) of a FILE argument, which may be written as an engine, recorded:FILE?side=NAME."""
    if not file.startswith("recorded:"):
        return Path(file), side
    from onepolicy.engines.base import EngineSpec

    spec = EngineSpec.parse(file)
    unknown = set(spec.options) - {"side"}
    if unknown:
        raise UsageError(f"{file}: unknown option {min(unknown)!r}; wanted recorded:FILE?side=NAME")
    return Path(spec.target), spec.options.get("side", side)


def _names(given: Sequence[str] | None) -> list[str] | None:
    """Names given one by one or joined by commas; `pair` alone asks for no leg at all."""
    if given is None:
        return None
    names = [name.strip() for text in given for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError("--legs and --skip want names of legs, joined by commas; --legs pair runs none")
    return [name for name in names if name != "pair"]


@contextmanager
def _kept(directory: Path | None) -> Iterator[Path]:
    """Where finished scorings are kept. Without a directory of the user's: a temporary one, which is named when the
    check is interrupted and removed when it ends."""
    kept = directory or Path(tempfile.mkdtemp(prefix="onepolicy-check-"))
    ours = directory is None
    try:
        yield kept
    except (UsageError, ContentError):  # asked again otherwise: nothing of it would be taken
        if ours:
            shutil.rmtree(kept, ignore_errors=True)
        raise
    except BaseException:
        if kept.is_dir() and any(kept.iterdir()):
            print(f"what was finished is kept: --resume {kept} goes on from there", file=sys.stderr, flush=True)
        elif ours:
            kept.rmdir()
        raise
    if ours:
        shutil.rmtree(kept, ignore_errors=True)


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
