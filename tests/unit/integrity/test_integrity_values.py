"""Values that are no log-probs, constant, copied, rounded when stored, or of another token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from integrity_dumps import NAMES, batch, changed, codes, drawn, found, only_drawn, reply, settled, shaped, with_values
from onepolicy.engines.fake_rounding import round_to
from onepolicy.integrity.precision import _on_grids
from onepolicy.rollouts import Rollouts

# -- null, NaN, infinite, above 0 --


@pytest.mark.parametrize(("value", "kind"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
def test_not_finite_by_kind(value: float, kind: str) -> None:
    r = drawn("float32")
    at = np.flatnonzero(r.drawn)[[5, 77, 300]]

    def put(x: Any) -> None:
        x[at] = value

    (f,) = found(batch(changed(r, "sampler", put)))
    assert (f.code, f.evidence[kind], len(f.evidence["places"])) == ("nonfinite-logprob", 3, 3)
    assert f.evidence["places"][0]["position"] == int(at[0] - r.offsets[np.searchsorted(r.offsets, at[0], "right") - 1])
    old = found(batch(changed(r, "old", put)))
    assert codes(old) == ([] if kind == "-inf" else ["nonfinite-logprob"])  # a scorer may call a token impossible


def test_null_is_not_nan() -> None:
    r = drawn("float32")
    col = r.scorings["old"].logprobs
    valid = col.mask() & (np.arange(r.n_tokens) % 50 != 10)
    (f,) = found(batch(with_values(r, "old", col.values, valid)))
    missing = int((r.drawn & ~valid).sum())
    assert (f.code, f.evidence["side"], f.evidence["missing"]) == ("missing-logprobs", "old", missing)
    assert f.evidence["share"] == missing / r.drawn.sum()


def test_nothing_scored_on_both_sides() -> None:
    r = drawn("float32")
    nobody = np.zeros(r.n_tokens, dtype=bool)
    f = found(batch(with_values(r, "old", np.zeros(r.n_tokens), nobody)))
    assert codes(f) == ["nothing-scored"] and f"{int(r.drawn.sum()):,} tokens" in f[0].message


@pytest.mark.parametrize(
    ("change", "like"),
    [
        (np.exp, "probabilities"),
        (np.negative, "losses"),
        (lambda x: x + 2.0, "logits"),
        (lambda x: x + 1e-6, None),
        (
            lambda x: x + 0.5 * np.random.default_rng(0).standard_normal(len(x)),
            "log-probs to which something was added",
        ),
    ],
)
def test_above_zero_says_what_it_looks_like(change: Any, like: str | None) -> None:
    (f,) = [x for x in found(batch(changed(drawn("float32"), "sampler", change))) if x.code == "positive-logprob"]
    assert f.severity.value == "fail"
    assert f.evidence["looks_like"] is None if like is None else f.evidence["looks_like"].startswith(like)


# -- constant --


@pytest.mark.parametrize(("vocab", "told"), [(151936, 151936), (32000, 32064), (256, None)])
def test_uniform(vocab: int, told: int | None) -> None:
    r = changed(drawn("float32"), "sampler", lambda x: np.full(len(x), -np.log(vocab)))
    (f,) = found(batch(r), vocab_size=told)
    assert (f.code, f.evidence["vocabulary_that_fits"]) == ("uniform-vocabulary", vocab)
    assert f.evidence["fits_vocab_size"] is (None if told is None else True)


def test_uniform_up_to_rounding_and_on_both_sides() -> None:
    rng = np.random.default_rng(0)
    r = changed(drawn("float32"), "sampler", lambda x: -np.log(32000.0) + 1e-3 * rng.standard_normal(len(x)))
    assert codes(found(batch(r))) == ["uniform-vocabulary"]
    both = r
    for side in NAMES:
        both = changed(both, side, lambda x: np.full(len(x), -np.log(32000.0)))
    assert codes(found(batch(both))) == ["uniform-vocabulary"] * 2
    few = settled(reply("r", [-9.0] * 5, [-1.0, -2.0, -0.3, -0.2, -4.0], 5))
    assert "uniform-vocabulary" not in codes(found(few))


# -- one source --


def test_two_columns_of_one_list() -> None:
    r = drawn("float32")
    copied = r.with_scoring("old", r.scorings["sampler"])
    (f,) = found(batch(copied))
    assert (f.code, f.outcome.value, f.evidence["share"]) == ("one-source", "inconclusive", 1.0)
    close = changed(copied, "old", lambda x: np.where(np.arange(len(x)) % 3 == 0, x * (1 + 1e-6), x))
    assert found(batch(close)) == []
    assert found(settled(reply("r", [-0.5, -1.5, -0.2], [-0.5, -1.5, -0.2], 3))) == []  # three tokens are no proof


# -- precision of what is stored --


@pytest.mark.parametrize("side", NAMES)
@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "bf16"), ("float16", "fp16")])
def test_stored_precision(side: str, dtype: str, kind: str) -> None:
    for r in (drawn("float32"), drawn("bfloat16"), shaped()):
        (f,) = found(batch(changed(r, side, lambda x: round_to(x, dtype).astype(np.float64))))
        assert (f.code, f.evidence["side"], f.severity.value) == (f"stored-as-{kind}", side, "warn")
        assert f.evidence[f"share_exact_{kind}"] == 1.0
    (alone,) = found(batch(changed(drawn("float32"), side, lambda x: round_to(x, dtype)), (side, None)))
    assert alone.code == f"stored-as-{kind}"


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_grids_against_numpy_and_bits(kind: str) -> None:
    """numpy has float16; bfloat16 is the upper half of a float32."""
    rng = np.random.default_rng(1)
    x = -np.exp(rng.uniform(-18, 6, 4000)).astype(np.float32).astype(np.float64)
    on = x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    rounded = on.view(np.float32).astype(np.float64) if kind == "bf16" else x.astype(np.float16).astype(np.float64)
    both = np.concatenate([x, rounded])
    with np.errstate(over="ignore"):
        exact = both.astype(np.float16) == both
    if kind == "bf16":
        exact = (both.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF)) == 0
    telling = (both.astype(np.float32).view(np.uint32) & np.uint32(0x1FFFFF)) != 0
    assert _on_grids(both)[kind] == int((exact & telling).sum())
    assert _on_grids(both)["float32"] == int(telling.sum())
    assert _on_grids(both + 1e-12)["float32"] < 0.1 * len(both)


def test_round_numbers_say_nothing_about_precision() -> None:
    a = [-0.5, -1.0, -2.25, -0.75, -1.5, -4.0, -0.125, -3.0, -1.25, -0.25, -6.0, -1.75, -0.875, -0.625]
    b = [x * 1.001 for x in a]
    assert found(settled(*(reply(f"r{i}", a, b, 14) for i in range(10)))) == []
    decimals = [round(x * 1.013, 2) for x in a]
    assert codes(found(settled(*(reply(f"r{i}", decimals, b, 14) for i in range(10))))) == ["stored-rounded"]
    assert found(settled(reply("r", decimals, b, 14))) == []  # fourteen numbers may be written by hand


# -- the top token's value --


def model(temperature: float = 1.0, top_p: float = 1.0) -> tuple[Rollouts, Any, Any]:
    """Tokens drawn from known distributions: rollouts, all log-probs `[T, V]`, and the drawn ids."""
    r = shaped(sequences=40)
    rng = np.random.default_rng(0)
    logits = rng.uniform(0.5, 6.0, (r.n_tokens, 1)) * rng.standard_normal((r.n_tokens, 24))
    lp = log_softmax(logits)
    z = log_softmax(logits / temperature)
    if top_p < 1:
        order = np.sort(np.exp(z), axis=1)[:, ::-1]
        kept = (np.cumsum(order, axis=1) - order) < top_p
        least = np.where(kept, order, 1.0).min(axis=1, keepdims=True)
        z = log_softmax(np.where(np.exp(z) >= least, z, -np.inf))
    ids = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    return r, (lp, z), ids


def log_softmax(z: Any) -> Any:
    z = z - z.max(axis=1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=1, keepdims=True))


def sides(r: Rollouts, a: Any, b: Any) -> Rollouts:
    rng = np.random.default_rng(9)
    noise = np.exp(0.01 * rng.standard_normal(len(a)))
    r = changed(changed(r, "sampler", lambda x: a), "old", lambda x: b * noise)
    return replace(r, scorings={name: only_drawn(r, name) for name in NAMES})


def test_the_likeliest_tokens_value_is_stored() -> None:
    r, (lp, _), ids = model()
    own, top = lp[np.arange(len(ids)), ids], lp.max(axis=1)
    (f,) = found(batch(sides(r, top, own)))
    assert (f.code, f.evidence["side"], f.evidence["below"]) == ("top-token-stored", "sampler", 0)
    at = f.evidence["places"][0]
    assert at["value"] > at["other"] + 0.3
    (f,) = found(batch(sides(r, own, top)))
    assert (f.code, f.evidence["side"]) == ("top-token-stored", "old")


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"temperature": 1.7}, {"top_p": 0.8}])
def test_other_distributions_are_not_the_top_token(settings: dict[str, float]) -> None:
    r, (lp, z), ids = model(**settings)
    rows = np.arange(len(ids))
    assert found(batch(sides(r, z[rows, ids], lp[rows, ids]))) == []


def test_other_weights_and_few_tokens_are_not_the_top_token() -> None:
    r, (lp, _), ids = model()
    rng = np.random.default_rng(3)
    other = log_softmax(lp + 1.0 * rng.standard_normal(lp.shape))
    rows = np.arange(len(ids))
    assert found(batch(sides(r, lp[rows, ids], other[rows, ids]))) == []
    tops = sides(r, lp.max(axis=1), lp[rows, ids])
    few = tops.take([int(tops.lengths.argmin())])
    assert few.n_tokens < 32 and "top-token-stored" not in codes(found(batch(few)))
