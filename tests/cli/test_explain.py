"""`explain` of legs: the question, the changed factor, the finding, the switches and the engines that have them."""

from __future__ import annotations

import pytest
from commands import Command

from onepolicy.codes import CODES
from onepolicy.engines import ENGINES
from onepolicy.engines.open import engine_class
from onepolicy.legs import LEGS, SPECIAL


@pytest.mark.parametrize("key", LEGS)
def test_a_leg_says_what_it_asks_and_what_it_makes(cli: Command, key: str):
    ran = cli("explain", key)
    leg = LEGS[key]
    assert ran.code == 0
    assert ran.out.startswith(f"{key}\n")
    assert f"compares {leg.factor}\n" in ran.out
    assert leg.question.value in ran.out
    assert (f"finds    {leg.code}: {CODES[leg.code].title}\n" if leg.code else "none: it informs") in ran.out


@pytest.mark.parametrize("key", SPECIAL)
def test_legs_that_are_no_pair_of_scorings_have_the_same_rows(cli: Command, key: str):
    out = cli("explain", key).out
    assert [row.split()[0] for row in out.splitlines()[1:]] == ["compares", "asks", "over", "finds", "needs"]
    assert out.split("finds    ")[1].splitlines()[0] in CODES


@pytest.mark.parametrize(
    ("key", "switch", "side"), [("scorer-packing", "packing", "scorer"), ("sampler-cache", "cache", "sampler")]
)
def test_a_leg_names_the_switches_and_the_engines_that_have_them(cli: Command, key: str, switch: str, side: str):
    (needs,) = [row for row in cli("explain", key).out.splitlines() if row.startswith("  needs")]
    named = set(needs.rpartition("(")[2].rstrip(")").split(", "))
    assert switch in needs.partition("(")[0]
    assert f"a {side} with" in needs
    assert named == {n for n in ENGINES if switch in engine_class(n).SWITCHES and engine_class(n).SWITCHES[switch].live}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("scorer-again", "needs    any scorer\n"),
        ("sampler-batch", "a sampler with batch_size ("),
        ("scorer-attention", "a scorer with attention or order ("),
        ("sampler-precision", "needs    the sampler's recorded values; a scorer with dtype, rounded_to ("),
        ("scorer-packing", "first    the scorer: packing=alone\n"),
        ("same-function", "bounds   preset function\n"),
    ],
)
def test_what_a_leg_needs(cli: Command, key: str, said: str):
    assert said in cli("explain", key).out


@pytest.mark.parametrize("name", ["floor", "leg"])
def test_bounds_on_stretches_of_positions_are_one_line(cli: Command, name: str):
    out = cli("explain", name).out
    assert out.count("gap_over_floor_from_N/rms <= ") == 1
    assert "_from_512" not in out


def test_the_list_names_every_leg_and_each_metric_once(cli: Command):
    out = cli("explain").out
    assert all(f"  {key} " in out for key in [*LEGS, *SPECIAL])
    assert out.count("gap_over_floor_from_") == 1
    assert "gap_over_floor_from_N/rms" in out


def test_did_you_mean_a_leg(cli: Command):
    ran = cli("explain", "scorer-pakcing")
    assert ran.code == 2
    assert "did you mean 'scorer-packing'?" in ran.err
