"""A real vLLM API server process: ids and log-probs over HTTP are those of the engine, and its death is one line."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from server import Server, serving

from onepolicy import models
from onepolicy.check import Choices, check, check_engines
from onepolicy.engines.base import Engine, SamplingParams
from onepolicy.engines.http_load import busy
from onepolicy.engines.open import open_engine
from onepolicy.engines.shards import sample_shards
from onepolicy.errors import ContentError, EngineError
from onepolicy.record import record_rollouts
from onepolicy.rollouts import Rollouts, concat
from onepolicy.suite import load
from onepolicy.types import Outcome, Ran, Scoring, Values

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--generation-config", "vllm") as running:
        yield running


@pytest.fixture(scope="module")
def engine(server: Server) -> Iterator[Engine]:
    with open_engine(f"{server.url}?dtype=float32") as opened:
        yield opened


@pytest.fixture(scope="module")
def served(server: Server) -> Rollouts:
    """The 64 own prompts, one reply each of at most 48 tokens, through the recording that users call."""
    return record_rollouts(f"{server.url}?dtype=float32", params=SamplingParams(max_tokens=48, seed=1))


def gap(rollouts: Rollouts, other: Scoring) -> np.ndarray:
    """|log-ratio| on the drawn tokens; nothing may be missing there."""
    at = rollouts.drawn
    assert other.logprobs.mask()[at].all()
    return np.abs(other.logprobs.values[at].astype(np.float64) - rollouts.scorings["sampler"].logprobs.values[at])


def test_it_knows_who_answers(engine: Engine) -> None:
    said = engine.fingerprint()
    known = {"dialect": "vllm", "server": "vllm", "model": "tiny", "max_model_len": 2048, "dtype": "float32"}
    assert {k: said[k] for k in known} == known and said["version"][0].isdigit()
    assert said["weights_digest"] is None


def test_what_is_recorded_keeps_the_contract(served: Rollouts) -> None:
    sampler = served.scorings["sampler"]
    assert len(served) == 64 and np.array_equal(sampler.logprobs.mask(), served.drawn)
    values = sampler.logprobs.values[served.drawn]
    assert np.isfinite(values).all() and (values <= 0).all() and len(set(values.tolist())) > 100
    assert (sampler.semantics, sampler.dtype) == ("raw", "float32")
    last = {served.record("finish_reason", i): int(served.token_ids[served.sequence(i)][-1]) for i in range(64)}
    assert last["stop"] == 2 and set(last) <= {"stop", "length"}  # the drawn stop token is part of the reply


def test_its_ids_and_numbers_are_those_of_the_engine_without_a_server(
    server: Server, engine: Engine, served: Rollouts, vllm: Engine
) -> None:
    """vLLM in our own worker: the same ids of a text and chat, the same draws at the same seeds in fp32."""
    chat = [{"role": "user", "content": "Why do people like cats?"}]
    assert engine.encode(["a cat", chat]) == vllm.encode(["a cat", chat])
    assert engine.decode([67, 291, 67]) == vllm.decode([67, 291, 67])
    with open_engine(f"{server.url}?tokenizer={models.path('tiny')}") as local:
        assert local.encode(["a cat", chat]) == vllm.encode(["a cat", chat])
        assert local.fingerprint()["tokenizer_digest"] == vllm.fingerprint()["tokenizer_digest"]
    prompts = [served.token_ids[served.sequence(i)][: served.record("prompt_length", i)].tolist() for i in range(8)]
    params = SamplingParams(max_tokens=16, seed=4, ignore_eos=True)
    ours = concat(list(sample_shards(engine, prompts, params)))
    theirs = concat(list(sample_shards(vllm, prompts, params)))
    assert np.array_equal(ours.token_ids, theirs.token_ids)
    assert gap(ours, theirs.scorings["sampler"]).max() < 1e-4


def test_fp32_is_the_same_function_as_transformers(engine: Engine, served: Rollouts, hf: Engine) -> None:
    d = gap(served, hf.score(served))
    assert d.mean() < 1e-5 and d.max() < 1e-4
    prefill = engine.score(served)
    assert gap(served, prefill).max() < 1e-4
    reference = hf.score(served)
    at = reference.logprobs.mask()
    assert np.array_equal(prefill.logprobs.mask(), at)  # prompts are scored too
    assert np.abs(prefill.logprobs.values - reference.logprobs.values)[at].max() < 1e-4


def test_a_check_with_a_server_as_the_scorer(server: Server, served: Rollouts) -> None:
    report, _ = check(served, f"{server.url}?dtype=float32", bounds="fp32")
    assert report.outcome.value == "pass", [f.message for f in report.findings]


def test_alone_in_a_batch_and_beside_a_load(server: Server, engine: Engine, served: Rollouts) -> None:
    some = served.take(range(12))
    idle = engine.score(some)
    for using in ({"batch_size": 1}, {"load": "loaded", "load_requests": 6}):
        other = engine.score(some, using=using)
        assert np.abs(other.logprobs.values - idle.logprobs.values).max() < 1e-4
        assert {k: other.fingerprint[k] for k in using} == using
    with busy(engine._client, lambda k: engine._dialect.load([1, 400, 201 + k], 200), 5):  # type: ignore[attr-defined]
        assert soon_running(server, 5)
    assert soon_running(server, 0)  # its requests were given up, not worked off


def soon_running(server: Server, n: int) -> bool:
    """Whether the server says within five seconds that it works on `n` requests: it counts once a step, and one that
    has just ended is followed by another."""
    return any(threading.Event().wait(0.1) or server.metric("vllm:num_requests_running") == n for _ in range(50))


@pytest.mark.parametrize(
    ("prompt", "n", "error", "says"),
    [
        ([5, 5000], 4, ContentError, "prompt 0: Token id 5000 is out of vocabulary; the ids were made by another"),
        ([5] * 2040, 16, EngineError, "prompt 0: 2056 tokens with the reply, but the server's max_model_len is 2048"),
    ],
)
def test_what_it_refuses_is_one_line(
    engine: Engine, prompt: list[int], n: int, error: type[Exception], says: str
) -> None:
    with pytest.raises(error) as caught:
        engine.sample([prompt], SamplingParams(max_tokens=n))
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_ids_of_another_vocabulary_name_the_record(engine: Engine, served: Rollouts) -> None:
    ids = np.array(served.token_ids)
    ids[served.sequence(3)] = 700
    other = replace(served, tokens={**served.tokens, "token_ids": Values(ids)})
    name = served.record("record_id", 3)
    with pytest.raises(ContentError, match=f"record '{name}': .*out of vocabulary"):
        engine.score(other)


def score_for_ever(engine: Engine, rollouts: Rollouts) -> None:
    for _ in range(1000):
        engine.score(rollouts)


def test_the_whole_check_of_a_server(server: Server) -> None:
    """A server that computes in float32, as is declared, against transformers: its own legs over HTTP."""
    suite = load("default")
    written = replace(suite, prompts=tuple(p for p in suite.prompts if p.prompt)[:40], texts=())
    legs = ["same-function", "sampler-again", "sampler-batch", "sampler-load", "across-prefill", "contract"]
    choices = Choices(legs, suite=written, params=SamplingParams(max_tokens=32, seed=3))
    report, _ = check_engines(f"{server.url}?dtype=float32", "hf:tiny?dtype=float32", choices=choices)
    ran = {x.key: (x.ran, x.outcome) for x in report.legs if x.key in legs}
    assert ran == dict.fromkeys(legs, (Ran.DONE, Outcome.PASS))
    assert report.outcome is Outcome.PASS
    contract = next(x for x in report.legs if x.key == "contract").facts
    assert contract["meaning"] == "raw"  # vLLM's own default


def test_a_server_killed_half_way_is_one_line(server: Server, engine: Engine, served: Rollouts) -> None:
    """The last test of this file: nothing answers after it."""
    threading.Timer(0.3, server.kill).start()
    with pytest.raises(EngineError) as caught:
        score_for_ever(engine, concat([served.take(range(32))] * 40))
    said = str(caught.value)
    assert said.startswith(f"{server.url}: record '") and "\n" not in said
    assert "broke off during POST /v1/completions" in said or "refused the connection" in said
    with pytest.raises(EngineError, match="refused the connection"):
        engine.score(served)
