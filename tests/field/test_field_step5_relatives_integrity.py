"""Relatives of the public faults of the record, as files through `audit` (`cases/step5_relatives_integrity.jsonl`).

Each file holds a fault in some records and, often, sound ones beside it: the finding names those and no others, with
the numbers of the case, and the conclusions that the case forbids are not drawn.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from onepolicy.audit import Choices, audit
from onepolicy.cli.main import run
from onepolicy.types import Finding, Outcome, Report, Severity

HERE = Path(__file__).parent / "cases" / "step5_relatives_integrity.jsonl"
CASES: dict[str, dict[str, Any]] = {
    case["id"]: case for case in map(json.loads, HERE.read_text(encoding="utf-8").splitlines())
}
#: Nats, counts and factors; the case's numbers come from unrounded arrays.
NEAR: dict[str, Any] = {"abs": 2e-3, "rel": 5e-3}
FAULTS = [k for k, c in CASES.items() if c["expected"]["finding"]]


def written(folder: Path, case: str) -> Path:
    file = folder / "rollouts.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in CASES[case]["input"]["records"]), encoding="utf-8")
    return file


@cache
def _reports() -> dict[str, Report]:
    return {}


def audited(folder: Path, case: str) -> Report:
    if case not in _reports():
        _reports()[case] = audit([written(folder, case)], Choices(workers=1, what_if=False))
    return _reports()[case]


def expected(case: str) -> dict[str, Any]:
    return CASES[case]["expected"]


def told(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.severity is not Severity.INFO]


def named(report: Report, case: str) -> Finding:
    found = [f for f in report.findings if f.code == expected(case)["finding"]]
    assert len(found) == 1, [(f.code, f.message) for f in report.findings]
    return found[0]


@pytest.mark.parametrize("case", FAULTS)
def test_the_fault_is_named_first_and_is_as_grave_as_it_should_be(case: str, tmp_path: Path) -> None:
    report = audited(tmp_path, case)
    assert told(report)[0].code == expected(case)["finding"]
    assert named(report, case).severity.value == expected(case)["verdict"]
    assert (report.outcome in (Outcome.DRIFT, Outcome.ERROR)) == (expected(case)["verdict"] == "fail")


@pytest.mark.parametrize("case", CASES)
def test_no_wrong_conclusion_is_drawn(case: str, tmp_path: Path) -> None:
    report = audited(tmp_path, case)
    assert not {f.code for f in report.findings} & set(expected(case)["must_not"])
    if expected(case)["verdict"] == "pass":
        assert not told(report), [(f.code, f.message) for f in told(report)]


@pytest.mark.parametrize("case", FAULTS)
def test_the_records_that_are_named_are_those_with_the_fault(case: str, tmp_path: Path) -> None:
    places = named(audited(tmp_path, case), case).evidence.get("places", [])
    assert {p["record"] for p in places} == set(expected(case)["records"])
    for record, positions in expected(case).get("positions", {}).items():
        assert [p["reply_position"] for p in places if p["record"] == record] == positions


@pytest.mark.parametrize("case", FAULTS)
def test_the_numbers(case: str, tmp_path: Path) -> None:
    finding = named(audited(tmp_path, case), case)
    for key, value in expected(case)["evidence"].items():
        number = isinstance(value, float)
        assert finding.evidence[key] == (pytest.approx(value, **NEAR) if number else value), key
    assert expected(case).get("says", "") in finding.message


@pytest.mark.parametrize(("case", "code"), [("R100", 1), ("R108", 3), ("R112", 3), ("R120", 1)])
def test_the_exit_code_is_the_verdict(case: str, code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Three sound records are too few to pass."""
    assert run(["audit", str(written(tmp_path, case)), "--no-what-if", "--workers", "1"]) == code
    out = capfd.readouterr()
    assert "Traceback" not in out.err
    if expected(case)["finding"]:
        assert expected(case)["finding"] in out.out
