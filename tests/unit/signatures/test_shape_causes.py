"""Both ways: every signature of shape names its own fault, and is silent on healthy data and on all other faults."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

import audit_batches as batches
from onepolicy.codes import CODES
from onepolicy.signatures.base import Answer
from onepolicy.signatures.weigh import Weighed, weighed
from onepolicy.survey import evidence_of, survey_of
from onepolicy.types import Outcome, Severity

TOKENS = 6000
#: Faults that need more sequences than these tests have, and what is said of them at this size.
LARGER = {"tail-rises": 40_000, "stale-cache": 24_000, "never-updated": 20_000, "never-updated-jump": 20_000}
LARGER |= {"speculative-tail": 9_000, "hidden-update": 18_000}
#: What names no cause.
QUIET = {"bf16-noise", "rounding-noise", "larger-than-rounding", "coarser-than-declared", "cause-unclear"}


@lru_cache(maxsize=64)
def told(data: str, dtype: str = "bfloat16") -> Weighed:
    rollouts = batches.healthy(dtype, LARGER.get(data, TOKENS), 77)
    if data in batches.FAULTS:
        rollouts = batches.FAULTS[data](rollouts, np.random.default_rng(77))
    return weighed(evidence_of(survey_of(rollouts, ("sampler", "old"))))


@pytest.mark.parametrize("fault", batches.SHAPE)
def test_a_fault_is_named_and_no_other_cause_is(fault: str) -> None:
    code, also = batches.NAMED[fault]
    found = {f.code: f for f in told(fault).findings}
    assert code in found
    if code not in QUIET and code != "quantisation-suspected":
        assert found[code].outcome is CODES[code].outcome
    assert set(found) - QUIET <= {code, *also}
    # a gap that has a cause is not called rounding
    assert not {"bf16-noise", "rounding-noise"} & set(found)


@pytest.mark.parametrize("dtype", batches.LEVELS)
@pytest.mark.parametrize("make", [batches.healthy, batches.fake])
def test_healthy_data_has_no_cause(make: batches.Make, dtype: str) -> None:
    rollouts = make(dtype, TOKENS, 3)
    found = weighed(evidence_of(survey_of(rollouts, ("sampler", "old")))).findings
    assert [f.code for f in found] == ["bf16-noise" if dtype == "bfloat16" else "rounding-noise"]
    assert (found[0].severity, found[0].outcome) == (Severity.INFO, Outcome.PASS)


@pytest.mark.parametrize("fault", batches.MEANING)
def test_faults_of_meaning_are_no_causes_of_shape(fault: str) -> None:
    """Temperature and truncation are named by their own signatures, or by none."""
    code, also = batches.NAMED[fault]
    assert {f.code for f in told(fault).findings} - QUIET <= {code, *also}


def test_what_was_ruled_out_is_said_with_its_reason() -> None:
    answers = told("experts").answers
    finding = next(f for f in told("experts").findings if f.code == "expert-routing-mismatch")
    gone = [key for key, a in answers.items() if a.verdict == "no"]
    assert {"position", "padding", "cache", "every_token"} <= set(gone)
    assert all(isinstance(answers[k], Answer) and answers[k].why for k in gone)
    assert len(finding.ruled_out) >= 4 and all(line for line in finding.ruled_out)


def test_without_columns_a_signature_says_what_it_needs() -> None:
    answers = weighed(evidence_of(survey_of(batches.fake("bfloat16", 1500, 1), ("sampler", "old")))).answers
    lacking = {key: a.why for key, a in answers.items() if a.verdict == "lacks"}
    for key, word in (("staleness", "policy_version"), ("cache", "cached_prefix_length"), ("experts", "routed_experts"),
                      ("padding", "padding_length"), ("never_updated", "step"), ("tail", "step")):  # fmt: skip
        assert word in lacking[key]
