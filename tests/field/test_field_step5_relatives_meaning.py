"""Relatives of the given cases of meaning and shape, made by a little model (`little_model`): what faults do to a real
softmax, in small dumps, and what must not be concluded from them (`cases/step5_relatives.jsonl`)."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from little_model import Engine, Process, Told, V, Weights, generate, log_softmax, moved, prompts, score, weights
from onepolicy.codes import CODES
from onepolicy.records import from_records
from onepolicy.signatures.weigh import weigh
from onepolicy.survey import evidence_of, survey_of
from onepolicy.types import Finding, Outcome, Severity

LINES = (Path(__file__).parent / "cases" / "step5_relatives.jsonl").read_text(encoding="utf-8").splitlines()
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in map(json.loads, LINES)}
ROUNDING = {"bf16-noise", "rounding-noise"}
#: The sampler's kernel, and the scorer's.
PLAIN, FUSED = Engine(), Engine(fused=True)
OFF: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}


@cache
def model(seed: int = 3) -> Weights:
    return weights(seed)


def both(
    replies: int, tokens: int, a: Engine = PLAIN, b: Engine = FUSED, scorer: Weights | None = None, **more: Any
) -> tuple[np.ndarray, Told, Told]:
    """(prompts, what the sampler told, what the scorer told)."""
    start = prompts(replies, 5)
    drawn = generate(model(), a, start, tokens, 2, **more)
    return start, drawn, score(scorer or model(), b, start, drawn.ids)


def records(start: np.ndarray, ids: np.ndarray, a: np.ndarray, b: np.ndarray, **more: Any) -> list[dict[str, Any]]:
    """One record a reply. `more`: a value for all, a list with one for each, or [B, T] for each token."""
    n = start.shape[1]
    spread = lambda x: [None] * n + [round(float(v), 6) for v in x]
    out: list[dict[str, Any]] = []
    for i in range(len(ids)):
        row = {"record_id": f"r{i:03d}", "token_ids": [*start[i].tolist(), *ids[i].tolist()], "prompt_length": n}
        row |= {"sampler_logprobs": spread(a[i]), "old_logprobs": spread(b[i])}
        for name, x in more.items():
            if isinstance(x, np.ndarray) and x.ndim == 3:
                row[name] = [None] * n + x[i].tolist()
            elif isinstance(x, np.ndarray) and x.ndim == 2:
                row[name] = spread(x[i]) if x.dtype.kind == "f" else [None] * n + x[i].tolist()
            else:
                row[name] = x[i] if isinstance(x, list) else x
        out.append(row)
    return out


def judged(rows: list[dict[str, Any]]) -> dict[str, Finding]:
    return {f.code: f for f in weigh(evidence_of(survey_of(from_records(rows), ("sampler", "old"))))}


def decided(found: dict[str, Finding]) -> set[str]:
    """Codes that make a drift."""
    return {code for code, f in found.items() if f.outcome is Outcome.DRIFT}


def expected(found: dict[str, Finding], case: str) -> Finding:
    """The case's finding; nothing else is decided, and nothing is called rounding."""
    wanted = CASES[case]["expected"]
    code = wanted["finding"]
    assert code in found, [(f.code, f.message) for f in found.values()]
    assert decided(found) <= {code} and not set(found) & ROUNDING
    outcome = {"fail": Outcome.DRIFT, "inconclusive": Outcome.INCONCLUSIVE, "info": Outcome.INCONCLUSIVE}
    assert found[code].outcome is outcome[wanted["verdict"]], found[code].message
    if wanted["verdict"] == "info":
        assert found[code].severity is Severity.INFO
    return found[code]


def at_temperature(drawn: Told, t: float) -> np.ndarray:
    """The sampler's log-probs of what it drew, at another temperature."""
    return np.take_along_axis(log_softmax(drawn.logits / t), drawn.ids[:, :, None], axis=2)[:, :, 0]


def tempered(t: Any) -> Process:
    """Draws at a temperature, or at one for each reply."""
    return lambda z, _: log_softmax(z / np.broadcast_to(np.asarray(t, dtype=np.float64), len(z))[:, None])


def masked(forbidden: np.ndarray) -> Process:
    return lambda z, _: log_softmax(np.where(forbidden, -1e9, z))


def test_every_case_has_a_test_and_a_code() -> None:
    told = {case["expected"]["finding"] for case in CASES.values()} - {None, "rounding"}
    assert told <= set(CODES)
    source = Path(__file__).read_text(encoding="utf-8")
    assert [case for case in CASES if f"test_{case.lower()}_" not in source] == []


# -- temperature -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("replies", "tokens"), [(1, 80), (24, 80)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_r01_a_temperature_is_suspected_from_the_likeliest_tokens(replies: int, tokens: int, dtype: str) -> None:
    start, drawn, _ = both(replies, tokens, replace(PLAIN, dtype=dtype), process=tempered(0.6))
    old = score(model(), replace(FUSED, dtype=dtype), start, drawn.ids, 0.6)
    found = expected(judged(records(start, drawn.ids, at_temperature(drawn, 1.0), old.logp)), "R01")
    assert "old looks sharper" in found.message and any("soft-cap" in r for r in found.rivals)
    assert found.evidence["temperature_ratio_about"] == pytest.approx(0.6, abs=0.12)


def test_r01_relative_two_versions_of_the_weights_are_no_temperature() -> None:
    start, drawn, old = both(24, 80, scorer=moved(model(), 1, 0.03))
    assert not {c for c in judged(records(start, drawn.ids, drawn.logp, old.logp)) if c.startswith("temperature")}


@pytest.mark.parametrize(("sampler", "scorer"), [(1.0, 0.6), (0.7, 1.0)])
def test_r02_with_an_entropy_and_a_declaration_one_reply_is_enough(sampler: float, scorer: float) -> None:
    declared = min(sampler, scorer)
    start, drawn, _ = both(1, 60, process=tempered(declared))
    old = score(model(), FUSED, start, drawn.ids, scorer)
    more = {"old_entropy": old.entropy, "temperature": declared}
    found = expected(judged(records(start, drawn.ids, at_temperature(drawn, sampler), old.logp, **more)), "R02")
    assert found.evidence["fitted_temperature"] == pytest.approx({"sampler": sampler, "old": scorer}, abs=0.08)


def requests(scorer: Any, dtype: str = "bfloat16") -> list[dict[str, Any]]:
    """24 replies of four temperatures in turns. `scorer`: its temperature, None for each request's own."""
    own = np.array([1.0, 0.6, 0.8, 1.2] * 6)
    start, drawn, _ = both(24, 60, replace(PLAIN, dtype=dtype), process=tempered(own))
    old = score(model(), replace(FUSED, dtype=dtype), start, drawn.ids, own if scorer is None else scorer)
    return records(start, drawn.ids, drawn.logp, old.logp, temperature=own.tolist())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_r03_one_temperature_for_requests_of_several(dtype: str) -> None:
    found = expected(judged(requests(1.0, dtype)), "R03")
    assert found.evidence["own_temperature"] == "sampler"
    low, _, high = found.evidence["one_temperature"]["old"].partition(" to ")
    assert float(low) <= CASES["R03"]["expected"]["one_temperature"] <= float(high or low)
    shares = found.evidence["share_higher_by_temperature"]
    assert shares["0.6"] < 0.1 and shares["1.2"] > 0.9


def test_r03_relatives_another_common_one_and_each_request_s_own() -> None:
    assert expected(judged(requests(0.8)), "R03").evidence["one_temperature"] == {"old": "0.8"}
    assert set(judged(requests(None))) <= ROUNDING


@pytest.mark.parametrize("declared", [{"temperature": 0.0}, {"top_k": 1}])
@pytest.mark.parametrize("replies", [1, 24])
def test_r04_greedy_tokens_are_reported_as_certain(declared: dict[str, Any], replies: int) -> None:
    greedy = lambda z, _: log_softmax(np.where(z == z.max(axis=1, keepdims=True), z, -1e9))
    start, drawn, old = both(replies, 60, process=greedy)
    found = expected(judged(records(start, drawn.ids, drawn.logp, old.logp, **declared)), "R04")
    assert found.evidence["mean_kept_mass"] == pytest.approx(np.exp(old.logp).mean(), abs=0.02)


# -- support and penalties ---------------------------------------------------------------------------------------------


def top_k(k: int) -> Process:
    return lambda z, _: log_softmax(np.where(z >= np.sort(z, axis=1)[:, -k][:, None], z, -1e9))


def test_r05_top_k_under_noise() -> None:
    start, drawn, old = both(24, 80, process=top_k(20))
    found = expected(judged(records(start, drawn.ids, drawn.logp, old.logp, top_k=20)), "R05")
    kept = np.exp(np.sort(log_softmax(drawn.logits), axis=2)[:, :, -20:]).sum(axis=2).mean()
    assert found.evidence["side"] == CASES["R05"]["expected"]["side"]
    assert found.evidence["mean_kept_mass"] == pytest.approx(kept, abs=0.01)


@pytest.mark.parametrize("replies", [1, 24])
def test_r06_a_grammar_is_no_padded_row(replies: int) -> None:
    start, drawn, old = both(replies, 60, process=masked(np.arange(V) % 4 > 0))
    told = judged(records(start, drawn.ids, drawn.logp, old.logp, **OFF))
    found = told[CASES["R06"]["expected"]["finding"]]
    assert not set(told) & {*ROUNDING, "padded-rows-in-softmax"} and "declared off" in found.message
    kept = np.exp(log_softmax(drawn.logits))[:, :, ::4].sum(axis=2).mean()
    assert found.evidence["mean_kept_mass"] == pytest.approx(kept, abs=0.02)
    assert any("grammar" in rival for rival in found.rivals)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_r07_bad_words_are_no_padded_rows(dtype: str) -> None:
    engines = (replace(e, dtype=dtype) for e in (PLAIN, FUSED))
    start, drawn, old = both(24, 80, *engines, process=masked(np.arange(V) % 32 == 0))
    found = judged(records(start, drawn.ids, drawn.logp, old.logp, **OFF))
    assert not decided(found) and not set(found) & ROUNDING
    if dtype == "float32":  # under bf16 noise 2% of the mass are not told
        assert any("bad words" in rival for rival in expected(found, "R07").rivals)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_r08_padded_rows_are_still_named(dtype: str) -> None:
    a, b = replace(PLAIN, dtype=dtype), replace(FUSED, dtype=dtype, padded=1000)
    start, drawn, old = both(24, 80, a, b)
    found = expected(judged(records(start, drawn.ids, drawn.logp, old.logp, **OFF)), "R08")
    lost = np.exp(log_softmax(old.logits))[:, :, V:].sum(axis=2).mean()
    assert found.evidence["lost_mass"] == pytest.approx(lost, abs=0.02)


def presence(by: float) -> Process:
    def process(z: np.ndarray, ids: np.ndarray) -> np.ndarray:
        seen = np.zeros(z.shape, dtype=bool)
        if ids.shape[1]:
            np.put_along_axis(seen, ids, True, axis=1)
        return log_softmax(z - by * seen)

    return process


def test_r09_a_presence_penalty_shows_in_one_reply_by_its_signs() -> None:
    engines = (replace(e, dtype="float32") for e in (PLAIN, FUSED))
    start, drawn, old = both(1, 60, *engines, process=presence(0.5))
    found = expected(judged(records(start, drawn.ids, drawn.logp, old.logp)), "R09")
    assert found.evidence["side"] == CASES["R09"]["expected"]["side"] and "presence" in found.evidence["kind"]


def test_r09_relatives_a_temperature_and_noise_are_no_penalty() -> None:
    engines = [replace(e, dtype="float32") for e in (PLAIN, FUSED)]
    start, drawn, _ = both(3, 80, *engines, process=tempered(0.7))
    old = score(model(), engines[1], start, drawn.ids, 1.0)
    assert "penalty-mismatch" not in judged(records(start, drawn.ids, drawn.logp, old.logp))
    for seed in range(12):
        start = prompts(1, seed)
        drawn = generate(weights(seed), replace(PLAIN, gain=8.0), start, 60, seed)
        old = score(weights(seed), replace(FUSED, gain=8.0), start, drawn.ids)
        assert "penalty-mismatch" not in judged(records(start, drawn.ids, drawn.logp, old.logp))


def test_r10_a_logit_bias_on_some_tokens_is_not_benign() -> None:
    start, drawn, old = both(24, 80, process=lambda z, _: log_softmax(z + 2.0 * (np.arange(V) % 21 == 0)))
    found = expected(judged(records(start, drawn.ids, drawn.logp, old.logp)), "R10")
    assert "most tokens" in found.message and any("biases" in rival for rival in found.rivals)


# -- other functions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replies", [1, 24])
def test_r11_a_soft_cap_is_no_noise(replies: int) -> None:
    start, drawn, old = both(replies, 100, PLAIN, replace(FUSED, cap=15.0))
    found = expected(judged(records(start, drawn.ids, drawn.logp, old.logp)), "R11")
    assert "sampler looks sharper" in found.message and any("soft-cap" in r for r in found.rivals)


@pytest.mark.parametrize(("case", "replies"), [("R12", 1), ("R12", 24), ("R13", 1), ("R13", 24)])
def test_r12_r13_another_function_is_no_noise(case: str, replies: int) -> None:
    other = replace(model(), head=np.random.default_rng(9).permutation(model().head)) if case == "R13" else None
    scorer = replace(FUSED, theta=1e6) if case == "R12" else FUSED
    start, drawn, old = both(replies, 100, PLAIN, scorer, other)
    found = expected(judged(records(start, drawn.ids, drawn.logp, old.logp)), case)
    assert "no rounding of logits does that" in found.message and "rope" in " ".join(found.rivals)


test_r13_another_head = test_r12_r13_another_function_is_no_noise


@pytest.mark.parametrize(
    ("sampler", "scorer", "place", "within"),
    [
        # absolute positions, of which 8 are the prompt
        (replace(FUSED, kv8_from=64), FUSED, 56, 6),
        (PLAIN, replace(FUSED, rope_scale=4.0, rope_from=50), 42, 6),
        (PLAIN, replace(FUSED, window=48), 40, 8),
    ],
)
def test_r14_one_place_is_said_in_replies_of_one_length(
    sampler: Engine, scorer: Engine, place: int, within: int
) -> None:
    start, drawn, old = both(24, 100, sampler, scorer)
    found = expected(judged(records(start, drawn.ids, drawn.logp, old.logp)), "R14")
    assert abs(found.evidence["change_point"] - place) <= within
    assert "another place in each" not in found.message and any("window" in rival for rival in found.rivals)


def test_r14_relative_one_reply_leaves_both_readings_open() -> None:
    start, drawn, old = both(1, 100, PLAIN, replace(FUSED, rope_scale=4.0, rope_from=50))
    found = judged(records(start, drawn.ids, drawn.logp, old.logp))
    seen = found["changes-inside-reply"]
    assert seen.outcome is Outcome.INCONCLUSIVE and "another place" not in seen.message and not decided(found)
    assert any("window" in r for r in seen.rivals) and any("weights updated" in r for r in seen.rivals)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_r15_drafted_log_probs_at_the_end(dtype: str) -> None:
    start, drawn, old = both(24, 80, replace(PLAIN, dtype=dtype), replace(FUSED, dtype=dtype))
    draft = score(moved(model(), 3, 0.08), FUSED, start, drawn.ids)
    reported = np.concatenate([drawn.logp[:, :-6], draft.logp[:, -6:]], axis=1)
    found = expected(judged(records(start, drawn.ids, reported, old.logp)), "R15")
    assert "end" in found.evidence["side"] and any("drafted" in rival for rival in found.rivals)


@pytest.mark.parametrize(("place", "side"), [(0, "start"), (-1, "end")])
def test_r16_one_token_at_an_end_of_every_reply(place: int, side: str) -> None:
    start, drawn, old = both(24, 80)
    other = score(moved(model(), 5, 0.15), FUSED, start, drawn.ids)
    old.logp[:, place] = other.logp[:, place] - 0.4
    found = judged(records(start, drawn.ids, drawn.logp, old.logp))
    assert expected(found, "R16").evidence["side"] == side


# -- groups, experts, records ------------------------------------------------------------------------------------------


@cache
def groups() -> tuple[np.ndarray, Told, np.ndarray, np.ndarray]:
    """(prompts, drawn with the right weights, the scorer's log-probs, and those of other weights) of 96 replies."""
    start = prompts(96, 6, 4)
    drawn = generate(model(), PLAIN, start, 30, 2)
    near, far = (score(w, FUSED, start, drawn.ids).logp for w in (model(), moved(model(), 1, 0.05)))
    return start, drawn, near, far


def grouped(bad: np.ndarray, rows: slice = slice(None), **more: Any) -> dict[str, Finding]:
    start, drawn, near, far = groups()
    old = np.where(bad[:, None], far, near)
    picked = {k: v[rows] for k, v in more.items()}
    return judged(records(start[rows], drawn.ids[rows], drawn.logp[rows], old[rows], **picked))


def test_r17_one_replica_of_four() -> None:
    number = np.arange(96) % 4
    names = [f"dp{k}" for k in number.tolist()]
    found = expected(grouped(number == 2, replica_id=names), "R17")
    assert found.evidence["groups"] == CASES["R17"]["expected"]["groups"] and not found.evidence["all_but_these"]
    few = grouped(number == 2, slice(0, 56), replica_id=names)["one-group-differs"]
    assert few.outcome is Outcome.INCONCLUSIVE and few.evidence["groups"] == ["dp2"]


def test_r17_relatives_an_environment_decides_nothing_and_healthy_groups_are_silent() -> None:
    number = np.arange(96) % 4
    names = [f"e{k}" for k in number.tolist()]
    found = grouped(number == 2, env_id=names)
    assert (found["one-group-differs"].outcome, decided(found)) == (Outcome.INCONCLUSIVE, set())
    more = {"replica_id": names, "env_id": names[::-1], "turn": (number % 3).tolist()}
    assert set(grouped(np.zeros(96, dtype=bool), **more)) <= ROUNDING


def test_r17_relative_where_every_replica_is_off_none_is_blamed() -> None:
    names = [f"dp{k}" for k in (np.arange(96) % 4).tolist()]
    assert "one-group-differs" not in grouped(np.ones(96, dtype=bool), replica_id=names)


def test_r18_every_turn_but_the_first() -> None:
    turn = np.arange(96) % 4
    found = expected(grouped(turn > 0, turn=turn.tolist()), "R18")
    assert found.evidence["all_but_these"] and found.evidence["groups"] == CASES["R18"]["expected"]["all_but"]


def test_r19_other_experts_told_and_not_told() -> None:
    w = weights(7, experts=8)
    start = prompts(12, 5)
    drawn = generate(w, replace(PLAIN, router_noise=0.02), start, 60, 2)
    old = score(w, FUSED, start, drawn.ids)
    assert drawn.experts is not None and old.experts is not None
    more = {"routed_experts": drawn.experts, "scorer_routed_experts": old.experts}
    found = expected(judged(records(start, drawn.ids, drawn.logp, old.logp, **more)), "R19")
    pair = lambda x: np.sort(x.reshape(*x.shape[:2], 2, 2), axis=3)
    other = (pair(drawn.experts) != pair(old.experts)).any(axis=(2, 3))
    assert found.evidence["share_tokens"] == pytest.approx(other.mean(), abs=1e-9)
    untold = judged(records(start, drawn.ids, drawn.logp, old.logp))
    assert not set(untold) & ROUNDING and not decided(untold)
    assert any("experts" in rival for rival in untold["larger-than-rounding"].rivals)


def test_r19_relative_two_flipped_tokens_are_described() -> None:
    w, engines = weights(9, experts=8), [replace(e, dtype="float32") for e in (PLAIN, FUSED)]
    start = prompts(1, 60)
    drawn = generate(w, engines[0], start, 60, 2)
    old = score(w, engines[1], start, drawn.ids)
    assert drawn.experts is not None
    flipped, at = drawn.experts.copy(), [15, 50]
    flipped[0, at, 0] = [next(k for k in range(8) if k not in row[:2]) for row in drawn.experts[0, at]]
    columns = {"routed_experts": drawn.experts, "scorer_routed_experts": flipped}
    untouched = judged(records(start, drawn.ids, drawn.logp, old.logp, **columns))
    assert "expert-routing-mismatch" not in untouched
    old.logp[0, at] -= 0.8
    found = judged(records(start, drawn.ids, drawn.logp, old.logp, **columns))
    seen = found["expert-routing-mismatch"]
    assert (seen.outcome, seen.evidence["tokens_differing"]) == (Outcome.INCONCLUSIVE, at) and not decided(found)


def test_r20_no_gap_has_no_change_inside() -> None:
    start, drawn, _ = both(24, 60)
    assert judged(records(start, drawn.ids, drawn.logp, drawn.logp)) == {}


def lagged(lags: list[int]) -> dict[str, Finding]:
    """Two replies drawn at each of these lags, scored by version 10."""
    rows: list[dict[str, Any]] = []
    for lag in lags:
        start = prompts(2, 40 + lag)
        drew = moved(model(), 20 + lag, 0.02 * lag) if lag else model()
        drawn = generate(drew, PLAIN, start, 60, lag)
        old = score(model(), FUSED, start, drawn.ids)
        version = np.full(drawn.ids.shape, 10 - lag)
        rows += records(start, drawn.ids, drawn.logp, old.logp, policy_version=version, scorer_version=10)
    return judged([row | {"record_id": f"r{i}"} for i, row in enumerate(rows)])


def test_r21_staleness_is_described_from_few_replies() -> None:
    found = expected(lagged([0, 1, 2, 3]), "R21")
    sizes = list(found.evidence["mean_abs_by_lag"].values())
    assert sizes == sorted(sizes) and "not decided" in found.message


def test_r21_relative_where_every_token_is_older_it_is_a_rival_of_rounding() -> None:
    start, drawn, old = both(24, 60)
    version = np.full(drawn.ids.shape, 9)
    found = judged(records(start, drawn.ids, drawn.logp, old.logp, policy_version=version, scorer_version=10))
    assert set(found) == {"bf16-noise"} and "staleness" in found["bf16-noise"].rivals[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_r22_healthy_engines_are_left_alone(dtype: str, seed: int) -> None:
    a, b = replace(PLAIN, dtype=dtype), replace(FUSED, dtype=dtype)
    for replies, tokens in ((1, 60), (24, 50)):
        start = prompts(replies, seed)
        drawn = generate(weights(seed), a, start, tokens, seed, tempered(0.7 if seed else 1.0))
        old = score(weights(seed), b, start, drawn.ids, 0.7 if seed else 1.0)
        number = np.arange(replies)
        more = {
            "temperature": 0.7 if seed else 1.0, "old_entropy": old.entropy, "turn": (number % 3).tolist(),
            "replica_id": [f"dp{k}" for k in (number % 4).tolist()], "step": (number * 5 // replies).tolist(),
            "scorer_version": 3, "policy_version": np.repeat(3 - number[:, None] % 3, tokens, axis=1),
            "cached_prefix_length": (4 * (number % 2)).tolist(),
        }  # fmt: skip
        assert set(judged(records(start, drawn.ids, drawn.logp, old.logp, **more))) <= ROUNDING
