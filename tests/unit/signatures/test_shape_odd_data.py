"""Odd dumps are looked at without a crash and without a warning, and what the data cannot tell is not claimed."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

import audit_batches as batches
from build import rollouts_of  # pyright: ignore[reportAttributeAccessIssue]
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.signatures.weigh import Weighed, weighed
from onepolicy.survey import evidence_of, survey_of
from onepolicy.types import Values

ROUNDING = {"bf16-noise", "rounding-noise"}


def looked(rollouts: Rollouts) -> Weighed:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return weighed(evidence_of(survey_of(rollouts, ("sampler", "old"))))


def odd(name: str) -> Rollouts:
    rng = np.random.default_rng(8)
    n = 400
    a = -rng.exponential(1.0, n)
    if name == "one token a reply":
        return rollouts_of(a, a - 0.01, [2] * 200)
    if name == "one reply":
        return rollouts_of(a, a - 0.01 * rng.random(n), [n])
    if name == "all equal":
        return rollouts_of(a, a.copy(), [40] * 10)
    if name == "constant gap":
        return rollouts_of(a, a - 0.5, [40] * 10)
    if name == "huge gaps":
        return rollouts_of(a, a - 1e5 * rng.random(n), [40] * 10)
    if name == "half infinite":
        return rollouts_of(a, np.where(np.arange(n) % 2, -np.inf, a), [40] * 10)
    if name == "certain on both sides":
        return rollouts_of(np.zeros(n), np.zeros(n), [40] * 10)
    if name == "positive log-probs":
        return rollouts_of(a, a + 3.0, [40] * 10)
    return _recorded(name, rollouts_of(a, a + 0.05 * rng.standard_normal(n), [40] * 10))


def _recorded(name: str, rollouts: Rollouts) -> Rollouts:
    """Columns that are there and say little."""
    n = len(rollouts)
    some = [1, None] * (n // 2)
    records = {k: column_values(k, some) for k in ("step", "scorer_version", "padding_length", "cached_prefix_length")}
    if name == "every value null":
        records = {k: column_values(k, [None] * n) for k in records}
    version = Values(np.arange(rollouts.n_tokens) - 5, np.arange(rollouts.n_tokens) % 3 > 0)
    return replace(rollouts, records=records, tokens={**rollouts.tokens, "policy_version": version})


@pytest.mark.parametrize(
    "name",
    [
        "one token a reply", "one reply", "all equal", "constant gap", "huge gaps", "half infinite",
        "certain on both sides", "positive log-probs", "columns half null", "every value null",
    ],
)  # fmt: skip
def test_odd_data_is_looked_at(name: str) -> None:
    told = looked(odd(name))
    assert told.answers
    found = {f.code for f in told.findings}
    if name in ("all equal", "constant gap", "huge gaps", "certain on both sides", "positive log-probs"):
        assert not found & ROUNDING
    assert all(a.finding is not None for a in told.answers.values() if a.verdict == "fits")


def test_without_steps_the_scorers_version_tells_the_course() -> None:
    rollouts = batches.FAULTS["never-updated"](batches.healthy("bfloat16", 20_000, 31), np.random.default_rng(31))
    found = {f.code: f for f in looked(batches.declare(rollouts, step=None)).findings}
    assert set(found["engine-never-updated"].evidence["mean_abs_by_step"]) == {str(s) for s in range(10, 18)}
    assert len(found["engine-never-updated"].evidence["declared_lag_by_step"]) == 8


def test_experts_of_the_token_before_are_tried_as_well() -> None:
    """Engines store experts at the token that was routed, one before the token that is scored."""
    rollouts = batches.FAULTS["experts"](batches.healthy("bfloat16", 6000, 32), np.random.default_rng(32))
    shifted = {}
    for name, lists in rollouts.lists.items():
        rows = lists.values.reshape(rollouts.n_tokens, -1)
        shifted[name] = replace(lists, values=np.roll(rows, -1, axis=0).reshape(-1))
    found = {f.code: f for f in looked(replace(rollouts, lists=shifted)).findings}
    evidence = found["expert-routing-mismatch"].evidence
    assert evidence["experts_of"] == "the token before" and (evidence["layers"], evidence["experts_a_layer"]) == (3, 2)
