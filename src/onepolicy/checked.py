"""The report of a check: the pair judged by the floor and by absolute bounds, and what every leg makes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy.checking import Going, is_neutral
from onepolicy.codes import by_rank, finding
from onepolicy.engine_tokens import directory_of, findings_in_check
from onepolicy.engines.texts import decoder_of
from onepolicy.errors import EngineDied, OnepolicyError, UsageError
from onepolicy.floor import equal_routes, ownership, smallest_fault
from onepolicy.gates.bounds import Preset
from onepolicy.gates.judge import worst
from onepolicy.legs import LEGS, SPECIAL, contract
from onepolicy.legs.base import On, Side, values_of
from onepolicy.legs.floors import at_the_edge, floor_of, part_of
from onepolicy.legs.plan import Planned, Task
from onepolicy.legs.results import failed, findings_of, kernels_of, not_run, result_of
from onepolicy.legs.routes import behind, routes_result
from onepolicy.legs.run import flat_index, opened
from onepolicy.legs.step_zero import step_zero
from onepolicy.rollouts import Rollouts
from onepolicy.types import Finding, Floor, FloorColumns, LegResult, Outcome, Question, Ran, Report, Scoring, Severity
from onepolicy.verdict import compare, fingerprint_findings, worst_in_context

#: The floor of each ground, with what it predicts at every token.
Floors = dict[On, tuple[Floor | None, FloorColumns | None]]


def report_of(going: Going, preset: Preset | None) -> tuple[Report, Rollouts]:
    """The report, and the rollouts with the scoring `scorer`."""
    rollouts, pair = going.rollouts, going.pair
    scoring, seen = _production(going)
    scored = rollouts.with_scoring("scorer", scoring)
    whole = going.production in going.done.scorings
    cut: tuple[Floor | None, FloorColumns | None] = (Floor("incomplete", "the scorer did not finish"), None)
    floors: Floors = {on: _floor(going, on) if whole else cut for on in _grounds(going)}
    stranger = _stranger(going, scoring) if whole else ""
    if stranger:
        floors = dict.fromkeys(floors, (Floor("incomplete", stranger), None))
    floor, columns = floors["drawn"]
    if columns is not None:
        columns = _with_equal_routes(going, columns, scoring)
        floors["drawn"] = (floor, columns)
    judged = scored if whole else scored.take(range(going.done.partial[going.production][1]))
    side = rollouts.scorings[pair.side]
    seen += fingerprint_findings(side.fingerprint, scoring.fingerprint)
    seen += findings_in_check(judged, *(_home(going, name) for name in ("sampler", "scorer")))
    special, more = _special(going, scored, scoring)
    seen += more + _left_out(going)
    legs, found = _legs(going, {on: columns for on, (_, columns) in floors.items()})
    legs = [_with_production(leg, side, scoring) for leg in legs]
    judges_floor = preset is None or any(b.metric.startswith("gap_over_floor") for b in preset.bounds)
    view = going.view if pair.view == "drawn" else pair.view
    report, pairs = compare(
        judged, None, (pair.side, "scorer"), preset, view, pair.reply_length, [*seen, *found],
        columns if judges_floor else None,
    )  # fmt: skip
    report = replace(report, findings=tuple(_at_the_edge(going, f) for f in report.findings))
    report = _with_legs(report, (*special, *legs), floor)
    rows = next((leg.facts for leg in special if leg.key == "contract" and leg.ran is Ran.DONE), None)
    if rows is not None:
        told = contract.with_contract(side.fingerprint, rows)
        report = replace(report, fingerprints={**report.fingerprints, pair.side: told})
    with _decoder(going) as engine:
        tokens = worst_in_context(report.sums, pairs, engine)
    return replace(report, context={**report.context, **_context(going, report, floor), "tokens": tokens}), scored


def _home(going: Going, side: Side) -> Path | None:
    """The model directory of a side's engine, where it has one."""
    party = going.parties.get(side)
    return None if party is None or party.engine is not None else directory_of(str(party.spec))


@contextmanager
def _decoder(going: Going) -> Iterator[Any]:
    """What turns ids into text for people, without a heavy engine's start; None where there is nothing."""
    for side in ("scorer", "sampler", "floor"):
        party = going.parties.get(side)
        if party is None:
            continue
        if party.engine is not None or not party.heavy:
            with opened(party, going.choices.timeout) as engine:
                yield engine
            return
        found = decoder_of(party.spec.target)
        if found is not None:
            yield found
            return
    yield None


def _production(going: Going) -> tuple[Scoring, list[Finding]]:
    """The scorer's values of the pair, and what went wrong on the way."""
    done, task = going.done, going.production
    fingerprint = done.fingerprints.get(task.config, {})
    if task in done.scorings:
        scoring = done.scorings[task]
        return replace(scoring, fingerprint={**scoring.fingerprint, **fingerprint}), []
    scoring, n = done.partial[task]
    err = done.failures[task]
    code = "engine-died" if isinstance(err, EngineDied) else "engine-failed"
    message = f"{err}; {n} of {len(going.rollouts)} sequences had been scored"
    evidence = {"sequences": n, "of": len(going.rollouts)}
    return replace(scoring, fingerprint=fingerprint), [finding(code, message, origin="run", evidence=evidence)]


def _grounds(going: Going) -> list[On]:
    return [on for on in ("drawn", "texts") if on in going.grounds.rollouts]


def _floor(going: Going, on: On) -> tuple[Floor | None, FloorColumns | None]:
    if going.floor is None:
        return None, None
    rollouts = going.grounds.rollouts[on]
    mask = rollouts.drawn if on == "drawn" and going.view == "drawn" else ~rollouts.drawn
    return floor_of(going.floor, going.done.scorings, rollouts, on, mask)


#: A floor's engine further than this many floors from *both* sides computes another model.
_KIN = 5.0


def _stranger(going: Going, scoring: Scoring) -> str:
    """Why the engine that was named for the floor is not taken: its own values are near neither side's."""
    found = _floor(going, "drawn")[0] if "floor" in going.parties else None
    if found is None or not found.rms or going.floor is None:
        return ""
    task = next((t for _, t, own in going.floor.variants if own and t.on == "drawn" and t in going.done.scorings), None)
    if task is None:
        return ""
    base, on = values_of(going.done.scorings[task]), going.rollouts.drawn
    sides = (values_of(going.rollouts.scorings[going.pair.side]), values_of(scoring))
    with np.errstate(invalid="ignore"):
        near = min(float(np.sqrt(np.nanmedian((base - x)[on] ** 2))) for x in sides)
    if near <= _KIN * found.rms:
        return ""
    size = f"median gap {near:.2g} nats, its own rounding {found.rms:.2g}"
    return f"the engine named for the floor is near neither side ({size})"


def _with_equal_routes(going: Going, columns: FloorColumns, scoring: Scoring) -> FloorColumns:
    """A mixture model's gap is held against rounding where both engines took the same experts."""
    sampler = _sampler_routes(going)
    if sampler is None or scoring.routes is None:
        return columns
    pair = (behind(sampler, going.rollouts), behind(scoring.routes, going.rollouts))
    return replace(columns, counted=equal_routes(*pair, len(columns.scale)))


def _sampler_routes(going: Going) -> Any:
    found = going.done.scorings.get(going.routes) if going.routes is not None else None
    return None if found is None else found.routes


# -- legs --------------------------------------------------------------------------------------------------------------


def _legs(going: Going, columns: Mapping[On, FloorColumns | None]) -> tuple[list[LegResult], list[Finding]]:
    """Every leg that was asked for, run or not, in the table's order."""
    planned = {p.leg.key: p for p in going.plan.legs}
    results: list[LegResult] = []
    found: list[Finding] = []
    for key, leg in LEGS.items():
        if key in planned:
            result = _result(going, planned[key], columns)
        elif key in going.plan.not_run:
            result = not_run(leg, going.plan.not_run[key])
        else:
            continue
        results.append(result)
        found += findings_of(leg, result)
    return results, [*found, *_asked_by_name(going, results)]


def _asked_by_name(going: Going, results: Sequence[LegResult]) -> list[Finding]:
    """A leg that was named and cannot be run leaves a question open that somebody asked."""
    named = set(going.choices.legs or ())
    return [
        finding("leg-failed", f"{x.key} was asked for and cannot be run: {x.why}", origin="run")
        for x in results
        if x.key in named and x.ran is Ran.NOT and not x.why.startswith(HARMLESS)
    ]


#: Why a named leg may be left out without a word: there is nothing that it could show.
HARMLESS = ("the draw had no settings", "both sides of it are one")


def _result(going: Going, planned: Planned, columns: Mapping[On, FloorColumns | None]) -> LegResult:
    leg, done = planned.leg, going.done
    for task in (planned.a, planned.b):
        if task in done.failures:
            return _failure(planned, done.failures[task])
    if planned.b not in done.scorings or (planned.a is not None and planned.a not in done.scorings):
        return not_run(leg, "the check ended before it")
    rollouts = going.grounds.rollouts[leg.on]
    a = rollouts.scorings[going.pair.side] if planned.a is None else done.scorings[planned.a]
    floor = None if leg.bounds else _columns_for(going, planned, columns)
    if floor is not None:  # of the leg's own two scorings
        x, y = (behind(s.routes, rollouts) for s in (a, done.scorings[planned.b]))
        floor = replace(floor, counted=equal_routes(x, y, rollouts.n_tokens))
    words = (_words(planned.a), _words(planned.b))
    return result_of(leg, rollouts, a, done.scorings[planned.b], words, floor, going.view)


def _failure(planned: Planned, err: OnepolicyError) -> LegResult:
    """A refusal of what was asked is no failure of the engine: the leg cannot be run with it."""
    return not_run(planned.leg, str(err)) if isinstance(err, UsageError) else failed(planned.leg, err)


def _columns_for(going: Going, planned: Planned, columns: Mapping[On, FloorColumns | None]) -> FloorColumns | None:
    """What rounding predicts at the leg's tokens; not where it is scored at another meaning than the floor was."""
    on = planned.leg.on
    if on == "texts":
        return columns.get("texts")
    whole = columns.get("drawn")
    if whole is None or planned.b.raw:
        return None
    return part_of(whole, flat_index(going.rollouts, going.grounds.some)) if on == "some" else whole


def _words(task: Task | None) -> str:
    if task is None:
        return "recorded with the draw"
    said = ", ".join(f"{k}={v}" for k, v in task.using)
    again = ", asked again" if task.call > 1 else ""
    return task.config + (f" [{said}]" if said else "") + again


def _with_production(leg: LegResult, sampler: Scoring, scorer: Scoring) -> LegResult:
    """A float32 leg says which kernels production uses instead: it does not cover them."""
    if "kernels" not in leg.facts:
        return leg
    used = ", ".join(dict.fromkeys(f"{kernels_of(x)} {x.dtype or 'dtype not declared'}" for x in (sampler, scorer)))
    return replace(leg, facts={**leg.facts, "production_kernels": used})


# -- the legs that are no pair of scorings -----------------------------------------------------------------------------


def _special(going: Going, rollouts: Rollouts, scoring: Scoring) -> tuple[list[LegResult], list[Finding]]:
    """The contract and the step-0 identities."""
    results: list[LegResult] = []
    found = contract.placeholder_findings(rollouts, rollouts.scorings[going.pair.side], scoring)
    if going.asked("contract"):
        result, more = _contract(going, rollouts, scoring)
        results.append(result)
        found += more + _asked_by_name(going, [result])
    if going.asked("routes") and any(p.options.get("routes") for p in going.parties.values()):
        result, more = routes_result(rollouts, *_routes(going, rollouts))
        results.append(result)
        found += more
    if going.asked("step-0"):
        result, more = step_zero(rollouts)
        results.append(result)
        found += more
    return results, found


def _routes(going: Going, rollouts: Rollouts) -> tuple[Any, dict[str, Any], str]:
    """(the sampler's experts, the scorer's by kernel, why there are none), each at the token that they predict."""
    own = {
        kernel: behind(found.routes, rollouts)
        for kernel, task, emulates in (going.floor.variants if going.floor else ())
        if emulates and task.on == "drawn" and (found := going.done.scorings.get(task)) and found.routes is not None
    }
    sampler = behind(_sampler_routes(going), rollouts)
    side = "the sampler does not tell its experts" if sampler is None else ""
    return sampler, own, side or "the scorer tells its experts for one kernel only"


def _contract(going: Going, rollouts: Rollouts, scoring: Scoring) -> tuple[LegResult, list[Finding]]:
    factor = SPECIAL["contract"]
    none = LegResult("contract", Question.MEANING, factor, "", "", Ran.NOT)
    readings = [going.done.scorings[t] for t in going.reading if t in going.done.scorings]
    if going.died is not None and going.probes is None:
        return replace(none, ran=Ran.FAILED, why=str(going.died)), [
            finding("leg-failed", f"contract: {going.died}", origin="run")
        ]
    if going.probes is None or len(readings) < 2:
        failure = next((str(going.done.failures[t]) for t in going.reading if t in going.done.failures), "")
        return replace(none, why=going.unread or failure or "no sampler engine was given (--sampler)"), []
    side = rollouts.scorings[going.pair.side]
    rows = contract.contract_of(going.probes, *readings)
    names = (str(side.fingerprint.get("engine")), str(scoring.fingerprint.get("engine")))
    result = contract.contract_result(rows, names[0], side.semantics)
    found = contract.contract_findings(rows, names, side.semantics, scoring.semantics, not is_neutral_draw(rollouts))
    return result, found


def is_neutral_draw(rollouts: Rollouts) -> bool:
    """Whether the tokens were drawn at temperature 1 with nothing cut, so that every meaning is the same."""
    return is_neutral(contract.processed(rollouts))


def _left_out(going: Going) -> list[Finding]:
    """A note on what of the suite did not fit."""
    lines = going.suite.get("left_out", [])
    message = f"{len(lines)} left out, as {lines[0]}" if lines else ""
    return [finding("texts-left-out", message, origin="run", evidence={"left_out": lines})] if lines else []


#: As many tokens at the edge of a kept set as twice what the scorer's own kernels show, and three, are rounding's.
_EDGE_TIMES, _EDGE_MORE = 2, 3


def _at_the_edge(going: Going, found: Finding) -> Finding:
    """A token in one side's nucleus only is a warning where the scorer's own kernels differ by as many."""
    own = at_the_edge(going.floor, going.done.scorings, going.rollouts)
    if found.code != "support-violation" or not own or found.evidence["tokens"] > _EDGE_TIMES * own + _EDGE_MORE:
        return found
    message = f"{found.message}; between the scorer's own kernels it is {own}: rounding at the edge of the kept set"
    return replace(found, message=message, severity=Severity.WARN, outcome=Outcome.PASS)


# -- the whole ---------------------------------------------------------------------------------------------------------


def _with_legs(report: Report, legs: tuple[LegResult, ...], floor: Floor | None) -> Report:
    findings = list(report.findings)
    if floor is not None and floor.source in ("incomplete", "assumed") and floor.why:
        findings.append(finding(f"floor-{floor.source}", floor.why))
    return replace(
        report, findings=tuple(by_rank(findings)), outcome=worst([f.outcome for f in findings]), legs=legs, floor=floor
    )


def _context(going: Going, report: Report, floor: Floor | None) -> dict[str, Any]:
    out: dict[str, Any] = {}
    gate = next((g for g in report.gates if g.metric == "gap_over_floor/rms"), None)
    if gate is not None and gate.smallest_seen and gate.value is not None and floor is not None and floor.rms:
        out["floor_fault"] = smallest_fault(gate.smallest_seen, min(gate.value, gate.smallest_seen), floor.rms)
    owned = _ownership(going, report)
    if owned:
        out["ownership"] = owned
    if going.suite:
        out["suite"] = going.suite
    return out


#: Legs that hold both sides against one third scoring, the reference before the scorer's own float32.
_THIRD = (("reference-sampler", "reference-scorer"), ("sampler-precision", "scorer-precision"))


def _ownership(going: Going, report: Report) -> dict[str, Any]:
    """How much of the gap each side owns, where a third scoring of the same tokens was had."""
    rms = {leg.key: m.value for leg in report.legs if (m := leg.measurements.get("log_ratio/rms")) is not None}
    gap = report.measurements.get("log_ratio/rms")
    for a, b in _THIRD:
        x, y = rms.get(a), rms.get(b)
        if x and y and gap is not None and gap.value:
            owned = ownership(gap.value**2, x**2, y**2)
            against = "the reference" if a.startswith("reference") else "the scorer's own float32"
            return {
                "sampler": x, "scorer": y, "gap": gap.value, "correlation": owned["correlation"],
                "sampler_share": owned["a_share"], "scorer_share": owned["b_share"], "against": against,
            }  # fmt: skip
    return {}
