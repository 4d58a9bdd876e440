"""Record and check against the bare work of the same engines: generate, then one forward of the same tokens."""

from __future__ import annotations

import time

from onepolicy.check import Choices, check
from onepolicy.engines.base import SamplingParams
from onepolicy.engines.open import open_engine
from onepolicy.record import record_rollouts
from onepolicy.rollouts import Rollouts
from onepolicy.suite import own_prompts

SAMPLER, SCORER = "vllm:tiny", "hf:tiny"
PARAMS = SamplingParams(max_tokens=128)


def main() -> None:
    bare_sample = _bare_sample()
    began = time.perf_counter()
    rollouts = record_rollouts(SAMPLER, params=PARAMS)
    recorded = time.perf_counter() - began
    bare_score = _bare_score(rollouts)
    began = time.perf_counter()
    report, _ = check(rollouts, SCORER, choices=Choices(legs=()))
    checked = time.perf_counter() - began
    print(f"record and check of {rollouts.n_tokens:,} tokens, {SAMPLER} against {SCORER}: {report.outcome}")
    rows = (("record", recorded, "generate", bare_sample), ("check", checked, "forward", bare_score))
    for verb, ours, work, bare in rows:
        print(f"  {verb:6s} {ours:6.1f} s, engine start and bare {work:8s} {bare:6.1f} s: {ours / bare:.2f} x")


def _bare_sample() -> float:
    """Seconds to start the sampler and draw the same replies, nothing kept."""
    began = time.perf_counter()
    with open_engine(SAMPLER) as engine:
        engine.sample(engine.encode(own_prompts()), PARAMS)
        return time.perf_counter() - began


def _bare_score(rollouts: Rollouts) -> float:
    """Seconds to start the scorer and run the same tokens through it, nothing compared."""
    began = time.perf_counter()
    with open_engine(SCORER) as engine:
        engine.score(rollouts)
        return time.perf_counter() - began
