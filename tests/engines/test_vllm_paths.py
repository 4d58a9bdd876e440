"""The two ways by which vLLM scores given ids, in any batch, with a cold and a warm cache; entropies of its draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from onepolicy.engines.base import Engine, SamplingParams
from onepolicy.engines.open import open_engine
from onepolicy.errors import ContentError, EngineError, UsageError
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import Scoring, Values

pytestmark = pytest.mark.engines

RULES = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.02}
NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}


@pytest.fixture(scope="module")
def bf16() -> Iterator[Engine]:
    with open_engine("vllm:tiny?entropy=true") as engine:
        yield engine


@pytest.fixture(scope="module")
def drawn_bf16(bf16: Engine, recorded: Rollouts) -> Rollouts:
    """32 replies that were drawn together."""
    prompts = [recorded.token_ids[recorded.sequence(i)][: recorded.record("prompt_length", i)] for i in range(32)]
    return bf16.sample([p.tolist() for p in prompts], SamplingParams(max_tokens=48, seed=3))


def random_texts(lengths: list[int], prompts: list[int | None], **declared: Any) -> Rollouts:
    """Ids that nobody would draw."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.random.default_rng(1).integers(3, 512, offsets[-1]).astype(np.int32)
    columns = {"prompt_length": prompts} | {k: [v] * len(lengths) for k, v in declared.items()}
    records = {k: column_values(k, v) for k, v in columns.items() if any(x is not None for x in v)}
    return Rollouts(offsets, {"token_ids": Values(ids)}, records)


def gaps(a: Scoring, b: Scoring) -> np.ndarray:
    """`[n]` |log-ratio| where both are valid."""
    both = a.logprobs.mask() & b.logprobs.mask()
    assert both.any()
    return np.abs(a.logprobs.values[both].astype(np.float64) - b.logprobs.values[both])


def test_forced_through_decode_the_same_ids_have_the_same_bits(bf16: Engine, drawn_bf16: Rollouts) -> None:
    again = bf16.score(drawn_bf16, using={"path": "decode"})
    sampler = drawn_bf16.scorings["sampler"]
    assert np.array_equal(again.logprobs.mask(), drawn_bf16.drawn)
    assert gaps(again, sampler).max() == 0.0
    assert (again.semantics, again.dtype, again.fingerprint["path"]) == ("processed", "bfloat16", "decode")


@pytest.mark.parametrize("batch_size", [1, 5])
def test_batches_and_prefill_differ_by_rounding_only(bf16: Engine, drawn_bf16: Rollouts, batch_size: int) -> None:
    for path in ("decode", "prefill"):
        out = bf16.score(drawn_bf16, using={"path": path, "batch_size": batch_size})
        d = gaps(out, drawn_bf16.scorings["sampler"])
        assert d.mean() < 0.02 and d.max() < 0.3
        assert out.fingerprint["batch_size"] == batch_size


def test_entropies_of_draws_are_kept_and_forced_ids_have_the_same(
    bf16: Engine, drawn_bf16: Rollouts, hf: Engine
) -> None:
    sampler, scored = drawn_bf16.scorings["sampler"], hf.score(drawn_bf16)
    forced = bf16.score(drawn_bf16, using={"path": "decode"})
    at = drawn_bf16.drawn
    for name, bound in (("entropy", 0.05), ("varentropy", 0.2)):
        mine, again, other = (getattr(s, name) for s in (sampler, forced, scored))
        assert np.array_equal(mine.mask(), at) and np.array_equal(again.mask(), at)
        assert np.array_equal(mine.values[at], again.values[at])
        assert np.abs(mine.values - other.values)[at].mean() < bound
    assert bf16.score(drawn_bf16).entropy is None  # prefill has none


def test_a_float32_head_changes_the_values_and_raw_is_what_it_says(
    bf16: Engine, drawn_bf16: Rollouts, processed: Rollouts
) -> None:
    with open_engine("vllm:tiny?head_dtype=float32&logprobs=raw&entropy=true") as head:
        out, whole = head.score(drawn_bf16, using={"path": "decode"}), head.score(drawn_bf16)
        with pytest.raises(UsageError, match=r"record 0: its log-probs are 'processed' \(temperature 0\.8"):
            head.score(processed, using={"path": "decode"})
    said = out.fingerprint
    assert (said["head_dtype"], said["dtype"], said["logprobs"]) == ("float32", "bfloat16", "raw")
    assert bf16.fingerprint()["head_dtype"] == "bfloat16"
    d = gaps(out, drawn_bf16.scorings["sampler"])  # the same hidden states: only the head has rounded
    assert (d > 0).mean() > 0.5 and d.mean() < 0.02
    assert out.semantics == "raw" and gaps(out, whole).mean() < 0.02
    mine, other = out.entropy, drawn_bf16.scorings["sampler"].entropy
    assert mine is not None and other is not None
    assert np.abs(mine.values - other.values)[drawn_bf16.drawn].mean() < 0.02


def test_random_ids_come_out_exactly_and_mean_what_transformers_says(vllm: Engine, hf: Engine) -> None:
    texts = random_texts([40, 7, 1, 90, 2, 33], [20, None, 1, 0, 2, 40], logprob_semantics="raw")
    out, want = vllm.score(texts, using={"path": "decode"}), hf.score(texts)
    place = np.concatenate([np.arange(n) for n in texts.lengths])
    begin = np.repeat([20, 1, 1, 1, 2, 33], texts.lengths)  # nothing of the last two is behind its prompt
    assert np.array_equal(out.logprobs.mask(), place >= begin)
    assert gaps(out, want).max() < 1e-3 and gaps(out, want).mean() < 1e-5
    assert out.semantics == "raw" and out.entropy is None


def test_decode_scores_by_every_declared_rule(vllm: Engine, hf: Engine, processed: Rollouts) -> None:
    out = vllm.score(processed, using={"path": "decode"})
    assert out.semantics == "processed"
    assert gaps(out, processed.scorings["sampler"]).max() < 1e-4
    cut = random_texts([30, 50], [10, 25], logprob_semantics="processed", **RULES, **PENALTIES)
    out, want = vllm.score(cut, using={"path": "decode"}), hf.score(cut)
    at = out.logprobs.mask()
    assert np.isneginf(out.logprobs.values[at]).any()  # a random id is seldom in the kept set
    assert np.array_equal(np.isneginf(out.logprobs.values[at]), np.isneginf(want.logprobs.values[at]))
    whole = random_texts([30, 50], [10, 25], logprob_semantics="processed", **(RULES | NEUTRAL), **PENALTIES)
    out, want = vllm.score(whole, using={"path": "decode"}), hf.score(whole)
    assert out.semantics == "processed" and gaps(out, want).max() < 1e-3
    only = random_texts([30], [10], logprob_semantics="temperature", temperature=0.5)
    out, want = vllm.score(only, using={"path": "decode"}), hf.score(only)
    assert out.semantics == "temperature" and gaps(out, want).max() < 1e-3


def test_a_warm_cache_is_read_and_a_cold_one_is_not(vllm: Engine) -> None:
    texts = random_texts([300, 280, 300], [270, 260, 129], logprob_semantics="raw")
    outs = {c: vllm.score(texts, using={"path": "decode", "cache": c}) for c in ("cold", "warm", "as_is")}
    cached = {c: out.fingerprint["cached_tokens"] for c, out in outs.items()}
    assert cached == {"cold": 0, "warm": 256 + 256 + 128, "as_is": 256 + 256 + 128}  # blocks of 128
    assert gaps(outs["cold"], outs["warm"]).max() < 1e-3
    assert outs["warm"].fingerprint["cache"] == "warm" and vllm.score(texts).fingerprint["cached_tokens"] == 0


def test_a_reply_with_foreign_tokens_is_not_counted_as_drawn(vllm: Engine) -> None:
    texts = random_texts([20], [5], logprob_semantics="processed", **RULES, **PENALTIES)
    place = np.arange(20)
    texts = replace(texts, tokens={**texts.tokens, "drawn": Values((place >= 5) & ((place < 10) | (place > 12)))})
    with pytest.raises(UsageError, match="record 0: it has tokens that were not drawn behind its prompt"):
        vllm.score(texts, using={"path": "decode"})


@pytest.mark.parametrize(
    ("using", "says"),
    [
        ({"dtype": "bfloat16"}, "'dtype' cannot change while it runs; live switches: path, batch_size, cache"),
        ({"pth": "decode"}, "'pth' cannot change while it runs"),
        ({"batch_size": 33}, r"batch_size: got 33, wanted 0 to max_num_seqs \(32\)"),
        ({"batch_size": -1}, "batch_size: got -1"),
        ({"cache": "warm"}, "cache=warm needs path=decode"),
    ],
)
def test_switches_that_cannot_be_are_refused_and_it_works_on(vllm: Engine, using: dict[str, Any], says: str) -> None:
    texts = random_texts([4], [2], logprob_semantics="raw")
    with pytest.raises(UsageError, match=says):
        vllm.score(texts, using=using)
    assert vllm.score(texts).logprobs.mask().sum() == 3


def test_bad_ids_and_lengths_are_named_on_the_decode_path_too(vllm: Engine) -> None:
    long = random_texts([2049], [5], logprob_semantics="raw")
    with pytest.raises(EngineError, match="2049 tokens with the reply, but max_model_len is 2048"):
        vllm.score(long, using={"path": "decode"})
    texts = random_texts([4], [2], logprob_semantics="raw")
    texts.token_ids[3] = 512
    with pytest.raises(ContentError, match="token id 512 at position 3 is outside the vocabulary of 512"):
        vllm.score(texts, using={"path": "decode"})
    full = random_texts([2048], [2040], logprob_semantics="raw")  # nothing is drawn behind it on this path
    assert vllm.score(full, using={"path": "decode"}).logprobs.mask().sum() == 8
