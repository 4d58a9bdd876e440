"""False alarms and misses of the gates, on simulated pairs of the fake engine.

    python lab/power.py --pairs 1000 --out docs/power.md

Each pair is a recording by one reduction order and a scoring by another, at the same dtype: what a healthy pair of
engines differs in. Misses are counted at stated drifts (RMS nats). Every pair has weights and draws of its own.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

# before numpy: one thread a process, two processes
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from onepolicy.check import compare
from onepolicy.engines.base import SamplingParams
from onepolicy.engines.fake import FakeEngine
from onepolicy.engines.open import open_engine
from onepolicy.engines.shards import sample_shards
from onepolicy.gates.bounds import load
from onepolicy.gates.judge import judge
from onepolicy.rollouts import concat

#: dtype -> the presets that fit it
FITTING = {"float32": ("fp32", "strict"), "float16": ("fp16",), "bfloat16": ("bf16",)}
ORDERS = ("reversed", "pairwise", "blocked")
DRIFTS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.4)
CLUSTERS, TOKENS = 40, 64


def pair_outcomes(seed: int, dtype: str, drift: float = 0.0, clusters: int = CLUSTERS) -> dict[str, str]:
    """Preset -> outcome of one pair: about `clusters` x 50 drawn tokens, in `clusters` groups."""
    order = ORDERS[seed % len(ORDERS)]
    prompts = [list(range(1 + i, 9 + i)) for i in range(clusters)]
    params = SamplingParams(max_tokens=TOKENS, seed=seed)
    with (
        open_engine(f"fake:?seed={seed}&dtype={dtype}") as sampler,
        open_engine(f"fake:?seed={seed}&dtype={dtype}&order={order}&drift={drift}") as scorer,
    ):
        drawn = concat(list(sample_shards(sampler, prompts, params, max_sequences=clusters)))
        scored = drawn.with_scoring("scorer", scorer.score(drawn))
    first, *rest = FITTING[dtype]
    report, _ = compare(scored, None, ("sampler", "scorer"), load(first), "drawn", None)
    return {first: str(report.outcome), **{name: str(judge(report.sums, load(name)).outcome) for name in rest}}


def outcomes(seeds: Iterable[int], dtype: str, drift: float = 0.0) -> dict[str, Counter[str]]:
    """Preset -> how often each outcome came, over all seeds, on two processes."""
    work = functools.partial(pair_outcomes, dtype=dtype, drift=drift)
    counts = {name: Counter[str]() for name in FITTING[dtype]}
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for row in pool.imap_unordered(work, seeds, chunksize=8):
            for name, outcome in row.items():
                counts[name][outcome] += 1
    return counts


def table(pairs: int, misses: int) -> str:
    """The Markdown page."""
    lines = [
        "# False alarms and misses of the gates",
        "",
        f"Simulated pairs of the fake engine, {CLUSTERS} prompts of at most {TOKENS} drawn tokens each "
        f"(`python lab/power.py`, {datetime.date.today()}). A healthy pair differs in the reduction order alone.",
        "",
        "| dtype | preset | drift (RMS nats) | pairs | pass | inconclusive | drift found |",
        "|---|---|---|---|---|---|---|",
    ]
    for dtype in FITTING:
        for drift, n in [(0.0, pairs), *((d, misses) for d in DRIFTS)]:
            for preset, c in outcomes(range(1, n + 1), dtype, drift).items():
                row = (dtype, preset, f"{drift:g}" if drift else "none", n, c["pass"], c["inconclusive"], c["drift"])
                lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    assert FakeEngine.SCORES
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=1000)
    parser.add_argument("--misses", type=int, default=100)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    text = table(args.pairs, args.misses)
    print(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
