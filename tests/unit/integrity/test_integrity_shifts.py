"""A side that is late or early: found at each lag, silent where values do not tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from integrity_dumps import NAMES, batch, changed, codes, drawn, found, reply, rolled, settled, shaped
from onepolicy.types import Finding


def shift(findings: list[Finding]) -> Finding:
    (only,) = [f for f in findings if f.code == "shift-by-one"]
    return only


@pytest.mark.parametrize("k", [-2, -1, 1, 2])
@pytest.mark.parametrize("side", NAMES)
def test_each_lag_on_each_side(k: int, side: str) -> None:
    for healthy in (shaped(), drawn("bfloat16")):
        findings = found(batch(rolled(healthy, side, k)))
        assert codes(findings) == ["shift-by-one"]
        f = findings[0]
        assert f.evidence["best_lag"] == (k if side == "old" else -k)
        assert f.evidence["share"] >= 0.9
        assert f.evidence[f"corr_lag{f.evidence['best_lag']}"] > 0.99
        assert abs(f.evidence["corr_lag0"]) < 0.2


def test_which_one_is_late_is_said() -> None:
    assert found(batch(rolled(shaped(), "old", 1)))[0].message.startswith("old is one token late against sampler")
    assert found(batch(rolled(shaped(), "sampler", 1)))[0].message.startswith("sampler is one token late against old")
    two = found(batch(rolled(shaped(), "old", -2)))[0].message
    assert two.startswith("sampler is 2 tokens late against old (or old 2 tokens early)")


def test_the_commonest_of_several_far_lags_is_told_in_words_and_numbers() -> None:
    """The first record lies apart by seven tokens, the others by five."""
    r = shaped()
    seven, five = (rolled(r, "old", k).scorings["old"].logprobs.values for k in (7, 5))
    first = np.arange(r.n_tokens) < r.offsets[1]
    f = shift(found(batch(changed(r, "old", lambda x: np.where(first, seven, five)))))
    assert f.message.startswith("old is late against sampler by 5 tokens")
    assert f.evidence["best_lag"] == 5 and f.evidence["by_lag"]["7"] == 1
    assert f.evidence["places"][0]["best_lag"] == 7


def test_numbers_against_numpy() -> None:
    a = [-1.1, -0.03, -0.85, -0.02, -2.99, -3.7, -0.01, -0.35, -0.03, -0.2, -0.18, -1.53, -1.08, -0.22]
    b = [0.0, *[round(x * 0.99, 5) for x in a[:-1]]]
    f = shift(found(settled(reply("r", a, b, 14))))
    x, y = np.array(a), np.array(b)
    assert f.evidence["corr_lag0"] == pytest.approx(np.corrcoef(x, y)[0, 1], abs=2e-6)
    assert f.evidence["corr_lag1"] == pytest.approx(np.corrcoef(x[:-1], y[1:])[0, 1], abs=2e-6)
    assert f.evidence["max_abs_after_shift"] == pytest.approx(np.abs(x[:-1] - y[1:]).max())
    assert f.evidence["mean_abs_lag0"] == pytest.approx(np.abs(x - y).mean())


def test_half_of_the_records() -> None:
    r = shaped()
    late = rolled(r, "old", 1).scorings["old"].logprobs.values
    half = np.repeat(np.arange(len(r)) % 2 == 0, r.lengths)
    f = shift(found(batch(changed(r, "old", lambda x: np.where(half, late, x)))))
    assert f.evidence["records"] in (27, 28, 29, 30) and f.evidence["of"] == 60
    assert {p["record"] for p in f.evidence["places"]} <= {f"r{i:03}" for i in range(0, 60, 2)}


def _periodic(period: int) -> tuple[list[float], list[float]]:
    a = ([-0.1, -2.0, -0.7, -1.5, -3.0] * 10)[: 6 * period] if period == 5 else [-0.1, -2.0] * 16
    return a, [0.0, *a[:-1]]


def test_repetitive_text_fits_several_lags() -> None:
    a, b = _periodic(2)
    assert "shift-by-one" not in codes(found(settled(reply("r", a, b, len(a)))))


@pytest.mark.parametrize("spread", [0.0, 0.01])
def test_flat_values_fit_any_lag(spread: float) -> None:
    rng = np.random.default_rng(1)
    a = -1.0 - spread * rng.random(60)
    b = np.concatenate([[-2.0], a[:-1]])
    assert "shift-by-one" not in codes(found(settled(reply("r", a.tolist(), b.tolist(), 60))))


@pytest.mark.parametrize("noise", [0.02, 0.5, 1.5])
def test_noise_and_permutation_are_no_shift(noise: float) -> None:
    rng = np.random.default_rng(2)
    r = shaped()
    noisy = changed(r, "old", lambda x: np.minimum(x + noise * rng.standard_normal(len(x)), 0.0))
    assert "shift-by-one" not in codes(found(batch(noisy)))
    assert "shift-by-one" not in codes(found(batch(changed(r, "old", lambda x: rng.permutation(x)))))


def _short(n: int, records: int, late: bool) -> list[Any]:
    rng = np.random.default_rng(3)
    out: list[Any] = []
    for i in range(records):
        a = -np.exp(rng.normal(-1.0, 1.5, n))
        b = a * 1.01
        b = np.concatenate([[0.0], b[:-1]]) if late else b
        out.append(reply(f"s{i:03}", a.tolist(), b.tolist(), n))
    return out


def test_short_replies_tell_together() -> None:
    f = shift(found(settled(*_short(5, 40, late=True))))
    assert f.evidence["best_lag"] == 1 and f.message.startswith("old is one token late against sampler")
    assert "shift-by-one" not in codes(found(settled(*_short(5, 40, late=False))))
    assert shift(found(settled(*_short(5, 4, late=True)))).evidence["pairs"] == 16  # to the digit, that is enough
    assert "shift-by-one" not in codes(found(settled(*_short(3, 4, late=True))))


def test_a_few_short_replies_of_other_values_tell_nothing() -> None:
    for seed in range(300):
        rng = np.random.default_rng(seed)
        a, b = (-np.exp(rng.normal(-1.0, 1.5, (2, 6))) for _ in range(2))
        records = [reply(f"s{i}", a[i].tolist(), b[i].tolist(), 6) for i in range(2)]
        assert "shift-by-one" not in codes(found(settled(*records))), seed


@pytest.mark.parametrize(("k", "from_"), [(1, 3), (1, 30), (-1, 12), (2, 20), (-2, 8)])
@pytest.mark.parametrize("noise", [0.001, 0.02])
def test_a_value_lost_or_put_in_inside_a_reply(k: int, from_: int, noise: float) -> None:
    """From token `from_` on the trainer's list is k late: k values were put in before it, or lost."""
    rng = np.random.default_rng(11)
    n = 60
    a = -np.exp(rng.normal(-1.0, 1.3, n))
    b = a * np.exp(noise * rng.standard_normal(n))
    put = -rng.exponential(1.0, abs(k))
    b = np.concatenate([b[:from_], put, b[from_:]])[:n] if k > 0 else np.concatenate([b[:from_], b[from_ - k :], put])
    f = shift(found(settled(reply("r", a.tolist(), b.tolist(), n))))
    if from_ > 3:
        assert f.message.startswith("from some token on")
        assert abs(f.evidence["places"][0]["reply_position"] - from_) <= 2
    assert f.evidence["best_lag"] == k


@pytest.mark.parametrize("noise", [0.1, 0.5, 1.0])
def test_noise_and_outliers_do_not_shift_inside(noise: float) -> None:
    rng = np.random.default_rng(12)
    for seed in range(3):
        r = shaped(noise, 60, seed)
        late = changed(r, "old", lambda x: np.where(rng.random(len(x)) < 0.2, x - rng.exponential(3.0, len(x)), x))
        assert "shift-by-one" not in codes(found(batch(late)))
