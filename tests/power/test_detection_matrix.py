"""A part of the detection matrix (`docs/detection.md`) again: faults are named, healthy dumps are not blamed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "lab"))

import audit_matrix  # pyright: ignore[reportMissingImports]

import audit_batches as batches
from onepolicy.types import Outcome

pytestmark = pytest.mark.power

#: fault -> (tokens, trials, how many of them must be named).
AGAIN = {
    "mixed-versions": (500, 4, 4),
    "outlier": (500, 4, 4),
    "experts": (5_000, 2, 2),
    "grows-with-position": (5_000, 2, 2),
    "cached-prefix": (5_000, 2, 2),
    "broad-0.1": (5_000, 2, 2),
    "padded-rows": (5_000, 2, 2),
    "chunk-boundary": (5_000, 2, 2),
}


@pytest.mark.parametrize("fault", AGAIN)
def test_a_fault_is_named(fault: str) -> None:
    tokens, trials, least = AGAIN[fault]
    row = audit_matrix.run_cell(fault, tokens, trials)
    assert row.get("named", 0) >= least and row.get("wrong", 0) == 0, row


@pytest.mark.parametrize("data", audit_matrix.HEALTHY)
def test_healthy_dumps_are_not_blamed(data: str) -> None:
    row = audit_matrix.run_cell(data, 500, 12)
    assert row.get("abstains") == 12, row
    row = audit_matrix.run_cell(data, 5_000, 2)
    assert row.get("abstains") == 2, row


def test_the_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_matrix, "TRIALS", {500: (1, 1)})
    path, cells = tmp_path / "lines.jsonl", audit_matrix.cells()
    size = len(cells) // 2
    audit_matrix.run(path, (1, size), say=lambda line: None)
    first = path.read_text(encoding="utf-8")
    assert len(audit_matrix.read_lines(path)) == len(cells[0::size])
    path.write_text(first + '{"data": "outlier", "tok', encoding="utf-8")  # cut off in the middle of a line
    audit_matrix.run(path, (1, size), say=lambda line: pytest.fail(line))
    with path.open("a", encoding="utf-8") as file:
        file.write("\n")
    audit_matrix.run(path, (2, size), say=lambda line: None)
    rows = audit_matrix.read_lines(path)
    assert set(rows) == {*cells[0::size], *cells[1::size]}
    table = audit_matrix.page(rows)
    assert all(f"| {data} |" in table for data, _ in rows) and "false alarms" in table


def test_every_fault_has_a_name_and_outcomes_are_told_apart() -> None:
    from onepolicy.codes import CODES, finding

    assert set(batches.NAMED) == set(batches.FAULTS)
    assert {c for code, also in batches.NAMED.values() for c in (code, *also)} <= set(CODES)
    sure, other = finding("grows-with-position", "x"), finding("gap-jumped", "x")
    few = finding("grows-with-position", "x", outcome=Outcome.INCONCLUSIVE)
    told = audit_matrix.outcome
    assert told("grows-with-position", [sure]) == "named" and told("grows-with-position", [few]) == "undecided"
    assert told("grows-with-position", [other, sure]) == "wrong" and told("healthy bfloat16", [other]) == "wrong"
    assert told("grows-with-position", [finding("bf16-noise", "x")]) == "abstains"
