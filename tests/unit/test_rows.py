"""The change point of a reply's gap: how often it is found where there is none, and where it is found."""

from __future__ import annotations

import numpy as np
import pytest

from onepolicy.rows import change_point, scaled_size


@pytest.mark.parametrize(("n", "seed"), [(40, 0), (200, 1), (1000, 2)])
def test_no_change_is_seldom_called_one(n: int, seed: int):
    """Kolmogorov's law: 1.63 is passed by 1% without a change (fewer in short replies), 1.36 by 5%."""
    rng = np.random.default_rng(seed)
    clear = np.array([change_point(rng.normal(size=n))[1] for _ in range(1500)])
    assert (clear > 1.63).mean() < 0.02
    assert 0.01 < (clear > 1.36).mean() < 0.07


@pytest.mark.parametrize("at", [30, 100, 170])
def test_a_change_is_found_at_its_place(at: int):
    rng = np.random.default_rng(at)
    found = []
    for _ in range(50):
        d = rng.normal(size=200) * np.where(np.arange(200) < at, 0.01, 0.1)
        level = scaled_size(np.abs(d), np.full(200, -1.0), np.full(200, np.abs(d).mean()))
        k, clear = change_point(level)
        assert clear > 1.95
        found.append(k)
    assert abs(np.median(found) - at) <= 2
    assert np.percentile(np.abs(np.array(found) - at), 90) <= 20  # CUSUM leans to the middle of the reply


def test_the_first_token_after_the_change_is_named():
    assert change_point(np.array([0.0] * 10 + [1.0] * 10)) == (10, pytest.approx(np.sqrt(20) / 2))
    assert change_point(np.zeros(20)) == (1, 0.0)


def test_a_stretch_of_sure_tokens_is_no_change():
    """The gap of a token of probability p is about the logits' times 1 - p."""
    rng = np.random.default_rng(3)
    a = np.log(np.where(np.arange(400) < 200, 0.3, 0.95))
    clear = []
    for _ in range(100):
        size = np.abs(rng.normal(size=400)) * 0.02 * (1 - np.exp(a))
        clear.append(change_point(scaled_size(size, a, np.full(400, size.mean())))[1])
    assert (np.array(clear) > 1.95).mean() < 0.05
