"""Public faults of the record as small inputs (`cases/step5_integrity.jsonl`), and relatives of them (R50 to R55).

Each case gives its finding, at its place, with its numbers, and no other; a record that is sound is not named.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from integrity_dumps import batch, codes, found, reply, settled, shaped
from onepolicy.codes import CODES
from onepolicy.integrity.base import Batch
from onepolicy.types import Finding

HERE = Path(__file__).parent / "cases"


def cases(name: str) -> dict[str, dict[str, Any]]:
    lines = (HERE / name).read_text(encoding="utf-8").splitlines()
    return {case["id"]: case for case in map(json.loads, lines)}


CASES = cases("step5_integrity.jsonl")
#: Cases of other kinds: their record is sound.
SOUND = {k: c for k, c in cases("step1.jsonl").items() if c["kind"] not in {x["kind"] for x in CASES.values()}}
#: Kinds whose findings are made here; what the cases call a side is `rollout` or `trainer`.
SIDES = {"sampler": "rollout", "old": "trainer"}
#: "compare with an absolute tolerance of 2e-3 (weights: relative 1%)"
NEAR: dict[str, Any] = {"abs": 2e-3}
WEIGHT: dict[str, Any] = {"rel": 0.01}


def dump(case: dict[str, Any]) -> Batch:
    given = case["input"]
    records = given.get("records") or [{"id": case["id"], **given}]
    raw = [
        reply(
            r["id"], r["rollout_logprobs"], r["trainer_logprobs"],
            r.get("response_ids") or len(r["rollout_logprobs"]), mask=r["loss_mask"],
        )
        for r in records
    ]  # fmt: skip
    return settled(*raw)


def raised(case: str) -> list[Finding]:
    return found(dump(CASES[case]))


def expected(case: str) -> Any:
    return CASES[case]["expected"]


def test_the_cases_names_are_codes() -> None:
    assert {expected(case)["finding"] for case in CASES} <= set(CODES)


@pytest.mark.parametrize("case", CASES)
def test_each_case_gives_its_finding_and_no_other(case: str) -> None:
    verdict = expected(case).get("verdict", "fail")
    assert [(f.code, f.severity.value) for f in raised(case)] == (
        [] if verdict == "pass" else [(expected(case)["finding"], verdict)]
    )


@pytest.mark.parametrize("case", ["C14", "R50"])
def test_lengths_are_explained(case: str) -> None:
    (f,) = raised(case)
    rows = {row["record"]: row for row in f.evidence["places"]}
    wanted = {name: row for name, row in expected(case)["records"].items() if row["verdict"] == "fail"}
    assert set(rows) == set(wanted)
    for name, row in wanted.items():
        for key, value in row.items():
            if key != "verdict":
                assert rows[name][key] == (pytest.approx(value, **NEAR) if isinstance(value, float) else value), key
    assert f.evidence["wrong"] == len(wanted)


@pytest.mark.parametrize("case", ["C19", "R51"])
def test_fills_are_found_where_they_are(case: str) -> None:
    (f,) = raised(case)
    for name, row in expected(case)["records"].items():
        positions = f.evidence["records"].get(name, [])
        if row["verdict"] == "pass":
            assert positions == []
        elif "positions" in row:
            assert positions == row["positions"]
        else:  # "every value is 0.0"
            assert positions == list(range(len(positions))) and f.evidence["all_zero_records"] == 1
    if case == "C19":
        assert f.evidence["worst_factor"] == pytest.approx(expected(case)["records"]["some"]["worst_factor"], **WEIGHT)
        assert f.evidence["records"]["all"] == [0, 1, 2, 3]


@pytest.mark.parametrize("case", ["C37", "R52"])
def test_shifts(case: str) -> None:
    (f,) = raised(case)
    for key, value in expected(case).items():
        if key not in ("finding", "verdict"):
            assert f.evidence[key] == pytest.approx(value, **NEAR), key


@pytest.mark.parametrize("case", ["C52", "R54"])
def test_stored_precision(case: str) -> None:
    (f,) = raised(case)
    assert SIDES[f.evidence["side"]] == expected(case)["side"]
    share = next(k for k in expected(case) if k.startswith("share_exact"))
    assert f.evidence[share] == expected(case)[share]
    if case == "C52":
        assert expected(case)["max_rel"] <= f.evidence["largest_relative_rounding"] == 2**-8


def test_uniform_vocabulary() -> None:
    (f,) = raised("R55")
    assert (f.evidence["side"], f.evidence["vocabulary_that_fits"]) == ("sampler", expected("R55")["vocabulary"])


@pytest.mark.parametrize("case", [k for k, c in SOUND.items() if "rollout_logprobs" in c["input"]])
def test_sound_records_with_other_faults_are_silent(case: str) -> None:
    given = SOUND[case]["input"]
    mask = given.get("loss_mask") or [1] * len(given["rollout_logprobs"])
    trainer = given["trainer_logprobs"]  # one list, or one for each setting of the trainer
    for values in trainer.values() if isinstance(trainer, dict) else [trainer]:
        record = reply(case, given["rollout_logprobs"], values, len(mask), mask=mask)
        assert [f for f in found(settled(record)) if f.severity.value != "info"] == []


def test_c55_a_large_batch_is_looked_at_piece_by_piece() -> None:
    """Pieces of one dump give what the whole gives; nothing but integers and places is kept between them."""
    whole = shaped(0.05, 400, 55)
    pieces = [batch(whole.take(i)) for i in np.array_split(np.arange(400), 9)]
    assert codes(found(*pieces)) == codes(found(batch(whole))) == []


def test_places_are_said_in_words() -> None:
    (f,) = raised("C19")
    assert "record some, reply positions 2, 4 (dump.jsonl:some)" in f.place
