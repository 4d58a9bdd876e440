"""The simulation: the closed form within its own error, the same walks for a seed, and able to contradict."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from onepolicy.metrics.horizon import SEQUENCE_CLIP, TOKEN_CLIP, horizon
from onepolicy.metrics.laws import Histogram, Law, Mixture, Normal, StudentT
from onepolicy.metrics.walks import default_answers, how_far, simulate, simulated
from onepolicy.metrics.whole_answer import Answers, Gap, closed

HISTOGRAM = Histogram(np.array([-6.0, -1.0, 0.0, 0.4, 3.0]), np.array([1.0, 20, 40, 38, 1]))
CASES: dict[str, tuple[Law, float]] = {
    "normal": (Normal(), 0.0),
    "mixture": (Mixture(0.01, 10.0), 0.0),
    "histogram": (HISTOGRAM, 0.0),
    "student": (StudentT(6.0), 0.0),
    "correlated": (Normal(), 0.7),
    "alternating": (Normal(), -0.7),
    "correlated histogram": (HISTOGRAM, 0.4),
}
N, LENGTH, SD = 4000, 400, 0.05


@pytest.fixture(scope="module", params=CASES)
def both(request: pytest.FixtureRequest) -> tuple[Gap, dict[str, Any], dict[str, Any]]:
    """(gap, closed form, simulation) of the normalised reading."""
    law, rho = CASES[request.param]
    gap = Gap(SD, law, rho)
    walks = simulate(gap, LENGTH, 3 * LENGTH, N, 3, TOKEN_CLIP)
    return (
        gap,
        closed(gap, "normalised", LENGTH, TOKEN_CLIP, SEQUENCE_CLIP),
        simulated(walks, "normalised", SEQUENCE_CLIP),
    )


def test_the_two_agree(both: tuple[Gap, dict[str, Any], dict[str, Any]]):
    gap, exact, seen = both
    assert seen["drift"] == pytest.approx(exact["drift"], abs=4 * exact["spread"] / math.sqrt(N))
    assert seen["spread"] == pytest.approx(exact["spread"], rel=0.05)
    about = 0.0 if Answers(gap, LENGTH).exact() else 0.006  # a normal stands in for D there
    for by, share in exact["off_by"].items():
        assert seen["off_by"][by] == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / N) + about + 1 / N), (
            by
        )
    share = exact["answers_outside_clip"]
    assert seen["answers_outside_clip"] == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / N) + about)
    if exact["half_off_by_2"] <= 3 * LENGTH:
        assert seen["half_off_by_2"] == pytest.approx(exact["half_off_by_2"], rel=0.15)
    else:
        assert seen["half_off_by_2"] is None


def test_tokens_outside_their_clip(both: tuple[Gap, dict[str, Any], dict[str, Any]]):
    gap, exact, seen = both
    share = exact["tokens_outside_clip"]
    if gap.autocorrelation and not isinstance(gap.law, Normal):
        # a sum of innovations is nearer to the normal than their law
        assert 0 < seen["tokens_outside_clip"] < 2 * share
    else:  # a million tokens are looked at, or more
        assert seen["tokens_outside_clip"] == pytest.approx(share, abs=5 * math.sqrt(share / 1e6))


def test_the_effective_share_where_it_can_be_seen():
    gap = Gap(0.02, Mixture(0.05, 5.0))
    exact = closed(gap, "normalised", 300, TOKEN_CLIP, SEQUENCE_CLIP)
    seen = simulated(simulate(gap, 300, 300, 20_000, 1, TOKEN_CLIP), "normalised", SEQUENCE_CLIP)
    assert exact["ess_share"] == pytest.approx(math.exp(-(0.02**2) * 300), rel=0.01)
    assert seen["ess_share"] == pytest.approx(exact["ess_share"], abs=0.01)


def test_the_simulation_would_contradict_a_wrong_formula():
    """Correlated tokens against the formula of independent ones."""
    seen = simulated(simulate(Gap(SD, autocorrelation=0.7), LENGTH, LENGTH, N, 3, TOKEN_CLIP), "walk", SEQUENCE_CLIP)
    wrong = closed(Gap(SD), "walk", LENGTH, TOKEN_CLIP, SEQUENCE_CLIP)
    assert seen["spread"] > 2 * wrong["spread"]
    assert abs(seen["off_by"]["2"] - wrong["off_by"]["2"]) > 0.1


@pytest.mark.parametrize("rho", [0.6, -0.6, 0.999])
def test_the_walks_of_an_ar1_are_those_of_the_recursion(rho: float):
    """Blocks and ends against a token-by-token loop on the same draws: one answer fills a block whole."""

    class Told:
        """A normal whose draws are kept."""

        about = "told"

        def __init__(self) -> None:
            self.kept: list[np.ndarray] = []

        def draw(self, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
            self.kept.append(rng.standard_normal(shape))
            return self.kept[-1]

        log_mgf, outside, sum_outside = Normal().log_mgf, Normal().outside, Normal().sum_outside

    law = Told()
    walks = simulate(Gap(0.5, law, rho), 300, 300, 3, 9, TOKEN_CLIP)  # type: ignore[arg-type]
    x, total, sums = np.zeros(3), np.zeros(3), []
    for i, e in enumerate(np.concatenate(law.kept)):
        x = e if i == 0 else rho * x + math.sqrt(1 - rho * rho) * e
        total = total + x
        sums.append(total)
    assert len(sums) == 300
    np.testing.assert_allclose(walks.sums, 0.5 * np.array(sums)[walks.lengths - 1].T, rtol=0, atol=1e-9)


def test_a_seed_is_a_simulation():
    one, again, other = (horizon(Gap(0.01), 500, answers=50, seed=seed) for seed in (1, 1, 2))
    assert json.dumps(one) == json.dumps(again)
    assert one["walks"]["log_ratio"] != other["walks"]["log_ratio"]


def test_readings_share_their_walks_and_differ_in_the_drift():
    rows = horizon(Gap(0.05, mean=-0.01), 200, answers=300)["readings"]
    centred = {name: row["simulated"]["drift"] - row["drift"] for name, row in rows.items()}
    assert set(centred) == {"walk", "normalised", "given"}
    assert max(centred.values()) - min(centred.values()) < 1e-12


@pytest.mark.parametrize(("length", "answers"), [(1, 8), (3, 9), (2000, 5), (2000, 8)])
def test_the_drawing_starts_at_zero_and_ends_at_the_length(length: int, answers: int):
    result = horizon(Gap(0.02, mean=0.001), length, answers=answers)
    walks = result["walks"]
    assert walks["reading"] == "given"
    assert (walks["tokens"][0], walks["tokens"][-1]) == (0, length)
    assert len(walks["log_ratio"]) == min(answers, 8)
    assert all(len(row) == len(walks["tokens"]) and row[0] == 0 for row in walks["log_ratio"])
    assert walks["drift"][-1] == pytest.approx(0.001 * length)
    assert walks["upper"][-1] - walks["drift"][-1] == pytest.approx(0.02 * math.sqrt(length))
    middle = walks["tokens"].index(length // 2) if length == 2000 else 0
    assert walks["drift"][middle] - walks["lower"][middle] == pytest.approx(0.02 * math.sqrt(walks["tokens"][middle]))


def test_the_end_of_the_walks_is_the_simulated_answer():
    result = horizon(Gap(0.02), 700, answers=8)
    ends = [row[-1] for row in result["walks"]["log_ratio"]]
    assert np.mean(ends) == pytest.approx(result["readings"]["normalised"]["simulated"]["drift"])


def test_nothing_is_simulated_when_not_asked():
    result = horizon(Gap(0.02), 10**9, answers=0)
    assert "walks" not in result and "simulated" not in result["readings"]["walk"]


def test_how_long_is_simulated():
    assert how_far(10_000, [10_561, 8_560]) == 13_730
    assert how_far(100, [10_561, None]) == 100
    assert default_answers(10) == 4000
    assert default_answers(10**9) == 50


def test_what_is_said_beside_the_numbers():
    assert horizon(Gap(0.01), 100, answers=20)["notes"] == []
    tiny = horizon(Gap(0.068), 4096, answers=20, notes=("mine",))["notes"]
    assert len(tiny) == 2 and "cannot show an effective share below 1 / 20" in tiny[0] and tiny[1] == "mine"
    student = " ".join(horizon(Gap(0.01, StudentT(4.0)), 100, answers=20)["notes"])
    assert "mean ratio is infinite" in student and "closed ≈" in student
