"""vLLM on the packaged model: the contract of what it records, and the same function as transformers in fp32."""

from __future__ import annotations

import numpy as np
import pytest

from onepolicy.engines.base import Engine, SamplingParams
from onepolicy.errors import ContentError, EngineError, UsageError
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring, Values

pytestmark = pytest.mark.engines


def gap(rollouts: Rollouts, other: Scoring) -> np.ndarray:
    """|log-ratio| on the drawn tokens; nothing may be missing there."""
    at = rollouts.drawn
    assert other.logprobs.mask()[at].all()
    return np.abs(other.logprobs.values[at].astype(np.float64) - rollouts.scorings["sampler"].logprobs.values[at])


def test_what_is_recorded_keeps_the_contract(recorded: Rollouts) -> None:
    sampler = recorded.scorings["sampler"]
    assert len(recorded) == 64
    assert np.array_equal(sampler.logprobs.mask(), recorded.drawn)
    drawn = sampler.logprobs.values[recorded.drawn]
    assert np.isfinite(drawn).all() and (drawn <= 0).all() and len(set(drawn.tolist())) > 100
    assert (sampler.semantics, sampler.dtype) == ("processed", "float32")
    stops = set(recorded.lists["stop_token_ids"].row(0).tolist())
    reasons = set()
    for i in range(64):
        ids, n = recorded.token_ids[recorded.sequence(i)], recorded.record("prompt_length", i)
        reasons.add(recorded.record("finish_reason", i))
        # a drawn stop token is part of the reply, and only at its end
        assert (int(ids[-1]) in stops) == (recorded.record("finish_reason", i) == "stop")
        assert not stops & set(ids[n:-1].tolist()) and len(ids) - n <= 64
        assert recorded.record("temperature", i) == 1.0 and recorded.record("group_id", i) == str(i)
    assert "stop" in reasons


def test_fp32_is_the_same_function_as_transformers(recorded: Rollouts, hf: Engine) -> None:
    d = gap(recorded, hf.score(recorded))
    assert d.mean() < 1e-5 and d.max() < 1e-3


def test_processed_logprobs_follow_the_same_rules_in_both(processed: Rollouts, hf: Engine) -> None:
    d = gap(processed, hf.score(processed))
    assert d.mean() < 1e-5 and d.max() < 1e-3


def test_equal_models_have_equal_digests_in_both(vllm: Engine, hf: Engine) -> None:
    a, b = vllm.fingerprint(), hf.fingerprint()
    for what in ("weights_digest", "config_digest", "tokenizer_digest", "dtype", "vocab_size"):
        assert a[what] == b[what]
    assert a["kv_cache_dtype"] == "float32" and a["versions"]["vllm"]
    assert vllm.encode(["a cat"]) == hf.encode(["a cat"])
    assert "".join(vllm.decode(vllm.encode(["a cat"])[0])) == "a cat"


def test_it_scores_given_ids_at_raw_only(vllm: Engine, recorded: Rollouts, processed: Rollouts) -> None:
    own = vllm.score(recorded)
    assert own.semantics == "raw" and gap(recorded, own).max() < 1e-4
    assert not own.logprobs.mask()[recorded.offsets[:-1]].any()
    with pytest.raises(UsageError, match=r"record 0: its log-probs are 'processed' \(temperature 0\.8"):
        vllm.score(processed)


def test_draws_depend_on_the_seed_and_not_on_what_came_before(vllm: Engine, recorded: Rollouts) -> None:
    prompt = recorded.token_ids[: recorded.record("prompt_length", 0)].tolist()
    params = SamplingParams(max_tokens=12, samples=2, seed=9, ignore_eos=True)
    a, b = vllm.sample([prompt], params), vllm.sample([prompt], params)
    assert np.array_equal(a.token_ids, b.token_ids)
    assert (a.lengths == len(prompt) + 12).all()
    assert not np.array_equal(*(a.token_ids[a.sequence(i)] for i in range(2)))


@pytest.mark.parametrize(
    ("prompt", "error", "says"),
    [
        ([5, 5000], ContentError, "prompt 0: token id 5000 at position 1 is outside the vocabulary of 512"),
        ([], EngineError, "prompt 0: it is empty"),
        ([5] * 2040, EngineError, "prompt 0: 2056 tokens with the reply, but max_model_len is 2048"),
    ],
)
def test_bad_prompts_are_one_line_and_it_works_on(
    vllm: Engine, prompt: list[int], error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        vllm.sample([prompt], SamplingParams(max_tokens=16))
    assert says in str(caught.value)


def test_ids_of_another_vocabulary_name_record_and_position(hf: Engine, vllm: Engine) -> None:
    from onepolicy.rollouts import column_values

    records = {"logprob_semantics": column_values("logprob_semantics", ["raw"])}
    records["record_id"] = column_values("record_id", ["r7"])
    other = Rollouts(np.array([0, 2]), {"token_ids": Values(np.array([5, 512], dtype=np.int32))}, records)
    for engine in (hf, vllm):
        with pytest.raises(ContentError, match="record 'r7': token id 512 at position 1 is outside the vocabulary"):
            engine.score(other)
