"""Two fake engines and a suite small enough for many checks."""

from __future__ import annotations

from dataclasses import replace

from onepolicy.suite import Suite, load

SAMPLER, SCORER = "fake:?dtype=bfloat16", "fake:?dtype=bfloat16&order=pairwise"


def small(texts: int = 24) -> Suite:
    """40 prompts and short texts of other clusters."""
    suite = load("default")
    prompts = tuple(p for p in suite.prompts if p.prompt)[:40]
    short = [t for t in suite.texts if t.made is None and t.reply and len(t.reply) < 300]
    return replace(suite, prompts=prompts, texts=tuple(short[:texts]))
