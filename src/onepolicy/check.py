"""Check: two engines on the same tokens. The pair is judged, and every leg that the engines can run tells rounding from
a bug: the same function in float32, each side against itself, and the floor that rounding alone predicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from onepolicy import checked, checking
from onepolicy.checking import Choices
from onepolicy.engines.base import Engine, EngineSpec, Progress, options_of
from onepolicy.engines.open import engine_class, named
from onepolicy.errors import AlignmentError, ContentError, UsageError
from onepolicy.gates.bounds import load
from onepolicy.legs.run import Told
from onepolicy.rollouts import Rollouts
from onepolicy.types import Report
from onepolicy.verdict import (
    compare,
    compare_rollouts,
    declared_as,
    fingerprint_findings,
    judged,
    median_reply,
    rejudge,
    worst_in_context,
)  # fmt: skip

__all__ = [
    "Choices", "check", "check_engines", "check_file", "compare", "compare_rollouts", "fingerprint_findings", "judged",
    "median_reply", "rejudge", "worst_in_context",
]  # fmt: skip


def check_file(
    path: str | Path,
    scorer: str,
    *,
    save_scores: str | Path | None = None,
    side: str = "sampler",
    **more: Any,
) -> Report:
    """`check` of stored rollouts. With `save_scores` the rollouts and the scorer's values are written there.

    If the engine dies half way, what it had scored is judged and saved (beside `path`, when `save_scores` is not
    given), and the report has outcome `error`.
    """
    from onepolicy.storage import read, write

    _refuse_replay_of_itself(path, side, scorer)
    report, scored = check(read(path), scorer, side=side, **more)
    broken = any(f.code in ("engine-died", "engine-failed") for f in report.findings)
    if save_scores is not None or broken:
        from onepolicy.record import free_path

        target = save_scores or free_path(Path(path).with_name(Path(path).stem + ".partial-scores.parquet"))
        write(scored, target)
        report = replace(report, context={**report.context, "scores": str(target)})
    return report


def check(
    rollouts: Rollouts,
    scorer: str | Engine,
    *,
    sampler: str | Engine | None = None,
    side: str = "sampler",
    bounds: str | None = None,
    view: str = "drawn",
    reply_length: int | None = None,
    exact: bool = False,
    declare: Mapping[str, str] | None = None,
    choices: Choices | None = None,
    told: Told | None = None,
    progress: Progress | None = None,
) -> tuple[Report, Rollouts]:
    """Scores `rollouts` with `scorer`, compares with their scoring `side`, runs the legs, judges. Returns the report
    and the rollouts with the new scoring `scorer`. `sampler`: the engine that drew them, for its own legs.

    Errors: `UsageError`, `ContentError`, `AlignmentError` for input that cannot be compared; `EngineError` when the
    engine fails before anything was scored. An engine that fails later gives a report with outcome `error`.
    """
    rollouts = declared_as(rollouts, declare or {})
    _has_side(rollouts, side)
    pair = checking.Pair(side, bounds, view, reply_length, exact)
    preset = load(bounds) if bounds else None
    going = checking.run_check(rollouts, sampler, scorer, pair, choices or Choices(), told, progress)
    return checked.report_of(going, preset)


def check_engines(
    sampler: str | Engine,
    scorer: str | Engine,
    *,
    bounds: str | None = None,
    view: str = "drawn",
    reply_length: int | None = None,
    exact: bool = False,
    choices: Choices | None = None,
    told: Told | None = None,
    progress: Progress | None = None,
) -> tuple[Report, Rollouts]:
    """`check` of tokens that `sampler` draws first. Errors: as `check`; `UsageError` for a sampler that draws none."""
    drawer = engine_class(named(EngineSpec.parse(sampler)).name) if isinstance(sampler, str) else sampler
    if not drawer.SAMPLES:
        what = f"engine {drawer.NAME!r} draws no tokens"
        raise UsageError(f"{what}; record with another, or give the file: check FILE --scorer ENGINE")
    pair = checking.Pair("sampler", bounds, view, reply_length, exact)
    preset = load(bounds) if bounds else None
    going = checking.run_check(None, sampler, scorer, pair, choices or Choices(), told, progress)
    return checked.report_of(going, preset)


def _refuse_replay_of_itself(path: str | Path, side: str, scorer: str) -> None:
    """Hand-written files have no scoring ids that would tell: the file and the side do."""
    spec = EngineSpec.parse(scorer)
    if spec.name != "recorded" or not (Path(spec.target).exists() and Path(path).exists()):
        return
    replayed = options_of(engine_class("recorded"), spec)["side"]
    if replayed == side and Path(spec.target).samefile(path):
        raise AlignmentError(
            f"{scorer} is the scoring {side!r} of {path} itself; a comparison needs two engines or runs"
        )


def _has_side(rollouts: Rollouts, side: str) -> None:
    """Asked before an engine is started: a minute of loading should not end in this."""
    if side not in rollouts.scorings:
        have = ", ".join(f"{k}_logprobs" for k in rollouts.scorings) or "no log-probs"
        raise ContentError(
            f"the rollouts have no '{side}_logprobs' (they have {have}); record them, or name another side"
        )
