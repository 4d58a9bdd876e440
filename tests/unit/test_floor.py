"""The floor: scale table, variants, outliers, and what a gap is held against."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from build import rollouts_of
from onepolicy.align import align
from onepolicy.floor import (
    EDGES,
    SHAPE,
    Variant,
    assumed,
    equal_routes,
    measured,
    ownership,
    pairs_of,
    scale_at,
    scale_table,
    smallest_fault,
)
from onepolicy.gates.bounds import load
from onepolicy.gates.judge import judge
from onepolicy.metrics import METRICS
from onepolicy.reduce import reduce
from onepolicy.types import Floor, Outcome, Report

SEQUENCES, LENGTH = 64, 48
N = SEQUENCES * LENGTH


def reference(seed: int = 0, n: int = N) -> np.ndarray:
    return -0.01 - np.random.default_rng(seed).exponential(1.0, n)


def errors(rng: np.random.Generator, ref: np.ndarray, size: float = 0.06) -> np.ndarray:
    """Rounding of one kernel: it goes with 1 - p, and never makes a log-prob positive here."""
    noise = np.clip(rng.standard_normal(len(ref)), -3, 3)
    return np.minimum(size * (1 - np.exp(ref) + SHAPE) * noise, -ref - 1e-9)


def variants(rng: np.random.Generator, ref: np.ndarray, kernels: int = 3) -> list[Variant]:
    return [Variant(f"kernel {i}", ref + errors(rng, ref)) for i in range(kernels)]


def held(seed: int, fault: float = 0.0, n: int = SEQUENCES, length: int = LENGTH) -> tuple[Floor, Report]:
    """A pair whose sampler has another kernel's rounding; `fault`: RMS nats in the scorer besides."""
    rng = np.random.default_rng(seed)
    ref = reference(seed, n * length)
    own = variants(rng, ref)
    a = ref + errors(rng, ref)
    b = np.minimum(own[0].logprobs + fault * rng.standard_normal(len(ref)), 0.0)
    pairs = align(rollouts_of(a, b, [length] * n, groups=[str(i) for i in range(n)]))
    floor, columns = measured(own, ref, pairs.drawn, "bfloat16")
    positions = np.arange(n * length) % length
    return floor, judge(reduce(replace(pairs, floor=columns, positions=positions), METRICS.values()), load("floor"))


def test_the_scale_follows_the_rounding_that_was_put_in() -> None:
    rng = np.random.default_rng(1)
    ref = reference(1, 60_000)
    gaps = np.array([errors(rng, ref) - errors(rng, ref)])
    scale = scale_at(scale_table(ref, gaps), ref)
    truth = 0.06 * (1 - np.exp(ref) + SHAPE) * math.sqrt(2) * 0.9866  # the clip at 3 takes a little
    assert np.median(np.abs(scale / truth - 1)) < 0.03


def test_sparse_bins_are_joined_and_the_table_covers_all() -> None:
    ref = np.log(np.full(100, 0.4))
    rows = scale_table(ref, np.full((1, 100), 0.1))
    assert len(rows) == 1 and (rows[0][0], rows[0][1], rows[0][3]) == (0.0, 1.0, 100)
    assert rows[0][2] == pytest.approx(0.1 / (0.6 + SHAPE))


def test_values_worked_by_hand() -> None:
    p = np.repeat([0.25, 0.75], 50)
    gaps = np.array([np.repeat([0.3, 0.1], 50), np.repeat([0.1, np.nan], 50)])
    rows = scale_table(np.log(p), gaps)
    assert len(rows) == 2
    low = math.sqrt((0.3**2 + 0.1**2) / 2) / (0.75 + SHAPE)
    assert rows[0][2] == pytest.approx(low)
    assert rows[1][2] == pytest.approx(0.1 / (0.25 + SHAPE))
    assert scale_at(rows, np.log(np.array([0.25, np.nan])))[0] == pytest.approx(low * (0.75 + SHAPE))
    assert np.isnan(scale_at(rows, np.array([np.nan]))[0])


def test_edges_ascend_from_zero() -> None:
    assert EDGES[0] == 0.0 and list(EDGES) == sorted(set(EDGES)) and EDGES[-1] < 1


def test_a_rerun_is_no_distinct_kernel() -> None:
    x = Variant("full", np.zeros(3))
    assert pairs_of([x, replace(x)]) == []
    assert len(pairs_of([x, Variant("decode", np.zeros(3)), Variant("eager", np.zeros(3))])) == 3


def test_another_precision_is_paired_across() -> None:
    at_bf16 = [Variant("full", np.zeros(2)), Variant("decode", np.zeros(2))]
    own = Variant("full in float32", np.zeros(2), emulates=False)
    assert [(x.kernel, y.kernel) for x, y in pairs_of([*at_bf16, own])] == [
        ("full", "full in float32"), ("decode", "full in float32"),
    ]  # fmt: skip


def test_one_kernel_is_incomplete_and_bit_equal_ones_too() -> None:
    on = np.ones(N, dtype=bool)
    ref = reference()
    floor, columns = measured([Variant("full", ref)], ref, on, "bfloat16")
    assert floor.source == "incomplete" and columns is None and "distinct" in floor.why
    floor, columns = measured([Variant("full", ref), Variant("eager", ref)], ref, on, "bfloat16")
    assert floor.source == "incomplete" and columns is None and "bit" in floor.why


def test_assumed_is_sqrt_two_of_the_own_error_and_says_so() -> None:
    own = np.full(N, 0.05)
    floor, columns = assumed(own, reference(), np.ones(N, dtype=bool), "bfloat16")
    assert floor.source == "assumed" and "one kernel" in floor.why
    assert floor.rms == pytest.approx(0.05 * math.sqrt(2))
    assert columns.gaps[0] == pytest.approx(0.05 * math.sqrt(2))


def test_a_broken_kernel_is_left_out_and_named() -> None:
    rng = np.random.default_rng(5)
    ref = reference(5)
    own = variants(rng, ref)
    own[1] = Variant("kernel 1", np.minimum(own[1].logprobs + 0.3 * rng.standard_normal(N), 0.0))
    floor, _ = measured(own, ref, np.ones(N, dtype=bool), "bfloat16")
    assert "'kernel 1' left out" in floor.why
    assert [(v.a, v.b) for v in floor.variants] == [("kernel 0", "kernel 2")]
    healthy, _ = measured(variants(rng, ref), ref, np.ones(N, dtype=bool), "bfloat16")
    assert healthy.why == "" and len(healthy.variants) == 3


def test_healthy_pairs_pass_and_never_drift() -> None:
    outcomes = [held(seed)[1].outcome for seed in range(40)]
    assert set(outcomes) == {Outcome.PASS}


def test_a_fault_of_the_size_that_a_pass_excludes_is_seen() -> None:
    floor, report = held(0)
    gate = report.gates[0]
    assert gate.smallest_seen is not None and gate.value is not None and floor.rms is not None
    fault = smallest_fault(gate.smallest_seen, gate.value, floor.rms)
    # flat noise weighs more where the scale is small, so it is seen the more
    assert all(held(seed, fault=fault)[1].outcome is Outcome.DRIFT for seed in range(10))


def test_smallest_fault_is_what_the_contract_says() -> None:
    assert smallest_fault(1.25, 1.0, 1.0) == pytest.approx(0.75)
    assert smallest_fault(1.25, 1.10, 1.0) == pytest.approx(0.59, abs=0.005)
    assert smallest_fault(1.0, 1.2, 1.0) == 0.0


def test_a_late_fault_is_named_by_its_positions() -> None:
    rng = np.random.default_rng(2)
    n, length = 40, 600
    ref = reference(2, n * length)
    own = variants(rng, ref)
    late = np.tile(np.arange(length) >= 512, n)
    b = np.minimum(own[0].logprobs + np.where(late, 0.1, 0.0) * rng.standard_normal(n * length), 0.0)
    pairs = align(rollouts_of(ref + errors(rng, ref), b, [length] * n, groups=[str(i) for i in range(n)]))
    _, columns = measured(own, ref, pairs.drawn, "bfloat16")
    positions = np.arange(n * length) % length
    report = judge(reduce(replace(pairs, floor=columns, positions=positions), METRICS.values()), load("floor"))
    drifted = {g.metric for g in report.gates if g.outcome is Outcome.DRIFT}
    assert "gap_over_floor_from_512/rms" in drifted
    assert not drifted & {f"gap_over_floor_from_{low}/rms" for low in (0, 16, 32, 64, 128, 256)}
    assert "beyond-rounding-late" in {f.code for f in report.findings}


def test_tokens_with_other_experts_are_not_counted() -> None:
    x = np.array([[1, 2, 0, 3], [1, 2, 0, 3], [-1, -1, 0, 3]])
    y = np.array([[1, 2, 0, 3], [0, 3, 1, 2], [1, 2, 0, 3]])
    assert equal_routes(x, y, 3).tolist() == [True, False, True]
    assert equal_routes(None, y, 3).tolist() == [True] * 3


def test_ownership_recovers_the_covariance() -> None:
    rng = np.random.default_rng(0)
    shared = rng.standard_normal(200_000)
    a = 0.05 * (0.6 * shared + rng.standard_normal(200_000))
    b = 0.03 * (0.6 * shared + rng.standard_normal(200_000))
    owned = ownership(float(((a - b) ** 2).mean()), float((a**2).mean()), float((b**2).mean()))
    assert owned["covariance"] == pytest.approx(float((a * b).mean()), rel=1e-6)
    assert owned["correlation"] == pytest.approx(float(np.corrcoef(a, b)[0, 1]), abs=0.01)
    assert owned["a_share"] + owned["b_share"] == pytest.approx(1.0)
    assert owned["a_share"] > owned["b_share"]


def test_sums_over_other_scales_are_not_added() -> None:
    from onepolicy.errors import MergeError

    one, other = held(0)[1].sums, held(1)[1].sums
    with pytest.raises(MergeError, match="metrics"):
        one.merge(other)
