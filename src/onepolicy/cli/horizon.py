"""`onepolicy horizon`: what a per-token gap does to a whole answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onepolicy.cli import options
from onepolicy.errors import ContentError, UsageError

if TYPE_CHECKING:
    from onepolicy.metrics.whole_answer import Gap


def horizon(
    gap: Annotated[float | None, typer.Option(metavar="SD", help="Sd of a token's log-ratio, nats.")] = None,
    length: Annotated[int | None, typer.Option(min=1, metavar="N", help="Tokens of an answer.")] = None,
    report: Annotated[
        Path | None,
        typer.Option("--from", metavar="REPORT.json", help="A saved report: its gap, drift, tails, reply length."),
    ] = None,
    bias: Annotated[
        float | None, typer.Option(metavar="MEAN", help="Mean log-ratio of a token, nats. Default: mean ratio 1.")
    ] = None,
    autocorrelation: Annotated[
        float | None, typer.Option(metavar="RHO", help="Of neighbouring tokens' log-ratios, -1 to 1. Default: 0.")
    ] = None,
    tail: Annotated[
        str | None, typer.Option(metavar="LAW", help="normal, t:DEGREES or mixture:SHARE,SIZE. Default: normal.")
    ] = None,
    clip: Annotated[float, typer.Option(metavar="X", help="A token's ratio is clipped below 1 - X.")] = 0.2,
    clip_high: Annotated[float | None, typer.Option(metavar="X", help="And above 1 + X. Default: as --clip.")] = None,
    sequence_clip: Annotated[
        tuple[float, float], typer.Option(metavar="LOW HIGH", help="The same for geometric mean ratios (GSPO).")
    ] = (3e-4, 4e-4),
    answers: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Answers to simulate; 0: none. Default: a second's worth.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the simulation.")] = 0,
    svg: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Save the drawing of eight answers.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers and walks as JSON.")] = False,
    overwrite: options.Overwrite = False,
) -> int:
    """What a gap between two engines does to a whole answer, in closed form and by simulation.

    \b
    Example:
      onepolicy horizon --gap 0.01 --length 10000
      onepolicy horizon --from report.json --length 4096 --svg walks.svg
    """
    from onepolicy.cli.outputs import require_free
    from onepolicy.metrics import horizon as metric

    require_free(svg, overwrite, (".svg",))
    if svg is not None and answers == 0:
        raise UsageError("--svg draws simulated answers: wanted --answers 1 or more")
    found, length, notes = _found(gap, length, report)
    clips = (clip, clip if clip_high is None else clip_high)
    result = metric.horizon(
        _changed(found, bias, autocorrelation, tail),
        length,
        clip=clips,
        sequence_clip=sequence_clip,
        answers=answers,
        seed=seed,
        notes=[note for field, note in notes.items() if field != "autocorrelation" or autocorrelation is None],
    )
    return _shown(result, svg, as_json)


def _found(gap: float | None, length: int | None, path: Path | None) -> tuple[Gap, int, dict[str, str]]:
    """(gap, length, notes) of the numbers given, or of the report."""
    from onepolicy.metrics.whole_answer import Gap

    if (gap is None) == (path is None):
        raise UsageError("wanted either --gap SD or --from REPORT.json, as horizon --gap 0.01 --length 10000")
    if path is not None:
        return _of_report(path, length)
    if length is None:
        raise UsageError("--length: wanted the tokens of an answer, as --length 4096")
    return Gap(gap or 0.0), length, {}


def _of_report(path: Path, length: int | None) -> tuple[Gap, int, dict[str, str]]:
    from onepolicy.cli.judge import read_report
    from onepolicy.metrics.measured_gap import gap_of

    report = read_report(path)
    try:
        gap, notes = gap_of(report)
    except ContentError as err:
        raise ContentError(f"{path}: {err}") from None
    if length is None and not report.reply_length:
        raise UsageError(f"{path} has no reply length: wanted --length N")
    return gap, length or report.reply_length or 0, notes


def _changed(gap: Gap, bias: float | None, autocorrelation: float | None, tail: str | None) -> Gap:
    """What the command line says goes before what the report says."""
    from onepolicy.metrics.laws import law_of

    if bias is not None:
        gap = replace(gap, mean=bias, mean_is="given")
    if autocorrelation is not None:
        gap = replace(gap, autocorrelation=autocorrelation)
    return gap if tail is None else replace(gap, law=law_of(tail))


def _shown(result: dict[str, Any], svg: Path | None, as_json: bool) -> int:
    import shutil

    from onepolicy.cli.outputs import save, say
    from onepolicy.report import horizon as text
    from onepolicy.report import walks as drawing

    if svg is not None:
        save(drawing.svg(result["walks"], *text.captions(result)), svg)
    if as_json:
        say(json.dumps({"onepolicy_horizon": 1, **result}, indent=1, allow_nan=False))
    else:
        say(text.render(result, shutil.get_terminal_size((100, 40)).columns).rstrip("\n"))
    return 0
