"""Log-probs of both sides that stand one token apart, and everything that must not be taken for that."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.counts import check_counts
from onepolicy.tokens.shift import LEAST, check_shift


def columns(n: int, seed: int = 0, noise: float = 0.01) -> tuple[list[float], list[float]]:
    rng = np.random.default_rng(seed)
    ours = -rng.exponential(1.0, n)
    return ours.tolist(), (ours + rng.normal(0, noise, n)).tolist()


def found(ours: list[Any], theirs: list[Any]) -> list[Any]:
    return check_shift(TokenRecord("a", "file:1", logprobs=ours, scorer_logprobs=theirs))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("lag", "way"), [(1, "late"), (-1, "early")])
def test_one_token_late_or_early(seed: int, lag: int, way: str) -> None:
    ours, theirs = columns(64, seed)
    moved = [0.0, *theirs[:-1]] if lag > 0 else [*theirs[1:], 0.0]
    (f,) = found(ours, moved)
    assert (f.code, f.evidence["class"], f.evidence["best_lag"]) == ("counts-disagree", f"one token {way}", lag)
    aligned = np.array(ours[:-1]) - np.array(theirs[:-1]) if lag > 0 else np.array(ours[1:]) - np.array(theirs[1:])
    assert f.evidence["max_abs_after_shift"] == pytest.approx(np.abs(aligned).max())
    assert f.evidence["corr"][f"lag{lag:+d}"] > 0.99 > f.evidence["corr"]["lag0"]


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1])
def test_what_stands_right_is_quiet(noise: float) -> None:
    assert found(*columns(256, noise=noise)) == []


def test_other_tokens_altogether_are_no_shift() -> None:
    assert found(columns(64, 1)[0], columns(64, 2)[0]) == []


def test_values_that_hardly_change_tell_nothing() -> None:
    assert found([-0.5] * 32, [-0.5] * 32) == []
    assert found([-0.5] * 32, [-1.5] * 32) == []


@pytest.mark.parametrize(
    ("ours", "theirs"), [([], []), ([-1.0], [-2.0]), ([None] * 20, [None] * 20), (["-inf"] * 20, ["NaN"] * 20)]
)
def test_too_little_to_tell(ours: list[Any], theirs: list[Any]) -> None:
    assert found(ours, theirs) == []


def test_nulls_are_left_out() -> None:
    ours, theirs = columns(64)
    (f,) = found(ours, [None, *theirs[:-1]])
    assert f.evidence["best_lag"] == 1
    assert found(ours[:LEAST], [None, *theirs[: LEAST - 1]])  # as few as it takes


def test_it_is_a_part_of_the_counts_with_ids_and_without() -> None:
    ours, theirs = columns(64)
    late = [0.0, *theirs[:-1]]
    for ids in ([*range(64)], None):
        record = TokenRecord("a", reply_ids=ids, logprobs=ours, scorer_logprobs=late)
        assert [f.evidence["class"] for f in check_counts(record) if f.code == "counts-disagree"] == ["one token late"]
