"""Docs, tests and power studies measure with the fake engine: its own promises are tested by independent means."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from onepolicy.engines.base import EngineSpec, SamplingParams, options_of
from onepolicy.engines.fake import FakeEngine
from onepolicy.engines.fake_faults import FAULTS
from onepolicy.engines.fake_rounding import ORDERS
from onepolicy.errors import ContentError, EngineError, UnknownName, UsageError
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring, Values

PROMPTS = np.random.default_rng(3).integers(32, 127, size=(128, 12)).tolist()
PARAMS = SamplingParams(max_tokens=64, seed=5, ignore_eos=True)


def engine(**options) -> FakeEngine:
    return FakeEngine("", **{"seed": 1, **options})


def sampled(params: SamplingParams = PARAMS, prompts=PROMPTS, **options) -> Rollouts:
    return engine(**options).sample(prompts, params)


def drawn_of(rollouts: Rollouts, column: Values) -> np.ndarray:
    return column.values[rollouts.drawn].astype(np.float64)


def log_ratio(rollouts: Rollouts, scoring: Scoring) -> np.ndarray:
    """Scorer minus sampler on the drawn tokens that both scored."""
    sampler = rollouts.scorings["sampler"]
    both = rollouts.drawn & sampler.logprobs.mask() & scoring.logprobs.mask()
    return scoring.logprobs.values[both].astype(np.float64) - sampler.logprobs.values[both]


def rms(d: np.ndarray) -> float:
    return float(np.sqrt(np.mean(d**2)))


def surprisal_z(rollouts: Rollouts) -> float:
    s = rollouts.scorings["sampler"]
    assert s.entropy is not None
    assert s.varentropy is not None
    lp, entropy, varentropy = (drawn_of(rollouts, c) for c in (s.logprobs, s.entropy, s.varentropy))
    return float((-lp - entropy).sum() / np.sqrt(varentropy.sum()))


# --- determinism ----------------------------------------------------------------------------------------------------


def test_two_engines_of_one_spec_draw_the_same_bits() -> None:
    a, b = sampled(), sampled()
    assert np.array_equal(a.token_ids, b.token_ids)
    left, right = a.scorings["sampler"], b.scorings["sampler"]
    assert np.array_equal(left.logprobs.values, right.logprobs.values)
    assert left.scoring_id != right.scoring_id
    assert not np.array_equal(a.token_ids, sampled(replace(PARAMS, seed=6)).token_ids)
    assert not np.array_equal(a.token_ids, sampled(seed=2).token_ids)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_same_order_gives_the_same_bits_drawn_or_scored(dtype: str) -> None:
    rollouts = sampled(dtype=dtype)
    assert np.all(log_ratio(rollouts, engine(dtype=dtype).score(rollouts)) == 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_does_not_feel_its_batch(dtype: str) -> None:
    both = engine(dtype=dtype)
    whole, some = both.sample(PROMPTS, PARAMS), both.sample(PROMPTS[40:47], PARAMS)
    part = whole.take(range(40, 47))
    assert np.array_equal(part.token_ids, some.token_ids)
    assert np.array_equal(part.scorings["sampler"].logprobs.values, some.scorings["sampler"].logprobs.values)
    alone = whole.take([100])
    at = whole.sequence(100)
    assert np.array_equal(both.score(alone).logprobs.values, both.score(whole).logprobs.values[at])


# --- the size of healthy gaps ---------------------------------------------------------------------------------------

RANGES = {"float64": (1e-16, 1e-13), "float32": (3e-7, 1e-5), "float16": (3e-3, 1.5e-2), "bfloat16": (0.03, 0.08)}


@pytest.mark.parametrize("dtype", list(RANGES))
@pytest.mark.parametrize("order", [o for o in ORDERS if o != "forward"])
def test_healthy_gap_is_that_of_the_dtype(dtype: str, order: str) -> None:
    rollouts = sampled(dtype=dtype)
    d = log_ratio(rollouts, engine(dtype=dtype, order=order).score(rollouts))
    low, high = RANGES[dtype]
    assert low < rms(d) < high


@pytest.mark.parametrize("seed", range(4))
def test_bfloat16_pairs_look_like_real_ones(seed: int) -> None:
    rollouts = sampled(seed=seed, dtype="bfloat16")
    d = log_ratio(rollouts, engine(seed=seed, dtype="bfloat16", order="reversed").score(rollouts))
    assert np.abs(d).mean() < 0.05
    assert 3e-4 < np.mean(np.expm1(d) - d) < 3e-3
    assert abs(np.expm1(d).mean()) < 0.01


@pytest.mark.parametrize("seed", range(4))
def test_distributions_look_like_real_ones(seed: int) -> None:
    rollouts = sampled(seed=seed)
    p = np.exp(drawn_of(rollouts, rollouts.scorings["sampler"].logprobs))
    assert 0.15 < np.mean(p > 0.95) < 0.6
    assert 0.15 < np.mean(p < 0.3) < 0.5
    assert len(np.unique(rollouts.token_ids[rollouts.drawn])) > 200


# --- drift and faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("drift", [0.01, 0.1, 0.5, 2.0])
def test_drift_is_the_rms_in_nats(seed: int, drift: float) -> None:
    rollouts = sampled(replace(PARAMS, samples=2), seed=seed)
    d = log_ratio(rollouts, engine(seed=seed, drift=drift).score(rollouts))
    assert rms(d) == pytest.approx(drift, rel=0.1)


def test_drift_is_the_same_function_both_ways() -> None:
    rollouts = sampled(drift=0.1)
    assert rms(log_ratio(rollouts, engine().score(rollouts))) == pytest.approx(0.1, rel=0.1)
    assert np.all(log_ratio(rollouts, engine(drift=0.1).score(rollouts)) == 0)


@pytest.mark.parametrize(
    ("fault", "least"),
    [
        ("stale", 0.05),
        ("eps_norm", 2e-4),
        ("logits_times_two", 0.5),
        ("temperature", 0.2),
        ("shift", 1.0),
        ("zero_fill", 0.2),
    ],
)
def test_a_fault_of_the_scorer_is_seen_in_float32(fault: str, least: float) -> None:
    rollouts = sampled()
    assert rms(log_ratio(rollouts, engine(order="reversed", fault=fault).score(rollouts))) > least


@pytest.mark.parametrize("fault", ["none", "logits_plus_hundred", "drawn_at_0.7", "drawn_top_p_0.9"])
def test_what_does_not_change_the_function_is_not_seen(fault: str) -> None:
    rollouts = sampled()
    assert np.abs(log_ratio(rollouts, engine(order="reversed", fault=fault).score(rollouts))).max() < 1e-4


@pytest.mark.parametrize(("fault", "bad"), [("nan", np.isnan), ("support", np.isneginf)])
def test_one_drawn_value_is_spoiled(fault: str, bad) -> None:
    rollouts = sampled()
    scoring = engine(fault=fault).score(rollouts)
    assert bad(scoring.logprobs.values).sum() == 1
    assert bad(scoring.logprobs.values[rollouts.drawn]).sum() == 1


def test_shift_moves_each_value_one_place_within_its_sequence() -> None:
    rollouts = sampled()
    right, wrong = engine().score(rollouts).logprobs, engine(fault="shift").score(rollouts).logprobs
    at = rollouts.sequence(7)
    assert np.array_equal(wrong.values[at][2:], right.values[at][1:-1])
    assert list(wrong.mask()[at][:3]) == [False, False, True]


def test_zero_fill_makes_every_tenth_value_zero() -> None:
    rollouts = sampled()
    scoring = engine(fault="zero_fill").score(rollouts)
    told = scoring.logprobs.values[scoring.logprobs.mask()]
    assert np.all(told[::10] == 0)
    assert np.mean(told == 0) < 0.35


def test_stale_weights_have_another_digest() -> None:
    digests = {f: engine(fault=f).fingerprint()["weights_digest"] for f in ("none", "temperature", "stale")}
    assert digests["none"] == digests["temperature"] != digests["stale"]
    assert engine(dtype="bfloat16").fingerprint()["weights_digest"] == digests["none"]


def test_every_fault_is_built_and_explained() -> None:
    for name, fault in FAULTS.items():
        assert fault.meaning
        dtype = "bfloat16" if name == "oom" else "float32"
        assert sampled(SamplingParams(max_tokens=4), PROMPTS[:2], fault=name, dtype=dtype).n_tokens > 24


# --- what is drawn --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [PARAMS, replace(PARAMS, temperature=0.8, top_p=0.9), replace(PARAMS, top_k=5), replace(PARAMS, min_p=0.1)],
)
def test_honest_tokens_follow_the_reported_distribution(params: SamplingParams) -> None:
    rollouts = sampled(params, dtype="bfloat16")
    assert rollouts.drawn.sum() >= 8000
    assert abs(surprisal_z(rollouts)) < 4


@pytest.mark.parametrize("fault", ["drawn_at_0.7", "drawn_top_p_0.9"])
def test_tokens_drawn_from_elsewhere_do_not(fault: str) -> None:
    assert surprisal_z(sampled(fault=fault)) < -6


def test_frequencies_match_probabilities() -> None:
    """2,000 first tokens after one prompt, by chi-square over the likely ones."""
    rollouts = sampled(SamplingParams(max_tokens=1, samples=2000), PROMPTS[:1])
    first = rollouts.token_ids[rollouts.drawn]
    p = np.exp(engine().score(rollouts.take([0]), distributions=True).distributions[-1])  # type: ignore[index]
    likely = np.flatnonzero(p * 2000 > 5)
    seen, wanted = np.bincount(first, minlength=256)[likely], p[likely] * 2000
    chi = float(np.sum((seen - wanted) ** 2 / wanted))
    assert chi < len(likely) + 5 * np.sqrt(2 * len(likely))


@pytest.mark.parametrize(
    "params",
    [
        replace(PARAMS, temperature=0.7, top_p=0.9),
        replace(PARAMS, top_k=3),
        replace(PARAMS, min_p=0.2, top_k=20, top_p=0.8),
    ],
)
def test_processed_logprobs_are_renormalised_over_the_kept_set(params: SamplingParams) -> None:
    rollouts = sampled(params)
    scoring = engine().score(rollouts, distributions=True)
    assert np.all(log_ratio(rollouts, scoring) == 0)
    dist, raw = scoring.distributions, _raw(rollouts)
    assert dist is not None
    told = scoring.logprobs.mask()
    assert np.allclose(np.exp(dist[told]).sum(-1), 1, atol=1e-5)
    kept, at_temperature = np.isfinite(dist[told]), raw[told] / params.temperature
    mass = np.where(kept, np.exp(at_temperature), 0).sum(-1) / np.exp(at_temperature).sum(-1)
    assert kept.sum(-1).max() <= (params.top_k or 256)
    assert np.all(kept.any(-1))
    if params.top_k == 0:
        assert np.all(mass >= params.top_p - 1e-5)
        least = np.where(kept, np.exp(at_temperature), np.inf).min(-1) / np.exp(at_temperature).sum(-1)
        assert np.all(mass - least < params.top_p + 1e-5)
    expected = np.where(kept, at_temperature, -np.inf)
    expected = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    assert np.abs(dist[told][kept] - expected[kept]).max() < 1e-4


def _raw(rollouts: Rollouts) -> np.ndarray:
    declared = {"logprob_semantics": Values(np.array(["raw"] * len(rollouts), dtype=object))}
    dist = engine().score(replace(rollouts, records={**rollouts.records, **declared}), distributions=True).distributions
    assert dist is not None
    return dist


def test_entropy_and_varentropy_are_those_of_the_distribution() -> None:
    rollouts = sampled(replace(PARAMS, top_p=0.95, max_tokens=16))
    scoring = engine(dtype="bfloat16").score(rollouts, distributions=True)
    told = scoring.logprobs.mask()
    assert scoring.distributions is not None
    assert scoring.entropy is not None
    assert scoring.varentropy is not None
    lp = scoring.distributions[told]
    p, s = np.exp(lp), np.where(np.isfinite(lp), -lp, 0)
    entropy = (p * s).sum(-1)
    assert scoring.distributions.dtype == np.float64
    assert np.abs(scoring.entropy.values[told] - entropy).max() < 1e-4
    assert np.abs(scoring.varentropy.values[told] - (p * (s - entropy[:, None]) ** 2).sum(-1)).max() < 1e-3
    chosen = np.take_along_axis(lp, rollouts.token_ids[told][:, None], axis=-1)[:, 0]
    assert np.array_equal(scoring.logprobs.values[told], chosen.astype(np.float32))


def test_raw_and_temperature_semantics() -> None:
    params = replace(PARAMS, temperature=0.7, top_p=0.9)
    raw, tempered = sampled(params, logprobs="raw"), sampled(params, logprobs="temperature")
    assert np.array_equal(raw.token_ids, tempered.token_ids)
    for rollouts, temperature in ((raw, 1.0), (tempered, 0.7)):
        scoring = engine().score(rollouts)
        assert np.all(log_ratio(rollouts, scoring) == 0)
        assert scoring.semantics == rollouts.record("logprob_semantics", 0)
        z = _raw(rollouts)[rollouts.drawn] / temperature
        wanted = z - np.log(np.exp(z).sum(-1, keepdims=True))
        got = drawn_of(rollouts, rollouts.scorings["sampler"].logprobs)
        assert (
            np.abs(np.take_along_axis(wanted, rollouts.token_ids[rollouts.drawn][:, None], 1)[:, 0] - got).max() < 1e-4
        )


def test_temperature_zero_takes_the_likeliest_token() -> None:
    rollouts = sampled(replace(PARAMS, temperature=0.0))
    assert np.array_equal(_raw(rollouts)[rollouts.drawn].argmax(-1), rollouts.token_ids[rollouts.drawn])
    assert np.all(log_ratio(rollouts, engine().score(rollouts)) == 0)


# --- the contract ---------------------------------------------------------------------------------------------------


def test_sample_fills_the_columns() -> None:
    rollouts = sampled(SamplingParams(max_tokens=200, samples=3, seed=1), [[72, 105], [65] * 9])
    assert [rollouts.record("group_id", i) for i in range(6)] == ["0"] * 3 + ["1"] * 3
    assert [rollouts.record("sample_id", i) for i in range(6)] == ["0", "1", "2"] * 2
    assert rollouts.record("logprob_semantics", 0) == "processed"
    assert len({tuple(rollouts.token_ids[rollouts.sequence(i)]) for i in range(6)}) == 6
    assert np.array_equal(rollouts.drawn, rollouts.tokens["loss_mask"].values)
    assert np.array_equal(rollouts.scorings["sampler"].logprobs.mask(), rollouts.drawn)
    for i in range(6):
        ids, n = rollouts.token_ids[rollouts.sequence(i)], rollouts.record("prompt_length", i)
        assert list(ids[:n]) == [[72, 105], [65] * 9][i // 3]
        assert np.array_equal(rollouts.drawn[rollouts.sequence(i)], np.arange(len(ids)) >= n)
        stopped = rollouts.record("finish_reason", i) == "stop"
        assert stopped == (ids[-1] == 255)
        assert stopped or len(ids) == n + 200
        assert 255 not in ids[n:-1]
        assert list(rollouts.lists["stop_token_ids"].row(i)) == [255]


def test_about_half_of_the_replies_end_within_a_hundred_tokens() -> None:
    rollouts = sampled(SamplingParams(max_tokens=100))
    assert 0.2 < np.mean(rollouts.records["finish_reason"].values == "stop") < 0.9


def test_score_covers_every_token_but_the_first() -> None:
    rollouts = sampled(SamplingParams(max_tokens=3, ignore_eos=True), [[65], [66, 67]])
    scoring = engine().score(rollouts, distributions=True)
    assert list(np.flatnonzero(~scoring.logprobs.mask())) == [0, 4]
    assert scoring.distributions is not None
    assert np.isnan(scoring.distributions[[0, 4]]).all()
    assert np.all(scoring.logprobs.values <= 0)
    assert scoring.semantics == "processed"
    assert scoring.dtype == "float32"


def test_score_groups_sequences_by_their_declaration() -> None:
    rollouts = sampled(PARAMS, PROMPTS[:4])
    temperature = Values(np.array([1.0, 0.5, 1.0, 0.5]))
    mixed = engine().score(replace(rollouts, records={**rollouts.records, "temperature": temperature}))
    plain, at = engine().score(rollouts), rollouts.sequence(1)
    assert np.array_equal(mixed.logprobs.values[rollouts.sequence(2)], plain.logprobs.values[rollouts.sequence(2)])
    assert not np.array_equal(mixed.logprobs.values[at], plain.logprobs.values[at])


def test_fingerprint_is_json_and_names_the_switches() -> None:
    print_ = json.loads(json.dumps(engine(dtype="bfloat16", order="pairwise", drift=0.5).fingerprint()))
    assert (print_["engine"], print_["dtype"], print_["order"], print_["drift"]) == (
        "fake",
        "bfloat16",
        "pairwise",
        0.5,
    )
    assert print_["vocab_size"] == 256
    assert print_["weights_digest"] != engine(seed=2).fingerprint()["weights_digest"]


def test_texts_are_bytes() -> None:
    text, chat = engine().encode(["aé", [{"role": "user", "content": "hi"}]])
    assert text == [97, 0xC3, 0xA9]
    assert bytes(chat) == b"<user>\nhi\n<assistant>\n"
    assert engine().decode([97, 0xC3, 255]) == ["a", "<0xC3>", "<stop>"]


def test_other_sizes_work() -> None:
    rollouts = sampled(SamplingParams(max_tokens=8), [[1, 2]], vocab=50, hidden=24)
    assert rollouts.token_ids.max() < 50
    assert np.all(log_ratio(rollouts, engine(vocab=50, hidden=24).score(rollouts)) == 0)


def test_the_spec_of_the_documentation_opens() -> None:
    options = options_of(FakeEngine, EngineSpec.parse("fake:?seed=1&drift=0.5"))
    assert FakeEngine("", **options).fingerprint()["drift"] == 0.5


def test_refusals() -> None:
    with pytest.raises(UsageError, match="wanted none"):
        FakeEngine("model")
    with pytest.raises(UnknownName, match="did you mean 'reversed'"):
        FakeEngine("", order="revrsed")
    with pytest.raises(UnknownName, match="did you mean 'drift'"):
        FakeEngine("", drif=1.0)
    with pytest.raises(UsageError, match="drift=-1"):
        FakeEngine("", drift=-1.0)
    with pytest.raises(EngineError, match="cannot be reached"):
        FakeEngine("", drift=1e-9)
    with pytest.raises(EngineError, match="vocab=256"):
        FakeEngine("", vocab=50).encode(["hello"])
    with pytest.raises(EngineError, match="prompt 1 is empty"):
        engine().sample([[1], []], PARAMS)
    with pytest.raises(EngineError, match="penalties are not implemented"):
        engine().sample([[1]], replace(PARAMS, presence_penalty=0.5))
    with pytest.raises(ContentError, match="token id 256"):
        engine().sample([[1, 256]], PARAMS)
    rollouts = sampled(SamplingParams(max_tokens=2), [[1]])
    with pytest.raises(UsageError, match="not declared"):
        engine().score(replace(rollouts, records={}))
    engine().close()
