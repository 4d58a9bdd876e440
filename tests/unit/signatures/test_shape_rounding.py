"""What is called rounding, what is not, and what size decides without a floor: nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import audit_batches as batches
from onepolicy.rollouts import Rollouts
from onepolicy.signatures.weigh import Weighed, weighed
from onepolicy.survey import evidence_of, survey_of
from onepolicy.types import Finding, Outcome, Severity, Values

PAIR = ("sampler", "old")


def looked(rollouts: Rollouts) -> Weighed:
    return weighed(evidence_of(survey_of(rollouts, PAIR)))


def only(rollouts: Rollouts) -> Finding:
    (found,) = looked(rollouts).findings
    return found


@pytest.mark.parametrize(("sd", "k3"), [(0.1, 0.0050), (0.5, 0.133)])
def test_noise_on_every_token_is_not_benign_and_its_kl_is_recovered(sd: float, k3: float) -> None:
    """log r has mean 0 and sd s at every token, certain ones too: k3 is exp(s^2 / 2) - 1."""
    healthy = batches.healthy("float32", 20_000, 11)
    a = batches.both(healthy)[0] - 5.0  # so low that nothing is cut at 0; p is read from the healthy side
    e = evidence_of(survey_of(unclipped(healthy, a, a + sd * np.random.default_rng(1).standard_normal(len(a))), PAIR))
    measured = e.measurements["kl_sampler_scorer_k3/mean"]
    assert measured.lower is not None and measured.upper is not None
    assert measured.lower <= k3 <= measured.upper and k3 == pytest.approx(np.expm1(sd * sd / 2), abs=4e-4)
    # no token is certain here, so the shape cannot be seen: no cause, and not one word of rounding
    assert not {f.code for f in weighed(e).findings} & {"bf16-noise", "rounding-noise"}
    found = only(batches.FAULTS[f"broad-{sd}"](healthy, np.random.default_rng(2)))
    assert (found.code, found.severity, found.outcome) == ("noise-on-every-token", Severity.FAIL, Outcome.DRIFT)
    assert found.evidence["sd"] == pytest.approx(sd, rel=0.15) and "rounding at any precision" in found.ruled_out


def unclipped(r: Rollouts, a: np.ndarray, b: np.ndarray) -> Rollouts:
    for name, x in (("sampler", a), ("old", b)):
        values = np.zeros(r.n_tokens)
        values[r.drawn] = x
        r = r.with_scoring(name, replace(r.scorings[name], logprobs=Values(values, r.drawn)))
    return r


def test_noise_on_the_samplers_side_is_seen_as_well() -> None:
    healthy = batches.healthy("float32", 8000, 12)
    a, _ = batches.both(healthy)
    noisy = np.minimum(a + 0.1 * np.random.default_rng(3).standard_normal(len(a)), -1e-7)
    assert only(batches.with_side(healthy, "sampler", noisy)).code == "noise-on-every-token"


def test_bf16_noise_says_more_than_the_mean() -> None:
    healthy = batches.healthy("bfloat16", 6000, 13)
    found = only(healthy)
    a, b = batches.both(healthy)
    d = b - a
    numbers = {
        "mean": d.mean(), "sd": d.std(), "max_abs": np.abs(d).max(),
        "fraction_outside_0.9_1.1": np.mean(np.abs(np.exp(d) - 1) > 0.1),
    }  # fmt: skip
    for key, value in numbers.items():
        assert found.evidence[key] == pytest.approx(value, rel=1e-6, abs=1e-9)
    assert found.evidence["p95_abs"] == pytest.approx(np.quantile(np.abs(d), 0.95), rel=0.02)
    for words in ("sd ", "95% of |d|", "the largest", "of ratios are outside"):
        assert words in found.message


def test_float32_declared_and_bf16_found() -> None:
    found = only(batches.declared_dtype(batches.healthy("bfloat16", 6000, 14), "float32"))
    assert (found.code, found.outcome) == ("coarser-than-declared", Outcome.INCONCLUSIVE)
    assert only(batches.declared_dtype(batches.healthy("bfloat16", 6000, 14), "bfloat16")).code == "bf16-noise"
    finer = batches.declared_dtype(batches.healthy("float32", 6000, 14), "bfloat16")
    assert only(finer).code == "rounding-noise"


def test_size_alone_is_inconclusive_and_quantisation_only_suspected() -> None:
    healthy = batches.healthy("bfloat16", 6000, 15)
    found = only(batches.FAULTS["other-weights"](healthy, np.random.default_rng(4)))
    assert (found.code, found.outcome) == ("larger-than-rounding", Outcome.INCONCLUSIVE)
    assert any("quantised" in rival for rival in found.rivals)
    found = only(batches.FAULTS["quantised"](healthy, np.random.default_rng(4)))
    assert (found.code, found.outcome) == ("quantisation-suspected", Outcome.INCONCLUSIVE)
    assert found.evidence["declared"] == {"sampler quantization": "fp8", "sampler kv_cache_dtype": "fp8_e4m3"}


def test_declared_quantisation_with_a_small_gap_is_no_finding() -> None:
    healthy = batches.healthy("bfloat16", 6000, 16)
    sampler = replace(healthy.scorings["sampler"], fingerprint={"quantization": "fp8"})
    assert only(healthy.with_scoring("sampler", sampler)).code == "bf16-noise"


def test_too_few_tokens_show_no_shape() -> None:
    healthy = batches.healthy("bfloat16", 3000, 18)
    told = looked(unclipped(healthy, *(x - 3.0 for x in batches.both(healthy))))  # no token is certain
    assert told.findings == () and told.answers["rounding"].verdict == "unclear"


def test_no_gap_at_all_is_not_rounding() -> None:
    healthy = batches.healthy("bfloat16", 3000, 19)
    told = looked(batches.with_side(healthy, "old", batches.both(healthy)[0]))
    assert "bf16-noise" not in {f.code for f in told.findings}
    assert "no gap" in told.answers["beyond_rounding"].why


@pytest.mark.parametrize("size", [3000, 30_000])
def test_one_broken_token_is_found_with_its_place(size: int) -> None:
    healthy = batches.healthy("bfloat16", size, 20)
    broken = batches.FAULTS["outlier"](healthy, np.random.default_rng(5))
    at = np.flatnonzero(np.abs(np.subtract(*batches.both(broken))) > 8)
    sequence, index = batches.index_of(broken)
    found = only(broken)
    assert (found.code, found.evidence["positions"]) == ("single-outlier", index[at].tolist())
    assert found.evidence["records"] == [broken.content_ids()[sequence[at[0]]]]


def test_a_heavy_tail_is_no_outlier() -> None:
    """Student's t with 3 degrees of freedom on the logits: a few tokens are far, and others between."""
    healthy = batches.healthy("bfloat16", 20_000, 21)
    a, _ = batches.both(healthy)
    b = a + 0.06 * (1 - np.exp(a)) * np.random.default_rng(6).standard_t(3, len(a))
    assert "single-outlier" not in {f.code for f in looked(batches.with_side(healthy, "old", b)).findings}
