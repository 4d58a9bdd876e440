"""Rows that the tables of several reports share, as text: legs, positions, keys of fingerprints that differ."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from onepolicy.estimate import LEAST_CLUSTERS
from onepolicy.metrics.floor import BUCKETS
from onepolicy.report import words
from onepolicy.report.numbers import interval, number
from onepolicy.report.text import escaped
from onepolicy.types import LegResult, Measurement, Outcome, Question, Ran, Report


@dataclass(frozen=True, slots=True)
class LegRow:
    """A leg that was run. Every field but `outcome` is printable text."""

    key: str
    compared: str
    tokens: str
    rms: str
    largest: str
    over_floor: str
    outcome: Outcome | None
    #: what the leg adds: the first bad token, cached tokens
    note: str


def leg_rows(report: Report) -> Iterator[tuple[str, list[LegRow]]]:
    """(question, its legs that were run), in the order of the questions."""
    order = list(Question)
    run = [leg for leg in report.legs if leg.ran is Ran.DONE]
    run.sort(key=lambda leg: order.index(leg.question))
    for question, legs in groupby(run, key=lambda leg: leg.question):
        yield question.value, [_leg_row(leg) for leg in legs]


def _leg_row(leg: LegResult) -> LegRow:
    rms, largest, over = (
        _value(leg.measurements.get(k)) for k in ("log_ratio/rms", "abs_log_ratio/max", "gap_over_floor/rms")
    )
    n = next((m.n for k in ("abs_log_ratio/mean", "log_ratio/rms") if (m := leg.measurements.get(k))), 0)
    compared = leg.factor or f"{leg.a} / {leg.b}"
    said = (f"{n:,}" if n else "–", number(rms, 2), number(largest, 2), number(over))
    return LegRow(escaped(leg.key, 40), escaped(compared, 160), *said, leg.outcome, _note(leg))


def _value(m: Measurement | None) -> float | None:
    return None if m is None else m.value


def _note(leg: LegResult) -> str:
    """Only where something is to be looked at."""
    if leg.outcome in (None, Outcome.PASS):
        return ""
    return escaped(leg.place or leg.why or "; ".join(f"{g.metric} {g.why}" for g in leg.gates if g.why), 200)


def not_run(report: Report, ran: Ran = Ran.NOT) -> list[tuple[str, list[str]]]:
    """(why, the legs) that were not run (or, with `ran`, failed), grouped by the reason."""
    groups: dict[str, list[str]] = {}
    for leg in report.legs:
        if leg.ran is ran:
            groups.setdefault(escaped(leg.why or "no reason given", 160), []).append(escaped(leg.key, 40))
    return list(groups.items())


# -- what legs found besides numbers -----------------------------------------------------------------------------------

_APPLIED = {True: "applied", False: "not applied", None: "not told apart"}


def contract_rows(report: Report) -> list[tuple[str, str, str, str, str]]:
    """(setting, whether it is applied, gap if it were, gap if it were not, tokens) of the contract that was probed."""
    leg = next((leg for leg in report.legs if leg.key == "contract"), None)
    settings = words.mapping(leg.facts).get("settings") if leg is not None else None
    rows = settings if isinstance(settings, (list, tuple)) else ()
    return [_contract_row(words.mapping(row)) for row in rows[:40]]


def _contract_row(row: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    applied, n = row.get("applied"), row.get("tokens")
    told = _APPLIED[applied if isinstance(applied, bool) else None]
    if_applied, if_not = (number(row.get(k), 2) for k in ("gap_if_applied", "gap_if_not"))
    return escaped(row.get("setting"), 60), told, if_applied, if_not, f"{n:,}" if isinstance(n, int) else "–"


def found_lines(report: Report) -> list[str]:
    """A line for each leg that found something besides numbers: the contract, the identities of step 0."""
    out: list[str] = []
    rows = contract_rows(report)
    for word in _APPLIED.values():
        names = [setting for setting, told, *_ in rows if told == word]
        out += [f"{word}: {', '.join(names)}"] if names else []
    contract = [f"contract: {'; '.join(out)}"] if out else []
    step = next((leg for leg in report.legs if leg.key == "step-0" and leg.ran is Ran.DONE), None)
    pairs = step.facts.items() if step is not None else ()
    return contract + [f"step-0, {escaped(pair, 60)}: {escaped(words.flat(found), 200)}" for pair, found in pairs]


# -- positions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PositionRow:
    """The gap over one stretch of positions. `outcome`: that of its bound, None where it has none."""

    positions: str
    tokens: str
    rms: str
    over_floor: str
    limits: str
    outcome: Outcome | None


def position_rows(report: Report) -> list[PositionRow]:
    """Stretches that have tokens."""
    outcomes = {g.metric: g.outcome for g in report.gates}
    out: list[PositionRow] = []
    for low in BUCKETS:
        gap = report.measurements.get(f"log_ratio_from_{low}/rms")
        over = report.measurements.get(f"gap_over_floor_from_{low}/rms")
        known = next((m for m in (gap, over) if m is not None and m.value is not None), None)
        if known is None:
            continue
        limits = "" if over is None or over.value is None else _limits(over)
        outcome = outcomes.get(f"gap_over_floor_from_{low}/rms")
        out.append(PositionRow(span(low), f"{known.n:,}", number(_value(gap)), number(_value(over)), limits, outcome))
    return out


def _limits(m: Measurement) -> str:
    """Limits from few clusters say nothing."""
    return "few clusters" if m.effective_clusters < LEAST_CLUSTERS else interval(m.lower, m.upper)


def stretch(metric: str) -> int | None:
    """Where the stretch of positions of a metric starts; None for a metric of all positions."""
    found = re.fullmatch(r"(?:gap_over_floor|log_ratio)_from_([0-9]{1,9})/rms", metric)
    return None if found is None else int(found[1])


def span(low: int) -> str:
    """The stretch of positions that starts at `low`."""
    after = [b for b in BUCKETS if b > low]
    return f"{low:,} to {after[0] - 1:,}" if after else f"{low:,} and above"


# -- fingerprints ------------------------------------------------------------------------------------------------------


def differing(report: Report) -> list[tuple[str, list[str]]]:
    """(key, its value on each side) of the fingerprints' keys that differ; those that both have come first."""
    flat = [dict(_flat(f)) for f in report.fingerprints.values()]
    keys = dict.fromkeys(k for one in flat for k in one)
    rows = [(k, [one.get(k) for one in flat]) for k in keys]
    rows = [(k, values) for k, values in rows if any(v != values[0] for v in values)]
    rows.sort(key=lambda row: None in row[1])
    return [(escaped(k, 80), ["–" if v is None else escaped(v, 120) for v in values]) for k, values in rows]


def _flat(fingerprint: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in fingerprint.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        elif value is not None:
            yield f"{above}{key}", value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)
