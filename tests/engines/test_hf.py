"""The transformers engine against plain torch: one sequence at a time, rules by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_reference import chosen, expected, log_softmax, plain_logits, texts

from onepolicy import models
from onepolicy.engines.base import SamplingParams
from onepolicy.engines.open import open_engine
from onepolicy.errors import EngineError, UsageError
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import Lists, Values

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def logits_of() -> Callable[[np.ndarray], np.ndarray]:
    return plain_logits(models.path("tiny"))


@pytest.mark.parametrize(
    "switches", ["batch_size=1", "batch_size=4", "padding_side=left", "attention=eager", "path=decode&batch_size=3"]
)
def test_batches_padding_kernels_and_the_cache_do_not_change_fp32(switches: str, logits_of: Any) -> None:
    rollouts = texts("raw")
    with open_engine(f"hf:tiny?dtype=float32&{switches}", in_process=True) as engine:
        out = engine.score(rollouts)
    want = expected(rollouts, logits_of, lambda z, before, n, t: z)
    at = out.logprobs.mask()
    assert np.array_equal(np.flatnonzero(~at), rollouts.offsets[:-1])
    assert np.abs(out.logprobs.values - chosen(rollouts, want))[at].max() < 2e-5
    p = np.exp(want[at])
    entropy = -(p * want[at]).sum(-1)
    assert np.abs(out.entropy.values[at] - entropy).max() < 2e-5
    assert np.abs(out.varentropy.values[at] - (p * (-want[at] - entropy[:, None]) ** 2).sum(-1)).max() < 2e-4
    assert (out.semantics, out.dtype) == ("raw", "float32")


def test_distributions_are_whole_and_the_limit_says_how_many(logits_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = texts("temperature", temperature=0.7)
    with open_engine("hf:tiny?dtype=float32", in_process=True) as engine:
        out = engine.score(rollouts, distributions=True)
        monkeypatch.setattr("onepolicy.engines.hf._DISTRIBUTION_BYTES", 2**19)
        with pytest.raises(EngineError, match="ask for at most 128 tokens at once"):
            engine.score(rollouts, distributions=True)
    want = expected(rollouts, logits_of, lambda z, before, n, t: z / 0.7)
    at = out.logprobs.mask()
    assert np.abs(out.distributions - want)[at].max() < 1e-4 and np.isnan(out.distributions[~at]).all()
    assert np.abs(np.exp(out.distributions[at]).sum(-1) - 1).max() < 1e-14
    assert np.abs(out.logprobs.values - chosen(rollouts, want))[at].max() < 2e-5


def by_hand(z: np.ndarray, before: np.ndarray, n: int, t: int) -> np.ndarray:
    """Penalties, temperature, min_p, top_k, top_p, each written out with loops and sets."""
    for x in set(before.tolist()):
        z[x] = z[x] / 1.2 if z[x] > 0 else z[x] * 1.2
    reply = before[n:].tolist() if t >= n else []
    for x in set(reply):
        z[x] -= 0.1 * reply.count(x) + 0.3
    z = z / 0.9
    p = np.exp(log_softmax(z))
    z[p < 0.01 * p.max()] = -np.inf
    order = np.argsort(-z, kind="stable")
    z[order[20:]] = -np.inf
    p = np.exp(log_softmax(z))
    for place, x in enumerate(order):
        if p[order[:place]].sum() >= 0.8:
            z[x] = -np.inf
    return z


def test_processed_is_every_rule_in_vllms_order(logits_of: Any) -> None:
    rules = {"temperature": 0.9, "min_p": 0.01, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.2}
    rollouts = texts("processed", **rules, presence_penalty=0.3, frequency_penalty=0.1)
    with open_engine("hf:tiny?dtype=float32", in_process=True) as engine:
        out = engine.score(rollouts)
    with np.errstate(divide="ignore"):
        want = chosen(rollouts, expected(rollouts, logits_of, by_hand))
    at = out.logprobs.mask()
    got, want = out.logprobs.values[at], want[at]
    assert np.array_equal(np.isneginf(got), np.isneginf(want)) and np.isneginf(got).any()
    finite = np.isfinite(want)
    assert np.abs(got[finite] - want[finite]).max() < 5e-5
    assert np.isfinite(out.entropy.values[at]).all()


def test_a_recorded_sampling_mask_replaces_the_engines_own_kept_set(logits_of: Any) -> None:
    rollouts = texts("processed", top_k=2)
    kept = [[int(x), 7] if i % 2 else [] for i, x in enumerate(rollouts.token_ids)]
    offsets = np.concatenate([[0], np.cumsum([len(set(k)) for k in kept])])
    flat = np.array([x for k in kept for x in sorted(set(k))], dtype=np.int32)
    with_mask = replace(rollouts, lists={"sampling_mask": Lists(flat, offsets)})
    with open_engine("hf:tiny?dtype=float32", in_process=True) as engine:
        out, plain = engine.score(with_mask), engine.score(rollouts)
    want = expected(rollouts, logits_of, lambda z, before, n, t: z)
    for t in np.flatnonzero(out.logprobs.mask()):
        among = want[t][sorted(set(kept[t]))] if kept[t] else None
        mine = want[t][rollouts.token_ids[t]]
        expect = plain.logprobs.values[t] if among is None else mine - np.log(np.exp(among).sum())
        assert out.logprobs.values[t] == pytest.approx(expect, abs=2e-5)


def test_what_it_draws_it_scores_the_same_and_half_precision_stays_close() -> None:
    params = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, repetition_penalty=1.1, samples=2)
    with open_engine("hf:tiny?dtype=float32", in_process=True) as engine:
        drawn = engine.sample(engine.encode(["One day a cat", "The sun"]), params)
        again = engine.score(drawn)
    at = drawn.drawn
    sampler = drawn.scorings["sampler"].logprobs.values
    assert np.abs(again.logprobs.values - sampler)[at].max() < 2e-5
    for dtype, bound in (("float16", 0.01), ("bfloat16", 0.05)):
        with open_engine(f"hf:tiny?dtype={dtype}", in_process=True) as engine:
            out = engine.score(drawn)
            assert engine.fingerprint()["dtype"] == out.dtype == dtype
        d = np.abs(out.logprobs.values - sampler)[at]
        assert 1e-5 < d[np.isfinite(d)].mean() < bound


def test_what_it_cannot_load_or_score_is_one_line(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(models.path("tiny"), copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    with (
        pytest.raises(EngineError, match=r"tensors are not in the files and would be random, 'model\.layers\.4"),
        open_engine(f"hf:{copy}", in_process=True),
    ):
        pass
    (copy / "config.json").write_text("{")
    with pytest.raises(EngineError) as caught, open_engine(f"hf:{copy}", in_process=True):
        pass
    assert "\n" not in str(caught.value)
    with open_engine("hf:tiny", in_process=True) as engine:
        long = Rollouts(
            np.array([0, 2049]),
            {"token_ids": Values(np.zeros(2049, dtype=np.int32))},
            {"logprob_semantics": column_values("logprob_semantics", ["raw"])},
        )
        with pytest.raises(EngineError, match="2049 tokens, but tiny has positions for 2048"):
            engine.score(long)
        with pytest.raises(UsageError, match="logprob_semantics not declared"):
            engine.score(replace(long, records={}))
