"""Signatures of meaning against every fault and healthy data: each names its own and stays silent on the others."""

from __future__ import annotations

import functools
import zlib

import numpy as np
import pytest

import audit_batches as batches
import audit_meaning as meaning
from onepolicy.signatures import SIGNATURES
from onepolicy.signatures.base import Answer, Evidence
from onepolicy.signatures.weigh import weigh
from onepolicy.survey import evidence_of, survey_of

MINE = (
    "temperature", "truncation", "penalties", "softcap", "raw_processed", "stored_policy", "copied_old", "reference",
)  # fmt: skip
#: Faults of the shared table -> the signature that says so, and what it says.
SHARED = {
    "temperature-0.7": ("temperature", "unclear"),
    "temperature-undeclared": ("temperature", "unclear"),
    "top-p-0.9": ("truncation", "fits"),
    "top-p-undeclared": ("truncation", "fits"),
    "top-k-20": ("truncation", "fits"),
    "padded-rows": ("truncation", "unclear"),
}
#: Of our own faults, those that are suspected and not named, and a second signature that is right as well.
SUSPECTED = {"softcap-15-entropy"}
ALSO = {"declared-raw": {"truncation"}}
SILENT = {"softcap-15", "softcap-30-entropy", "healthy-policies", "replayed-sets", "one-temperature-entropy"}


@functools.cache
def evidence(fault: str, dtype: str, tokens: int) -> Evidence:
    r, rng = batches.healthy(dtype, tokens, 11), np.random.default_rng(zlib.crc32(fault.encode()))
    if fault in meaning.MEANING:
        r = meaning.MEANING[fault][0](r, rng)
    elif fault:
        r = batches.FAULTS[fault](r, rng)
    return evidence_of(survey_of(r, ("sampler", "old")))


def answers(fault: str, dtype: str, tokens: int) -> dict[str, Answer]:
    e = evidence(fault, dtype, tokens)
    found = {key: SIGNATURES[key].judge(e) for key in MINE}
    return {key: a for key, a in found.items() if a.verdict in ("fits", "unclear")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", sorted(set(meaning.MEANING) - SILENT))
def test_each_fault_of_meaning_is_its_signature_s_alone(fault: str, dtype: str) -> None:
    key = meaning.MEANING[fault][1]
    got = answers(fault, dtype, 3000)
    assert set(got) - ALSO.get(fault, set()) == {key}, {k: a.why for k, a in got.items()}
    assert got[key].verdict == ("unclear" if fault in SUSPECTED else "fits")
    found = got[key].finding
    assert found is not None
    assert found.code == SIGNATURES[key].code


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        *((fault, "bfloat16") for fault in [*sorted(batches.FAULTS), *sorted(SILENT), ""]),
        *((fault, "float32") for fault in [*sorted(SHARED), *sorted(SILENT), "broad-0.5", "outlier", ""]),
    ],
)
def test_other_faults_and_healthy_data_are_left_alone(fault: str, dtype: str) -> None:
    got = {key: a.verdict for key, a in answers(fault, dtype, 3000).items()}
    if fault == "padded-rows" and dtype == "bfloat16":  # noise hides that nothing is above 0
        assert got in ({}, {"truncation": "unclear"})
    else:
        assert got == (dict([SHARED[fault]]) if fault in SHARED else {})


@pytest.mark.parametrize("seed", range(3))
def test_small_healthy_dumps_are_left_alone(seed: int) -> None:
    for dtype in batches.LEVELS:
        for r in (batches.healthy(dtype, 300, seed), batches.fake(dtype, 300, seed)):
            e = evidence_of(survey_of(r, ("sampler", "old")))
            assert {k: a.why for k in MINE if (a := SIGNATURES[k].judge(e)).verdict in ("fits", "unclear")} == {}


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("presence-0.5", "penalty-mismatch"),
        ("frequency-0.3", "penalty-mismatch"),
        ("temperature-0.6-entropy", "temperature-mismatch"),
        ("softcap-15-entropy", "softcap-differs"),
        ("min-p-0.1", "truncated-support-mismatch"),
    ],
)
def test_shapes_that_a_meaning_makes_are_not_named_beside_it(fault: str, code: str) -> None:
    found = weigh(evidence(fault, "bfloat16", 3000))
    assert [f.code for f in found] == [code], [(f.code, f.message) for f in found]
    assert found[0].ruled_out


def test_a_suspicion_is_told_where_nothing_is_named() -> None:
    (found,) = weigh(evidence("temperature-0.7", "bfloat16", 3000))
    assert (found.code, found.outcome) == ("temperature-suspected", "inconclusive")
    assert "would decide" in found.message
    assert found.rivals


@pytest.mark.parametrize(
    ("fault", "ratio"),
    [
        ("temperature-0.6-entropy", 0.6),
        ("temperature-0.6-drawn", 0.6),
        ("temperature-0.6-sampler", 0.6),
        ("temperature-1.2-entropy", 1 / 1.2),
        ("temperature-0.9-entropy", 0.9),
        ("logits-doubled", 0.5),
    ],
)
def test_the_quotient_of_temperatures_is_recovered(fault: str, ratio: float) -> None:
    """Within a hundredth, whichever side tells its entropy and whoever drew the tokens."""
    answer = SIGNATURES["temperature"].judge(evidence(fault, "bfloat16", 3000))
    assert answer.finding is not None
    assert answer.finding.evidence["temperature_ratio"] == pytest.approx(ratio, abs=0.01)


@pytest.mark.parametrize(
    ("fault", "kind"), [("presence-0.5", "presence"), ("frequency-0.3", "frequency"), ("repetition-1.2", "repetition")]
)
def test_the_kind_of_penalty(fault: str, kind: str) -> None:
    found = SIGNATURES["penalties"].judge(evidence(fault, "bfloat16", 3000)).finding
    assert found is not None
    assert (found.evidence["kind"], found.evidence["side"]) == (kind, "sampler")


def test_declared_temperature_says_which_side_has_it() -> None:
    found = SIGNATURES["temperature"].judge(evidence("temperature-1.2-entropy", "float32", 3000)).finding
    assert found is not None
    assert found.evidence["fitted_temperature"] == pytest.approx({"sampler": 1.2, "old": 1.0}, abs=0.02)
