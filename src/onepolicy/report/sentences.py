"""The verdict's sentences: rounding, same function, what the floor is, what the gap does to an answer.

A pass says "consistent with", never that there is no bug: what could not have been seen is said beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onepolicy.report import rows, words
from onepolicy.report.horizon import verdict_sentence
from onepolicy.report.numbers import number, share
from onepolicy.report.text import escaped
from onepolicy.types import Floor, Gate, LegResult, Outcome, Ran, Report

_PRECEDENCE = (Outcome.ERROR, Outcome.DRIFT, Outcome.INCONCLUSIVE, Outcome.PASS)
_ROUNDING = {
    Outcome.PASS: "Consistent with {}rounding",
    Outcome.DRIFT: "Beyond {}rounding",
    Outcome.INCONCLUSIVE: "Not decided whether this is {}rounding",
}
#: Of a list in a sentence, how many are named.
_NAMED = 6
_FUNCTION = {
    Outcome.PASS: "yes in float32",
    Outcome.DRIFT: "no, in float32 the gap stays",
    Outcome.ERROR: "no answer, the float32 leg met an error",
    Outcome.INCONCLUSIVE: "not decided in float32",
}


def sentences(report: Report) -> list[str]:
    """What the verdict means, a sentence each; none for a report without legs and floor."""
    if report.floor is None and not report.legs:
        return []
    found = [rounding(report), same_function(report.legs)]
    return [said if said.endswith(".") else f"{said}." for said in found if said]


# -- rounding ----------------------------------------------------------------------------------------------------------


def rounding(report: Report) -> str:
    """The gap against the floor, the smallest fault it could have shown, and what it does to an answer."""
    parts = [_against_floor(report), _smallest_fault(report), answer(report)]
    said = "; ".join(p for p in parts if p)
    return said[:1].upper() + said[1:]


def _against_floor(report: Report) -> str:
    floor = report.floor
    if floor is None:
        return ""
    if floor.source == "incomplete":
        return f"Floor incomplete: {escaped(floor.why)}; absolute bounds instead ({escaped(report.preset, 60)})"
    outcome = floor_outcome(report)
    if outcome is None:
        start = "Not judged against the floor of {}rounding"
    else:
        start = _ROUNDING.get(outcome, _ROUNDING[Outcome.INCONCLUSIVE])
    said = start.format(_rounding_of(floor)) + f": {_sizes(report, floor)}"
    return "; ".join([said, *_source(floor), *_above(_floor_gates(report))])


_RATIO = "gap_over_floor/rms"


def _rounding_of(floor: Floor) -> str:
    kind = f"{words.precision(floor.dtype)} " if floor.dtype else ""
    return f"assumed {kind}" if floor.source == "assumed" else kind


def _source(floor: Floor) -> list[str]:
    """What a reader must know of a floor that was not measured."""
    if floor.source == "measured":
        return []
    if floor.source == "assumed":
        return [f"floor assumed: {escaped(floor.why)}" if floor.why else "the floor is assumed"]
    return [f"floor from a saved report{': ' + escaped(floor.why) if floor.why else ''}"]


def _sizes(report: Report, floor: Floor) -> str:
    measured, ratio = (report.measurements.get(k) for k in ("log_ratio/rms", _RATIO))
    said = f"predicted {number(floor.rms)}, measured {number(measured.value if measured else None)} nats RMS"
    if ratio is None or ratio.value is None:
        return said
    if ratio.lower is None or ratio.upper is None:
        return f"{said} ({ratio.value:.2f} floors)"
    return f"{said} ({ratio.value:.2f} floors, {ratio.lower:.2f} to {ratio.upper:.2f})"


def _floor_gates(report: Report) -> list[Gate]:
    return [g for g in report.gates if g.metric.startswith("gap_over_floor")]


def floor_outcome(report: Report) -> Outcome | None:
    """The outcome of the gates that use the floor; None where none of them was held against a number."""
    held = [g.outcome for g in _floor_gates(report) if words.gate_word(g) in list(Outcome) and not words.silent(g)]
    return next((o for o in _PRECEDENCE if o in held), None)


def _above(gates: Sequence[Gate]) -> list[str]:
    """The quantiles and the stretches of positions that are above their bounds."""
    drifted = [g for g in gates if g.outcome is Outcome.DRIFT]
    found = [
        f"{g.metric.removeprefix('gap_over_floor/')} at {number(g.value)} floors"
        for g in drifted
        if g.metric.startswith("gap_over_floor/") and g.metric != _RATIO
    ][:_NAMED]
    late = [low for g in drifted if (low := rows.stretch(g.metric)) is not None]
    known = [g for g in gates if rows.stretch(g.metric) is not None and g.value is not None]
    if late and len(late) == len(known):
        found.append("every stretch of positions")
    elif late:
        more = f" and {len(late) - _NAMED} more stretches" if len(late) > _NAMED else ""
        found.append(f"positions {', '.join(rows.span(low) for low in late[:_NAMED])}{more}")
    return [f"above the bound: {', '.join(found)}"] if found else []


def _smallest_fault(report: Report) -> str:
    fault = report.context.get("floor_fault")
    if not isinstance(fault, float) or floor_outcome(report) is not Outcome.PASS:
        return ""
    return f"a fault under {number(fault, 2)} nats RMS would not have been seen"


def answer(report: Report) -> str:
    """What the gap does to a whole answer; nothing where a finding withholds the numbers."""
    return "" if words.withheld(report) else verdict_sentence(words.answer(report))


# -- same function -----------------------------------------------------------------------------------------------------


def same_function(legs: Sequence[LegResult]) -> str:
    """The answer of the float32 legs, their kernels, and what they do not cover."""
    asked = [leg for leg in legs if leg.key.startswith("same-function")][:_NAMED]
    if not asked:
        return ""
    run = [leg for leg in asked if leg.ran is Ran.DONE]
    if not run:
        why = next((leg for leg in asked if leg.ran is Ran.FAILED), asked[0])
        word = "no answer" if why.ran is Ran.FAILED else "not asked"
        return f"Same function: {word}" + (f" ({escaped(why.why)})" if why.why else "")
    outcome = next((o for o in _PRECEDENCE if o in [leg.outcome for leg in run]), Outcome.INCONCLUSIVE)
    sizes = [said for leg in run if (said := _function_sizes(leg))]
    said = f"Same function: {_FUNCTION[outcome]}" + (f" ({'; '.join(sizes)})" if sizes else "")
    place = next((leg.place for leg in run if leg.place and leg.outcome is not Outcome.PASS), "")
    return "; ".join([said, *([escaped(place)] if place else []), *_missing(asked), *_uncovered(run, outcome)])


_WHERE = {"same-function-texts": "on texts ", "same-function-settings": "at the draw's settings "}


def _function_sizes(leg: LegResult) -> str:
    mean, most = (leg.measurements.get(f"abs_log_ratio/{x}") for x in ("mean", "max"))
    if mean is None or most is None or mean.value is None:
        return ""
    size = f"mean {number(mean.value, 2)}, max {number(most.value, 2)}"
    return f"{_WHERE.get(leg.key, '')}{size} over {mean.n:,} tokens"


def _missing(asked: Sequence[LegResult]) -> list[str]:
    """A part of the question that has no answer, where the other has one."""
    missing = [leg for leg in asked if leg.ran is Ran.FAILED or (leg.ran is Ran.NOT and leg.key == "same-function")]
    return [f"{escaped(leg.key, 40)} {leg.ran.value} ({escaped(leg.why, 120)})" for leg in missing]


def _uncovered(run: Sequence[LegResult], outcome: Outcome) -> list[str]:
    """The kernels that agreed, and that others did not take part. Nothing where they did not agree."""
    if outcome is not Outcome.PASS:
        return []
    facts: Mapping[str, Any] = next((leg.facts for leg in run if leg.facts.get("kernels")), {})
    said = [f"kernels of that leg: {escaped(words.flat(facts['kernels']), 200)}"] if facts else []
    used = facts.get("production_kernels")
    uses = f" ({escaped(words.flat(used), 200)})" if used else ""
    return [*said, f"what production uses instead{uses} is not covered by it"]


# -- whose gap ---------------------------------------------------------------------------------------------------------


def ownership(report: Report) -> str:
    """How much of the gap each side owns against a third scoring; empty where none was made."""
    found = words.mapping(report.context.get("ownership"))
    if not all(isinstance(found.get(k), float) for k in ("sampler", "scorer")):
        return ""
    shares = [
        f"{side} {share(found[k])}"
        for side in ("sampler", "scorer")
        if isinstance(found.get(k := f"{side}_share"), float)
    ]
    errors = f"their errors {number(found['sampler'])} and {number(found['scorer'])} nats RMS"
    against = f" against {escaped(found['against'], 80)}" if found.get("against") else ""
    c = found.get("correlation")
    together = f", correlation {number(c, 2)}" if isinstance(c, float) else ""
    owns = f"of the squared gap {', '.join(shares)}; " if shares else ""
    return f"{owns}{errors}{against}{together}"
