"""A reported number is found by its definition, and by no other that comes to another number."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from build import column, random_rollouts
from onepolicy.dialects.accumulate import Accumulator
from onepolicy.dialects.definitions import DEFINITIONS, Match, Meanings, definition_matches, masked
from onepolicy.dialects.view import View
from onepolicy.errors import ContentError, UsageError
from onepolicy.rollouts import Rollouts


def rollouts(seed: int = 3) -> Rollouts:
    """Long and short replies with heavy tails; every fifth token is tool output whose gap is large and one-sided."""
    rng = np.random.default_rng(seed)
    base = random_rollouts(seed, sequences=30)
    n = base.n_tokens
    tool = rng.random(n) < 0.2
    a = -rng.exponential(1.0, n)
    d = np.where(tool, -0.8, 0.25) * rng.standard_exponential(n) * rng.choice([-0.4, 1.0], n)
    d[rng.random(n) < 0.01] += 3.0
    d[rng.random(n) < 0.002] -= 30.0
    b = np.minimum(a + d, 0.0)
    c = np.minimum(b + rng.normal(0.02, 0.1, n), 0.0)
    old = base.scorings["old"]
    sides = {"sampler": a, "old": b, "current": c}
    scorings = {k: replace(old, logprobs=replace(old.logprobs, values=v), scoring_id=k) for k, v in sides.items()}
    drawn = base.drawn & ~tool
    tokens = {**base.tokens, "drawn": column(drawn), "loss_mask": column(drawn & (rng.random(n) < 0.9))}
    return replace(
        base, tokens=tokens, scorings=scorings, records={"prompt_length": column(np.ones(len(base), dtype=int))}
    )


R = rollouts()
VIEWS = masked(R)


@cache
def values_of(mask: str, policy: str) -> dict[str, float | None]:
    acc = Accumulator(DEFINITIONS, {"scorer": policy, "precision": "float64"})
    acc.add(VIEWS[mask])
    return acc.numbers()


def value_of(name: str, mask: str, policy: str) -> float:
    found = values_of(mask, policy)[name]
    assert found is not None
    return found


def who(matches: list[Match]) -> set[tuple[str, str, str]]:
    return {(m.definition, m.mask, m.policy) for m in matches}


def test_masks_that_select_the_same_are_one() -> None:
    assert list(VIEWS) == ["trained", "drawn", "reply"]  # "all" is the reply: the prompt is one token without context
    assert list(masked(random_rollouts(1))) == ["trained"]


@pytest.mark.parametrize("policy", ["old", "current"])
@pytest.mark.parametrize("mask", ["trained", "drawn", "reply"])
def test_every_definition_is_found_and_a_near_miss_is_not(mask: str, policy: str) -> None:
    meanings = Meanings()
    meanings.add(VIEWS)
    values = {name: value_of(name, mask, policy) for name in DEFINITIONS.keys}
    found = meanings.matches(values)
    missed = meanings.matches({k: x * (1 + 3e-4) for k, x in values.items()})
    for name, x in values.items():
        assert (name, mask, policy) in who(found[name]), name
        assert (name, mask, policy) not in who(missed[name]), name
        assert all(m.value == pytest.approx(x, rel=1e-4) for m in found[name])


def test_few_definitions_come_to_one_number() -> None:
    """Of some six hundred, those that are one number here, and hardly a coincidence."""
    meanings = Meanings()
    meanings.add(VIEWS)
    found = meanings.matches({name: value_of(name, "trained", "old") for name in DEFINITIONS.keys})
    assert np.mean([len(m) for m in found.values()]) < 1.8
    assert who(found["k1/token"]) == {("k1/token", "trained", "old")}


NAMED = {
    "as named": ("k1/token", "trained", "old"),
    "the other sign": ("k1_opposite/token", "trained", "old"),
    "of the current policy": ("k1/token", "trained", "current"),
    "with tool output": ("k1/token", "reply", "old"),
    "a mean of sequences": ("k1/sequence", "trained", "old"),
    "zeros of the padding included": ("k1/padded", "trained", "old"),
    "another estimator": ("k3/token", "trained", "old"),
    "the swapped k3": ("k3_swapped/token", "trained", "old"),
}


@pytest.mark.parametrize("case", NAMED)
@pytest.mark.parametrize("key", ["verl:rollout_corr/kl", "kl_sampler_scorer_k1/mean"])
def test_a_name_is_kept_or_not(case: str, key: str) -> None:
    found = definition_matches({key: value_of(*NAMED[case])}, VIEWS)[key]
    assert found[0].as_named == (case == "as named")
    assert NAMED[case] in who(found) or found[0].as_named


def test_a_dialects_own_quirks_are_as_named() -> None:
    """TRL's ratio is after masking, which no plain definition is."""
    acc = Accumulator("trl", {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 1.37})
    acc.add(VIEWS["trained"])
    key, options = "sampling/importance_sampling_ratio/mean", acc.options
    reported = {key: acc.numbers()[key]}
    assert [m.as_named for m in definition_matches(reported, VIEWS, dialect="trl", options=options)[key]] == [True]
    assert definition_matches(reported, VIEWS, dialect="trl")[key] == []  # another cap than the run had
    raw = {key: value_of("ratio/token", "trained", "old")}
    found = definition_matches(raw, VIEWS, dialect="trl", options=options)[key]
    assert found[0].definition == "ratio/token"
    assert not any(m.as_named for m in found)


def test_after_truncation() -> None:
    for cap in ("ratio_capped_2/token", "ratio_band_0.5_5/token"):
        found = definition_matches({"ratio/mean": value_of(cap, "trained", "old")}, VIEWS)["ratio/mean"]
        assert cap in {m.definition for m in found}
        assert not any(m.as_named for m in found)


def test_a_given_case() -> None:
    """Tool output in the mean turns k1 from 0.02 to -0.86 (the number as it was printed)."""
    a = np.array([-0.2, -0.5, -2.5, -3.0, -1.9, -0.3, -0.11])
    b = np.array([-0.22, -0.53, -0.4, -0.6, -0.3, -0.31, -0.13])
    on = np.array([1, 1, 0, 0, 0, 1, 1], dtype=bool)
    views = {"trained": View(a[on], np.array([4]), old=b[on], width=7), "reply": View(a, np.array([7]), old=b, width=7)}
    found = definition_matches({"kl": -0.86, "k1": 0.02, "k3": 0.000223}, views)
    assert {m.mask for m in found["kl"]} == {"reply"}
    assert found["kl"][0].definition == "k1/token"
    assert {m.mask for m in found["k3"]} == {"trained"}
    assert found["k3"][0].definition == "k3/token"


def test_rounded_numbers_match_to_their_digits() -> None:
    exact = value_of("k3/token", "trained", "old")
    for digits, width in ((2, 0.01), (3, 5e-3), (6, 1e-4)):
        x = float(f"{exact:.{digits - 1}e}")
        found = definition_matches({"kl": x}, VIEWS)["kl"]
        assert ("k3/token", "trained", "old") in who(found) or abs(x / exact - 1) > width
    assert definition_matches({"kl": float(f"{exact:.1e}") * 1.03}, VIEWS)["kl"] == []


def test_zero_says_nothing_but_that_a_name_fits() -> None:
    a = -np.arange(1.0, 5.0)
    view = View(a, np.array([4]), old=a, width=4)
    found = definition_matches({"kl": 0.0, "kl_sampler_scorer_k3/mean": 0.0, "gone": None}, view)
    assert found["kl"] == []
    assert [m.as_named for m in found["kl_sampler_scorer_k3/mean"]] == [True]
    assert "gone" not in found


def test_steps_and_shards() -> None:
    whole, left, right = Meanings("verl"), Meanings("verl"), Meanings("verl")
    parts = [(masked(rollouts(s)), s % 2) for s in range(4)]
    for i, (views, step) in enumerate(parts):
        whole.add(views, step)
        (left, right)[i // 2].add(views, step)
    left = Meanings.from_dict(json.loads(json.dumps(left.to_dict())))
    left.merge(right)
    assert left.to_dict() == whole.to_dict()
    acc = Accumulator("verl")
    for views, step in parts:
        acc.add(views["trained"], step)
    row = next(r for r in acc.rows() if r.key.name == "rollout_corr/k3_kl")
    for step, x in ((None, row.whole), (0, row.steps[0]), (1, row.steps[1])):
        reported = {"rollout_corr/k3_kl": x}
        assert left.matches(reported, step) == whole.matches(reported, step)
        assert left.matches(reported, step)["rollout_corr/k3_kl"][0].as_named
    assert left.matches({"rollout_corr/k3_kl": row.steps[0]}, 1)["rollout_corr/k3_kl"] == []


def test_what_is_not_finite_matches_nothing() -> None:
    found = definition_matches({"kl": math.nan, "k3": math.inf}, VIEWS)
    assert found == {"kl": [], "k3": []}
    with pytest.raises(UsageError, match="tolerance -1"):
        definition_matches({"kl": 1.0}, VIEWS, tolerance=-1)


@pytest.mark.parametrize("data", [{}, {"sums": {"trained": {}}, "named": None}, {"sums": [], "named": None}])
def test_what_is_no_state_of_definitions_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ContentError, match="not saved"):
        Meanings.from_dict(data)
