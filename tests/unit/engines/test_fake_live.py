"""The fake engine's live switches, and the faults that only one of them brings out: legs are built on these."""

from __future__ import annotations

import time

import numpy as np
import pytest

from onepolicy.engines.base import SamplingParams
from onepolicy.engines.fake import FakeEngine
from onepolicy.engines.fake_rounding import ORDERS
from onepolicy.engines.open import open_engine
from onepolicy.errors import EngineError, EngineTimeout, UnknownName, UsageError
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring

RANDOM = np.random.default_rng(8)
PROMPTS = [RANDOM.integers(32, 127, size=4 + i % 9).tolist() for i in range(24)]
VARIANTS = [
    {"batch_size": 1},
    {"batch_size": 5},
    {"padding_side": "left"},
    {"packing": "packed"},
    {"packing": "packed", "batch_size": 1},
]


def rollouts(tokens: int = 48) -> Rollouts:
    return FakeEngine(seed=1).sample(PROMPTS, SamplingParams(max_tokens=tokens, seed=5))


def rms(a: Scoring, b: Scoring, at: np.ndarray | None = None) -> float:
    told = a.logprobs.mask() if at is None else a.logprobs.mask() & at
    d = (b.logprobs.values - a.logprobs.values)[told].astype(np.float64)
    return float(np.sqrt(np.mean(d**2)))


@pytest.mark.parametrize("using", VARIANTS)
def test_in_health_layout_changes_no_bit(using: dict[str, object]) -> None:
    engine, given = FakeEngine(seed=1, dtype="bfloat16"), rollouts()
    plain, other = engine.score(given), engine.score(given, using=using)
    assert np.array_equal(plain.logprobs.values, other.logprobs.values)
    assert {k: other.fingerprint[k] for k in using} == using
    assert engine.fingerprint()["packing"] == "alone"


def test_every_order_on_every_path_is_a_kernel_of_its_own() -> None:
    engine, given = FakeEngine(seed=1, dtype="bfloat16"), rollouts()
    ways = [{"order": order, "path": path} for order in ORDERS for path in ("prefill", "decode")]
    out = [engine.score(given, using=way) for way in ways]
    gaps = [rms(a, b) for i, a in enumerate(out) for b in out[:i]]
    assert min(gaps) > 0.03 and max(gaps) < 0.15
    kernels = [scoring.fingerprint["kernels"]["matmul"] for scoring in out]
    assert len(set(kernels)) == 8 and "blocks of 12 along K, first to last" in kernels


def test_a_live_switch_is_the_same_as_starting_with_it() -> None:
    given = rollouts()
    started = FakeEngine(seed=1, dtype="bfloat16", order="pairwise", path="decode").score(given)
    live = FakeEngine(seed=1, dtype="bfloat16").score(given, using={"order": "pairwise", "path": "decode"})
    assert np.array_equal(started.logprobs.values, live.logprobs.values)
    assert started.fingerprint == live.fingerprint


@pytest.mark.parametrize(
    ("fault", "brought_out", "hidden"),
    [
        ("leaks_neighbours", [{}, {"packing": "packed", "batch_size": 1}], [{"batch_size": 1}]),
        ("left_padding", [{"padding_side": "left"}], [{}, {"padding_side": "left", "batch_size": 1}]),
        ("decode_cache", [{"path": "decode"}], [{}, {"padding_side": "left", "packing": "packed"}]),
    ],
)
def test_a_fault_of_the_layout_acts_at_its_switch_alone(
    fault: str, brought_out: list[dict[str, str]], hidden: list[dict[str, str]]
) -> None:
    broken, healthy, given = FakeEngine(seed=1, fault=fault), FakeEngine(seed=1), rollouts()
    for using in brought_out:
        assert 0.1 < rms(healthy.score(given), broken.score(given, using=using)) < 6
    for using in hidden:
        assert rms(healthy.score(given), broken.score(given, using=using)) == 0


def test_neighbours_leak_into_all_but_the_first_of_a_batch() -> None:
    broken, healthy, given = FakeEngine(seed=1, fault="leaks_neighbours"), FakeEngine(seed=1), rollouts()
    moved = broken.score(given, using={"batch_size": 5}).logprobs.values != healthy.score(given).logprobs.values
    by_sequence = [bool(moved[given.sequence(i)].any()) for i in range(len(given))]
    assert by_sequence == [i % 5 != 0 for i in range(len(given))]


def test_left_padding_hurts_the_shorter_sequences_alone() -> None:
    broken, healthy, given = FakeEngine(seed=1, fault="left_padding"), FakeEngine(seed=1), rollouts()
    out, right = broken.score(given, using={"padding_side": "left"}), healthy.score(given)
    longest = given.lengths == given.lengths.max()
    assert longest.any() and not longest.all()
    owner = np.repeat(longest, given.lengths)
    assert rms(right, out, owner) == 0 and rms(right, out, ~owner) > 1


@pytest.mark.parametrize(("fault", "using"), [("late_positions", {}), ("decode_cache", {"path": "decode"})])
def test_the_gap_grows_with_the_position(fault: str, using: dict[str, str]) -> None:
    params = SamplingParams(max_tokens=300, seed=5, ignore_eos=True)
    given = FakeEngine(seed=1).sample(PROMPTS[:6], params)
    right, wrong = FakeEngine(seed=1).score(given), FakeEngine(seed=1, fault=fault).score(given, using=using)
    position = np.arange(given.n_tokens) - np.repeat(given.offsets[:-1], given.lengths)
    early, late = (rms(right, wrong, at) for at in (position < 64, position >= 256))
    assert late > 0.3 and late > 4 * early
    assert (early == 0) == (fault == "late_positions")


def test_unstable_gives_other_values_each_time() -> None:
    engine, given = FakeEngine(seed=1, fault="unstable"), rollouts()
    assert 0.1 < rms(engine.score(given), engine.score(given)) < 0.4


def test_out_of_memory_is_of_float32_alone_and_a_hang_is_ended() -> None:
    with pytest.raises(EngineError, match="out of memory at dtype=float32"):
        FakeEngine(fault="oom")
    assert FakeEngine(fault="oom", dtype="bfloat16").score(rollouts()).dtype == "bfloat16"
    begin = time.monotonic()
    with open_engine("fake:?fault=hangs", worker=True, timeout=6.0) as engine:
        given = engine.sample([[65, 66]], SamplingParams(max_tokens=4))
        with pytest.raises(EngineTimeout, match="no answer to score within 6 s"):
            engine.score(given)
    assert time.monotonic() - begin < 60


def test_rounded_weights_are_said_where_they_changed() -> None:
    given = rollouts()
    plain, bf16, fp16 = (FakeEngine(seed=1, rounded_to=dtype) for dtype in ("none", "bfloat16", "float16"))
    assert plain.fingerprint()["rounding_changed_weights"] is False
    assert bf16.fingerprint()["rounding_changed_weights"] is False  # they are bfloat16 values as they are
    assert np.array_equal(plain.score(given).logprobs.values, bf16.score(given).logprobs.values)
    assert fp16.fingerprint()["rounding_changed_weights"] is True  # the smallest ones are subnormal in float16
    assert fp16.fingerprint()["weights_digest"] == plain.fingerprint()["weights_digest"]


def test_live_switches_are_checked() -> None:
    engine, given = FakeEngine(seed=1), rollouts(2)
    with pytest.raises(UsageError, match="'dtype' cannot change while it runs; live switches: order, path"):
        engine.score(given, using={"dtype": "bfloat16"})
    with pytest.raises(UnknownName, match="did you mean 'decode'"):
        engine.score(given, using={"path": "decoded"})
    with pytest.raises(UsageError, match="batch_size=-1"):
        engine.score(given, using={"batch_size": -1})
