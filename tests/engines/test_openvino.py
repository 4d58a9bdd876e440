"""OpenVINO on the packaged model: what it records, what its log-probs mean, and by which rules it really draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chi2

from onepolicy.engines.base import Engine, SamplingParams
from onepolicy.engines.open import open_engine
from onepolicy.engines.shards import sample_shards
from onepolicy.errors import ContentError, EngineError, UsageError
from onepolicy.rollouts import Rollouts, column_values, concat
from onepolicy.types import Scoring, Values

pytestmark = pytest.mark.engines

THINGS = ("cats", "dogs", "fire", "water", "the sun", "the moon", "trees", "birds")
ASKS = ("What do you know about {}?", "Tell a story about {}.", "Count the {}.", "Why do people like {}?")


@pytest.fixture(scope="module")
def openvino() -> Iterator[Engine]:
    with open_engine("openvino:tiny?dtype=float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def drawn(openvino: Engine) -> Rollouts:
    """32 chat prompts, one reply each of at most 64 tokens, drawn at temperature 1, fp32."""
    prompts = openvino.encode([[{"role": "user", "content": ask.format(x)}] for x in THINGS for ask in ASKS])
    return concat(list(sample_shards(openvino, prompts, SamplingParams(max_tokens=64, seed=1))))


def prompts_of(rollouts: Rollouts, every: int = 1) -> list[list[int]]:
    n = range(0, len(rollouts), every)
    return [rollouts.token_ids[rollouts.sequence(i)][: rollouts.record("prompt_length", i)].tolist() for i in n]


def gap(rollouts: Rollouts, other: Scoring) -> np.ndarray:
    """|log-ratio| on the drawn tokens; nothing may be missing there."""
    at = rollouts.drawn
    assert other.logprobs.mask()[at].all()
    return np.abs(other.logprobs.values[at].astype(np.float64) - rollouts.scorings["sampler"].logprobs.values[at])


@pytest.fixture(scope="module")
def undecided(drawn: Rollouts, hf: Engine) -> list[int]:
    """The ids before the token that could most easily have been another."""
    entropy = hf.score(drawn).entropy
    assert entropy is not None
    t = int(np.argmax(np.where(drawn.drawn, entropy.values, -1)))
    start = int(drawn.offsets[np.searchsorted(drawn.offsets, t, side="right") - 1])
    return drawn.token_ids[start:t].tolist()


def declared_as(rollouts: Rollouts, semantics: str) -> Rollouts:
    """The same with another declaration of what the log-probs mean."""
    column = column_values("logprob_semantics", [semantics] * len(rollouts))
    return replace(rollouts, records={**rollouts.records, "logprob_semantics": column})


def test_what_is_recorded_keeps_the_contract(drawn: Rollouts) -> None:
    sampler = drawn.scorings["sampler"]
    assert len(drawn) == 32
    assert np.array_equal(sampler.logprobs.mask(), drawn.drawn)
    values = sampler.logprobs.values[drawn.drawn]
    assert np.isfinite(values).all() and (values <= 0).all() and len(set(values.tolist())) > 100
    assert (sampler.semantics, sampler.dtype) == ("raw", "float32")
    stops = set(drawn.lists["stop_token_ids"].row(0).tolist())
    reasons = set()
    for i in range(32):
        ids, n = drawn.token_ids[drawn.sequence(i)], drawn.record("prompt_length", i)
        reasons.add(drawn.record("finish_reason", i))
        # a drawn stop token is part of the reply, and only at its end
        assert (int(ids[-1]) in stops) == (drawn.record("finish_reason", i) == "stop")
        assert not stops & set(ids[n:-1].tolist()) and 0 < len(ids) - n <= 64
    assert reasons == {"stop", "length"}


def test_fp32_is_the_same_function_as_transformers(drawn: Rollouts, hf: Engine) -> None:
    d = gap(drawn, hf.score(drawn))
    assert d.mean() < 1e-5 and d.max() < 1e-3  # measured: 1.8e-6 and 1.6e-5


def test_its_prefill_agrees_with_its_decode_in_any_batch(openvino: Engine, drawn: Rollouts) -> None:
    together, alone = openvino.score(drawn), openvino.score(drawn, using={"batch_size": 1})
    assert gap(drawn, together).max() < 1e-4 and gap(drawn, alone).max() < 1e-4
    assert (together.fingerprint["batch_size"], alone.fingerprint["batch_size"]) == (0, 1)
    assert np.array_equal(np.flatnonzero(~together.logprobs.mask()), drawn.offsets[:-1])
    with pytest.raises(UsageError, match="'dtype' cannot change while it runs; live switches: batch_size"):
        openvino.score(drawn, using={"dtype": "bfloat16"})


def test_equal_models_have_equal_digests_in_both(openvino: Engine, hf: Engine) -> None:
    a, b = openvino.fingerprint(), hf.fingerprint()
    for what in ("weights_digest", "config_digest", "tokenizer_digest", "dtype", "vocab_size"):
        assert a[what] == b[what]
    assert a["kv_cache_dtype"] == "float32" and a["versions"]["openvino"]
    assert openvino.encode(["a cat"]) == hf.encode(["a cat"])
    assert "".join(openvino.decode(openvino.encode(["a cat"])[0])) == "a cat"


def test_draws_depend_on_the_seed_and_not_on_their_company(openvino: Engine, drawn: Rollouts) -> None:
    first, *others = prompts_of(drawn, 8)
    params = SamplingParams(max_tokens=12, samples=2, seed=9, ignore_eos=True)
    a, b = openvino.sample([first], params), openvino.sample([first, *others], params)
    n = a.n_tokens
    assert np.array_equal(a.token_ids, b.token_ids[:n])
    assert (a.lengths == len(first) + 12).all()
    assert not np.array_equal(*(a.token_ids[a.sequence(i)] for i in range(2)))
    assert np.abs(a.scorings["sampler"].logprobs.values - b.scorings["sampler"].logprobs.values[:n]).max() < 1e-5


def test_its_logprobs_are_raw_whatever_it_draws_by(openvino: Engine, drawn: Rollouts, hf: Engine) -> None:
    params = SamplingParams(max_tokens=32, temperature=0.7, top_p=0.8, repetition_penalty=1.2, seed=3)
    replies = openvino.sample(prompts_of(drawn, 2), params)
    raw, processed = hf.score(replies), hf.score(declared_as(replies, "processed"))
    assert replies.scorings["sampler"].semantics == "raw"
    assert gap(replies, raw).mean() < 1e-5
    assert gap(replies, processed).mean() > 0.1
    # all were drawn by those rules, so none is outside of what they keep
    assert np.isfinite(processed.logprobs.values[replies.drawn]).all()


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 7},
        {"min_p": 0.2, "top_k": 9},
        {"repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_it_draws_by_the_rules_that_it_declares(
    openvino: Engine, undecided: list[int], hf: Engine, rules: dict[str, float]
) -> None:
    """One token 1,000 times, against the distribution that transformers makes of the same rules."""
    n = 1000
    replies = openvino.sample([undecided], SamplingParams(max_tokens=1, samples=n, seed=100, **rules))
    counts = np.bincount(replies.token_ids[replies.drawn], minlength=512)
    whole = hf.score(declared_as(replies.take(range(1)), "processed"), distributions=True).distributions
    assert whole is not None
    expected = n * np.exp(whole[-1])
    assert counts[expected == 0].sum() == 0
    often = expected >= 5
    seen, wanted = np.append(counts[often], counts[~often].sum()), np.append(expected[often], expected[~often].sum())
    statistic = ((seen - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum()
    assert often.sum() > 2 and statistic < chi2.isf(1e-4, often.sum())


def test_greedy_takes_the_likeliest(openvino: Engine, drawn: Rollouts, hf: Engine) -> None:
    replies = openvino.sample(prompts_of(drawn, 8), SamplingParams(max_tokens=8, temperature=0.0))
    best = hf.score(replies, distributions=True).distributions
    assert best is not None
    assert np.array_equal(best[replies.drawn].argmax(-1), replies.token_ids[replies.drawn])


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"presence_penalty": 0.5}, "another rule than what these names declare"),
        ({"min_p": 0.1, "top_p": 0.9}, "keeps more tokens than is declared"),
    ],
)
def test_rules_that_mean_something_else_there_are_refused(openvino: Engine, rules: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        openvino.sample([[5, 6]], SamplingParams(max_tokens=4, **rules))


def test_it_scores_raw_only(openvino: Engine, drawn: Rollouts) -> None:
    hot = replace(drawn, records={**drawn.records, "temperature": column_values("temperature", [0.7] * len(drawn))})
    with pytest.raises(UsageError, match=r"record 0: its log-probs are 'processed' \(temperature 0\.7"):
        openvino.score(declared_as(hot, "processed"))
    with pytest.raises(UsageError, match="gives no full distributions"):
        openvino.score(drawn, distributions=True)


@pytest.mark.parametrize(
    ("prompt", "error", "says"),
    [
        ([5, 5000], ContentError, "prompt 0: token id 5000 at position 1 is outside the vocabulary of 512"),
        ([], EngineError, "prompt 0: it is empty"),
        ([5] * 2040, EngineError, "prompt 0: 2056 tokens with the reply, but tiny has positions for 2048"),
    ],
)
def test_bad_prompts_are_one_line_and_it_works_on(
    openvino: Engine, prompt: list[int], error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        openvino.sample([prompt], SamplingParams(max_tokens=16))
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert len(openvino.sample([[5, 6]], SamplingParams(max_tokens=2))) == 1


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"top_p": 0.0}, "top_p must be a positive float"),
        ({"temperature": -1.0}, "temperature must be a strictly positive float"),
        ({"max_tokens": 0}, "'max_new_tokens' must be greater than 0"),
    ],
)
def test_what_openvino_refuses_is_one_line_and_it_works_on(openvino: Engine, rules: dict, says: str) -> None:
    with pytest.raises(EngineError, match=says) as caught:
        openvino.sample([[5, 6], [7]], SamplingParams(**{"max_tokens": 4, **rules}))
    assert "\n" not in str(caught.value)
    assert openvino.sample([[5, 6], [7]], SamplingParams(max_tokens=2)).n_tokens > 3


def test_it_scores_up_to_the_last_position(openvino: Engine) -> None:
    records = {"logprob_semantics": column_values("logprob_semantics", ["raw"])}

    def of(n: int) -> Rollouts:
        ids = np.random.default_rng(0).integers(3, 512, n).astype(np.int32)
        return Rollouts(np.array([0, n]), {"token_ids": Values(ids)}, records)

    assert openvino.score(of(2048)).logprobs.mask().sum() == 2047
    assert openvino.score(of(1)).logprobs.mask().sum() == 0
    with pytest.raises(EngineError, match="2049 tokens with the reply, but tiny has positions for 2048"):
        openvino.score(of(2049))


def test_ids_of_another_vocabulary_name_record_and_position(openvino: Engine) -> None:
    records = {k: column_values(k, [v]) for k, v in (("logprob_semantics", "raw"), ("record_id", "r7"))}
    other = Rollouts(np.array([0, 2]), {"token_ids": Values(np.array([5, 512], dtype=np.int32))}, records)
    with pytest.raises(ContentError, match="record 'r7': token id 512 at position 1 is outside the vocabulary"):
        openvino.score(other)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("openvino:nowhere", r"'nowhere' is no directory and no packaged model"),
        ("openvino:nowhere.gguf", r"no such file"),
        ("openvino:tiny?batch_size=-1", r"batch_size: got -1, wanted at least 0"),
        ("openvino:tiny?dtype=float32&kv_cache_dtype=bfloat16", r"it stores float32, float16, uint8, uint4"),
    ],
)
def test_what_cannot_start_is_one_line(spec: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught, open_engine(spec, in_process=True):
        pass
    assert "\n" not in str(caught.value)
