"""The given cases as files on disk, through `audit`: what a user with that dump would be told."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from onepolicy.audit import Choices, audit
from onepolicy.types import Finding, Report, Severity

CASES = Path(__file__).parent / "cases"


@cache
def case(name: str) -> dict[str, Any]:
    for file in ("step5_integrity.jsonl", "step5_meaning.jsonl", "step5_shape.jsonl"):
        for line in (CASES / file).read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            if found["id"] == name:
                return found
    raise KeyError(name)


def pair(name: str, **more: Any) -> list[dict[str, Any]]:
    """A case of two lists of log-probs, as one record without token ids."""
    given = case(name)["input"]
    keys = ("rollout_logprobs", "trainer_logprobs", "loss_mask")
    return [{"id": "r", **{k: given[k] for k in keys if k in given}, **more}]


def audited(folder: Path, rows: list[dict[str, Any]]) -> Report:
    file = folder / "rollouts.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return audit([file], Choices(workers=1))


def named(report: Report, code: str) -> Finding:
    found = [f for f in report.findings if f.code == code]
    assert found, [(f.code, f.message) for f in report.findings]
    return found[0]


def warned(report: Report) -> set[str]:
    return {f.code for f in report.findings if f.severity is not Severity.INFO}


def test_c14_lengths_that_do_not_fit(tmp_path: Path):
    report = audited(tmp_path, case("C14")["input"]["records"])
    found = named(report, case("C14")["expected"]["finding"])
    assert found.severity is Severity.FAIL
    said = json.dumps(found.evidence)
    assert "a_stop_trimmed" in said and "b_retokenised" in said
    assert not report.measurements, "nothing is cut to fit"


def test_c19_filled_values_and_an_honest_zero(tmp_path: Path):
    report = audited(tmp_path, case("C19")["input"]["records"])
    found = named(report, case("C19")["expected"]["finding"])
    said = json.dumps(found.evidence)
    assert found.severity is Severity.FAIL and "sentinel" in said and "honest_zero" not in said


def test_c15_a_temperature_from_chosen_tokens_is_suspected_only(tmp_path: Path):
    given = case("C15")["input"]
    rows = [{"id": "r", "response_ids": given["token_ids"], **{k: given[k] for k in given if k.endswith("_logprobs")}}]
    report = audited(tmp_path, rows)
    assert "temperature-mismatch" not in {f.code for f in report.findings}
    assert named(report, "temperature-suspected").severity is Severity.INFO


def test_c16_a_truncated_side(tmp_path: Path):
    expected = case("C16")["expected"]
    report = audited(tmp_path, pair("C16", top_p=0.8, temperature=1.0))
    found = named(report, expected["finding"])
    assert found.severity is Severity.FAIL
    assert found.evidence["mean_ratio"] == pytest.approx(expected["mean_ratio"], abs=1e-5)
    assert found.evidence["positive_deltas"] == 0
    assert report.measurements["ratio/mean"].value == pytest.approx(expected["mean_ratio"], abs=1e-5)


def test_c22_ordinary_noise_has_nothing_to_warn_of(tmp_path: Path):
    expected = case("C22")["expected"]
    report = audited(tmp_path, pair("C22"))
    assert not warned(report)
    said = named(report, "bf16-noise")
    assert said.severity is Severity.INFO
    shown = " ".join((said.message, json.dumps(said.evidence)))
    assert all(word in shown for word in ("sd", "95%", "largest")), "not the mean alone"
    assert report.measurements["abs_log_ratio/max"].value == pytest.approx(expected["max_abs"], abs=1e-5)
    assert report.measurements["abs_log_ratio/p95"].value == pytest.approx(expected["p95_abs"], rel=0.01)


def test_c23_one_token(tmp_path: Path):
    expected = case("C23")["expected"]
    report = audited(tmp_path, pair("C23"))
    found = named(report, expected["finding"])
    assert found.severity is Severity.WARN and str(expected["positions"][0]) in found.place
    assert report.measurements["mult_prob_error/mean"].value == pytest.approx(expected["mean_exp_abs"], rel=1e-6)
    assert report.measurements["abs_log_ratio/mean"].value == pytest.approx(expected["mean_abs"], abs=1e-6)


def test_c30_experts(tmp_path: Path):
    given, expected = case("C30")["input"], case("C30")["expected"]
    rows = pair("C30", experts_engine=given["experts_engine"], experts_trainer=given["experts_trainer"])
    found = named(audited(tmp_path, rows), expected["finding"])
    assert found.severity is Severity.FAIL
    assert found.evidence["share_tokens"] == pytest.approx(expected["share_tokens"])
    assert found.evidence["mean_abs_differing"] == pytest.approx(expected["mean_abs_differing"], abs=1e-4)
    assert found.evidence["mean_abs_same"] == pytest.approx(expected["mean_abs_same"], abs=1e-4)


def test_c34_growing_with_the_position(tmp_path: Path):
    expected = case("C34")["expected"]
    report = audited(tmp_path, pair("C34"))
    found = named(report, "grows-with-position")
    assert found.evidence["grows_with_position"] is True
    assert found.evidence["mean_abs_by_quarter"] == pytest.approx(expected["mean_abs_by_quarter"], abs=1e-4)


def test_c37_one_position_late(tmp_path: Path):
    expected = case("C37")["expected"]
    found = named(audited(tmp_path, pair("C37")), expected["finding"])
    assert found.severity is Severity.FAIL
    assert found.evidence["best_lag"] == expected["best_lag"]


def test_c50_two_weight_versions(tmp_path: Path):
    given, expected = case("C50")["input"]["records"][0], case("C50")["expected"]
    report = audited(tmp_path, [given])
    found = named(report, expected["finding"])
    assert found.severity is Severity.WARN and "23" in found.message


def test_c52_stored_in_bf16(tmp_path: Path):
    report = audited(tmp_path, pair("C52"))
    assert named(report, case("C52")["expected"]["finding"]).severity is Severity.WARN
    assert warned(report) == {"stored-as-bf16"}
