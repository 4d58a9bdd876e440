"""What vLLM really recorded, beside transformers' scores: the audit calls it rounding, and names no cause."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from onepolicy.engines.base import Engine
from onepolicy.engines.open import open_engine
from onepolicy.rollouts import Rollouts
from onepolicy.signatures.weigh import weigh
from onepolicy.survey import evidence_of, survey_of
from onepolicy.types import Finding, Outcome, Severity, Values

pytestmark = pytest.mark.engines


def causes(rollouts: Rollouts) -> list[Finding]:
    return weigh(evidence_of(survey_of(rollouts, ("sampler", "old"))))


@pytest.fixture(scope="module")
def coarse(recorded: Rollouts) -> Rollouts:
    """The replies that vLLM drew, scored by transformers in bf16."""
    with open_engine("hf:tiny?dtype=bfloat16") as engine:
        return recorded.with_scoring("old", engine.score(recorded))


def test_bf16_is_called_consistent_with_bf16(coarse: Rollouts) -> None:
    (found,) = causes(coarse)
    assert (found.code, found.severity, found.outcome) == ("bf16-noise", Severity.INFO, Outcome.PASS)
    d = (coarse.scorings["old"].logprobs.values - coarse.scorings["sampler"].logprobs.values)[coarse.drawn]
    assert found.evidence["sd"] == pytest.approx(d.astype(np.float64).std(), rel=1e-5)
    assert "95% of |d|" in found.message


def test_float32_is_finer_than_that(recorded: Rollouts, hf: Engine) -> None:
    (found,) = causes(recorded.with_scoring("old", hf.score(recorded)))
    assert (found.code, found.outcome) == ("rounding-noise", Outcome.PASS) and "float32" in found.message


def test_a_real_gap_on_the_same_replies_is_not(coarse: Rollouts) -> None:
    """Noise of sd 0.1 and 0.5 on every token, and log-probs at another temperature."""
    old = coarse.scorings["old"]
    rng = np.random.default_rng(1)
    for sd in (0.1, 0.5):
        noisy = np.minimum(old.logprobs.values + sd * rng.standard_normal(coarse.n_tokens), -1e-7)
        found = causes(coarse.with_scoring("old", replace(old, logprobs=Values(noisy, old.logprobs.mask()))))
        assert not {"bf16-noise", "rounding-noise"} & {f.code for f in found}
    halved = replace(old, logprobs=Values(old.logprobs.values * 2.0, old.logprobs.mask()))
    found = causes(coarse.with_scoring("old", halved))
    assert not {"bf16-noise", "rounding-noise"} & {f.code for f in found}
