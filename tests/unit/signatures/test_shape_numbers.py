"""The numbers behind the signatures of shape, against values worked by hand, and the same integers for any split."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

import audit_batches as batches
from build import rollouts_of  # pyright: ignore[reportAttributeAccessIssue]
from onepolicy.align import align
from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.profiles import PROFILES, Bins, Seen, profiled
from onepolicy.rollouts import Rollouts
from onepolicy.signatures import SIGNATURES, experts, inside, position, scale
from onepolicy.signatures.base import Answer, Evidence, Signature
from onepolicy.signatures.contrast import contrast, needed, told
from onepolicy.signatures.series import course
from onepolicy.signatures.weigh import weighed
from onepolicy.survey import evidence_of, survey_of
from onepolicy.types import Outcome, Values
from onepolicy.views import both_finite, view_mask

PAIR = ("sampler", "old")


def seen_of(rollouts: Rollouts) -> Seen:
    pairs = align(rollouts, *PAIR)
    return Seen(rollouts, pairs, both_finite(pairs, view_mask(pairs, "drawn")))


def bins_of(rollouts: Rollouts, key: str) -> Bins:
    found = profiled(seen_of(rollouts), PROFILES[key])
    assert found is not None
    return found


def test_any_split_and_order_adds_up_to_the_same_integers() -> None:
    whole = batches.FAULTS["mixed-versions"](batches.healthy("bfloat16", 1500, 5), np.random.default_rng(5))
    one = survey_of(whole, PAIR)
    order = np.random.default_rng(1).permutation(len(whole))
    parts = [survey_of(whole.take(order[k::3]), PAIR) for k in (2, 0, 1)]
    for other in parts[1:]:
        parts[0].add(other)
    for ours, theirs in ((one.profiles, parts[0].profiles), (one.extra, parts[0].extra)):
        assert set(ours) == set(theirs)
        for key in ours:
            assert json.dumps(ours[key].to_dict()) == json.dumps(theirs[key].to_dict()), key
    assert evidence_of(one).rows.tobytes() == evidence_of(parts[0]).rows.tobytes()


def test_a_bin_knows_its_scaled_mean_its_spread_and_their_error() -> None:
    rollouts = batches.healthy("bfloat16", 4000, 9)
    bins, seen = bins_of(rollouts, "place"), seen_of(rollouts)
    inner = (seen.index > 0) & (seen.index < seen.counts[seen.sequence] - 1)
    p = np.exp(np.maximum(seen.a, seen.b))
    by_hand = np.minimum(np.abs(seen.d) / (1 - p + 0.003), 4.0)
    assert bins.mean("inner", "scaled") == pytest.approx(by_hand[inner].mean(), abs=1e-9)
    assert bins.sd("inner") == pytest.approx(seen.d[inner].std(), abs=1e-8)
    size = len(rollouts)
    n = np.bincount(seen.sequence[inner], minlength=size)
    left = np.bincount(seen.sequence[inner], by_hand[inner], size) - bins.mean("inner", "scaled") * n
    error = math.sqrt((left**2).sum() * size / (size - 1)) / n.sum()
    assert bins.std_error("inner", "scaled") == pytest.approx(error, rel=1e-6)
    assert Bins.from_dict(json.loads(json.dumps(bins.to_dict()))) == bins


def test_two_kinds_of_tokens_are_held_against_each_other() -> None:
    rng = np.random.default_rng(2)
    lengths = [30] * 60
    a = np.full(1800, math.log(0.5))
    b = a + np.where(np.repeat(np.arange(60) < 30, 30), 0.1, 0.02) * np.abs(rng.standard_normal(1800))
    turn = Values(np.where(np.arange(60) < 30, 1, 0).astype(np.int32))
    held = contrast(bins_of(rollouts_of(a, b, lengths, records={"turn": turn}), "turn"), ("0",), ("1",))
    assert held is not None and held.sequences == 30 and held.larger and held.enough
    size = (b - a) / (1 - np.exp(b) + 0.003)  # the larger probability is the scorer's
    size = size.reshape(60, 30)[:, 1:]  # the first token of a sequence has no context
    base, other = size[30:].mean(), size[:30].mean()
    assert held.ratio == pytest.approx(other / base, rel=1e-6)
    assert held.share == pytest.approx((other - base) / (other + base), rel=1e-6)
    back = contrast(bins_of(rollouts_of(a, b, lengths, records={"turn": turn}), "turn"), ("1",), ("0",))
    assert back is not None and not back.larger and back.share == 0.0
    assert contrast(None, ("0",), ("1",)) is None


def test_few_sequences_need_more_and_decide_nothing() -> None:
    for n in (2, 5, 20):
        assert needed(n) == pytest.approx(stats.t.isf(2.5e-5, n - 1), rel=1e-6)
    assert needed(1) == math.inf and needed(10_000) == 5.0
    few = told("grows-with-position", "it grows", False)
    assert few.outcome is Outcome.INCONCLUSIVE and "not decided: that takes 20 sequences" in few.message
    assert told("grows-with-position", "it grows", True).outcome is Outcome.DRIFT


def test_spans_begin_at_the_first_token_of_another_version() -> None:
    rollouts = rollouts_of(np.full(12, -1.0), np.full(12, -1.5), [6, 6])
    version = Values(np.array([0, 4, 4, 5, 4, 5, 0, 4, 4, 4, 4, 4]))
    rollouts = replace(rollouts, tokens={**rollouts.tokens, "policy_version": version})
    bins = bins_of(rollouts, "span")
    assert (bins.n("before"), bins.n("after")) == (2, 3)
    counted = inside.look(seen_of(rollouts))
    assert (counted.counts["mixed"], counted.counts["replies"]) == (1, 2)
    assert counted.most == {"last change": 2, "-first change": -2}


def test_probability_that_the_largest_gaps_stand_at_flips_by_chance() -> None:
    bins = Bins(sizes={experts.OTHER: {900: 3, 700: 1}, experts.SAME: {650: 10, 800: 6}})
    # k = 4 of 20; three of the four largest are theirs
    assert experts.by_chance(bins) == pytest.approx(stats.hypergeom.sf(2, 20, 4, 4), rel=1e-9)
    none = Bins(sizes={experts.OTHER: {1: 2}, experts.SAME: {900: 18}})
    assert experts.by_chance(none) == pytest.approx(1.0)


@pytest.mark.parametrize(("layers", "top"), [(3, 2), (4, 1), (2, 4), (1, 8)])
def test_experts_a_layer_are_read_from_what_never_comes_twice(layers: int, top: int) -> None:
    rng = np.random.default_rng(layers)
    rows = np.stack([[rng.permutation(16)[:top] for _ in range(layers)] for _ in range(60)]).reshape(60, -1)
    counted = Counted()
    for k in (k for k in range(1, layers * top + 1) if layers * top % k == 0):
        counted.count(f"0 repeats {layers * top} {k}", experts._repeats(rows, k))  # pyright: ignore[reportPrivateUsage]
    assert experts.layout(counted) == (layers * top, top)


@pytest.mark.parametrize(
    ("gaps", "jump", "grows"),
    [
        ([0.011, 0.016, 0.027, 0.041, 0.058, 0.079], None, True),
        ([0.01, 0.018, 0.201, 0.222, 0.24, 0.259], 2, True),
        ([0.01, 0.018, 0.015, 0.016, 0.014, 0.017], None, False),
        ([0.01, 0.01, 0.2, 0.19, 0.21, 0.2, 0.19], 2, False),
        ([0.02] * 8, None, False),
        ([0.01, 0.02, 0.04, 0.05, 0.05, 0.05, 0.05, 0.049], None, False),  # it rose and stays
        ([0.08, 0.06, 0.04, 0.03, 0.02], None, False),
    ],
)
def test_the_course_of_a_series(gaps: list[float], jump: int | None, grows: bool) -> None:
    went = course(gaps)
    assert (went.jump, went.keeps_growing) == (jump, grows)


@pytest.mark.parametrize(
    ("sampler", "scorer", "differs"),
    [
        ({"rope_theta": 1e4}, {"rope_parameters": {"rope_theta": 5e5}}, {"rope_theta"}),
        ({"rope_theta": 1e4, "rope_scaling": None}, {"rope_theta": 10000}, set()),
        ({"rope_scaling": {"factor": 4}}, {"rope_scaling": {"factor": 8}}, {"factor"}),
        ({"rope_theta": 1e4}, {}, set()),
        ({"rope_scaling": None}, {"rope_scaling": {"type": "linear", "factor": 2.0}}, {"factor", "rope_type"}),
        ({"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}, set()),
        ({"sliding_window": 4096}, {"sliding_window": 1024}, {"sliding_window"}),
    ],
)  # fmt: skip
def test_settings_of_positions_wherever_they_stand(sampler: Any, scorer: Any, differs: set[str]) -> None:
    rollouts = batches.configured(batches.healthy("bfloat16", 1000, 1), sampler, scorer)
    e = evidence_of(survey_of(rollouts, PAIR))
    assert set(position.rope(e)) == differs
    answer = position.judge(e)
    assert (answer.verdict == "fits") == bool(differs)
    if answer.finding is not None:  # the gap does not grow here: said, and not decided
        assert (answer.finding.code, answer.finding.outcome) == ("rope-differs", Outcome.INCONCLUSIVE)


def test_levels_and_far_tokens_by_hand() -> None:
    p = np.array([0.2] * 40 + [0.95] * 40)
    d = 0.1 * (1 - p + 0.003)
    d[7] = 3.0
    n = np.concatenate([[0.0], np.log(p)])
    rollouts = rollouts_of(n, n - np.concatenate([[0.0], d]), [81])
    counted = scale.look(seen_of(rollouts))
    open_, sure = scale.level(counted, (1,)), scale.level(counted, (3,))
    assert (open_.n, sure.n) == (40, 40)
    for level in (open_, sure):
        assert level.median == pytest.approx(0.1, rel=0.19)
    found = scale.far(counted, 1 + scale.BANDS.index(2.0))
    rest = np.delete(d, 7)
    assert (found.n, found.positions) == (1, (7,))
    assert found.mean_exp_abs == pytest.approx(np.exp(d).mean()) and found.mean_abs == pytest.approx(d.mean())
    assert found.mean_exp_abs_without == pytest.approx(np.exp(rest).mean())
    assert counted.counts["below"] == int((d > -math.log(0.9)).sum())


def signature(key: str, verdict: Any, strength: float = 0.0, rivals: tuple[str, ...] = (), last: int = 0) -> Signature:
    codes = {"one": "staleness", "two": "grows-with-position", "left": "larger-than-rounding", "noise": "bf16-noise"}
    out = finding(codes[key], f"{key} it is") if verdict == "fits" else None
    return Signature(
        key, codes[key], key, lambda e: Answer(verdict, f"why {key}", out, strength), (), rivals, last=last
    )


def asked(*signatures: Signature, above: tuple[str, ...] = ()) -> Any:
    given: Any = Evidence(PAIR, None, {}, {}, np.zeros(0), above=above)  # type: ignore[arg-type]
    return weighed(given, {s.key: s for s in signatures})


def test_rivals_that_fit_alike_both_abstain() -> None:
    (found,) = asked(signature("one", "fits", 0.5, ("two",)), signature("two", "fits", 0.4)).findings
    assert (found.code, found.outcome) == ("cause-unclear", Outcome.INCONCLUSIVE)
    assert "staleness, grows-with-position" in found.message and len(found.rivals) == 2


def test_the_rival_that_explains_much_more_is_named_with_what_it_beats() -> None:
    (found,) = asked(signature("one", "fits", 0.2, ("two",)), signature("two", "fits", 0.8)).findings
    assert found.code == "grows-with-position" and "staleness: it explains 20% of the gap" in found.ruled_out


def test_two_causes_that_are_no_rivals_are_both_named() -> None:
    found = asked(signature("one", "fits", 0.2), signature("two", "fits", 0.8)).findings
    assert [f.code for f in found] == ["grows-with-position", "staleness"]


def test_what_is_left_is_described_only_where_no_cause_explains_it() -> None:
    left, noise = signature("left", "fits", 0.5, last=1), signature("noise", "fits", 1.0, last=2)
    assert [f.code for f in asked(signature("one", "no"), left, noise).findings] == ["larger-than-rounding"]
    assert [f.code for f in asked(signature("one", "fits", 0.3), left, noise).findings] == ["staleness"]
    assert [f.code for f in asked(signature("one", "no"), noise).findings] == ["bf16-noise"]
    small = asked(signature("one", "fits", 0.1), left, noise)
    assert [f.code for f in small.findings] == ["larger-than-rounding", "staleness"] and "noise" not in small.answers


def test_numbers_below_a_finding_that_withholds_them_name_no_cause() -> None:
    assert asked(signature("one", "fits", 0.9), above=("shift-by-one",)).findings == ()
    assert len(asked(signature("one", "fits", 0.9), above=("duplicate-records",)).findings) == 1


def test_rivals_and_codes_of_the_table_exist() -> None:
    from onepolicy.codes import CODES

    for s in SIGNATURES.values():
        assert s.code in CODES and set(s.rivals) <= set(SIGNATURES) and s.says
