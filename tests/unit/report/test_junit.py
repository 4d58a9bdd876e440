"""JUnit XML: well formed for every reader, and in step with the exit code."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from full import HOSTILE, REPORTS, checked, other_leg, poisoned, with_findings
from scenarios import batch, judged

from onepolicy.codes import finding
from onepolicy.report.junit import render_junit
from onepolicy.types import Outcome, Ran, Report

#: Attributes that the readers of Jenkins, GitLab and GitHub actions know.
ATTRIBUTES = {
    "testsuites": {"name", "tests", "failures", "errors", "time"},
    "testsuite": {"name", "tests", "failures", "errors", "skipped", "time"},
    "property": {"name", "value"},
    "properties": set(),
    "testcase": {"name", "classname", "time"},
    "failure": {"message", "type"},
    "error": {"message", "type"},
    "skipped": {"message"},
    "system-out": set(),
}


def suite_of(report: Report) -> ET.Element:
    root = ET.fromstring(render_junit(report))
    assert root.tag == "testsuites" and [x.tag for x in root] == ["testsuite"]
    return root[0]


def cases(report: Report, kind: str) -> dict[str, str]:
    """name -> the tag of its result, of the cases of one kind."""
    found = [c for c in suite_of(report).iter("testcase") if c.get("classname") == f"onepolicy.{kind}"]
    return {c.get("name", ""): c[0].tag if len(c) else "passed" for c in found}


def message(report: Report, kind: str, name: str) -> str:
    for case in suite_of(report).iter("testcase"):
        if (case.get("classname"), case.get("name")) == (f"onepolicy.{kind}", name):
            return case[0].get("message", "")
    raise AssertionError(name)


def assert_well_formed(report: Report) -> None:
    text = render_junit(report)
    assert text.startswith('<?xml version="1.0" encoding="UTF-8"?>\n<testsuites ') and text.isascii()
    assert not re.search(r"&#(?:x0*)?(?:[0-8]|11|12|1[4-9]|2\d|3[01]|55[23]\d\d|6553[45]);", text)
    root = ET.fromstring(text)
    for element in root.iter():
        assert set(element.attrib) <= ATTRIBUTES[element.tag], element.tag
    suite = root[0]
    tags = [c[0].tag if len(c) else "" for c in suite.iter("testcase")]
    assert suite.get("tests") == root.get("tests") == str(len(tags))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        assert suite.get(name) == str(tags.count(tag))
    names = [(c.get("classname"), c.get("name")) for c in suite.iter("testcase")]
    assert len(set(names)) == len(names) and all(all(n) for n in names)


@pytest.mark.parametrize("what", REPORTS)
def test_every_report_is_well_formed_and_fails_where_the_exit_code_does(what: str):
    report = REPORTS[what]()
    assert_well_formed(report)
    suite = suite_of(report)
    failed = int(suite.get("failures", "")) + int(suite.get("errors", ""))
    assert (failed > 0) == (report.outcome.exit_code != 0)
    assert suite.get("name") == "onepolicy check"


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_text_is_well_formed(what: str):
    assert_well_formed(poisoned(HOSTILE[what]))


def test_a_healthy_check():
    assert cases(checked(), "verdict") == {"verdict": "passed"}
    bounds = cases(checked(), "bounds")
    assert bounds["gap_over_floor/rms <= 1.25"] == "passed"
    assert bounds["gap_over_floor/p99.9 <= 1.25"] == "skipped"
    assert bounds["surprisal_scorer/excess <= 0.01"] == "skipped"
    assert not [name for name in bounds if "_from_" in name]
    legs = cases(checked(), "legs")
    assert list(legs) == [x.key for x in checked().legs]
    assert {k for k, v in legs.items() if v == "skipped"} == {x.key for x in checked().legs if x.ran is Ran.NOT}
    assert message(checked(), "legs", "sampler-load") == "not run: engine 'vllm' is no server"
    assert cases(checked(), "findings") == {}


def test_drift_fails():
    report = REPORTS["a late fault"]()
    assert cases(report, "verdict") == {"verdict": "failure"}
    bounds = cases(report, "bounds")
    assert bounds["gap_over_floor/rms <= 1.25"] == bounds["gap_over_floor_from_64/rms <= 1.25"] == "failure"
    assert message(report, "bounds", "gap_over_floor/p95 <= 1.25").startswith("drift: 6.")
    found = cases(report, "findings")
    assert found["beyond-rounding"] == found["beyond-rounding (2)"] == found["beyond-rounding-late"] == "failure"
    assert cases(REPORTS["another function"](), "legs")["same-function"] == "failure"


def test_inconclusive_fails_with_its_type():
    few = judged(batch(sequences=8))
    assert few.outcome is Outcome.INCONCLUSIVE
    case = next(suite_of(few).iter("testcase"))
    assert (case[0].tag, case[0].get("type")) == ("failure", "inconclusive")


def test_an_error_and_a_leg_that_failed_are_errors():
    assert cases(REPORTS["withheld"](), "verdict") == {"verdict": "error"}
    assert set(cases(REPORTS["withheld"](), "bounds").values()) == {"skipped"}
    failed = REPORTS["float32 failed"]()
    assert cases(failed, "legs")["same-function"] == "error"
    assert message(failed, "legs", "same-function") == "out of memory: float32 needs 3.1 GiB, 2.0 GiB are free"


def test_where_the_verdict_passes_nothing_fails():
    report = other_leg(checked(), "sampler-batch", outcome=Outcome.DRIFT, place="first bad token: record a, position 1")
    report = other_leg(report, "scorer-path", ran=Ran.FAILED, why="a kernel is missing", outcome=None)
    report = with_findings(report, finding("tokenizer-differs", "tokenizer_digest: a and b", origin="run"))
    assert report.outcome is Outcome.PASS
    suite = suite_of(report)
    assert (suite.get("failures"), suite.get("errors")) == ("0", "0")
    said = message(report, "legs", "sampler-batch")
    assert said.startswith("drift, but the verdict does not hang on it: drift; RMS 0.0")
    assert message(report, "legs", "scorer-path").startswith("failed, but the verdict does not hang on it: a kernel")
    assert message(report, "findings", "tokenizer-differs") == "warns: tokenizer_digest: a and b"


def test_properties_hold_versions_bounds_and_floor():
    found = {p.get("name"): p.get("value") for p in suite_of(checked()).iter("property")}
    assert found["outcome"] == "pass"
    assert found["bounds"] == "floor + bf16"
    assert found["floor"] == "measured" and float(found["floor.rms_nats"] or "") == pytest.approx(0.034, abs=0.002)
    assert found["sampler.version.vllm"] == "0.32.0"
    assert found["sampler.engine"] == "vllm 0.32.0 · SmolLM2-135M · bfloat16 · cpu"
    incomplete = {p.get("name"): p.get("value") for p in suite_of(REPORTS["no floor"]()).iter("property")}
    assert incomplete["floor"] == "incomplete" and "cannot be emulated" in (incomplete["floor.why"] or "")


def test_the_output_has_the_sentences():
    out = suite_of(checked()).find("system-out")
    assert out is not None and out.text is not None
    assert out.text.splitlines()[0] == "pass: the two sides agree within every bound"
    assert "Consistent with bf16 rounding" in out.text and "Same function: yes" in out.text


def test_a_report_without_context_still_renders():
    bare = replace(checked(), context={}, gates=(), fingerprints={}, measurements={}, legs=(), floor=None, findings=())
    assert_well_formed(bare)
