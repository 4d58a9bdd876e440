"""A view has the tokens under its mask, in order, with nulls as NaN."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from build import column, rollouts_of
from onepolicy.dialects.view import View, views
from onepolicy.errors import ContentError, UnknownName
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring

# prompt 2, reply 4 of which the third is tool output; then prompt 1, reply 2 that is not trained on
DRAWN = np.array([0, 0, 1, 1, 0, 1, 0, 1, 1], dtype=bool)
TRAINED = np.array([0, 0, 1, 1, 0, 1, 0, 0, 0], dtype=bool)


def rollouts(**records: object) -> Rollouts:
    a, b = -np.arange(9.0), -np.arange(9.0) - 0.5
    valid_b = np.array([0, 1, 1, 0, 1, 1, 0, 1, 1], dtype=bool)
    out = rollouts_of(a, b, [6, 3], drawn=DRAWN, valid_b=valid_b, records={k: column(v) for k, v in records.items()})
    more = {"loss_mask": column(TRAINED), "advantages": column(np.arange(9.0))}
    return replace(out, tokens={**out.tokens, **more})


@pytest.mark.parametrize(
    ("mask", "sampler", "lengths"),
    [
        ("trained", [-2, -3, -5], [3, 0]),
        ("drawn", [-2, -3, -5, -7, -8], [3, 2]),
        ("reply", [-2, -3, -4, -5, -7, -8], [4, 2]),
        ("all", [-1, -2, -3, -4, -5, -7, -8], [5, 2]),
    ],
)
def test_masks(mask: str, sampler: list[float], lengths: list[int]) -> None:
    view = View.of(rollouts(prompt_length=np.array([2, 1])), mask)
    assert view.sampler.tolist() == sampler
    assert view.lengths.tolist() == lengths
    assert view.width == 4


def test_a_prompt_of_unknown_length_ends_at_the_first_drawn_token() -> None:
    assert View.of(rollouts(), "reply").lengths.tolist() == [4, 2]


def test_null_is_nan_and_columns_follow_the_mask() -> None:
    view = View.of(rollouts())
    assert np.isnan(view.old[1])
    assert view.old[[0, 2]].tolist() == [-2.5, -5.5]
    assert view.advantages.tolist() == [2, 3, 5]
    assert view.current is None
    assert view.runs is not None
    assert view.runs.tolist() == [2, 1]
    assert View.of(rollouts(), "drawn").runs.tolist() == [2, 1, 2]  # pyright: ignore[reportOptionalMemberAccess]


def test_other_names_of_the_scorer() -> None:
    r = rollouts().with_scoring("leg", Scoring(column(np.full(9, -1.0)), entropy=column(np.full(9, 2.0))))
    view = View.of(r, old="leg", current="old")
    assert view.old.tolist() == [-1, -1, -1]
    assert view.current[0] == -2.5
    assert view.entropy.tolist() == [2, 2, 2]


def test_by_step() -> None:
    found = list(views(rollouts(step=np.array([4, 2])), "drawn"))
    assert [(step, v.lengths.tolist()) for step, v in found] == [(2, [2]), (4, [3])]
    assert [step for step, _ in views(rollouts())] == [None]
    r = rollouts()
    partly = replace(r, records={"step": column(np.array([4, 0]), [True, False])})
    assert [(step, v.lengths.tolist()) for step, v in views(partly, "drawn")] == [(None, [2]), (4, [3])]


def test_sequence_values() -> None:
    view = View(np.array([1.0, 2.0, 6.0]), np.array([2, 0, 1]), width=3)
    assert view.sums(view.sampler).tolist() == [3, 0, 6]
    assert view.means(view.sampler).tolist() == [1.5, 0, 6]
    assert view.greatest(view.sampler).tolist() == [2, 6]
    assert view.spread(np.array([7.0, 8.0, 9.0])).tolist() == [7, 7, 9]
    assert view.run_means(view.sampler).tolist() == [1.5, 1.5, 6]  # without runs, a sequence is one


def test_errors() -> None:
    with pytest.raises(UnknownName, match="did you mean 'trained'"):
        View.of(rollouts(), "trainde")
    with pytest.raises(ContentError, match="no column 'sampler_logprobs'"):
        View.of(replace(rollouts(), scorings={}))
    with pytest.raises(ContentError, match="old has 2 values, the sampler 3"):
        View(np.zeros(3), np.array([3]), old=np.zeros(2))
    with pytest.raises(ContentError, match="lengths add up to 4"):
        View(np.zeros(3), np.array([4]))
