"""The closed form: the figures of the contract, hand-worked numbers, and scipy where there is no hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from onepolicy.errors import UnknownName, UsageError
from onepolicy.metrics.horizon import SEQUENCE_CLIP, TOKEN_CLIP, USES, answer, horizon, usable
from onepolicy.metrics.laws import Histogram, Law, Mixture, Normal, StudentT, law_of
from onepolicy.metrics.whole_answer import READINGS, Answers, Gap, closed, half_length, inflation

CLIPS = (TOKEN_CLIP, SEQUENCE_CLIP)


def off(drift: float, spread: float, by: float) -> float:
    """P(|N(drift, spread^2)| >= ln by), by scipy."""
    law = stats.norm(drift, spread)
    return float(law.cdf(-math.log(by)) + law.sf(math.log(by)))


# -- the contract's figures --------------------------------------------------------------------------------------------


def test_the_example_of_the_contract():
    found = answer(0.068, 4096)
    assert (round(found["drift"], 1), round(found["spread"], 1)) == (-9.5, 4.4)
    assert 1 / found["median_ratio"] == pytest.approx(13_000, rel=0.01)
    assert found["ess_share"] == pytest.approx(6e-9, rel=0.01)
    assert math.log(found["walk_factor"]) == pytest.approx(4.35, abs=0.005)
    row = closed(Gap(0.068), "normalised", 4096, *CLIPS)
    for key in ("drift", "spread", "median_ratio", "ess_share"):
        assert row[key] == pytest.approx(found[key], rel=1e-12)


def test_the_walk_and_the_normalised_one_are_told_apart():
    walk, normalised = (closed(Gap(0.01), reading, 10_000, *CLIPS) for reading in ("walk", "normalised"))
    assert walk["typical_factor"] == pytest.approx(math.e)
    assert round(100 * walk["off_by"]["2"]) == 49
    assert round(100 * normalised["off_by"]["2"]) == 54
    assert (walk["drift"], normalised["drift"]) == (0.0, pytest.approx(-0.5))
    assert (walk["half_off_by_2"], normalised["half_off_by_2"]) == (10_561, 8_560)


def test_the_lengths_at_which_half_are_off_by_hand():
    """Walk: ln 2 is the upper quartile of N(0, s^2 n). Normalised: a root in the variance, by scipy."""
    quartile = stats.norm.ppf(0.75)
    assert math.ceil((math.log(2) / quartile / 0.01) ** 2) == 10_561
    variance = optimize.brentq(lambda v: off(-v / 2, math.sqrt(v), 2) - 0.5, 0.1, 1.3)
    assert math.ceil(variance / 0.01**2) == 8_560


@pytest.mark.parametrize("sd", [0.003, 0.068, 0.5])
@pytest.mark.parametrize("rho", [0.0, 0.6, -0.4])
@pytest.mark.parametrize("reading", ["walk", "normalised", "given"])
def test_the_solved_length_is_the_first_one(sd: float, rho: float, reading: str):
    gap = Gap(sd, autocorrelation=rho, mean=sd / 10)
    n = half_length(gap, reading)
    assert n is not None
    shares = []
    for length in (n - 1, n):
        answers = Answers(gap, max(length, 1))
        shares.append(off(READINGS[reading].drift(gap, max(length, 1)), answers.spread, 2))
    assert shares[1] >= 0.5 and (n == 1 or shares[0] < 0.5)


def test_no_gap_is_never_off_and_a_bias_alone_is_off_at_once():
    assert half_length(Gap(0.0), "normalised") is None
    assert half_length(Gap(0.0, mean=-0.01), "given") == math.ceil(math.log(2) / 0.01) == 70
    row = closed(Gap(0.0, mean=0.3), "given", 10, *CLIPS)
    assert (row["tokens_outside_clip"], row["answers_outside_clip"], row["off_by"]["10"]) == (1.0, 1.0, 1.0)
    assert closed(Gap(0.0), "walk", 10, *CLIPS)["tokens_outside_clip"] == 0.0


def test_shares_and_clips_are_scipys():
    gap, n, rho = 0.05, 700, 0.3
    spread = gap * math.sqrt(inflation(rho, n))
    row = closed(Gap(gap, autocorrelation=rho, mean=-0.002), "given", n, *CLIPS)
    for by in (1.5, 2, 10):
        assert row["off_by"][f"{by:g}"] == pytest.approx(off(-1.4, spread, by), rel=1e-12)
    token = stats.norm(-0.002, gap)
    assert row["tokens_outside_clip"] == pytest.approx(token.cdf(math.log(0.8)) + token.sf(math.log(1.2)), rel=1e-12)
    mean = stats.norm(-0.002, spread / n)
    outside = mean.cdf(math.log(1 - 3e-4)) + mean.sf(math.log(1 + 4e-4))
    assert row["answers_outside_clip"] == pytest.approx(outside, rel=1e-12)
    assert row["ess_share"] == pytest.approx(math.exp(-(spread**2)), rel=1e-12)


# -- autocorrelation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.97, 0.9999, 1 - 1e-9, -0.3, -0.97, -0.9999])
@pytest.mark.parametrize("n", [1, 2, 3, 50, 1201])
def test_the_variance_of_a_sum_is_the_sum_of_all_covariances(rho: float, n: int):
    i = np.arange(n)
    whole = float((rho ** np.abs(i[:, None] - i[None, :]).astype(float)).sum())
    assert inflation(rho, n) == pytest.approx(whole, rel=1e-8)


def test_in_the_long_run_it_inflates_by_the_known_factor():
    assert inflation(0.6, 10**7) / 10**7 == pytest.approx(1.6 / 0.4, rel=1e-6)
    assert inflation(-0.6, 10**7) / 10**7 == pytest.approx(0.4 / 1.6, rel=1e-6)


def test_a_correlated_normal_is_normalised_as_a_whole():
    """E e^D = 1 needs half the variance of the sum, not n times that of a token."""
    gap = Gap(0.02, autocorrelation=0.5)
    assert READINGS["normalised"].drift(gap, 900) == pytest.approx(-(0.02**2) * inflation(0.5, 900) / 2, rel=1e-12)


@pytest.mark.parametrize("rho", [0.4, -0.4, 0.9])
def test_the_mean_ratio_of_correlated_tokens_of_any_law(rho: float):
    """Against the product of every innovation's own mgf; one that stops short, or takes wrong weights, is off."""
    law, sd, n = Mixture(0.05, 6.0), 0.03, 400
    power = rho ** np.arange(1, n)
    weights = sd * math.sqrt(1 - rho * rho) * (1 - power) / (1 - rho)
    first = np.array([sd * (1 - rho**n) / (1 - rho)])
    whole = float(law.log_mgf(first)[0] + law.log_mgf(weights).sum())
    assert Answers(Gap(sd, law, rho), n).log_mgf(1.0) == pytest.approx(whole, rel=1e-5)


def test_a_long_way_to_settle_is_summed_at_odd_strides():
    law, rho, n = Mixture(0.05, 6.0), -0.99995, 2_000_000
    whole = law.log_mgf(0.002 * math.sqrt(1 - rho * rho) / (1 - rho) * (1 - rho ** np.arange(1.0, n))).sum()
    whole += law.log_mgf(np.array([0.002 * (1 - rho**n) / (1 - rho)]))[0]
    assert Answers(Gap(0.002, law, rho), n).log_mgf(1.0) == pytest.approx(float(whole), rel=1e-4)


# -- laws --------------------------------------------------------------------------------------------------------------

_X = np.linspace(-9, 9, 4001)
LAWS: dict[str, Law] = {
    "normal": Normal(),
    "t": StudentT(5.0),
    "mixture": Mixture(0.02, 8.0),
    "narrow share": Mixture(0.7, 0.01),
    "histogram": Histogram(np.array([-4.0, -0.5, 0.1, 0.2, 7.0]), np.array([1.0, 50, 30, 20, 2])),
}


@pytest.mark.parametrize("name", LAWS)
def test_every_law_is_centred_and_of_unit_size(name: str):
    x = LAWS[name].draw(np.random.default_rng(5), (2000, 500)).ravel()
    assert abs(x.mean()) < 5 / 1000
    assert x.var() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("name", LAWS)
def test_the_share_outside_is_that_of_the_draws(name: str):
    law = LAWS[name]
    x = law.draw(np.random.default_rng(6), (2000, 500)).ravel()
    for low, high in ((-1.0, 1.5), (-4.0, 3.0)):
        share = float(np.mean((x <= low) | (x >= high)))
        assert law.outside(low, high) == pytest.approx(share, abs=5 * math.sqrt(share / 1e6) + 1e-6)


def test_the_tail_of_student_is_scipys():
    law = stats.t(3.5, scale=math.sqrt(1.5 / 3.5))
    for x in (0.1, 2.0, 30.0):
        assert StudentT(3.5).outside(-x, 2 * x) == pytest.approx(law.cdf(-x) + law.sf(2 * x), rel=1e-8)
    assert StudentT(3.5).outside(-1e200, 1e200) < 1e-300
    assert StudentT(3.5).log_mgf(np.array([0.0, 1e-9])).tolist() == [0.0, math.inf]


def test_the_mgf_of_a_mixture_is_the_integral():
    law = Mixture(0.03, 5.0)
    rest, far = law.sds()
    density = lambda x: 0.97 * stats.norm.pdf(x, 0, rest) + 0.03 * stats.norm.pdf(x, 0, far)
    assert 0.97 * rest**2 + 0.03 * far**2 == pytest.approx(1)
    for c in (0.2, 1.0):
        whole = integrate.quad(lambda x, c=c: math.exp(c * x) * density(x), -60, 60, limit=400, points=[-5, 0, 5])[0]
        assert math.exp(law.log_mgf(np.array([c]))[0]) == pytest.approx(whole, rel=1e-8)


def test_the_mgf_of_a_histogram_is_its_mean():
    law = LAWS["histogram"]
    assert isinstance(law, Histogram)
    x, p = law.values, np.array([1.0, 50, 30, 20, 2]) / 103
    assert float(p @ x) == pytest.approx(0, abs=1e-12) and float(p @ x**2) == pytest.approx(1)
    assert math.exp(law.log_mgf(np.array([0.3]))[0]) == pytest.approx(float(p @ np.exp(0.3 * x)))
    assert law.log_mgf(np.array([500.0]))[0] == pytest.approx(500 * x.max() + math.log(p[-1]))


def test_draws_of_a_histogram_have_its_weights():
    law = LAWS["histogram"]
    assert isinstance(law, Histogram)
    x = law.draw(np.random.default_rng(1), (1000, 1030)).ravel()
    seen = [int(np.sum(x == v)) for v in law.values]
    assert sum(seen) == x.size
    assert stats.chisquare(seen, np.array([1.0, 50, 30, 20, 2]) * 1e4).pvalue > 1e-3


@pytest.mark.parametrize(("n", "share"), [(1, 0.1), (7, 0.1), (400, 0.01), (10_000, 0.3)])
def test_the_sum_of_a_mixture_is_a_binomial_of_normals(n: int, share: float):
    law = Mixture(share, 12.0)
    rest, far = law.sds()
    k = np.arange(n + 1)
    sd = np.sqrt((n - k) * rest**2 + k * far**2)
    for x in (0.5 * math.sqrt(n), 3 * math.sqrt(n)):
        whole = stats.binom.pmf(k, n, share) @ (stats.norm.cdf(-x / sd) + stats.norm.sf(2 * x / sd))
        assert law.sum_outside(n, -x, 2 * x) == pytest.approx(float(whole), rel=1e-9)


def test_rare_large_errors_are_not_a_normal_sum():
    """That the mixture's closed form matters: a fourth moment that a normal of the same spread does not have."""
    law, n = Mixture(0.001, 30.0), 400
    assert law.sum_outside(n, -4 * 20, 4 * 20) > 30 * (Normal().sum_outside(n, -4 * 20, 4 * 20) or 0)
    assert Answers(Gap(0.01, law), n).exact()
    assert not Answers(Gap(0.01, law, 0.2), n).exact()
    assert not Answers(Gap(0.01, StudentT(4.0)), n).exact()
    assert Answers(Gap(0.01, StudentT(4.0)), 1).exact()


def test_the_effective_share_of_a_mixture_by_its_two_means():
    law, sd, n = Mixture(0.02, 8.0), 0.04, 300
    rest, far = (sd * x for x in law.sds())
    mean = lambda k: (0.98 * math.exp(k * k * rest**2 / 2) + 0.02 * math.exp(k * k * far**2 / 2)) ** n
    row = closed(Gap(sd, law), "normalised", n, *CLIPS)
    assert row["ess_share"] == pytest.approx(mean(1) ** 2 / mean(2), rel=1e-10)
    assert row["drift"] == pytest.approx(-math.log(mean(1)), rel=1e-10)


def test_no_effective_share_is_left_where_the_ratio_has_no_mean():
    row = closed(Gap(0.001, StudentT(4.0)), "normalised", 100, *CLIPS)
    assert row["ess_share"] == 0
    assert row["drift"] == pytest.approx(-(0.001**2) * 100 / 2)


# -- input and words ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Gap(-0.01), "gap -0.01: wanted"),
        (lambda: Gap(math.nan), "gap nan"),
        (lambda: Gap(math.inf), "gap inf"),
        (lambda: Gap(0.1, autocorrelation=1.0), "autocorrelation 1: wanted"),
        (lambda: Gap(0.1, autocorrelation=-1.0), "autocorrelation -1"),
        (lambda: Gap(0.1, autocorrelation=math.nan), "autocorrelation nan"),
        (lambda: Gap(0.1, mean=math.inf), "bias inf"),
        (lambda: law_of("t:2"), "more than 2 degrees"),
        (lambda: law_of("t:nan"), "more than 2 degrees"),
        (lambda: law_of("t"), "wanted t:DEGREES"),
        (lambda: law_of("normal:1"), "wanted normal"),
        (lambda: law_of("mixture:0.1"), "wanted mixture:SHARE,SIZE"),
        (lambda: law_of("mixture:0.1,x"), "wanted mixture:SHARE,SIZE"),
        (lambda: law_of("mixture:0,3"), "a share between 0 and 1"),
        (lambda: horizon(Gap(0.1), 0), "length 0"),
        (lambda: horizon(Gap(0.1), 10, clip=(1.0, 0.2)), "clip 1, 0.2"),
        (lambda: horizon(Gap(0.1), 10, sequence_clip=(1e-4, math.nan)), "sequence clip 0.0001, nan"),
        (lambda: horizon(Gap(0.1), 10, answers=-1), "answers -1"),
        (lambda: horizon(Gap(0.1), 10**6, answers=10**6), "ask for fewer answers"),
    ],
)
def test_numbers_that_cannot_be_are_refused(make: object, said: str):
    with pytest.raises(UsageError, match=said):
        make()  # type: ignore[operator]


def test_an_unknown_tail_has_a_neighbour():
    with pytest.raises(UnknownName, match="did you mean 'mixture'"):
        law_of("mixtur:0.1,3")
    assert law_of("mixture:0.01,10") == Mixture(0.01, 10.0)
    assert law_of("t:4") == StudentT(4.0)
    assert law_of("normal") == Normal()


@pytest.mark.parametrize(
    ("share", "word"),
    [(0.0, "unusable"), (0.0099, "unusable"), (0.01, "costly"), (0.49, "costly"), (0.5, "usable"), (1.0, "usable")],
)
def test_what_sequence_weights_are_good_for(share: float, word: str):
    assert usable(share).word == word
    assert usable(math.nan).word == "unusable"
    assert all(use.why for use in USES)
