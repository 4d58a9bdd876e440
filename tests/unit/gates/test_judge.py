"""The procedure of the gates: each outcome, their precedence, and what may never pass."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from build import random_rollouts, rollouts_of
from onepolicy.align import align
from onepolicy.codes import CODES, finding
from onepolicy.gates.bounds import Preset, load, parse
from onepolicy.gates.judge import judge, worst
from onepolicy.metrics import METRICS
from onepolicy.reduce import reduce
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.sums import Sums
from onepolicy.types import Outcome, Report, Scoring, Severity, Values


def bounds(metric: str, at_most: float, when: str = "required", least: int = 0, more: str = "") -> Preset:
    return parse(
        f'[[bound]]\nmetric="{metric}"\nat_most={at_most}\nwhen="{when}"\nmin_tokens={least}\n'
        f'source="a test"\ndate=2026-11-30\n{more}',
        "test",
    )


def sums_of(rollouts: Rollouts, view: str = "drawn", a: str = "sampler", b: str = "old") -> Sums:
    return reduce(align(rollouts, a, b), METRICS.values(), view)


def judged(rollouts: Rollouts, preset: Preset, view: str = "drawn") -> Report:
    return judge(sums_of(rollouts, view), preset)


def codes(report: Report) -> list[str]:
    return [f.code for f in report.findings]


BIG = random_rollouts(1, sequences=200)  # 100 clusters, about 6,000 tokens
GAP = bounds("abs_log_ratio/mean", 1.0).bounds


@pytest.mark.parametrize(
    ("at_most", "wanted"), [(0.05, Outcome.PASS), (0.03, Outcome.DRIFT), (0.0396, Outcome.INCONCLUSIVE)]
)
def test_pass_drift_and_between(at_most: float, wanted: Outcome) -> None:
    report = judged(BIG, bounds("abs_log_ratio/mean", at_most))
    assert report.outcome is wanted
    gate = report.gates[0]
    assert gate.value == pytest.approx(0.0396, abs=0.001)
    if wanted is Outcome.INCONCLUSIVE:
        assert gate.would_decide[0] > gate.n
        assert "would decide" in report.findings[0].message


def test_the_smallest_fault_is_stated_and_shrinks_with_data() -> None:
    seen = [judged(random_rollouts(1, sequences=n), bounds("abs_log_ratio/mean", 0.1)).gates[0] for n in (60, 600)]
    assert 0.1 < seen[1].smallest_seen < seen[0].smallest_seen < 0.15


def test_too_few_clusters_is_inconclusive_whatever_the_value() -> None:
    report = judged(random_rollouts(1, sequences=30, per_group=3), bounds("abs_log_ratio/mean", 1.0))
    assert report.outcome is Outcome.INCONCLUSIVE
    assert codes(report) == ["too-few-clusters"]
    assert report.gates[0].would_decide[1] >= 20


def test_too_few_tokens_cannot_pass() -> None:
    report = judged(BIG, bounds("abs_log_ratio/mean", 1.0, least=10**6))
    assert codes(report) == ["too-few-tokens"]
    assert report.gates[0].would_decide[0] == 10**6


def test_one_violation_of_a_maximum_is_drift_even_with_few_tokens() -> None:
    report = judged(random_rollouts(1, sequences=2), bounds("abs_log_ratio/max", 0.001, least=10**6))
    assert report.outcome is Outcome.DRIFT
    assert codes(report) == ["token-above-bound"]
    assert "position" in report.findings[0].place


def test_a_maximum_passes_only_with_enough_tokens() -> None:
    assert judged(BIG, bounds("abs_log_ratio/max", 1.0, least=100)).outcome is Outcome.PASS
    assert judged(BIG, bounds("abs_log_ratio/max", 1.0, least=10**6)).outcome is Outcome.INCONCLUSIVE


def test_required_and_not_measured_is_never_a_pass() -> None:
    report = judged(BIG, bounds("kl_sampler_scorer_exact/mean", 1.0))
    assert report.outcome is Outcome.INCONCLUSIVE
    assert codes(report) == ["not-measured"]
    also = GAP + bounds("kl_sampler_scorer_exact/mean", 1.0, when="if_measured").bounds
    optional = judged(BIG, Preset("test", "", "", also))
    assert optional.outcome is Outcome.PASS
    assert codes(optional) == ["not-covered"]


@pytest.mark.parametrize("metric", ["kl_sampler_scorer_exact/mean", "surprisal_sampler/excess", "abs_log_ratio/p99.9"])
def test_a_preset_of_which_nothing_was_judged_never_passes(metric: str) -> None:
    report = judged(BIG, bounds(metric, 1.0, when="if_measured"))
    assert report.outcome is Outcome.INCONCLUSIVE
    assert "no bound of 'test' was judged" in next(f for f in report.findings if f.code == "not-measured").message


def test_bounds_that_fixed_texts_cannot_have_do_not_pass_them() -> None:
    fixed = replace(BIG, tokens={**BIG.tokens, "drawn": Values(np.zeros(BIG.n_tokens, dtype=bool))})
    report = judged(fixed, bounds("kl_sampler_scorer_k3/mean", 1.0), view="fixed")
    assert report.gates == ()
    assert report.outcome is Outcome.INCONCLUSIVE
    assert codes(report) == ["not-measured"]


def test_zero_on_both_sides_cannot_pass() -> None:
    """The log-ratio of two zeros is no number; neither side can have drawn such a token."""
    at = int(np.flatnonzero(BIG.drawn)[5])
    both: dict[str, Scoring] = {}
    for name, scoring in BIG.scorings.items():
        values = scoring.logprobs.values.copy()
        values[at] = -np.inf
        both[name] = replace(scoring, logprobs=Values(values, scoring.logprobs.valid))
    report = judged(replace(BIG, scorings=both), load("bf16"))
    assert report.outcome is Outcome.INCONCLUSIVE
    assert "1 tokens have probability zero on both sides" in report.findings[0].message


def test_a_stand_in_is_judged_when_the_first_is_not_measured() -> None:
    preset = bounds("kl_sampler_scorer_exact/mean", 0.01, more='otherwise="kl_sampler_scorer_k3/mean"')
    assert judged(BIG, preset).gates[0].metric == "kl_sampler_scorer_k3/mean"


def spoiled(value: float, side: str = "old") -> Rollouts:
    lp = BIG.scorings[side].logprobs
    x = lp.values.copy()
    x[7] = value
    return BIG.with_scoring(side, replace(BIG.scorings[side], logprobs=Values(x, lp.valid)))


@pytest.mark.parametrize(
    ("value", "code", "outcome"),
    [
        (np.nan, "nonfinite-logprob", Outcome.ERROR),
        (np.inf, "nonfinite-logprob", Outcome.ERROR),
        (-np.inf, "support-violation", Outcome.DRIFT),
        (0.5, "positive-logprob", Outcome.ERROR),
    ],
)
@pytest.mark.parametrize("side", ["sampler", "old"])
def test_impossible_values_are_found_with_their_place(value: float, code: str, outcome: Outcome, side: str) -> None:
    report = judged(spoiled(value, side), bounds("abs_log_ratio/mean", 1.0))
    assert report.outcome is outcome
    assert code in codes(report)
    assert "position 7" in next(f for f in report.findings if f.code == code).place


def test_certainty_rounded_up_is_not_a_positive_log_prob() -> None:
    assert judged(spoiled(1e-7), bounds("abs_log_ratio/mean", 1.0)).outcome is Outcome.PASS


def test_missing_log_probs_cannot_pass() -> None:
    lp = BIG.scorings["old"].logprobs
    valid = lp.mask().copy()
    valid[9] = False
    old = replace(BIG.scorings["old"], logprobs=Values(lp.values, valid))
    report = judged(BIG.with_scoring("old", old), bounds("abs_log_ratio/mean", 1.0))
    assert report.outcome is Outcome.INCONCLUSIVE
    assert codes(report) == ["missing-logprobs"]
    assert "position 9" in report.findings[0].place


def test_nothing_scored_is_an_error() -> None:
    old = replace(
        BIG.scorings["old"], logprobs=Values(BIG.scorings["old"].logprobs.values, np.zeros(BIG.n_tokens, bool))
    )
    report = judged(BIG.with_scoring("old", old), load("bf16"))
    assert report.outcome is Outcome.ERROR
    assert "nothing-scored" in codes(report)


def test_a_term_that_overflows_cannot_pass() -> None:
    """d = 760: e^d is infinite, |d| is not."""
    lp = BIG.scorings["sampler"].logprobs
    x = lp.values.copy()
    x[7] = -760.0
    report = judged(
        BIG.with_scoring("sampler", replace(BIG.scorings["sampler"], logprobs=Values(x, lp.valid))),
        bounds("kl_sampler_scorer_k3/mean", 1e9),
    )
    assert report.outcome is Outcome.INCONCLUSIVE


def test_a_heavy_tail_withholds_the_interval() -> None:
    rng = np.random.default_rng(0)
    n = 8000
    a = -8 - rng.exponential(1, n)
    d = rng.standard_t(1, n) * 0.3
    rollouts = rollouts_of(a, np.minimum(a + d, 0.0), [40] * 200)
    report = judged(rollouts, bounds("kl_sampler_scorer_k3/mean", 1e6))
    assert report.outcome is Outcome.INCONCLUSIVE
    assert "heavy-ratio-tail" in codes(report)
    assert report.measurements["kl_sampler_scorer_k3/mean"].upper is None


def test_fixed_texts_gate_size_alone() -> None:
    """Nothing is drawn: no KL estimator exists, mean and maximum of |d| do."""
    fixed = replace(BIG, tokens={**BIG.tokens, "drawn": Values(np.zeros(BIG.n_tokens, bool))})
    report = judged(fixed, load("bf16"), view="fixed")
    assert [g.metric for g in report.gates] == ["abs_log_ratio/mean"]
    assert report.outcome is Outcome.PASS
    assert report.measurements["kl_sampler_scorer_k3/mean"].value is None
    assert report.measurements["log_ratio/rms"].value == pytest.approx(0.05, rel=0.05)


def test_drawn_tokens_that_are_not_there() -> None:
    fixed = replace(BIG, tokens={**BIG.tokens, "drawn": Values(np.zeros(BIG.n_tokens, bool))})
    report = judged(fixed, load("bf16"))
    assert report.outcome is Outcome.ERROR
    assert codes(report) == ["nothing-scored"]


def test_kl_of_another_distribution_is_withheld_but_size_is_given() -> None:
    n = len(BIG)
    records = {
        **BIG.records,
        "logprob_semantics": column_values("logprob_semantics", ["raw"] * n),
        "temperature": column_values("temperature", [0.7] * n),
    }
    report = judged(replace(BIG, records=records), load("bf16"))
    assert "kl-withheld" in codes(report)
    assert report.measurements["kl_sampler_scorer_k3/mean"].value is None
    assert report.measurements["abs_log_ratio/max"].value is not None
    assert report.outcome is Outcome.INCONCLUSIVE


def test_a_biased_ratio_is_found_where_k3_is_blind() -> None:
    """Every token's ratio is the kept mass 0.9: k3 is 0.0054, below its bound; the mean ratio is not 1."""
    a = BIG.scorings["sampler"].logprobs
    old = Scoring(Values(a.values + np.log(0.9), a.valid), scoring_id="b")
    report = judged(BIG.with_scoring("old", old), load("bf16"))
    assert report.measurements["kl_sampler_scorer_k3/mean"].value == pytest.approx(0.9 - 1 - np.log(0.9))
    assert [f.code for f in report.findings if f.severity is Severity.FAIL] == ["gap-above-bound", "ratio-biased"] or [
        f.code for f in report.findings if f.severity is Severity.FAIL
    ] == ["ratio-biased", "gap-above-bound"]
    assert report.outcome is Outcome.DRIFT


def test_equal_bits_pass_bitwise_and_one_bit_does_not() -> None:
    a = BIG.scorings["sampler"].logprobs
    twin = Scoring(Values(a.values.copy(), a.valid), scoring_id="b")
    assert judged(BIG.with_scoring("old", twin), load("bitwise")).outcome is Outcome.PASS
    x = a.values.copy()
    x[7] = np.nextafter(x[7], -np.inf)
    assert (
        judged(BIG.with_scoring("old", replace(twin, logprobs=Values(x, a.valid))), load("bitwise")).outcome
        is Outcome.DRIFT
    )


def test_saved_sums_are_judged_to_the_same_report() -> None:
    sums = sums_of(BIG)
    again = Sums.from_dict(json.loads(sums.to_json()))
    for name in ("strict", "bf16"):
        first, second = judge(sums, load(name)), judge(again, load(name))
        assert (first.outcome, first.gates, first.findings) == (second.outcome, second.gates, second.findings)


def test_precedence() -> None:
    assert worst([Outcome.PASS, Outcome.INCONCLUSIVE, Outcome.DRIFT, Outcome.ERROR]) is Outcome.ERROR
    assert worst([Outcome.INCONCLUSIVE, Outcome.DRIFT]) is Outcome.DRIFT
    assert worst([Outcome.PASS, Outcome.INCONCLUSIVE]) is Outcome.INCONCLUSIVE
    assert worst([]) is Outcome.PASS
    assert [o.exit_code for o in (Outcome.PASS, Outcome.DRIFT, Outcome.INCONCLUSIVE, Outcome.ERROR)] == [0, 1, 3, 4]


def test_a_higher_finding_withholds_the_numbers_below() -> None:
    above = finding("semantics-differ", "raw and processed", origin="run")
    report = judge(sums_of(BIG), load("strict"), run_findings=[above])
    assert report.outcome is Outcome.DRIFT
    assert codes(report) == ["semantics-differ"]
    assert all("unjudged" in g.why for g in report.gates)


def test_what_was_found_before_an_error_is_kept() -> None:
    died = finding("engine-died", "half way", origin="run")
    report = judge(sums_of(BIG), load("strict"), run_findings=[died])
    assert report.outcome is Outcome.ERROR
    assert "kl-above-bound" in codes(report)


def test_a_warning_does_not_change_the_outcome() -> None:
    report = judge(sums_of(BIG), load("bf16"), run_findings=[finding("weights-differ", "x and y", origin="run")])
    assert report.outcome is Outcome.PASS


def test_every_code_is_consistent() -> None:
    for code in CODES.values():
        assert (code.severity is Severity.FAIL) == (code.outcome in (Outcome.DRIFT, Outcome.ERROR))
        assert 1 <= code.rank <= 7


def test_a_quantile_is_gated_by_its_own_interval() -> None:
    """95% point of |d| at sd 0.05: 0.098."""
    wanted = {0.12: Outcome.PASS, 0.08: Outcome.DRIFT, 0.098: Outcome.INCONCLUSIVE}
    reports = {b: judged(BIG, bounds("abs_log_ratio/p95", b)) for b in wanted}
    assert {b: r.outcome for b, r in reports.items()} == wanted
    assert reports[0.08].gates[0].p_value < 1e-4


def test_a_quantile_above_p99_informs_only_below_65k_tokens() -> None:
    report = judged(BIG, Preset("test", "", "", bounds("abs_log_ratio/p99.9", 1e-6).bounds + GAP))
    assert report.outcome is Outcome.PASS
    assert "informs only" in report.gates[0].why


def test_a_number_that_is_not_defined_never_passes_even_if_optional() -> None:
    """One probability at every token: no correlation. It was measured and came to nothing."""
    a = np.full(4000, -1.3)
    rollouts = rollouts_of(a, a * 0.5, [40] * 100)
    report = judged(rollouts, bounds("prob_pearson/r", 2.0, when="if_measured"))
    assert report.measurements["prob_pearson/r"].value is None
    assert report.outcome is Outcome.INCONCLUSIVE


def test_terms_that_all_overflow_never_pass_even_if_optional() -> None:
    a = np.full(4000, -900.0)
    report = judged(rollouts_of(a, a + 899, [40] * 100), bounds("kl_sampler_scorer_k3/mean", 1e9, when="if_measured"))
    assert report.outcome is Outcome.INCONCLUSIVE


def test_an_absolute_bound_looks_to_both_sides() -> None:
    """The ratio's bias is -0.03 and +0.03: the same verdict and nearly the same p."""
    a = BIG.scorings["sampler"].logprobs
    rng = np.random.default_rng(3)
    noise = rng.normal(0, 0.05, BIG.n_tokens)
    gates = []
    for bias in (-0.03, 0.03):
        old = Scoring(Values(a.values + noise - 0.05**2 / 2 + np.log1p(bias), a.valid), scoring_id="b")
        rollouts = BIG.with_scoring("old", old)
        rollouts = rollouts.with_scoring(
            "sampler", replace(BIG.scorings["sampler"], logprobs=Values(a.values - 1, a.valid))
        )
        rollouts = rollouts.with_scoring("old", replace(old, logprobs=Values(old.logprobs.values - 1, a.valid)))
        gates.append(judged(rollouts, bounds("ratio_bias/mean", 0.02, more="absolute=true")).gates[0])
    assert [g.outcome for g in gates] == [Outcome.DRIFT] * 2
    assert all(0.03 < g.limit < 0.035 for g in gates)


def test_the_p_of_an_absolute_bound_counts_both_tails() -> None:
    """At a bound of zero a value off by chance is as likely on either side: p is two-sided there."""
    one, both = (judged(BIG, bounds("ratio_bias/mean", 0.0, more=m)).gates[0] for m in ("", "absolute=true"))
    assert 0.01 < one.p_value < 0.99
    assert both.p_value == pytest.approx(2 * min(one.p_value, 1 - one.p_value))


def test_holm_protects_many_bounds_together() -> None:
    """A bound just below the lower limit drifts alone; among twenty wide ones it does not."""
    gate = judged(BIG, bounds("abs_log_ratio/mean", 0.05)).gates[0]
    width = np.log(gate.limit / gate.value)
    at = gate.value * np.exp(-1.15 * width)
    near = f'[[bound]]\nmetric="abs_log_ratio/mean"\nat_most={at}\nwhen="required"\nsource="a test"\ndate=2026-11-30\n'
    wide = near.replace(f"at_most={at}", "at_most=10.0")
    assert judged(BIG, parse(near, "one")).outcome is Outcome.DRIFT
    assert judged(BIG, parse(near + 20 * wide, "many")).outcome is Outcome.INCONCLUSIVE


def test_the_loss_view_judges_trained_tokens_alone() -> None:
    trained = np.zeros(BIG.n_tokens, dtype=bool)
    trained[::2] = True
    rollouts = replace(BIG, tokens={**BIG.tokens, "loss_mask": Values(trained)})
    report = judged(rollouts, bounds("abs_log_ratio/mean", 0.1), view="loss")
    assert report.gates[0].n == int((trained & BIG.drawn).sum())
    assert report.outcome is Outcome.PASS


def test_a_single_far_token_is_warned_of_and_a_near_one_is_not() -> None:
    a = BIG.scorings["sampler"].logprobs
    warned = {}
    for gap in (0.6, 12.0):
        x = a.values.copy()
        x[7] -= gap
        twin = Scoring(Values(x, a.valid), scoring_id="b")
        report = judged(BIG.with_scoring("old", twin), bounds("abs_log_ratio/mean", 1.0))
        warned[gap] = "heavy-ratio-tail" in codes(report)
    assert warned == {0.6: False, 12.0: True}
