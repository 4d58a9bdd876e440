"""Relatives of the public faults of corrections and of reported numbers (`cases/step4_relatives.jsonl`).

Written for this project in the forms of the public cases. What is expected was worked out with plain sums and `math`,
never with the library; each case also says what the number must not be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onepolicy import Monitor, corrections
from onepolicy.dialects.accumulate import Accumulator
from onepolicy.dialects.definitions import definition_matches
from onepolicy.dialects.view import View
from onepolicy.records import from_records
from onepolicy.rollouts import Rollouts
from onepolicy.signatures import reported

LINES = (Path(__file__).parent / "cases" / "step4_relatives.jsonl").read_text(encoding="utf-8").splitlines()
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in map(json.loads, LINES)}
KINDS = ["numpy", "float32", "float64"]
NEAR = {"rel": 2e-6, "abs": 2e-7}


def given(case: str) -> Any:
    return CASES[case]["input"]


def expected(case: str) -> Any:
    return CASES[case]["expected"]


def number(x: Any) -> float:
    """A number, "log 0.5", "nan" or "-inf"."""
    return math.log(float(x[4:])) if isinstance(x, str) and x.startswith("log ") else float(x)


def padded(rows: Sequence[Sequence[Any]], kind: str) -> tuple[Any, Any]:
    """(`[B, T]` values, 0 where there is nothing; the mask)."""
    width = max(map(len, rows))
    table = [[number(x) for x in row] + [0.0] * (width - len(row)) for row in rows]
    mask = [[True] * len(row) + [False] * (width - len(row)) for row in rows]
    if kind == "numpy":
        return np.array(table), np.array(mask)
    return torch.tensor(table, dtype=getattr(torch, kind)), torch.tensor(mask)


def of_ratios(rows: Sequence[Sequence[Any]], kind: str) -> dict[str, Any]:
    """Inputs whose log ratios are exactly these: one side is 0."""
    d, mask = padded(rows, kind)
    zero = d * 0
    where = np.where if kind == "numpy" else torch.where
    return {"sampler": where(d > 0, -d, zero), "old": where(d > 0, zero, d), "mask": mask}


def flat(x: Any) -> list[Any]:
    return np.asarray(x).ravel().tolist()


def view(rows: Sequence[Sequence[float]]) -> View:
    d = np.array([x for row in rows for x in row])
    sampler = np.full(len(d), -3.0)
    return View(sampler, np.array([len(row) for row in rows]), old=sampler + d, width=max(map(len, rows)))


# -- corrections -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_r70_a_ratio_on_a_bound_is_inside(kind: str) -> None:
    case, wanted = given("R70"), expected("R70")
    inputs = of_ratios([case["log_ratios"]], kind)
    pop = corrections.icepop(**inputs, low=case["band"][0], high=case["band"][1])
    assert [int(x) for x in flat(pop.keep)] == wanted["icepop_keep"]
    assert flat(pop.weights) == pytest.approx(wanted["icepop_weights"], **NEAR)
    tis = corrections.truncate(**inputs, cap=case["cap"])
    assert flat(tis.weights) == pytest.approx(wanted["tis_weights"], **NEAR)
    assert tis.effects.floats()["changed_high/share"] == pytest.approx(wanted["tis_changed_high"])
    assert bool(corrections.veto(**inputs, low=case["veto"]).keep.all()) is wanted["veto_keeps"]


@pytest.mark.parametrize("kind", KINDS)
def test_r71_what_is_not_finite(kind: str) -> None:
    case, wanted = given("R71"), expected("R71")
    sides = {
        "sampler": padded([case["rollout_logprobs"]], kind)[0],
        "old": padded([case["trainer_logprobs"]], kind)[0],
        "mask": padded([case["loss_mask"]], kind)[0],
    }
    c = corrections.truncate(**sides, cap=case["cap"])
    assert flat(c.weights) == pytest.approx(wanted["weights"], **NEAR)
    assert [int(x) for x in flat(c.keep)] == wanted["keep"]
    effects = c.effects.floats()
    assert (effects["tokens/missing"], effects["tokens/infinite"]) == (wanted["missing"], wanted["infinite"])
    assert float(c.denominator) == wanted["denominator"]
    # a loss that is NaN or infinite where nothing is kept does not reach the sum
    assert float(c.loss(padded([case["per_token_loss"]], kind)[0])) == pytest.approx(wanted["loss"], **NEAR)
    assert effects["kl_sampler_scorer_k1/mean"] == pytest.approx(wanted["k1"], **NEAR)
    assert effects["kl_sampler_scorer_k3/mean"] == pytest.approx(wanted["k3"], **NEAR)


@pytest.mark.parametrize("kind", KINDS)
def test_r72_weights_are_normalised_over_the_whole_batch(kind: str) -> None:
    case, wanted = given("R72"), expected("R72")
    ranks = [[[math.log(x) for x in row] for row in case[f"ratios_rank_{i}"]] for i in (0, 1)]
    tis = corrections.compose((corrections.truncate, {"cap": case["cap"]}), corrections.normalise)
    told: list[Any] = []
    alone = [tis(**of_ratios(rows, kind), reduce=lambda x: told.append(x)) for rows in ranks]
    together = [tis(**of_ratios(rows, kind), reduce=lambda x: told[0] + told[1]) for rows in ranks]
    for i in (0, 1):
        assert flat(alone[i].weights) == pytest.approx(wanted[f"rank_{i}_alone"], rel=1e-6)
        assert flat(together[i].weights) == pytest.approx(wanted[f"rank_{i}"], rel=1e-6)
    numbers = [np.asarray(x, dtype=float) for x in told]
    assert sum(x[0] for x in numbers) / sum(x[1] for x in numbers) == pytest.approx(wanted["mean"], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_r73_mismatch_and_update_are_two_ratios(kind: str) -> None:
    case, wanted = given("R73"), expected("R73")
    sampler, mask = padded([case["rollout_logprobs"]], kind)
    old, current = (padded([case[f"{name}_logprobs"]], kind)[0] for name in ("old", "current"))
    decoupled = corrections.truncate(sampler=sampler, old=old, mask=mask, cap=case["cap"])
    bypass = corrections.truncate(sampler=sampler, current=current, mask=mask, cap=case["cap"])
    assert flat(decoupled.weights) == pytest.approx(wanted["old_over_rollout"], **NEAR)
    assert flat(bypass.weights) == pytest.approx(wanted["current_over_rollout"], **NEAR)
    update = corrections.policy_ratio(current=current, old=old, mask=mask)
    assert flat(update) == pytest.approx(wanted["update_ratio"], **NEAR)
    raw = corrections.truncate(sampler=sampler, old=old, mask=mask, cap=None)
    assert flat(raw.weights * update) == pytest.approx(wanted["product_equals"], **NEAR)
    monitor = Monitor(step_zero=False)
    monitor.observe(sampler_logprobs=sampler, old_logprobs=old, current_logprobs=current, mask=mask)
    numbers = monitor.close().numbers
    assert numbers["kl_sampler_scorer_k1/mean"] == pytest.approx(wanted["kl_mismatch"], **NEAR)
    assert numbers["update.kl_k1/mean"] == pytest.approx(wanted["kl_update"], **NEAR)


@pytest.mark.parametrize("kind", KINDS)
def test_r74_three_denominators(kind: str) -> None:
    case, wanted = given("R74"), expected("R74")
    inputs, loss = of_ratios(case["log_ratios"], kind), padded(case["per_token_loss"], kind)[0]
    c = corrections.truncate(**inputs, cap=case["cap"])
    assert float(c.loss(loss)) == pytest.approx(wanted["token_mean"], **NEAR)
    assert float(c.loss(loss, per="sequence")) == pytest.approx(wanted["sequence_mean"], **NEAR)
    constant = corrections.truncate(**inputs, cap=case["cap"], denominator=len(loss) * case["max_length"])
    assert float(constant.loss(loss)) == pytest.approx(wanted["constant"], **NEAR)


def test_r75_effective_sample_sizes_and_chi_squared() -> None:
    case, wanted = given("R75"), expected("R75")
    effects = corrections.truncate(**of_ratios(case["log_ratios"], "numpy"), cap=case["cap"]).effects.floats()
    assert effects["ess_token/raw"] == pytest.approx(wanted["ess_token"], **NEAR)
    assert effects["ess_token/corrected"] == pytest.approx(wanted["ess_token_truncated"], **NEAR)
    assert effects["ess_sequence/raw"] == pytest.approx(wanted["ess_sequence_product"], **NEAR)
    batch = view(case["log_ratios"])
    verl = Accumulator("verl", {"rollout_is": "token", "rollout_is_threshold": case["cap"], "precision": "float64"})
    swift = Accumulator("ms_swift", {"precision": "float64"})
    for framework in (verl, swift):
        framework.add(batch)
    told = verl.numbers()
    # verl adds 1e-8 to the mean that it divides by
    assert told["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(wanted["ess_token_truncated"], rel=1e-7)
    assert told["rollout_corr/chi2_token"] == pytest.approx(wanted["chi2_token"], **NEAR)
    assert told["rollout_corr/chi2_seq"] == pytest.approx(wanted["chi2_seq_product"], **NEAR)
    assert swift.numbers()["rollout_correction/chi2_seq"] == pytest.approx(wanted["chi2_seq_geometric"], **NEAR)
    found = definition_matches({"ess": wanted["ess_token"], "seq_ess": wanted["ess_sequence_product"]}, batch)
    # a cap above every ratio gives the raw one too; the raw one is named first
    assert [found[k][0].definition for k in found] == ["ess/token", "ess/sequence_product"]
    capped = definition_matches({"ess": expected("R75")["ess_token_capped_2"]}, batch)["ess"]
    assert [m.definition for m in capped] == ["ess/token_capped_2"]


@pytest.mark.parametrize("kind", KINDS)
def test_r76_one_token_is_enough_for_a_veto(kind: str) -> None:
    case, wanted = given("R76"), expected("R76")
    ids = [s["id"] for s in case["sequences"]]
    rows = [[s["per_token_log_ratio"]] * s["length"] for s in case["sequences"]]
    for row, s in zip(rows, case["sequences"], strict=True):
        row[-1] += s.get("outlier", 0.0)
    inputs = of_ratios(rows, kind)

    def dropped(c: corrections.Correction) -> list[str]:
        return [name for name, keep in zip(ids, c.keep, strict=True) if not bool(keep.any())]

    assert dropped(corrections.veto(**inputs, low=case["veto"])) == wanted["vetoed"]
    geometric = corrections.geometric_truncate(**inputs, cap=None).weights
    assert {name: float(w[0]) for name, w in zip(ids, geometric, strict=True)} == pytest.approx(
        wanted["geometric_mean"], rel=1e-5
    )
    low, high = case["band"]
    assert dropped(corrections.geometric_reject(**inputs, low=low, high=high)) == wanted["geometric_rejected"]
    assert dropped(corrections.geometric_reject(**inputs, low=0.97, high=high)) == []
    assert dropped(corrections.divergence_reject(**inputs, at_most=wanted["k3_mean_long"] + 1e-4)) == []
    assert dropped(corrections.divergence_reject(**inputs, at_most=wanted["k3_mean_long"] - 1e-4)) == ["long"]
    product = corrections.sequence_truncate(**inputs, cap=None).weights
    assert math.log10(float(product[0, 0])) == pytest.approx(wanted["product_log10"], abs=1e-4)


def test_r77_the_band_of_k1_is_turned_round() -> None:
    case, wanted = given("R77"), expected("R77")
    inputs = of_ratios(case["log_ratios"], "numpy")
    options = {"rollout_rs_threshold": case["rollout_rs_threshold"]}
    for like_origin, key in ((False, "meant"), (True, "verl")):
        p = corrections.preset("verl:decoupled_seq_is_rs", like_origin=like_origin, **options)
        assert p(**inputs).keep.any(-1).astype(int).tolist() == wanted[key]
    verl = Accumulator("verl", {"rollout_rs": "seq_sum_k1", **options, "precision": "float64"})
    verl.add(view(case["log_ratios"]))
    dropped = 1 - sum(wanted["verl"]) / len(wanted["verl"])
    assert verl.numbers()["rollout_corr/rollout_rs_seq_sum_k1_masked_fraction"] == pytest.approx(dropped)


@pytest.mark.parametrize("kind", KINDS)
def test_r78_empty_replies_and_an_emptied_batch(kind: str) -> None:
    case, wanted = given("R78"), expected("R78")
    inputs = of_ratios(case["log_ratios"], kind)
    low, high = case["band"]
    c = corrections.geometric_reject(**inputs, low=low, high=high)
    kept = [row.tolist()[: len(d)] for row, d in zip(c.keep, case["log_ratios"], strict=True)]
    assert [[int(x) for x in row] for row in kept] == wanted["keep"]
    effects = c.effects.floats()
    counted = (effects["sequences/emptied"], effects["sequences/trained"])
    assert counted == (wanted["emptied"], wanted["sequences"])
    for per in ("token", "sequence"):
        assert float(c.loss(inputs["sampler"] + 7.0, per=per)) == wanted["loss"]
    kept_only = corrections.geometric_reject(**inputs, low=low, high=high, denominator="kept")
    assert float(kept_only.denominator) == 1.0 and float(kept_only.loss(inputs["sampler"] + 7.0)) == wanted["loss"]


def test_r79_the_wider_precision_subtracts() -> None:
    case, wanted = given("R79"), expected("R79")
    sampler = torch.tensor([case["rollout_logprobs_bf16"]], dtype=torch.bfloat16)
    old = torch.tensor([case["trainer_logprobs_fp32"]], dtype=torch.float32)
    c = corrections.truncate(sampler=sampler, old=old, mask=torch.ones(1, 3))
    assert c.weights.dtype == torch.float32
    assert flat(c.weights) == pytest.approx(wanted["weights"], abs=2e-6)
    assert c.effects.floats()["log_ratio/mean"] == pytest.approx(sum(wanted["log_ratio"]) / 3, abs=1e-6)
    turned = corrections.truncate(sampler=old, old=sampler, mask=torch.ones(1, 3))
    assert flat(turned.weights) == pytest.approx([1 / w for w in wanted["weights"]], abs=2e-6)


# -- numbers that are reported -----------------------------------------------------------------------------------------


def replies(case: str) -> Rollouts:
    sides = zip(given(case)["rollout_logprobs"], given(case)["trainer_logprobs"], strict=True)
    return from_records(
        {"token_ids": list(range(len(a) + 1)), "prompt_length": 1, "sampler_logprobs": [None, *a],
         "old_logprobs": [None, *b]}
        for a, b in sides
    )  # fmt: skip


def test_r80_the_plain_definitions_have_no_finding() -> None:
    assert reported.of_rollouts(replies("R80"), expected("R80")["healthy"]) == []


@pytest.mark.parametrize("name", expected("R80")["explained"])
def test_r80_other_averages_and_signs_are_named(name: str) -> None:
    value, says = expected("R80")["explained"][name]
    (found,) = reported.of_rollouts(replies("R80"), {name: value})
    assert (found.code, found.evidence["reported_matches"]) == ("reported-metric-explained", says)


def test_r80_a_number_that_nothing_gives_is_not_explained() -> None:
    (found,) = reported.of_rollouts(replies("R80"), {"kl": expected("R80")["nothing"]})
    assert found.code == "reported-metric-unexplained"


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_r81_clip_decisions_by_the_wrong_ratio(kind: str) -> None:
    case, wanted = given("R81"), expected("R81")
    column = lambda x: np.array([x], dtype=float) if kind == "numpy" else torch.tensor([x], dtype=torch.float64)
    monitor = Monitor(step_zero=False, clip=case["clip"])
    monitor.observe(
        sampler_logprobs=column(case["rollout_logprobs"]),
        old_logprobs=column(case["old_logprobs"]),
        current_logprobs=column(case["current_logprobs"]),
        mask=column([1] * 6),
        advantages=column(case["advantages"]),
    )
    numbers = monitor.close().numbers
    got = {
        k: numbers["wrong_decisions/share" if k == "wrong_decisions" else "/".join(k.rsplit("_", 1))] for k in wanted
    }
    assert got == pytest.approx(wanted, abs=1e-9)


def test_r82_micro_batches_are_pooled_over_tokens() -> None:
    case, wanted = given("R82"), expected("R82")
    parts = case["log_ratios_by_micro_batch"]
    monitor = Monitor(step_zero=False, micro_batches=len(parts))
    for rows in parts:
        d, mask = padded(rows, "numpy")
        monitor.observe(sampler_logprobs=d * 0 - 3.0, old_logprobs=d - 3.0, mask=mask)
    numbers = monitor.close().numbers
    assert numbers["kl_sampler_scorer_k1/mean"] == pytest.approx(wanted["k1"], **NEAR)
    assert numbers["kl_sampler_scorer_k3/mean"] == pytest.approx(wanted["k3"], **NEAR)
    assert wanted["mean_of_means"] != pytest.approx(wanted["k1"], rel=0.1)
    verl = Accumulator("verl")
    for rows in parts:
        verl.add(view(rows), 1)
    assert verl.numbers()["rollout_corr/kl"] == pytest.approx(wanted["k1"], **NEAR)
    trl = Accumulator("trl")
    for rows in parts:
        trl.add(view(rows), 1)
    assert trl.numbers()["sampling/sampling_logp_difference/mean"] == pytest.approx(wanted["abs"], **NEAR)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_r83_the_reference_kl_on_the_samplers_tokens(kind: str, estimator: str) -> None:
    case, wanted = given("R83"), expected("R83")
    current, mask = padded([case["current_logprobs"]], kind)
    sampler, reference = (padded([case[f"{x}_logprobs"]], kind)[0] for x in ("rollout", "ref"))
    inputs = {"current": current, "reference": reference, "mask": mask}
    kl = corrections.reference_kl(**inputs, sampler=sampler, estimator=estimator)
    assert flat(kl) == pytest.approx(wanted[estimator], rel=5e-6, abs=1e-6)
    plain = corrections.reference_kl(**inputs, unbiased=False)
    assert flat(plain) == pytest.approx(wanted["plain_k3"], rel=5e-6, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_r84_two_stages(kind: str) -> None:
    case, wanted = given("R84"), expected("R84")
    inputs, (low, high) = of_ratios(case["log_ratios"], kind), case["band"]
    both = corrections.compose(
        (corrections.geometric_reject, {"low": low, "high": high}), (corrections.truncate, {"cap": case["cap"]})
    )
    c = both(**inputs)
    assert [int(bool(row.all())) for row in c.keep] == wanted["keep"]
    assert [row.tolist() for row in c.weights] == [pytest.approx(row, **NEAR) for row in wanted["weights"]]
    assert c.effects.floats()["kept/share"] == pytest.approx(wanted["kept_share"])
    geometric = corrections.geometric_truncate(**inputs, cap=None).weights
    assert [float(row[0]) for row in geometric] == pytest.approx(wanted["geometric"], **NEAR)
