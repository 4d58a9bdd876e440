"""Public faults as small inputs (`cases/step1.jsonl`): what the core and the gates say of them.

Only what log-prob pairs and bounds can show is asserted here. A case whose cause is named by a later part (a
temperature, a softcap, a fill value) is at least found, its numbers are right, and its place is named.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepolicy.align import align
from onepolicy.codes import CODES
from onepolicy.errors import ContentError
from onepolicy.estimate import measure
from onepolicy.gates.bounds import load
from onepolicy.gates.judge import judge
from onepolicy.metrics import METRICS
from onepolicy.records import from_records
from onepolicy.reduce import reduce
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.sums import Metric, Sums, merge
from onepolicy.types import Measurement, Outcome, Report, Scoring, Severity, Values

LINES = (Path(__file__).parent / "cases" / "step1.jsonl").read_text(encoding="utf-8").splitlines()
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in map(json.loads, LINES)}

#: The names of the cases -> the codes that stand for them. Empty: refused before there is a report, or no finding.
CODES_OF: dict[str, tuple[str, ...]] = {
    "logprob-length-mismatch": (),  # the record is refused
    "temperature-mismatch": ("token-above-bound",),
    "truncated-support-mismatch": ("ratio-biased", "gap-above-bound", "kl-above-bound"),
    "filled-logprob": ("token-above-bound",),
    "bf16-noise": (),
    "single-outlier": ("heavy-ratio-tail",),
    "softcap-differs": ("token-above-bound",),
    "ratio-overflow": ("too-few-clusters",),  # four tokens: what overflowed is counted, nothing can pass
    "length-driven-sequence-weight": (),
    "kl-includes-unsampled-tokens": (),
    "unbiased-kl": (),
    "stored-as-bf16": (),
    "large-batch": (),
}
#: "compare with an absolute tolerance of 2e-3 (weights: relative 1%)"
NEAR, WEIGHT = {"abs": 2e-3}, {"rel": 0.01}


def given(case: str) -> Any:
    return CASES[case]["input"]


def expected(case: str) -> Any:
    return CASES[case]["expected"]


def pair(
    a: list[Any], b: list[Any], mask: list[int] | None = None, *, names: tuple[str, str] = ("sampler", "old")
) -> Rollouts:
    """One reply after one token of prompt: reply position i stands at index i + 1."""
    drawn = [0, *(mask or [1] * len(a))]
    ids = list(range(len(a) + 1))
    return from_records(
        [{"token_ids": ids, "drawn": drawn, f"{names[0]}_logprobs": [None, *a], f"{names[1]}_logprobs": [None, *b]}]
    )


def one_token_each(a: list[Any], b: list[Any]) -> Rollouts:
    """Every token a reply of its own: as many clusters as tokens."""
    return from_records(
        [
            {"token_ids": [0, i], "prompt_length": 1, "sampler_logprobs": [None, x], "old_logprobs": [None, y]}
            for i, (x, y) in enumerate(zip(a, b, strict=True))
        ]
    )


def sums_of(rollouts: Rollouts, *more: Metric) -> Sums:
    return reduce(align(rollouts), [*METRICS.values(), *more])


def measured(rollouts: Rollouts) -> dict[str, Measurement]:
    return measure(sums_of(rollouts))


def judged(rollouts: Rollouts, preset: str) -> Report:
    return judge(sums_of(rollouts), load(preset))


def raised(report: Report) -> set[str]:
    """Codes of findings at warn or above."""
    return {f.code for f in report.findings if f.severity is not Severity.INFO}


def worst_positions(sums: Sums) -> list[int]:
    """Positions in the reply, worst first."""
    return [place.position - 1 for place in sums.worst["tokens"]]


def test_every_case_has_a_row_in_the_table() -> None:
    assert {expected(case)["finding"] for case in CASES} == set(CODES_OF)
    assert {code for codes in CODES_OF.values() for code in codes} <= set(CODES)


@pytest.mark.parametrize("at", [0, 1])
def test_c14_more_log_probs_than_tokens_are_refused_not_cut(at: int) -> None:
    record = given("C14")["records"][at]
    ids, a, b = record["response_ids"], record["rollout_logprobs"], record["trainer_logprobs"]
    assert len(a) - len(ids) == expected("C14")["records"][record["id"]]["extra"]
    row = {"record_id": record["id"], "token_ids": [0, *ids], "prompt_length": 1}
    with pytest.raises(ContentError, match=f"{record['id']}.*sampler_logprobs.*too many values: got 18, wanted 17"):
        from_records([row | {"sampler_logprobs": [None, *a], "old_logprobs": [None, *b]}])


def test_c15_temperature_on_one_side() -> None:
    case, wanted = given("C15"), expected("C15")
    rollouts = pair(case["rollout_logprobs"], case["trainer_logprobs"])
    m = measured(rollouts)
    assert m["abs_log_ratio/mean"].value == pytest.approx(wanted["mean_abs_delta"], **NEAR)
    assert m["abs_log_ratio/max"].value == pytest.approx(wanted["max_abs_delta"], **NEAR)
    report = judged(rollouts, "strict")
    assert report.outcome is Outcome.DRIFT
    assert raised(report) >= set(CODES_OF["temperature-mismatch"])


def test_c15_division_by_the_temperature_is_no_fix() -> None:
    case, wanted = given("C15"), expected("C15")
    m = measured(pair(case["naive_fix"], case["trainer_logprobs"]))
    assert m["abs_log_ratio/max"].value == pytest.approx(wanted["naive_fix_max_abs_error"], **NEAR)
    assert judged(pair(case["naive_fix"], case["trainer_logprobs"]), "bf16").outcome is not Outcome.PASS


def test_c16_the_mean_ratio_is_the_kept_mass() -> None:
    case, wanted = given("C16"), expected("C16")
    rollouts = one_token_each(case["rollout_logprobs"], case["trainer_logprobs"])
    report = judged(rollouts, "bf16")
    m = report.measurements
    assert m["ratio/mean"].value == pytest.approx(wanted["mean_ratio"], **NEAR)
    assert m["ratio/mean"].value == pytest.approx(np.mean(case["kept_mass"]), **NEAR)
    assert m["extreme_share/1.1"].value == wanted["fraction_outside_0.9_1.1"]
    assert m["ratio/max"].value < 1
    # half of mean |r - 1| would be half of it
    assert m["tv_sampled/mean"].value == pytest.approx(1 - wanted["mean_kept_mass"], **NEAR)
    pairs = align(rollouts)
    assert pairs.log_ratio[pairs.drawn] == pytest.approx(np.log(case["kept_mass"]), **NEAR)
    assert report.outcome is Outcome.DRIFT
    assert raised(report) == set(CODES_OF["truncated-support-mismatch"])


@pytest.mark.parametrize(("name", "at"), [("some", [2, 4]), ("sentinel", [1])])
def test_c19_filled_values_are_the_worst_tokens(name: str, at: list[int]) -> None:
    record = next(r for r in given("C19")["records"] if r["id"] == name)
    wanted = expected("C19")["records"][name]
    report = judged(pair(record["rollout_logprobs"], record["trainer_logprobs"]), "strict")
    assert wanted["positions"] == at == worst_positions(report.sums)[: len(at)]
    assert report.outcome is Outcome.DRIFT
    assert raised(report) >= set(CODES_OF["filled-logprob"])
    if "worst_factor" in wanted:
        assert math.exp(report.measurements["abs_log_ratio/max"].value or 0) == pytest.approx(
            wanted["worst_factor"], **WEIGHT
        )


def test_c19_an_honest_zero_is_no_finding() -> None:
    record = next(r for r in given("C19")["records"] if r["id"] == "honest_zero")
    for preset in ("strict", "bf16"):
        assert raised(judged(pair(record["rollout_logprobs"], record["trainer_logprobs"]), preset)) == set()


OUTSIDE = Metric(
    "outside_0.9_1.1/share",
    "token",
    "scored",
    {"outside_0.9_1.1": lambda xp, x: xp.indicator(xp.abs(x.ratio_minus_one) > 0.1)},
    lambda t: t.mean("outside_0.9_1.1"),
    "share of ratios outside 1 +- 0.1",
)


def test_c22_ordinary_bf16_noise_has_no_finding() -> None:
    case, wanted = given("C22"), expected("C22")
    rollouts = pair(case["rollout_logprobs"], case["trainer_logprobs"])
    sums = sums_of(rollouts, OUTSIDE)
    m = measure(sums, {**METRICS, OUTSIDE.key: OUTSIDE})
    mean, rms = m["log_ratio/mean"].value or 0, m["log_ratio/rms"].value or 0
    assert mean == pytest.approx(wanted["mean_delta"], **NEAR)
    assert math.sqrt(rms**2 - mean**2) == pytest.approx(wanted["sd"], **NEAR)
    assert m["abs_log_ratio/p95"].value == pytest.approx(wanted["p95_abs"], **NEAR)
    assert m["abs_log_ratio/max"].value == pytest.approx(wanted["max_abs"], **NEAR)
    assert m[OUTSIDE.key].value == pytest.approx(wanted["fraction_outside_0.9_1.1"])
    report = judge(sums, load("bf16"))
    assert raised(report) == set(CODES_OF["bf16-noise"])
    assert report.outcome in (Outcome.PASS, Outcome.INCONCLUSIVE)
    # and where each token counts for itself there are clusters enough to say so
    assert raised(judged(one_token_each(case["rollout_logprobs"], case["trainer_logprobs"]), "bf16")) == set()


def test_c23_a_single_outlier_is_named_and_warned_of() -> None:
    case, wanted = given("C23"), expected("C23")
    a, b = case["rollout_logprobs"], case["trainer_logprobs"]
    report = judged(pair(a, b), "bf16")
    m = report.measurements
    assert raised(report) == set(CODES_OF["single-outlier"])
    assert report.outcome not in (Outcome.DRIFT, Outcome.ERROR)
    found = next(f for f in report.findings if f.code == "heavy-ratio-tail")
    assert found.place.endswith(f"position {wanted['positions'][0] + 1}")
    assert "447.6 with it, 1.015 without it" in found.message
    assert worst_positions(report.sums)[:1] == wanted["positions"]
    assert m["mult_prob_error/mean"].value == pytest.approx(wanted["mean_exp_abs"], **WEIGHT)
    assert m["abs_log_ratio/mean"].value == pytest.approx(wanted["mean_abs"], **NEAR)
    assert m["abs_log_ratio/p50"].value == pytest.approx(wanted["median_abs"], **NEAR)
    keep = [i for i in range(len(a)) if i not in wanted["positions"]]
    rest = measured(pair([a[i] for i in keep], [b[i] for i in keep]))
    assert rest["mult_prob_error/mean"].value == pytest.approx(wanted["mean_exp_abs_without"], **NEAR)


@pytest.mark.parametrize("side", ["uncapped", "formula_slip"])
def test_c36_softcap(side: str) -> None:
    case, wanted = given("C36"), expected("C36")
    rollouts = pair(case["rollout_logprobs"], case["trainer_logprobs"][side])
    report = judged(rollouts, "strict")
    assert report.measurements["abs_log_ratio/max"].value == pytest.approx(wanted["max_abs"][side], **NEAR)
    assert report.outcome is Outcome.DRIFT
    assert raised(report) >= set(CODES_OF["softcap-differs"])
    if side == "uncapped":
        pairs = align(rollouts)
        assert np.nanmin(pairs.a) == pytest.approx(wanted["min_logprob"]["engine"])
        assert np.nanmin(pairs.b) == pytest.approx(wanted["min_logprob"]["uncapped"])


def test_c41_a_ratio_that_overflows_is_counted_and_never_a_pass() -> None:
    case, wanted = given("C41"), expected("C41")
    rollouts = pair(case["rollout_logprobs"], case["trainer_logprobs"])
    pairs = align(rollouts)
    assert pairs.log_ratio[1:] == pytest.approx(wanted["log_ratio"], **NEAR)
    report = judged(rollouts, "bf16")
    k3 = report.measurements["kl_sampler_scorer_k3/mean"]
    assert (k3.n, k3.n_nonfinite) == (3, 1)  # e^1100 is beyond a double, e^90.7 is not
    assert report.measurements["abs_log_ratio/max"].value == pytest.approx(1100.0)
    assert not any(math.isnan(m.value) for m in report.measurements.values() if m.value is not None)
    assert sorted(worst_positions(report.sums)[:2]) == wanted["overflow_tokens_float32"]
    assert report.outcome is Outcome.INCONCLUSIVE
    assert {f.code for f in report.findings} >= set(CODES_OF["ratio-overflow"])


def test_c42_length_decides_a_sequence_weight() -> None:
    wanted = expected("C42")
    rows = [
        {
            "token_ids": [0] * (s["length"] + 1),
            "prompt_length": 1,
            "sampler_logprobs": [None, *[-1.0] * s["length"]],
            "old_logprobs": [None, *[-1.0 + s["per_token_log_ratio"]] * s["length"]],
        }
        for s in given("C42")["sequences"]
    ]
    m = measured(from_records(rows))
    weights = wanted["sequence_sum_weight"]
    got = {q: m[f"sequence_log_ratio/{q}"].value or 0 for q in ("p5", "p50", "p95")}
    assert got["p5"] / math.log(10) == pytest.approx(weights["low_log10"], **WEIGHT)
    assert math.exp(got["p50"]) == pytest.approx(weights["short"], **WEIGHT)
    assert math.exp(got["p95"]) == pytest.approx(weights["long"], **WEIGHT)
    assert m["geometric_ratio/p5"].value == pytest.approx(wanted["sequence_mean_weight"]["low"], **WEIGHT)
    assert m["geometric_ratio/p95"].value == pytest.approx(wanted["sequence_mean_weight"]["long"], **WEIGHT)
    assert m["catastrophic_sequence/share"].value == pytest.approx(1 / 3)


def test_c47_kl_is_over_drawn_tokens_alone() -> None:
    case, wanted = given("C47"), expected("C47")
    a, b = case["rollout_logprobs"], case["trainer_logprobs"]
    m = measured(pair(a, b, case["loss_mask"]))
    assert m["kl_sampler_scorer_k1/mean"].value == pytest.approx(wanted["k1_masked"])
    assert m["kl_sampler_scorer_k3/mean"].value == pytest.approx(wanted["k3_masked"], abs=2e-6)
    assert measured(pair(a, b))["kl_sampler_scorer_k1/mean"].value == pytest.approx(wanted["k1_unmasked"])


def test_c48_k3_to_the_reference() -> None:
    case, wanted = given("C48"), expected("C48")
    rollouts = pair(case["current_logprobs"], case["ref_logprobs"], names=("current", "reference"))
    pairs = align(rollouts, "current", "reference", drawn_by="a")
    m = measure(reduce(pairs, METRICS.values()))
    assert m["kl_sampler_scorer_k3/mean"].value == pytest.approx(np.mean(wanted["k3"]), abs=2e-6)


def test_c52_the_size_of_a_rounding_to_bf16() -> None:
    case, wanted = given("C52"), expected("C52")
    m = measured(pair(case["rollout_logprobs"], case["trainer_logprobs"]))
    assert m["abs_log_ratio/max"].value == pytest.approx(wanted["max_abs"], **NEAR)


SEQUENCE, PART = 1000, 1_000_000


def large_part(d: np.ndarray, first: int) -> Rollouts:
    """A file of `d` `[PART]`: replies of 1,000 tokens, named by the index of their first token in the whole."""
    n = len(d) // SEQUENCE
    names = [f"{first + SEQUENCE * i:09d}" for i in range(n)]
    a = np.full(len(d), -10.0)
    return Rollouts(
        np.arange(0, len(d) + 1, SEQUENCE),
        {"token_ids": Values(np.zeros(len(d), dtype=np.int32)), "drawn": Values(np.ones(len(d), dtype=bool))},
        {"record_id": column_values("record_id", names)},
        scorings={"sampler": Scoring(Values(a), scoring_id="a"), "old": Scoring(Values(a + d), scoring_id="b")},
    )


def test_c55_quantiles_and_the_worst_place_of_twenty_million_tokens() -> None:
    """File by file, as it would be read: only the Sums are kept."""
    wanted = expected("C55")
    d = np.random.default_rng(55).normal(0, 0.05, 20_000_000)
    d[12345] = 9.0
    asked = {k: METRICS[k] for k in ("abs_log_ratio/p50", "abs_log_ratio/p95", "abs_log_ratio/max")}
    parts = (reduce(align(large_part(d[at : at + PART], at)), asked.values()) for at in range(0, len(d), PART))
    sums = merge(parts)
    m = measure(sums, asked)
    assert m["abs_log_ratio/p50"].value == pytest.approx(wanted["p50_abs"], abs=wanted["tolerance"])
    assert m["abs_log_ratio/p95"].value == pytest.approx(wanted["p95_abs"], abs=wanted["tolerance"])
    assert m["abs_log_ratio/max"].value == wanted["max_abs"]
    worst = sums.worst["tokens"][0]
    assert int(worst.record) + worst.position == wanted["position"]
    assert len(sums.to_json()) < 3_000_000
