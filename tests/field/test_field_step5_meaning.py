"""Public faults of meaning as small dumps: temperature, truncated support, soft-cap, reported KL.

The given cases (`cases/step5_meaning.jsonl`), and relatives of them: another temperature, another side, another cap,
more noise, fewer tokens, nothing declared.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepolicy.records import from_records
from onepolicy.rollouts import Rollouts
from onepolicy.signatures import reported
from onepolicy.signatures.base import Evidence
from onepolicy.signatures.weigh import weigh
from onepolicy.survey import evidence_of, survey_of
from onepolicy.types import Finding, Outcome, Scoring, Severity, Values

LINES = (Path(__file__).parent / "cases" / "step5_meaning.jsonl").read_text(encoding="utf-8").splitlines()
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in map(json.loads, LINES)}
#: The names of the cases -> our codes.
CODE_OF = {
    "temperature-mismatch": "temperature-mismatch",
    "truncated-support-mismatch": "truncated-support-mismatch",
    "softcap-differs": "softcap-differs",
    "kl-includes-unsampled-tokens": "kl-includes-unsampled-tokens",
    "unbiased-kl": "reported-metric-explained",
}
NEAR = 2e-3


def given(case: str) -> Any:
    return CASES[case]["input"]


def expected(case: str) -> Any:
    return CASES[case]["expected"]


def pair(a: Any, b: Any, ids: Any = None, **more: Any) -> Rollouts:
    """One reply after one token of prompt."""
    ids = list(range(len(a))) if ids is None else list(ids)
    row = {"token_ids": [0, *ids], "prompt_length": 1}
    return from_records([row | {"sampler_logprobs": [None, *a], "old_logprobs": [None, *b]} | more])


def rescored(r: Rollouts, logits: Any) -> Rollouts:
    """With a third scoring that tells the logits of each reply token."""
    table = np.full((r.n_tokens, len(logits[0])), np.nan)
    table[1:] = logits
    known = np.arange(r.n_tokens) > 0
    chosen = np.zeros(r.n_tokens)
    chosen[1:] = log_softmax(table[1:])[np.arange(r.n_tokens - 1), r.token_ids[1:]]
    return r.with_scoring("rescored", Scoring(Values(chosen, known), distributions=table))


def log_softmax(z: np.ndarray) -> np.ndarray:
    top = z.max(axis=1, keepdims=True)
    return z - top - np.log(np.exp(z - top).sum(axis=1, keepdims=True))


def told(r: Rollouts) -> Evidence:
    return evidence_of(survey_of(r, ("sampler", "old")))


def causes(r: Rollouts) -> list[Finding]:
    return weigh(told(r))


def one(r: Rollouts, code: str) -> Finding:
    found = causes(r)
    assert [f.code for f in found] == [code], [(f.code, f.message) for f in found]
    return found[0]


def test_every_case_has_its_code() -> None:
    assert {case["expected"]["finding"] for case in CASES.values()} == set(CODE_OF)


# -- C15 ---------------------------------------------------------------------------------------------------------------


def test_c15_both_temperatures_are_fitted() -> None:
    case, wanted = given("C15"), expected("C15")
    r = rescored(pair(case["rollout_logprobs"], case["trainer_logprobs"], case["token_ids"]), case["logits"])
    found = one(r, CODE_OF[wanted["finding"]])
    assert (found.severity, found.outcome) == (Severity.FAIL, Outcome.DRIFT)
    fitted = wanted["fitted_temperature"]
    assert found.evidence["fitted_temperature"] == pytest.approx(
        {"sampler": fitted["rollout"], "old": fitted["trainer"]}, abs=NEAR
    )
    assert found.evidence["naive_fix_is_valid"] is wanted["naive_fix_is_valid"]
    assert "no fix" in found.message


def test_c15_the_naive_fix_is_named_as_what_it_is() -> None:
    case = given("C15")
    r = rescored(pair(case["naive_fix"], case["trainer_logprobs"], case["token_ids"]), case["logits"])
    found = one(r, "temperature-mismatch")
    assert found.evidence["divided"] == {"sampler": pytest.approx(case["temperature"], abs=NEAR)}
    assert "no distribution" in found.message


def test_c15_chosen_log_probs_alone_name_no_temperature() -> None:
    case = given("C15")
    found = causes(pair(case["rollout_logprobs"], case["trainer_logprobs"], case["token_ids"]))
    assert "temperature-mismatch" not in {f.code for f in found}
    assert all(f.outcome is not Outcome.PASS or f.severity is Severity.INFO for f in found)


@pytest.mark.parametrize(("sampler", "scorer"), [(0.7, 1.0), (1.0, 1.3), (0.83, 1.0), (1.0, 0.37)])
def test_c15_relatives_other_temperatures_and_sides(sampler: float, scorer: float) -> None:
    z, ids = np.array(given("C15")["logits"]), given("C15")["token_ids"]
    a, b = (log_softmax(z / t)[np.arange(len(z)), ids] for t in (sampler, scorer))
    found = one(rescored(pair(a, b, ids, temperature=sampler), z), "temperature-mismatch")
    assert found.evidence["fitted_temperature"] == pytest.approx({"sampler": sampler, "old": scorer}, abs=0.01)


def test_c15_relative_one_temperature_has_no_finding() -> None:
    z, ids = np.array(given("C15")["logits"]), given("C15")["token_ids"]
    a = log_softmax(z / 0.6)[np.arange(len(z)), ids]
    b = np.minimum(a + 1e-4 * np.sin(np.arange(len(a))), 0)
    assert not {f.code for f in causes(rescored(pair(a, b, ids, temperature=0.6), z))} & {
        "temperature-mismatch",
        "temperature-suspected",
        "softcap-differs",
    }


def test_c15_relative_entropy_of_the_scorer_instead_of_logits() -> None:
    """40 tokens of one reply: the quotient is named, since nearly all of the gap fits."""
    rng = np.random.default_rng(15)
    z = 2.0 * rng.standard_normal((40, 12))
    a, b = log_softmax(z), log_softmax(z / 0.6)
    ids = [int(rng.choice(12, p=np.exp(row))) for row in a]
    at = np.arange(40)
    h = -(np.exp(b) * b).sum(axis=1)
    v = (np.exp(b) * (b + h[:, None]) ** 2).sum(axis=1)
    more = {"old_entropy": [None, *h], "old_varentropy": [None, *v], "temperature": 0.6}
    found = one(pair(a[at, ids], b[at, ids], ids, **more), "temperature-mismatch")
    assert found.evidence["fitted_temperature"]["sampler"] == 1.0
    assert found.evidence["fitted_temperature"]["old"] == pytest.approx(0.6, abs=0.03)


# -- C16 ---------------------------------------------------------------------------------------------------------------


def nucleus(**more: Any) -> Rollouts:
    case = given("C16")
    facts = {"temperature": 1.0, "top_p": 0.8, "top_k": -1, "logprob_semantics": "processed"} | more
    return pair(case["rollout_logprobs"], case["trainer_logprobs"], **facts)


def test_c16_truncated_support_on_one_side() -> None:
    wanted = expected("C16")
    found = one(nucleus(), CODE_OF[wanted["finding"]])
    assert (found.severity, found.outcome) == (Severity.FAIL, Outcome.DRIFT)
    got = found.evidence
    assert got["positive_deltas"] == wanted["positive_deltas"]
    assert got["mean_ratio"] == pytest.approx(wanted["mean_ratio"], abs=NEAR)
    assert got["mean_kept_mass"] == pytest.approx(wanted["mean_kept_mass"], abs=NEAR)
    assert got["fraction_outside_0.9_1.1"] == wanted["fraction_outside_0.9_1.1"]
    assert got["side"] == "sampler"
    assert not {"temperature-mismatch", "temperature-suspected"} & {f.code for f in causes(nucleus())}


def test_c16_relative_nothing_declared_is_open_between_two_causes() -> None:
    found = one(nucleus(top_p=None, top_k=None, logprob_semantics=None), "truncated-support-mismatch")
    assert found.outcome is Outcome.INCONCLUSIVE
    assert len(found.rivals) == 2
    assert found.evidence["least_kept_mass_seen"] == pytest.approx(0.8, abs=0.01)


def test_c16_relative_the_scorer_is_truncated() -> None:
    r = nucleus()
    turned = replace(r, scorings={"sampler": r.scorings["old"], "old": r.scorings["sampler"]})
    found = one(turned, "truncated-support-mismatch")
    assert (found.evidence["side"], found.evidence["negative_deltas"]) == ("old", 0)
    assert found.evidence["mean_kept_mass"] == pytest.approx(expected("C16")["mean_kept_mass"], abs=NEAR)


def test_c16_relative_an_offset_beyond_the_declared_top_p_is_open() -> None:
    assert one(nucleus(top_p=0.95), "truncated-support-mismatch").outcome is Outcome.INCONCLUSIVE


def test_c16_relative_recorded_sets_explain_the_offset() -> None:
    """Kept sets and the scorer's distributions are recorded: log S token by token."""
    rng = np.random.default_rng(16)
    logp = log_softmax(1.5 * rng.standard_normal((30, 16)))
    order = np.argsort(-logp, axis=1)
    keep = [row[:6].tolist() for row in order]
    ids = [int(rng.choice(row)) for row in keep]
    mass = np.array([np.exp(p[k]).sum() for p, k in zip(logp, keep, strict=True)])
    b = logp[np.arange(30), ids]
    r = pair(b - np.log(mass), b, ids, top_k=6, sampling_mask=[None, *keep])
    table = np.full((31, 16), np.nan)
    table[1:] = logp
    r = r.with_scoring("old", replace(r.scorings["old"], distributions=table))
    found = one(r, "truncated-support-mismatch")
    assert found.evidence["delta_equals_log_kept_mass"] is True
    assert found.evidence["recorded_kept_mass"] == pytest.approx(mass.mean())


# -- C36 ---------------------------------------------------------------------------------------------------------------


def capped(side: str) -> Rollouts:
    case = given("C36")
    r = pair(case["rollout_logprobs"], case["trainer_logprobs"][side], case["token_ids"])
    configs = {"sampler": case["engine_config"], "old": case["trainer_config"]}
    for name, config in configs.items():
        r = r.with_scoring(name, replace(r.scorings[name], fingerprint=config))
    return r


@pytest.mark.parametrize("side", ["uncapped", "formula_slip"])
def test_c36_softcap_is_named_from_logits(side: str) -> None:
    wanted = expected("C36")
    found = one(rescored(capped(side), given("C36")["raw_logits"]), CODE_OF[wanted["finding"]])
    assert (found.severity, found.outcome) == (Severity.FAIL, Outcome.DRIFT)
    got = found.evidence
    assert got["fitted"]["sampler"] == "cap:30.0"
    assert got["fitted"]["old"] == {"uncapped": "cap:none", "formula_slip": "slip:30.0"}[side]
    assert got["max_abs"] == pytest.approx(wanted["max_abs"][side], abs=NEAR)
    assert got["min_logprob"]["sampler"] == pytest.approx(wanted["min_logprob"]["engine"], abs=NEAR)
    if side == "uncapped":
        assert got["min_logprob"]["old"] == pytest.approx(wanted["min_logprob"]["uncapped"], abs=NEAR)
        assert got["greedy_equal"] is wanted["greedy_equal"]
    else:
        assert got["order_preserved"] is wanted["order_preserved_by_formula_slip"]


def test_c36_relative_the_configurations_alone_name_it() -> None:
    assert one(capped("uncapped"), "softcap-differs").evidence["declared"] == {"sampler": "30.0", "old": "none"}


def test_c36_relative_without_logits_and_configurations_nothing_is_named() -> None:
    case = given("C36")
    found = causes(pair(case["rollout_logprobs"], case["trainer_logprobs"]["uncapped"], case["token_ids"]))
    assert not {"softcap-differs", "temperature-mismatch"} & {f.code for f in found}


def test_c36_relative_another_cap_on_the_other_side() -> None:
    z, ids = np.array(given("C36")["raw_logits"]), given("C36")["token_ids"]
    at = np.arange(len(z))
    a, b = log_softmax(z)[at, ids], log_softmax(50 * np.tanh(z / 50))[at, ids]
    found = one(rescored(pair(a, b, ids), z), "softcap-differs")
    assert found.evidence["fitted"] == {"sampler": "cap:none", "old": "cap:50.0"}


# -- C47, C48 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["drawn", "loss_mask"])
def test_c47_the_reported_kl_is_over_tokens_that_were_not_drawn(column: str) -> None:
    case, wanted = given("C47"), expected("C47")
    r = pair(case["rollout_logprobs"], case["trainer_logprobs"], **{column: [0, *case["loss_mask"]]})
    (found,) = reported.of_rollouts(r, case["reported"])
    assert found.code == CODE_OF[wanted["finding"]]
    assert found.evidence["reported_matches"] == wanted["reported_matches"]
    assert found.evidence["recomputed"]["k1/token"] == pytest.approx(wanted["k1_masked"], abs=NEAR)
    assert found.evidence["recomputed"]["k3/token"] == pytest.approx(wanted["k3_masked"], abs=2e-6)


def test_c47_relatives_the_right_number_and_one_that_nothing_gives() -> None:
    case, wanted = given("C47"), expected("C47")
    r = pair(case["rollout_logprobs"], case["trainer_logprobs"], drawn=[0, *case["loss_mask"]])
    assert reported.of_rollouts(r, {"kl": wanted["k1_masked"], "kl_k3": wanted["k3_masked"], "loss": 3.0}) == []
    (found,) = reported.of_rollouts(r, {"kl": 0.5})
    assert found.code == "reported-metric-unexplained"
    (found,) = reported.of_rollouts(r, {"kl": -wanted["k1_masked"]})
    assert (found.code, found.evidence["reported_matches"]) == ("reported-metric-explained", "opposite")


@pytest.mark.parametrize(
    ("which", "says"), [("mean", "unbiased"), ("with_sequence_ratio_wrong", "a slip"), ("k3", None)]
)
def test_c48_the_weight_in_front_of_the_penalty(which: str, says: str | None) -> None:
    case, wanted = given("C48"), expected("C48")
    row = {f"{k}_logprobs": [None, *case[f"{c}_logprobs"]] for k, c in (("old", "old"), ("current", "current"))}
    row |= {"reference_logprobs": [None, *case["ref_logprobs"]], "token_ids": [0, 1, 2, 3], "prompt_length": 1}
    found = reported.of_rollouts(from_records([row]), {"kl": round(float(np.mean(wanted[which])), 6)})
    assert [f.code for f in found] == ([] if says is None else [CODE_OF[wanted["finding"]]])
    assert says is None or says in found[0].message
