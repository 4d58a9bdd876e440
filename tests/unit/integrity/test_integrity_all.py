"""All checks together: silent in health, each fault its own finding and no other, and the same totals for any split."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from integrity_dumps import (
    NAMES,
    batch,
    changed,
    codes,
    drawn,
    found,
    reply,
    rolled,
    settled,
    shaped,
    totals,
    with_values,
)
from onepolicy.counted import Counted
from onepolicy.engines.fake_rounding import round_to
from onepolicy.formats.base import BrokenRecord
from onepolicy.integrity import CHECKS, judge_all, look_all
from onepolicy.integrity.base import Batch, Told
from onepolicy.rollouts import Rollouts
from onepolicy.types import Values

DTYPES = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [6, 48])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"temperature": 1.5}, {"top_p": 0.8}, {"top_k": 1}])
def test_health_is_silent(dtype: str, tokens: int, settings: dict[str, float]) -> None:
    """`top_k` 1: every value of the sampler is an honest 0.0, so is every one of the scorer."""
    r = drawn(dtype, 12, tokens, **settings)
    assert found(batch(r), vocab_size=256) == []
    assert found(batch(r, ("sampler", None)), vocab_size=256) == []


@pytest.mark.parametrize("noise", [1e-5, 0.02, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("sequences", [1, 60])
def test_gaps_of_any_size_are_silent(noise: float, sequences: int) -> None:
    for seed in range(2):
        assert found(batch(shaped(noise, sequences, seed))) == []


def _scattered(r: Rollouts, value: float) -> Rollouts:
    at = r.drawn & (np.random.default_rng(8).random(r.n_tokens) < 0.1)
    return changed(r, "sampler", lambda x: np.where(at, value, x))


def _empty_masks(r: Rollouts) -> Rollouts:
    mask = r.drawn & np.repeat(np.arange(len(r)) % 3 == 0, r.lengths)
    return replace(r, tokens={**r.tokens, "loss_mask": Values(mask)})


def _nulls(r: Rollouts) -> Rollouts:
    col = r.scorings["old"].logprobs
    return with_values(r, "old", col.values, col.mask() & (np.arange(r.n_tokens) % 40 != 7))


def _inside(r: Rollouts) -> Rollouts:
    """Every list one late from the middle of its sequence on."""
    late = rolled(r, "old", 1).scorings["old"].logprobs.values
    at = np.arange(r.n_tokens) - np.repeat(r.offsets[:-1], r.lengths)
    return changed(r, "old", lambda x: np.where(at > np.repeat(r.lengths, r.lengths) // 2, late, x))


def _top(r: Rollouts) -> Rollouts:
    """The sampler is far above the scorer at unlikely tokens of every second sequence."""
    odd = np.repeat(np.arange(len(r)) % 2 == 0, r.lengths)
    rng = np.random.default_rng(1)
    return changed(r, "sampler", lambda x: np.where(odd & (x < -1.6), -rng.exponential(0.3, len(x)), x))


def _bf16(x: Any) -> Any:
    return round_to(x, "bfloat16").astype(np.float64)


FAULTS: dict[str, Callable[[Rollouts], Rollouts]] = {
    "shift-by-one": lambda r: rolled(r, "old", 1),
    "filled-logprob": lambda r: _scattered(r, -9999.0),
    "uniform-vocabulary": lambda r: changed(r, "sampler", lambda x: np.full(len(x), -np.log(50257.0))),
    "one-source": lambda r: r.with_scoring("old", r.scorings["sampler"]),
    "stored-as-bf16": lambda r: changed(r, "sampler", _bf16),
    "stored-as-fp16": lambda r: changed(r, "old", lambda x: round_to(x, "float16").astype(np.float64)),
    "positive-logprob": lambda r: changed(r, "sampler", np.negative),
    "nonfinite-logprob": lambda r: _scattered(r, np.nan),
    "missing-logprobs": _nulls,
    "nothing-trained": _empty_masks,
}


@pytest.mark.parametrize("healthy", [*DTYPES, "shaped"])
@pytest.mark.parametrize("code", FAULTS)
def test_each_fault_its_own_finding_and_no_other(code: str, healthy: str) -> None:
    r = shaped() if healthy == "shaped" else drawn(healthy)
    at_masked = {"values-at-masked-places"} if code == "nothing-trained" and healthy == "shaped" else set[str]()
    assert set(codes(found(batch(FAULTS[code](r))))) - at_masked == {code}


def _json(parts: dict[str, Counted]) -> str:
    return json.dumps({k: v.to_dict() for k, v in sorted(parts.items())})


@pytest.mark.parametrize("code", [*FAULTS, "healthy", "zeros", "repeated"])
def test_any_split_and_order_gives_the_same_totals(code: str) -> None:
    more = {
        "healthy": lambda r: r,
        "zeros": lambda r: _scattered(r, 0.0),
        "repeated": lambda r: _scattered(r, -1.0),
        "inside": _inside,
        "top": _top,
    }
    r = {**FAULTS, **more}[code](shaped())
    whole = _json(totals(batch(r)))
    rng = np.random.default_rng(0)
    for pieces in (2, 7):
        order = rng.permutation(len(r))
        parts = [batch(r.take(x)) for x in np.array_split(order, pieces)]
        assert _json(totals(*parts)) == whole
    again = {k: Counted.from_dict(json.loads(json.dumps(v.to_dict()))) for k, v in totals(batch(r)).items()}
    assert judge_all(again, Told(NAMES)) == found(batch(r))


def test_settled_records_split_alike() -> None:
    a = [-0.4, -1.2, -0.1, -3.0, -0.9]
    records: list[Any] = [reply(f"r{i:02}", [*a, -1.0] if i % 3 else a, a, 5) for i in range(40)]
    records += [BrokenRecord(f"f:{i}", "cut off") for i in range(20)]
    whole = _json(totals(settled(*records)))
    assert _json(totals(*(settled(*records[i : i + 7]) for i in range(0, 60, 7)))) == whole
    assert _json(totals(*(settled(x) for x in reversed(records)))) == whole


def test_odd_batches_do_not_raise() -> None:
    empty = Rollouts(np.zeros(1, np.int64), {"token_ids": Values(np.zeros(0, np.int32))})
    assert judge_all(look_all(Batch(empty, (), (), None, None)), Told((None, None))) == []
    r = drawn("float32")
    fixed = replace(r, tokens={"token_ids": r.tokens["token_ids"]})  # nothing is drawn
    assert found(batch(fixed)) == []
    extremes = changed(r, "old", lambda x: np.where(np.arange(len(x)) % 2 == 0, np.inf, -np.inf))
    assert codes(found(batch(extremes))) == ["nonfinite-logprob", "nothing-scored"]
    huge = changed(r, "old", lambda x: np.full(len(x), -1e300))
    assert codes(found(batch(huge))) == ["filled-logprob"]
    assert set(look_all(batch(r))) == set(CHECKS)


def test_every_finding_says_where_it_comes_from_and_is_json() -> None:
    for make in FAULTS.values():
        for f in found(batch(make(shaped()))):
            assert f.origin == "run" and f.message and f.advice
            assert json.loads(json.dumps(f.evidence, allow_nan=False)) == json.loads(json.dumps(f.evidence))


def _odd(seed: int) -> Rollouts:
    """Anything a file may hold: empty sequences, odd values, columns that are null or missing."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 12, int(rng.integers(1, 8)))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    n = int(offsets[-1])
    flags = lambda p: Values(rng.random(n) < p, rng.random(n) < 0.8 if rng.random() < 0.3 else None)
    tokens = {
        "token_ids": Values(rng.integers(0, 50, n).astype(np.int32)),
        "drawn": flags(0.8),
        "loss_mask": flags(0.7),
    }
    out = Rollouts(offsets, {k: v for k, v in tokens.items() if k == "token_ids" or rng.random() < 0.8})
    pool = np.array([0.0, -0.0, 1.0, 2.5, -0.5, -1.0, -1e-9, -100.0, -9999.0, -1e308, 1e308, np.nan, np.inf, -np.inf])
    for name in NAMES:
        x = np.where(rng.random(n) < 0.5, rng.choice(pool, n), -rng.exponential(1.0, n))
        out = with_values(out, name, x, rng.random(n) < 0.9 if rng.random() < 0.5 else None)
    return out


@pytest.mark.filterwarnings("error")
def test_anything_is_looked_at_and_judged_the_same_in_pieces() -> None:
    for seed in range(40):
        r = _odd(seed)
        for names in (NAMES, ("sampler", None)):
            findings = found(batch(r, names), vocab_size=40)
            json.dumps([dict(f.evidence) for f in findings], allow_nan=False)
            whole = totals(batch(r, names))
            pieces = totals(*(batch(r.take([i]), names) for i in reversed(range(len(r)))))
            assert judge_all(pieces, Told(names)) == judge_all(whole, Told(names))
            assert _json(pieces) == _json(whole)
