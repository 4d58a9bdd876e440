"""One vLLM for the whole session: it starts in a worker, records once, and stays for the tests that ask it more."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from onepolicy.engines.base import Engine, SamplingParams
from onepolicy.engines.open import open_engine
from onepolicy.engines.shards import sample_shards
from onepolicy.rollouts import Rollouts, concat

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded: two engines share few cores here

THINGS = ("cats", "dogs", "fire", "water", "the sun", "the moon", "trees", "birds")
THINGS += ("rivers", "stones", "bread", "milk", "snow", "rain", "songs", "books")
ASKS = ("What do you know about {}?", "Tell a story about {}.", "Count the {}.", "Why do people like {}?")


@pytest.fixture(scope="session")
def vllm() -> Iterator[Engine]:
    with open_engine("vllm:tiny?dtype=float32") as engine:
        yield engine


@pytest.fixture(scope="session")
def recorded(vllm: Engine) -> Rollouts:
    """64 chat prompts, one reply each of at most 64 tokens, drawn at temperature 1, fp32."""
    prompts = vllm.encode([[{"role": "user", "content": ask.format(thing)}] for thing in THINGS for ask in ASKS])
    return concat(list(sample_shards(vllm, prompts, SamplingParams(max_tokens=64, seed=1))))


@pytest.fixture(scope="session")
def processed(vllm: Engine, recorded: Rollouts) -> Rollouts:
    """8 replies by every rule at once."""
    prompts = [recorded.token_ids[recorded.sequence(i)][: recorded.record("prompt_length", i)] for i in range(0, 64, 8)]
    params = SamplingParams(
        max_tokens=48,
        temperature=0.8,
        top_p=0.9,
        top_k=50,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        seed=5,
    )
    return concat(list(sample_shards(vllm, prompts, params)))


@pytest.fixture(scope="session")
def hf() -> Iterator[Engine]:
    with open_engine("hf:tiny?dtype=float32") as engine:
        yield engine
