"""What the signatures of meaning count: the same integers for any split, and the formulas behind them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import audit_batches as batches
import audit_meaning as meaning
from onepolicy.counted import Counted
from onepolicy.rollouts import Rollouts
from onepolicy.signatures import SIGNATURES, adding, definitions, entropy_fit, logit_fit, reported
from onepolicy.survey import Survey, evidence_of, survey_of
from onepolicy.types import Scoring, Values

NAMES = ("sampler", "old")


def rich() -> Rollouts:
    """Entropies of both sides, four policies, a third scoring with logits: everything that is looked at."""
    r = meaning.tempered(1.0, 0.8, 1.0, "old", top_p=0.9)(batches.healthy("bfloat16", 900, 3), np.random.default_rng(1))
    r = meaning.healthy_policies(r, np.random.default_rng(2))
    table = np.full((r.n_tokens, batches.VOCAB), np.nan)
    table[r.drawn] = batches.logits_of(batches.healthy("bfloat16", 900, 3)).z
    return r.with_scoring("third", Scoring(Values(np.zeros(r.n_tokens), r.drawn), distributions=table))


def test_counts_are_the_same_for_any_split_and_order() -> None:
    r = rich()
    whole = survey_of(r, NAMES)
    parts = [survey_of(r.take(rows), NAMES) for rows in ([5, 2], [0], [1, 3, 4], range(6, len(r)))]
    for order in itertools.islice(itertools.permutations(parts), 0, 24, 7):
        joined = Survey(NAMES)
        for part in order:
            joined.add(part)
        for key in ("temperature", "truncation", "penalties", "softcap", "raw_processed", "stored_policy"):
            assert joined.extra[key].to_dict() == whole.extra[key].to_dict(), key


def test_reported_numbers_merge() -> None:
    r = rich()
    whole, left, right = (reported.Reported({"kl": 0.25}) for _ in range(3))
    whole.add(r)
    left.add(r.take([0, 1, 2]))
    right.add(r.take(range(3, len(r))))
    left.merge(right)
    assert left.findings() == whole.findings() != []


def test_spread_is_the_sum_of_squares_over_sequences() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=50), rng.normal(size=50)
    c = Counted()
    adding.keep_gram(c, "g", {"x": x, "y": y})
    assert adding.spread(c, "g", {"y": 2.0, "x": -0.5}) == pytest.approx(np.sqrt(((2 * y - 0.5 * x) ** 2).sum()))


def test_slope_on_entropy_has_no_remainder() -> None:
    """Drawn from p, E[d (a + H)] = (beta - 1) V in every context: summed over the vocabulary, not sampled."""
    rng = np.random.default_rng(4)
    z = 3.0 * rng.standard_normal((20, 9))
    a, b = batches._log_softmax(z), batches._log_softmax(z / 0.5)
    p = np.exp(a)
    h, v = meaning.entropies(a)
    x = a + h[:, None]
    assert (p * x).sum(axis=1) == pytest.approx(np.zeros(20), abs=1e-12)
    assert (p * (b - a) * x).sum() / (p * x * x).sum() == pytest.approx(1 / 0.5 - 1)
    assert v == pytest.approx((p * x * x).sum(axis=1))


def test_no_temperature_bends_with_the_entropy_and_a_softcap_does() -> None:
    heat = lambda fault: evidence_of(
        survey_of(meaning.MEANING[fault][0](batches.healthy("float32", 3000, 5), np.random.default_rng(5)), NAMES)
    ).extra["temperature"]
    plain, bent = (entropy_fit.fit(heat(f), "b") for f in ("temperature-0.6-entropy", "softcap-15-entropy"))
    assert plain is not None and bent is not None
    assert (plain.bent, bent.bent) == (False, True)


def test_a_temperature_between_the_candidates_is_refined() -> None:
    rng = np.random.default_rng(6)
    z = 2.0 * rng.standard_normal((60, 8))
    c = Counted()
    c.count("tokens", 60)
    ids, own = rng.integers(0, 8, 60), batches._log_softmax(z / 0.7312)
    chosen = own[np.arange(60), ids]
    for t in logit_fit.TEMPERATURES:
        fitted = batches._log_softmax(z / t)[np.arange(60), ids]
        adding.keep(c, **{f"a:temperature:{t}": (chosen - fitted) ** 2})
    assert logit_fit.temperature(c, "a").value == pytest.approx(0.7312, abs=2e-3)


def test_weights_of_the_reference_kl_by_hand() -> None:
    r = batches.healthy("float32", 300, 1)
    old = r.scorings["old"].logprobs
    moved = lambda d: Scoring(Values(np.minimum(old.values + d, 0), old.valid))
    r = r.with_scoring("current", moved(-0.2)).with_scoring("reference", moved(-0.5))
    use = r.drawn & (old.values < -1e-9)
    d = np.minimum(old.values - 0.5, 0) - np.minimum(old.values - 0.2, 0)
    want = np.exp(-0.2) * (np.expm1(d) - d)[r.drawn]
    found = {
        (v.policy, v.estimator, v.weight, v.mask, v.mean): v.value for v in definitions.values(definitions.count(r))
    }
    assert use.any()
    assert found["current", "k3", "token", "drawn", "tokens"] == pytest.approx(want.mean(), rel=1e-9)
    assert found["current", "k1", "plain", "drawn", "tokens"] == pytest.approx(0.3)
    assert found["old", "k1", "plain", "drawn", "tokens"] == pytest.approx(0.5)


def test_repeats_count_drawn_tokens_and_tell_the_prompt() -> None:
    from onepolicy.align import align
    from onepolicy.profiles.base import Seen
    from onepolicy.records import from_records
    from onepolicy.views import both_finite, view_mask

    lp = [None, None, *[-1.0] * 6]
    row = {"token_ids": [7, 8, 9, 7, 9, 9, 8, 5], "prompt_length": 2, "sampler_logprobs": lp, "old_logprobs": lp}
    r = from_records([row, row])
    pairs = align(r)
    times, prompt = Seen(r, pairs, both_finite(pairs, view_mask(pairs, "drawn"))).repeats
    assert times.tolist() == 2 * [0, 0, 1, 2, 0, 0]
    assert prompt.tolist() == 2 * [False, True, False, False, True, False]


def without(r: Rollouts, **columns: object) -> Rollouts:
    return batches.declare(r, **columns)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"top_p": 1.7}, "top_p 1.7, wanted above 0, at most 1"),
        ({"temperature": -1.0}, "temperature -1"),
        ({"min_p": 1.5}, "min_p 1.5"),
        ({"logprob_semantics": "raw", "temperature": 0.7}, "'processed' for the file and raw in"),
    ],
)
def test_declarations_that_contradict_themselves(columns: dict[str, object], says: str) -> None:
    r = without(batches.healthy("float32", 300, 2), **columns)
    found = SIGNATURES["raw_processed"].judge(evidence_of(survey_of(r, NAMES))).finding
    assert found is not None and says in found.message


def test_fills_of_zero_are_no_kept_sets() -> None:
    """A tenth of the sampler's values is 0.0: at any probability, and nothing else is one-sided."""
    for dtype in ("float32", "bfloat16"):
        r = batches.healthy(dtype, 3000, 2)
        a = batches.both(r)[0].copy()
        a[::10] = 0.0
        e = evidence_of(survey_of(batches.with_side(r, "sampler", a), NAMES))
        assert SIGNATURES["truncation"].judge(e).verdict == "no"
        assert SIGNATURES["raw_processed"].judge(e).verdict == "no"


def test_a_uniform_side_is_no_temperature() -> None:
    r = batches.healthy("float32", 3000, 2)
    e = evidence_of(survey_of(batches.with_side(r, "old", np.full(int(r.drawn.sum()), -4.6)), NAMES))
    assert SIGNATURES["temperature"].judge(e).verdict == "no"


def test_reference_equal_before_any_update_is_no_finding() -> None:
    r = meaning.reference_follows(batches.healthy("float32", 300, 2), np.random.default_rng(0))
    r = batches.declare(r, step=0, scorer_version=0)
    assert SIGNATURES["reference"].judge(evidence_of(survey_of(r, NAMES))).verdict == "lacks"


def test_old_copied_from_the_sampler_needs_other_weights() -> None:
    r = meaning.old_copied(batches.healthy("float32", 900, 2), np.random.default_rng(0))
    level = np.repeat(r.records["scorer_version"].values, r.lengths)
    same = replace(r, tokens={**r.tokens, "policy_version": Values(level)})
    assert SIGNATURES["copied_old"].judge(evidence_of(survey_of(same, NAMES))).verdict == "lacks"
    assert SIGNATURES["copied_old"].judge(evidence_of(survey_of(r, NAMES))).verdict == "fits"


def test_distributions_of_a_side_tell_the_quotient() -> None:
    """The scorer tells its own distributions, at T = 0.7; the declared temperature says that this is the scorer's."""
    rng = np.random.default_rng(8)
    r = batches.healthy("float32", 300, 8)
    z = batches.logits_of(r).z
    a, b = batches._log_softmax(z), batches._log_softmax(z / 0.7)
    r = batches.declare(meaning.redrawn(r, a, b, batches._draw(a, rng)), temperature=0.7)
    table = np.full((r.n_tokens, batches.VOCAB), np.nan)
    table[r.drawn] = b
    r = r.with_scoring("old", replace(r.scorings["old"], distributions=table))
    found = SIGNATURES["temperature"].judge(evidence_of(survey_of(r, NAMES))).finding
    assert found is not None
    assert found.evidence["fitted_temperature"] == pytest.approx({"sampler": 1.0, "old": 0.7}, abs=5e-3)


KEYS = (
    "temperature",
    "truncation",
    "penalties",
    "softcap",
    "raw_processed",
    "stored_policy",
    "copied_old",
    "reference",
)


@pytest.mark.parametrize("odd", ["nothing scored", "one token", "huge", "odd entropy", "infinite", "equal"])
def test_odd_data_raises_nothing_and_names_nothing(odd: str) -> None:
    r = batches.healthy("float32", 300, 9)
    a, b = batches.both(r)
    n = len(a)
    if odd == "nothing scored":
        r = r.with_scoring(
            "old", replace(r.scorings["old"], logprobs=Values(np.zeros(r.n_tokens), np.zeros_like(r.drawn)))
        )
    elif odd == "one token":
        only = np.zeros(r.n_tokens, dtype=bool)
        only[np.flatnonzero(r.drawn)[5]] = True
        r = replace(r, tokens={**r.tokens, "drawn": Values(only)})
    elif odd == "huge":
        b[n // 2] = -1e300
        r = batches.with_side(r, "old", b)
    elif odd == "odd entropy":
        column = meaning.spread_over(r, np.where(np.arange(n) % 2, np.nan, -1e308))
        r = r.with_scoring("old", replace(r.scorings["old"], entropy=column, varentropy=column))
    elif odd == "infinite":
        a[:3], b[5] = -np.inf, np.nan
        r = batches.with_side(batches.with_side(r, "sampler", a), "old", b)
    else:
        r = batches.with_side(r, "old", a)
    e = evidence_of(survey_of(r, NAMES))
    got = {key: SIGNATURES[key].judge(e).verdict for key in KEYS}
    if odd == "equal":  # half of the tokens were drawn by other weights than scored them
        assert got.pop("copied_old") == "fits"
    assert set(got.values()) <= {"no", "lacks"}, got
