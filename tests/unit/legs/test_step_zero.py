"""Step-0 identities: one policy recomputed is silent, an updated or broken one is not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from build import random_rollouts
from onepolicy.legs.step_zero import step_zero
from onepolicy.rollouts import Rollouts
from onepolicy.types import Outcome, Ran, Scoring, Values


def with_trainer(gap: float, dtype: str = "bfloat16", name: str = "current") -> Rollouts:
    rollouts = random_rollouts(3)
    old = rollouts.scorings["old"]
    rng = np.random.default_rng(0)
    moved = np.minimum(old.logprobs.values + gap * rng.standard_normal(rollouts.n_tokens), 0.0)
    scoring = Scoring(Values(moved, old.logprobs.valid), dtype=dtype)
    return rollouts.with_scoring("old", replace(old, dtype=dtype)).with_scoring(name, scoring)


def test_equal_values_are_the_identity() -> None:
    result, findings = step_zero(with_trainer(0.0))
    row = result.facts["old and current"]
    assert result.outcome is Outcome.PASS and findings == []
    assert (row["ratio"], row["clip_fraction"], row["kl_k3"], row["bit_equal"]) == (1.0, 0.0, 0.0, 1.0)


def test_numbers_worked_by_hand() -> None:
    rollouts = with_trainer(0.0)
    n = rollouts.n_tokens
    on = rollouts.drawn
    base = np.full(n, -2.0)
    other = np.where(np.arange(n) % 2 == 0, -2.0 + np.log(1.5), -2.0)
    rollouts = rollouts.with_scoring("old", Scoring(Values(base, on), dtype="float32"))
    rollouts = rollouts.with_scoring("current", Scoring(Values(other, on), dtype="float32"))
    result, findings = step_zero(rollouts)
    row = result.facts["old and current"]
    share = float((np.arange(n)[on] % 2 == 0).mean())
    assert row["ratio"] == pytest.approx(1 + 0.5 * share)
    assert row["clip_fraction"] == pytest.approx(share)
    assert row["kl_k3"] == pytest.approx(share * (0.5 - np.log(1.5)))
    assert [f.code for f in findings] == ["not-at-step-zero"]


@pytest.mark.parametrize(("gap", "dtype", "drifts"), [
    (0.03, "bfloat16", False), (0.15, "bfloat16", True), (0.004, "float16", False), (0.05, "float16", True),
    (1e-6, "float32", False), (1e-2, "float32", True),
])  # fmt: skip
def test_the_bound_goes_with_the_precision(gap: float, dtype: str, drifts: bool) -> None:
    result, findings = step_zero(with_trainer(gap, dtype))
    assert (result.outcome is Outcome.DRIFT) == drifts == bool(findings)


def test_the_reference_is_held_too() -> None:
    result, findings = step_zero(with_trainer(0.5, name="reference"))
    assert list(result.facts) == ["old and reference"]
    assert "old and reference" in findings[0].message


def test_only_trained_tokens_count() -> None:
    rollouts = with_trainer(0.5)
    nothing = Values(np.zeros(rollouts.n_tokens, dtype=bool))
    result, findings = step_zero(replace(rollouts, tokens={**rollouts.tokens, "loss_mask": nothing}))
    assert result.facts["old and current"]["tokens"] == 0
    assert [f.code for f in findings] == ["not-measured"]  # not measured is never a pass


def test_without_a_trainers_values_it_is_not_run() -> None:
    result, findings = step_zero(random_rollouts(1))
    assert result.ran is Ran.NOT and findings == []
