"""Sums: counts of states, worst places, sequences with terms that are not finite, saved text."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from build import random_pairs, random_rollouts, rollouts_of
from onepolicy.align import align
from onepolicy.errors import ContentError, MergeError
from onepolicy.estimate import measure
from onepolicy.metrics import METRICS
from onepolicy.reduce import cluster_id, reduce
from onepolicy.sums import PLACES, WORST_TOKENS, Sums, merge


def sums_of(a: Any, b: Any, lengths: list[int], **more: Any) -> Sums:
    return reduce(align(rollouts_of(np.array(a), np.array(b), lengths, **more)), METRICS.values())


def test_every_state_is_counted_once() -> None:
    nan, inf = np.nan, np.inf
    a = [0.0, -1.0, nan, -inf, -inf, 0.5, -1.0]
    b = [0.0, -1.5, -1.0, -1.0, -inf, -1.0, inf]
    valid = np.array([False, True, True, True, True, True, True])
    counts = sums_of(a, b, [7], valid_a=valid, valid_b=valid & (np.arange(7) != 1)).counts
    wanted = {
        "tokens": 7, "viewed": 6, "scored": 1, "support_violations": 1, "both_neg_inf": 1,
        "a_null": 0, "a_nan": 1, "a_neg_inf": 2, "a_pos_inf": 0, "a_positive": 1,
        "b_null": 1, "b_nan": 0, "b_neg_inf": 1, "b_pos_inf": 1, "b_positive": 0,
    }  # fmt: skip
    assert {k: counts[k] for k in wanted} == wanted


def test_an_empty_sequence_is_not_a_viewed_one() -> None:
    drawn = np.array([True, True, False, True])
    assert sums_of([0.0, -1, 0, -1], [0.0, -1, 0, -2], [0, 2, 0, 2, 0], drawn=drawn).counts["viewed_sequences"] == 2


def test_the_worst_tokens_are_the_greatest_gaps_in_order() -> None:
    pairs = random_pairs(3)
    size = np.where(pairs.drawn, np.abs(pairs.b - pairs.a), 0.0)
    got = reduce(pairs, METRICS.values()).worst["tokens"]
    assert [-p.key for p in got] == np.sort(size)[::-1][:WORST_TOKENS].tolist()
    first = got[0]
    at = int(pairs.offsets[pairs.record_ids.index(first.record)]) + first.position
    assert (float(first.a), float(first.b)) == (pairs.a[at], pairs.b[at])


def test_ties_go_by_record_and_position_and_are_bounded() -> None:
    n = 3000
    sums = sums_of([-1.0] * n, [-1.5] * n, [3] * (n // 3))
    places = sums.worst["tokens"]
    assert len(places) == WORST_TOKENS
    ids = sorted(align(rollouts_of(np.full(n, -1.0), np.full(n, -1.5), [3] * (n // 3))).record_ids)
    assert [(p.record, p.position) for p in places[:4]] == [(i, at) for i in ids[:2] for at in (1, 2)]


def test_places_of_a_state_are_bounded() -> None:
    n = 3000
    assert len(sums_of([np.nan] * n, [-1.0] * n, [3] * 1000).worst["nonfinite"]) == PLACES


def test_a_sequence_with_a_term_that_overflows_has_no_mean() -> None:
    """d = 800 at one token: e^d is infinite. The other sequence's number is not passed off as the mean of both."""
    sums = sums_of([0, -801.0, -1, 0, -1, -1], [0, -1.0, -1.1, 0, -1, -1.2], [3, 3])
    m = measure(sums)
    for key in ("kl_sampler_scorer_k3/sequence_mean", "mult_prob_error/sequence_max"):
        assert (m[key].n, m[key].n_nonfinite) == (1, 1), key
    assert m["sequence_log_ratio/mean"].n_nonfinite == 0
    assert m["sequence_log_ratio/mean"].value == pytest.approx((799.9 - 0.2) / 2)


def test_gaps_beyond_the_greatest_float_are_saved_and_read() -> None:
    sums = sums_of([0, -1.7e308, 0, -1], [0, 1.7e308, 0, -1.5], [2, 2])
    again = Sums.from_dict(json.loads(sums.to_json()))
    assert again.to_json() == sums.to_json()
    assert again.worst["tokens"][0].key == -np.inf
    assert measure(again)["abs_log_ratio/mean"].n_nonfinite == 1


def test_totals_beyond_the_greatest_float_do_not_raise() -> None:
    m = measure(sums_of([0, -1e308] * 4, [0, -1.0] * 4, [2] * 4))
    assert m["abs_log_ratio/mean"].value is None
    assert m["abs_log_ratio/max"].value == 1e308


def test_rows_add_up_to_the_totals() -> None:
    sums = reduce(random_pairs(5), METRICS.values())
    for key, rows in sums.rows.items():
        assert sum(t for t, _ in rows.values()) == sums.totals[key].total, key
        assert sum(n for _, n in rows.values()) == sums.totals[key].n, key


def test_cluster_ids_do_not_depend_on_the_machine() -> None:
    assert cluster_id("group", "7") == 0xB63AAC6B85C8993B
    assert cluster_id("group", "7") != cluster_id("sequence", "7")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d.pop("totals"),
        lambda d: d.update(format=99),
        lambda d: d["totals"].update(x={"sum": "1.5", "n": 0, "nonfinite": 0}),
        lambda d: d.update(rows={"x": {"zz": ["1", 1]}}),
        lambda d: d.update(names=["a"]),
        lambda d: d.update(worst={"tokens": [[1]]}),
    ],
)
def test_what_is_not_saved_sums_is_refused(spoil: Any) -> None:
    data = reduce(random_pairs(), METRICS.values()).to_dict()
    spoil(data)
    with pytest.raises(ContentError):
        Sums.from_dict(data)


def test_nothing_to_merge() -> None:
    with pytest.raises(ContentError, match="no sums"):
        merge([])


def test_other_metrics_refuse_to_merge() -> None:
    rollouts = random_rollouts()
    some = [METRICS["abs_log_ratio/mean"]]
    with pytest.raises(MergeError, match="metrics"):
        reduce(align(rollouts), METRICS.values()).merge(reduce(align(rollouts), some))
