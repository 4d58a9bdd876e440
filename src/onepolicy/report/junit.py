"""A report as JUnit XML, for the test pages of CI systems.

One suite: the verdict, each bound, each leg, each finding that is no note. Where the report passes nothing fails here,
and where it does not, at least the verdict does: a reader of this file and of the exit code decide alike. So
inconclusive is a failure (a gate lets through what passed), and a leg whose outcome the verdict does not hang on is
skipped with its outcome as the reason.

Source of the format: the schema of Jenkins' xUnit plugin, which GitLab's and GitHub's readers accept.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from onepolicy.report import words
from onepolicy.report.numbers import number
from onepolicy.report.sentences import sentences
from onepolicy.report.text import escaped
from onepolicy.types import Finding, Gate, LegResult, Outcome, Ran, Report, TokenReport

_SUITE = "onepolicy check"
#: Cases of a kind; the rest are counted in the properties.
_CASES = 500


@dataclass(frozen=True, slots=True)
class Case:
    """One test case. `tag`: what stands in it (`failure`, `error`, `skipped`), empty where it passed."""

    kind: str
    name: str
    tag: str = ""
    type: str = ""
    message: str = ""
    body: str = ""


def render_junit(report: Report) -> str:
    """The report as JUnit XML text, with a declaration; plain ASCII."""
    said = "\n".join([f"{report.outcome.value}: {words.headline(report)}", *sentences(report)])
    return document(_SUITE, _cases(report), _properties(report), said)


def document(name: str, cases: Iterable[Case], properties: Iterable[tuple[str, str]], said: str) -> str:
    """One suite as JUnit XML text."""
    cases = list(_distinct(cases))
    counts = _counts(cases)
    root = ET.Element("testsuites", {"name": name, **{k: v for k, v in counts.items() if k != "skipped"}})
    suite = ET.SubElement(root, "testsuite", {"name": name, **counts})
    listed = ET.SubElement(suite, "properties")
    for key, value in properties:
        ET.SubElement(listed, "property", {"name": key, "value": value})
    for case in cases:
        suite.append(_element(case))
    out = ET.SubElement(suite, "system-out")
    out.text = said
    ET.indent(root)
    text = ET.tostring(root, encoding="us-ascii", xml_declaration=False).decode("ascii")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


def _counts(cases: list[Case]) -> dict[str, str]:
    count = {tag: str(sum(case.tag == tag for case in cases)) for tag in ("failure", "error", "skipped")}
    return {
        "tests": str(len(cases)), "failures": count["failure"], "errors": count["error"], "skipped": count["skipped"],
        "time": "0",
    }  # fmt: skip


def _element(case: Case) -> ET.Element:
    found = ET.Element("testcase", {"name": case.name, "classname": f"onepolicy.{case.kind}", "time": "0"})
    if case.tag:
        said = {"message": case.message, **({"type": case.type} if case.type else {})}
        ET.SubElement(found, case.tag, said).text = case.body or None
    return found


def _properties(report: Report) -> Iterator[tuple[str, str]]:
    yield "outcome", report.outcome.value
    yield "bounds", escaped(report.preset, 200)
    if report.floor is not None:
        yield "floor", report.floor.source
        yield from (("floor.rms_nats", number(report.floor.rms, 6)),) if report.floor.rms is not None else ()
        yield from (("floor.why", escaped(report.floor.why)),) if report.floor.why else ()
    yield "tokens", words.counted(report)
    for side, engine in words.sides(report):
        yield f"{side}.engine", engine
    for side, fingerprint in report.fingerprints.items():
        versions = words.mapping(fingerprint.get("versions"))
        for package, version in list(versions.items())[:40]:
            yield f"{escaped(side, 16)}.version.{escaped(package, 60)}", escaped(version, 60)
    if said := words.suite_words(report):
        yield "suite", said


# -- cases -------------------------------------------------------------------------------------------------------------


def _cases(report: Report) -> Iterator[Case]:
    yield _verdict(report)
    yield from (_bound(g, report) for g in report.gates[:_CASES] if not words.silent(g))
    yield from (_leg(leg, report) for leg in report.legs[:_CASES])
    yield from (finding_case(f, report) for f in report.findings[:_CASES] if not words.is_note(f))


def _verdict(report: Report) -> Case:
    body = "\n".join(sentences(report))
    return judged("verdict", "verdict", report.outcome, words.headline(report), body)


def judged(kind: str, name: str, outcome: Outcome, message: str, body: str = "") -> Case:
    """A case that passes with its outcome."""
    if outcome is Outcome.PASS:
        return Case(kind, name)
    tag = "error" if outcome is Outcome.ERROR else "failure"
    return Case(kind, name, tag, outcome.value, message, body)


def _bound(gate: Gate, report: Report) -> Case:
    name = f"{escaped(gate.metric, 120)} <= {number(gate.bound)}"
    word = words.gate_word(gate)
    if word not in list(Outcome):
        if gate.outcome is not Outcome.PASS:
            return _held(Case("bounds", name, "failure", gate.outcome.value, escaped(gate.why)), report)
        return Case("bounds", name, "skipped", message=escaped(gate.why))
    limit = "" if gate.limit is None else f", 99% limit {number(gate.limit)}"
    why = f": {escaped(gate.why)}" if gate.why else ""
    message = f"{word}: {number(gate.value)}{limit}, bound {number(gate.bound)}{why}"
    body = f"{gate.n:,} tokens, {gate.effective_clusters:.3g} effective clusters\nbound: {escaped(gate.source)}"
    return _held(judged("bounds", name, gate.outcome, message, body), report)


def _leg(leg: LegResult, report: Report) -> Case:
    name = escaped(leg.key, 80)
    if leg.ran is not Ran.DONE:
        failed = Case("legs", name, "error", "failed", escaped(leg.why), escaped(leg.factor))
        return _held(failed, report) if leg.ran is Ran.FAILED else Case("legs", name, "skipped", message=_why(leg))
    outcome = leg.outcome or Outcome.PASS
    over = leg.measurements.get("gap_over_floor/rms")
    rms = leg.measurements.get("log_ratio/rms")
    sizes = [f"RMS {number(rms.value)} nats"] if rms is not None else []
    sizes += [f"{number(over.value)} floors"] if over is not None and over.value is not None else []
    message = "; ".join([outcome.value, *sizes, *([escaped(leg.place)] if leg.place else [])])
    body = escaped(f"{leg.question.value}: {leg.factor} ({leg.a} against {leg.b})")
    return _held(judged("legs", name, outcome, message, body), report)


def _why(leg: LegResult) -> str:
    return escaped(f"not run: {leg.why or 'no reason given'}")


def finding_case(found: Finding, report: Report | TokenReport) -> Case:
    """A finding as a case: what only warns is skipped."""
    place = f"at {escaped(found.place)}\n" if found.place else ""
    body = f"{place}{escaped(found.advice)}\nonepolicy explain {found.code}"
    if found.outcome is Outcome.PASS:  # a warning
        return Case("findings", found.code, "skipped", message=escaped(f"warns: {found.message}"), body=body)
    return _held(judged("findings", found.code, found.outcome, escaped(found.message), body), report)


def _held(case: Case, report: Report | TokenReport) -> Case:
    """The case, skipped where it failed and the report passes all the same: the verdict does not hang on it."""
    if report.outcome is not Outcome.PASS or case.tag not in ("failure", "error"):
        return case
    message = f"{case.type}, but the verdict does not hang on it: {case.message}"
    return Case(case.kind, case.name, "skipped", message=message, body=case.body)


def _distinct(cases: Iterable[Case]) -> Iterator[Case]:
    """Names that are there already get a number: readers merge cases of one name."""
    seen: dict[tuple[str, str], int] = {}
    for case in cases:
        n = seen[case.kind, case.name] = seen.get((case.kind, case.name), 0) + 1
        name = case.name or "no name"
        name = name if n == 1 else f"{name} ({n})"
        yield Case(case.kind, name, case.tag, case.type, case.message, case.body)
