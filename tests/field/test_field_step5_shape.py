"""Public faults as small inputs (`cases/step5_shape.jsonl`), as dumps: what the signatures of shape make of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepolicy.codes import CODES
from onepolicy.rollouts import Rollouts, column_values, concat
from onepolicy.signatures import Evidence
from onepolicy.signatures.position import rope
from onepolicy.signatures.scale import BANDS, far
from onepolicy.signatures.weigh import weigh, weighed
from onepolicy.survey import evidence_of, survey_of
from onepolicy.types import Finding, Lists, Outcome, Scoring, Severity, Values

LINES = (Path(__file__).parent / "cases" / "step5_shape.jsonl").read_text(encoding="utf-8").splitlines()
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in map(json.loads, LINES)}

#: What the cases call a finding -> our code.
NAMES = {
    "bf16-noise": "bf16-noise",
    "single-outlier": "single-outlier",
    "prefix-cache-corrupts-prompt-logprobs": "depends-on-cache",
    "expert-routing-mismatch": "expert-routing-mismatch",
    "weights-not-delivered": "engine-never-updated",
    "rope-differs": "rope-differs",
    "mixed-weight-versions": "mixed-weight-versions",
}


def reply(
    a: Any,
    b: Any,
    name: str = "r",
    dtype: str | None = None,
    prints: tuple[dict[str, Any], ...] = ({}, {}),
    **more: Any,
) -> Rollouts:
    """One reply behind a prompt of one token. `prints`: the fingerprints; `more`: token columns and record values."""
    n = len(a) + 1
    drawn = np.arange(n) > 0
    shifted = lambda x: Values(np.concatenate([[0.0], np.asarray(x, dtype=np.float64)]), drawn)
    ids = np.random.default_rng(len(a)).integers(0, 5000, n).astype(np.int32)
    tokens = {"token_ids": Values(ids), "drawn": Values(drawn)}
    if "versions" in more:
        tokens["policy_version"] = Values(np.concatenate([[0], more.pop("versions")]).astype(np.int64), drawn)
    scorings = {
        side: Scoring(shifted(x), dtype=dtype, fingerprint=print_, scoring_id=side)
        for side, x, print_ in zip(("sampler", "old"), (a, b), prints, strict=True)
    }
    records = {k: column_values(k, [v]) for k, v in {"record_id": name, **more}.items()}
    return Rollouts(np.array([0, n]), tokens, records, {}, scorings)


def evidence(rollouts: Rollouts) -> Evidence:
    return evidence_of(survey_of(rollouts, ("sampler", "old")))


def judged(rollouts: Rollouts) -> dict[str, Finding]:
    return {f.code: f for f in weigh(evidence(rollouts))}


def causes(found: dict[str, Finding]) -> set[str]:
    """Codes of findings that warn or fail."""
    return {code for code, f in found.items() if f.severity is not Severity.INFO}


def test_c22_ordinary_bf16_noise() -> None:
    case = CASES["C22"]
    given, wanted = case["input"], case["expected"]
    found = judged(reply(given["rollout_logprobs"], given["trainer_logprobs"], dtype=given["dtype"]))
    assert set(found) == {NAMES[wanted["finding"]]}
    noise = found["bf16-noise"]
    assert (noise.severity, noise.outcome) == (Severity.INFO, Outcome.PASS)
    for ours, theirs in (("mean", "mean_delta"), ("sd", "sd"), ("p95_abs", "p95_abs"), ("max_abs", "max_abs")):
        assert noise.evidence[ours] == pytest.approx(wanted[theirs], abs=2e-3)
    assert noise.evidence["fraction_outside_0.9_1.1"] == pytest.approx(wanted["fraction_outside_0.9_1.1"], abs=1e-9)
    # must not: report only the mean
    assert all(word in noise.message for word in ("sd 0.05", "95% of |d|", "the largest", "7.2% of ratios"))


def test_c23_one_token_ruins_a_mean_of_exponentials() -> None:
    case = CASES["C23"]
    given, wanted = case["input"], case["expected"]
    found = judged(reply(given["rollout_logprobs"], given["trainer_logprobs"]))
    assert causes(found) == {NAMES[wanted["finding"]]}
    outlier = found["single-outlier"]
    assert (outlier.severity, outlier.outcome) == (Severity.WARN, Outcome.PASS)
    assert outlier.evidence["positions"] == wanted["positions"]
    assert outlier.evidence["mean_exp_abs"] == pytest.approx(wanted["mean_exp_abs"], rel=1e-6)
    assert outlier.evidence["mean_exp_abs_without"] == pytest.approx(wanted["mean_exp_abs_without"], abs=2e-3)
    assert outlier.evidence["mean_abs"] == pytest.approx(wanted["mean_abs"], abs=2e-3)
    assert outlier.evidence["median_abs"] == pytest.approx(wanted["median_abs"], abs=2e-3)


def scored_prompts(runs: dict[str, Any], cold: dict[str, Any], order: list[str], block: int) -> Rollouts:
    """What a server with its cache on said of the prompts in this order, beside what it says without one."""
    given = CASES["C26"]["input"]
    parts: list[Rollouts] = []
    for name in order:
        ids = np.array(given["prompts"][name], dtype=np.int32)
        seen = [given["prompts"][other] for other in order[: order.index(name)]]
        shared = max((_shared(ids.tolist(), other) // block * block for other in seen), default=0)
        one = reply(runs[name], cold[name], name, cached_prefix_length=shared, prompt_length=len(ids))
        parts.append(replace(one, tokens={"token_ids": Values(ids)}))
    return concat(parts)


def _shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def test_c26_scores_from_a_cached_prefix_as_a_dump() -> None:
    """The prompt's own log-probs are the fault: nothing is drawn, so the fixed view is looked at."""
    given, wanted = CASES["C26"]["input"], CASES["C26"]["expected"]
    cold = next(r for r in given["runs"] if not r["cache"])
    for run in (r for r in given["runs"] if r["cache"]):
        rollouts = scored_prompts(run, cold, run["order"], given["block_size"])
        survey = survey_of(rollouts, ("sampler", "old"), view="fixed")
        found = {f.code: f for f in weigh(evidence_of(survey))}
        if run["order"][-1] != wanted["affected"]["prompt"]:
            assert not causes(found)
            continue
        finding = found[NAMES[wanted["finding"]]]
        assert causes(found) == {finding.code} and finding.severity is Severity.FAIL
        assert finding.evidence["max_abs"] == pytest.approx(wanted["max_abs"], abs=2e-3)
        assert finding.evidence["shared_prefix_tokens"] == [wanted["shared_prefix_tokens"]]
        assert finding.evidence["records"] == ["p2"] * 7
        assert finding.evidence["score_positions"] == wanted["affected"]["score_positions"]


def test_c30_large_gaps_exactly_where_the_experts_differ() -> None:
    case = CASES["C30"]
    given, wanted = case["input"], case["expected"]
    rollouts = reply(given["rollout_logprobs"], given["trainer_logprobs"])
    columns = {"routed_experts": given["experts_engine"], "scorer_routed_experts": given["experts_trainer"]}
    lists: dict[str, Lists] = {}
    for name, rows in columns.items():
        flat = np.array(rows, dtype=np.int32).reshape(len(rows), -1)
        offsets = np.concatenate([[0], np.arange(len(rows) + 1) * flat.shape[1]]).astype(np.int64)
        lists[name] = Lists(flat.reshape(-1), offsets)
    found = judged(replace(rollouts, lists=lists))
    finding = found[NAMES[wanted["finding"]]]
    assert causes(found) == {finding.code} and finding.severity is Severity.FAIL
    assert finding.evidence["tokens_differing"] == wanted["tokens_differing"]
    assert (finding.evidence["layers"], finding.evidence["experts_a_layer"]) == (given["layers"], given["top_k"])
    for key in ("share_tokens", "share_token_layers", "mean_abs_differing", "mean_abs_same"):
        assert finding.evidence[key] == pytest.approx(wanted[key], abs=1e-5)


def moved(a: np.ndarray, gap: float, by: np.ndarray) -> np.ndarray:
    """Log-probs after the logits of the drawn tokens moved along `by`, so far that the mean |d| is `gap`."""
    odds = a - np.log1p(-np.exp(a))
    after = lambda times: -np.log1p(np.exp(-odds - times * by))
    low, high = 0.0, 50.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.abs(after(middle) - a).mean() < gap else (low, middle)
    return after(low)


def steps_of(run: dict[str, Any], replies: int = 24) -> Evidence:
    """A run whose mean |d| at each step is the one given, in replies of 40 tokens."""
    rng = np.random.default_rng(3)
    lags, total = run.get("version_lag"), None
    for step, gap in enumerate(run["mean_abs_delta"], 1):
        norms = [{"weight_norm": run[k][step - 1]} if k in run else {} for k in ("engine_norm", "trainer_norm")]
        parts: list[Rollouts] = []
        for k in range(replies):
            a = -rng.exponential(1.0, 40) - 0.05
            b = moved(a, gap, rng.standard_normal(40))
            more: dict[str, Any] = {}
            if lags is not None:
                more = {"versions": np.full(40, step - 1 - lags[step - 1]), "scorer_version": step - 1}
            parts.append(reply(a, b, f"{step}-{k}", prints=(norms[0], norms[1]), step=step, **more))
        one = survey_of(concat(parts), ("sampler", "old"))
        total = one if total is None else total
        if total is not one:
            total.add(one)
    assert total is not None
    return evidence_of(total)


@pytest.mark.parametrize("run", ["a_sync_every_1", "b_sync_every_4", "c_sleep_mode", "d_control"])
def test_c32_the_engine_never_got_the_new_weights(run: str) -> None:
    given, wanted = CASES["C32"]["input"]["runs"][run], CASES["C32"]["expected"]
    found = {f.code: f for f in weigh(steps_of(given))}
    if wanted["verdicts"][run] == "pass":
        assert not causes(found)
        return
    finding = found[NAMES[wanted["finding"]]]
    assert (finding.severity, finding.outcome) == (Severity.FAIL, Outcome.DRIFT) and causes(found) == {finding.code}
    if "engine_norm" in given:
        assert finding.evidence["engine_norm_constant"] is wanted["engine_norm_constant"]
    if run == "c_sleep_mode":
        assert finding.evidence["change_point_step"] == str(wanted["c_change_point_step_1based"])
        assert finding.evidence["change_point_index"] == given["warmup_steps"]
    # must not: conclude ordinary staleness, recommend a smaller version lag
    assert "staleness" not in found and "lag" not in finding.advice
    assert not any("staleness" in rival for rival in finding.rivals)
    if given.get("version_lag"):
        assert any(gone.startswith("ordinary staleness") for gone in finding.ruled_out)


def test_c32_one_reply_a_step_is_described_and_not_decided_without_norms() -> None:
    runs = CASES["C32"]["input"]["runs"]
    few = {f.code: f for f in weigh(steps_of(runs["c_sleep_mode"], replies=1))}
    assert few["engine-never-updated"].outcome is Outcome.INCONCLUSIVE
    # a norm that never moves beside one that does is a mark of its own
    norms = {f.code: f for f in weigh(steps_of(runs["a_sync_every_1"], replies=1))}
    assert norms["engine-never-updated"].outcome is Outcome.DRIFT
    assert not causes({f.code: f for f in weigh(steps_of(runs["d_control"], replies=1))})


def c34(configs: bool) -> Rollouts:
    given = CASES["C34"]["input"]
    prints = ({"config": given["engine_config"]}, {"config": given["trainer_config"]}) if configs else ({}, {})
    return reply(given["rollout_logprobs"], given["trainer_logprobs"], prints=prints)


def test_c34_rope_base_read_from_the_wrong_key() -> None:
    wanted = CASES["C34"]["expected"]
    found = judged(c34(True))
    finding = found[NAMES[wanted["finding"]]]
    assert causes(found) == {finding.code} and (finding.severity, finding.outcome) == (Severity.FAIL, Outcome.DRIFT)
    assert finding.evidence["rope_theta"] == wanted["rope_theta"] == rope(evidence(c34(True)))["rope_theta"]
    assert finding.evidence["mean_abs_by_quarter"] == pytest.approx(wanted["mean_abs_by_quarter"], abs=2e-3)
    assert finding.evidence["grows_with_position"] is wanted["grows_with_position"]


def test_c34_without_the_configs_the_key_is_not_named() -> None:
    """From the numbers the cause is a family; one reply does not decide it."""
    wanted = CASES["C34"]["expected"]
    found = judged(c34(False))
    assert "rope-differs" not in found
    finding = found["grows-with-position"]
    assert finding.outcome is Outcome.INCONCLUSIVE and "rope" in " ".join(finding.rivals)
    assert finding.evidence["mean_abs_by_quarter"] == pytest.approx(wanted["mean_abs_by_quarter"], abs=2e-3)


def c50(spans: bool) -> Rollouts:
    given = CASES["C50"]["input"]
    record = given["records"][0]
    version = np.full(len(record["loss_mask"]), record["weight_version"])
    for start, stop, drawn_at in record["version_spans"] if spans else []:
        version[start:stop] = drawn_at
    a, b = record["rollout_logprobs"], record["trainer_logprobs"]
    return reply(a, b, versions=version, scorer_version=given["trainer_version"])


def test_c50_one_reply_two_weight_versions() -> None:
    wanted = CASES["C50"]["expected"]
    finding = judged(c50(True))[NAMES[wanted["finding"]]]
    assert (finding.severity, finding.outcome) == (Severity.WARN, Outcome.PASS)
    assert CODES[finding.code].rank == 4
    assert finding.evidence["change_point"] == wanted["change_point"]
    assert finding.evidence["sd_before"] == pytest.approx(wanted["sd_before"], abs=1e-6)
    assert finding.evidence["sd_after"] == pytest.approx(wanted["sd_after"], abs=1e-6)
    assert wanted["label_covers_only"] == f"tokens {finding.evidence['change_point']}..39"


def test_c50_with_one_label_the_change_is_seen_and_not_decided() -> None:
    wanted = CASES["C50"]["expected"]
    found = judged(c50(False))
    assert "mixed-weight-versions" not in found
    finding = found["changes-inside-reply"]
    assert (
        finding.outcome is Outcome.INCONCLUSIVE and abs(finding.evidence["change_point"] - wanted["change_point"]) <= 1
    )
    assert any("weights updated" in rival for rival in finding.rivals)


def test_c50_a_label_that_counts_calls() -> None:
    given = CASES["C50"]["input"]
    record, second = given["records"][0], given["second"]
    versions = np.full(len(record["loss_mask"]), second["weight_version"])
    a, b = record["rollout_logprobs"], record["trainer_logprobs"]
    found = judged(reply(a, b, versions=versions, scorer_version=second["optimizer_steps"]))
    finding = found["version-ahead"]
    assert finding.severity is Severity.WARN
    assert (finding.evidence["newest"], finding.evidence["scorer"]) == (16, 4)
    assert any("calls of the weight update" in rival for rival in finding.rivals)
    assert "staleness" not in found


def test_c55_percentiles_of_a_large_batch() -> None:
    """A hundredth of the case's tokens, its outlier among them, in ten parts."""
    wanted = CASES["C55"]["expected"]
    d = np.random.default_rng(55).normal(0, 0.05, 200_000)  # the first of the case's 20 million
    d[12345] = 9.0
    chunks = [d[i : i + 20_000] for i in range(0, len(d), 20_000)]
    survey = None
    for k, chunk in enumerate(chunks):
        # far from 0, so that no log-prob is above it
        one = survey_of(reply(np.full(len(chunk), -20.0), -20.0 + chunk, f"r{k:02d}"), ("sampler", "old"))
        survey = one if survey is None else survey
        if survey is not one:
            survey.add(one)
    assert survey is not None
    e = evidence_of(survey)
    value = lambda key: e.measurements[key].value
    assert value("abs_log_ratio/p50") == pytest.approx(wanted["p50_abs"], rel=4e-3, abs=wanted["tolerance"])
    assert value("abs_log_ratio/p95") == pytest.approx(wanted["p95_abs"], rel=4e-3, abs=wanted["tolerance"])
    assert value("abs_log_ratio/max") == pytest.approx(wanted["max_abs"], abs=1e-9)
    worst = far(e.extra["rounding"], 1 + BANDS.index(8.0))
    assert (worst.n, worst.records, worst.positions) == (1, ("r00",), (wanted["position"],))


def test_every_name_is_a_code_and_answers_cover_every_signature() -> None:
    assert set(NAMES.values()) <= set(CODES)
    given = CASES["C22"]["input"]
    told = weighed(evidence(reply(given["rollout_logprobs"], given["trainer_logprobs"])))
    assert all(answer.why for answer in told.answers.values() if answer.verdict != "fits")
