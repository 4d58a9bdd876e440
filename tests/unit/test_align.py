"""Alignment refuses; it never guesses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from build import random_rollouts, rollouts_of
from onepolicy.align import align, estimable
from onepolicy.errors import AlignmentError
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import Scoring, Values


def named(rollouts: Rollouts, names: list[str] | None = None) -> Rollouts:
    ids = names or [f"r{i}" for i in range(len(rollouts))]
    return replace(rollouts, records={**rollouts.records, "record_id": column_values("record_id", ids)})


def fresh(rollouts: Rollouts) -> Rollouts:
    """The same rollouts as another engine would have left them: other scoring ids, other memory."""
    scorings = {
        k: Scoring(Values(v.logprobs.values.copy(), v.logprobs.valid), dtype=v.dtype, scoring_id=f"other-{k}")
        for k, v in rollouts.scorings.items()
    }
    return replace(rollouts, scorings=scorings)


def test_log_ratio_is_scorer_minus_sampler() -> None:
    pairs = align(rollouts_of(np.array([0.0, -1.0, -2.0]), np.array([0.0, -1.5, -1.0]), [3]))
    assert pairs.log_ratio[1:].tolist() == [-0.5, 1.0]
    assert np.isnan(pairs.log_ratio[0])
    assert pairs.drawn_by == "a"


@pytest.mark.parametrize(
    ("a", "b", "who"), [("sampler", "old", "a"), ("old", "sampler", "b"), ("old", "current", None)]
)
def test_who_drew(a: str, b: str, who: str | None) -> None:
    rollouts = random_rollouts()
    current = replace(
        rollouts.scorings["old"], logprobs=Values(rollouts.scorings["old"].logprobs.values - 0.1), scoring_id="c"
    )
    assert align(rollouts.with_scoring("current", current), a, b).drawn_by == who


def test_order_does_not_matter_where_records_have_names() -> None:
    rollouts = named(random_rollouts())
    other = fresh(rollouts).take(np.random.default_rng(0).permutation(len(rollouts)))
    pairs = align(rollouts, "sampler", "sampler", other=other)
    assert np.nanmax(np.abs(pairs.log_ratio)) == 0.0


def test_equal_values_from_two_engines_are_fine() -> None:
    rollouts = random_rollouts()
    twin = Scoring(Values(rollouts.scorings["sampler"].logprobs.values.copy()), scoring_id="twin")
    assert np.nanmax(np.abs(align(rollouts.with_scoring("old", twin)).log_ratio[rollouts.drawn])) == 0.0


def refusal(rollouts: Rollouts, a: str = "sampler", b: str = "old", other: Rollouts | None = None) -> str:
    with pytest.raises(AlignmentError) as err:
        align(rollouts, a, b, other=other)
    assert err.value.exit_code == 4
    assert "\n" not in str(err.value)
    return str(err.value)


def test_itself_by_name() -> None:
    assert "itself" in refusal(random_rollouts(), "sampler", "sampler")


def test_itself_by_memory_and_by_id() -> None:
    rollouts = random_rollouts()
    sampler = rollouts.scorings["sampler"]
    assert "one and the same" in refusal(rollouts.with_scoring("old", replace(sampler, scoring_id="x")))
    copied = replace(sampler, logprobs=Values(sampler.logprobs.values.copy()))
    assert "one and the same" in refusal(rollouts.with_scoring("old", copied))


def test_no_such_scoring() -> None:
    assert "reference_logprobs" in refusal(random_rollouts(), "sampler", "reference")


def test_unequal_tokens_are_named_by_the_first_place() -> None:
    rollouts = named(random_rollouts())
    ids = rollouts.token_ids.copy()
    at = int(rollouts.offsets[3]) + 4
    ids[at:] += 1
    other = fresh(replace(rollouts, tokens={**rollouts.tokens, "token_ids": Values(ids)}))
    text = refusal(rollouts, other=other)
    assert "'r3'" in text
    assert f"position 4: got {rollouts.token_ids[at]} on the first side, {ids[at]} on the second" in text


def test_unequal_lengths_are_never_cut() -> None:
    short = named(random_rollouts(sequences=3))
    lengths = short.lengths.copy()
    lengths[1] -= 1
    keep = np.ones(short.n_tokens, dtype=bool)
    keep[int(short.offsets[2]) - 1] = False
    tokens = {k: Values(v.values[keep]) for k, v in short.tokens.items()}
    scorings = {k: replace(v.take(np.flatnonzero(keep)), scoring_id=f"x{k}") for k, v in short.scorings.items()}
    other = Rollouts(np.concatenate([[0], np.cumsum(lengths)]), tokens, short.records, {}, scorings)
    text = refusal(short, other=other)
    assert "'r1'" in text
    assert f"{short.lengths[1]} tokens on the first side, {lengths[1]} on the second" in text
    assert "nothing is cut" in text


def test_missing_records() -> None:
    rollouts = named(random_rollouts(sequences=4))
    assert "3 on the second" in refusal(rollouts, other=fresh(rollouts.take([0, 1, 2])))
    assert "'r3' is missing" in refusal(rollouts, other=named(fresh(rollouts), ["r0", "r1", "r2", "zz"]))


@pytest.mark.parametrize(
    ("semantics", "change", "wanted"),
    [
        ("processed", {"temperature": 0.7, "top_p": 0.8}, True),
        ("raw", {"temperature": 1.0}, True),
        ("raw", {"temperature": 0.7}, False),
        ("temperature", {"temperature": 0.7}, True),
        ("temperature", {"temperature": 0.7, "top_p": 0.9}, False),
        ("raw", {"temperature": 1.0, "top_k": -1}, True),
        ("raw", {"temperature": 1.0, "top_k": 50}, False),
        ("raw", {"temperature": 1.0, "repetition_penalty": 1.1}, False),
        (None, {"temperature": 0.7}, True),
        ("processed", {"temperature": 0.0}, False),
    ],
)
def test_where_an_estimator_of_kl_exists(semantics: str | None, change: dict[str, float], wanted: bool) -> None:
    rollouts = random_rollouts(sequences=1)
    columns = {"logprob_semantics": column_values("logprob_semantics", [semantics])} if semantics else {}
    columns |= {k: column_values(k, [v]) for k, v in change.items()}
    assert estimable(replace(rollouts, records=columns)).tolist() == [wanted]
