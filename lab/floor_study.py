"""The floor on a real healthy pair: which scale, which margin, and how often it is wrong.

    python lab/floor_study.py record --model build/models/smollm2   # writes lab/data/healthy_smollm2.npz, 15 minutes
    python lab/floor_study.py scales                                # what a finer scale buys
    python lab/floor_study.py margins                               # plain, standardised, with and without 1.25

The data: replies that vLLM drew from SmolLM2-135M in bfloat16, scored by transformers' bfloat16 through three kernels
and by its float32. Draws of other sizes are cluster resamples of it: prompts with replacement, each copy a cluster.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy.align import align
from onepolicy.floor import EDGES, SHAPE, Variant, measured
from onepolicy.gates.bounds import Preset, joined, load
from onepolicy.gates.judge import judge
from onepolicy.metrics import METRICS
from onepolicy.reduce import reduce
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import FloatArray, IntArray, Report, Scoring, Values

DATA = Path(__file__).resolve().parent / "data" / "healthy_smollm2.npz"
KERNELS = {"full": "full forward", "eager": "another attention", "decode": "KV decode"}
COLUMNS = ("sampler", *KERNELS, "fp32")


@dataclass(frozen=True, slots=True)
class Healthy:
    """Drawn tokens only: `columns` `[T]` log-probs by name, `sequence` and `prompt` `[T]`, `position` `[T]`."""

    columns: dict[str, FloatArray]
    sequence: IntArray
    prompt: IntArray
    position: IntArray


def read(path: Path = DATA) -> Healthy:
    with np.load(path, allow_pickle=False) as z:
        columns = {name: z[name].astype(np.float64) for name in COLUMNS}
        return Healthy(columns, z["sequence"].astype(int), z["prompt"].astype(int), z["position"].astype(int))


def resampled(data: Healthy, rng: np.random.Generator, tokens: int | None = None) -> tuple[IntArray, IntArray]:
    """(token indices, cluster of each): prompts with replacement and one reply of each, until there are `tokens`; as
    many prompts as were recorded if None."""
    replies = [np.unique(data.sequence[data.prompt == p]) for p in np.unique(data.prompt)]
    where = {int(s): np.flatnonzero(data.sequence == s) for r in replies for s in r}
    picked: list[IntArray] = []
    total = 0
    while len(picked) < len(replies) if tokens is None else total < tokens:
        picked.append(where[int(rng.choice(replies[int(rng.integers(len(replies)))]))])
        total += len(picked[-1])
    return np.concatenate(picked), np.repeat(np.arange(len(picked)), [len(x) for x in picked])


def report_of(
    data: Healthy, at: IntArray, cluster: IntArray, preset: Preset, fault: FloatArray | None = None
) -> Report:
    """The verdict on a pair: the sampler against the scorer's full forward, the floor from its three kernels."""
    names = sorted({m for b in preset.bounds for m in (b.metric, b.otherwise) if m})
    column = {k: v[at] for k, v in data.columns.items()}
    scorer = column["full"] if fault is None else np.minimum(column["full"] + fault, 0.0)
    lengths = np.diff(np.concatenate([[0], np.flatnonzero(np.diff(cluster)) + 1, [len(cluster)]]))
    drawn = np.ones(len(at), dtype=bool)
    rollouts = Rollouts(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        {"token_ids": Values(np.zeros(len(at), dtype=np.int32)), "drawn": Values(drawn)},
        {"group_id": column_values("group_id", [str(i) for i in range(len(lengths))])},
        {},
        {
            "sampler": Scoring(Values(column["sampler"]), dtype="bfloat16"),
            "old": Scoring(Values(scorer), dtype="bfloat16"),
        },
    )
    variants = [Variant(words, column[k]) for k, words in KERNELS.items()]
    _, columns = measured(variants, column["fp32"], drawn, "bfloat16")
    pairs = replace(align(rollouts), floor=columns, positions=data.position[at])
    return judge(reduce(pairs, [METRICS[m] for m in (*names, "log_ratio/rms", "ratio/pareto_k")]), preset)


def default_bounds() -> Preset:
    """What `check` judges a bfloat16 pair by."""
    return joined(load("floor"), load("bf16"))


# -- which scale -------------------------------------------------------------------------------------------------------


def scales(data: Healthy) -> Iterator[str]:
    """For each scale: the healthy ratio, its standard errors (paired, and of the gap alone), how heavy the standardised
    gap is, and by how many errors a fault of 0.04 (1 - p) nats moves the ratio."""
    gap = data.columns["full"] - data.columns["sampler"]
    names = list(KERNELS)
    gaps = np.array([data.columns[x] - data.columns[y] for i, x in enumerate(names) for y in names[i + 1 :]])
    p = np.exp(data.columns["fp32"])
    square = (gaps**2).mean(0)
    rng = np.random.default_rng(0)
    yield "| scale | ratio | error, paired | error, unpaired | kurtosis of z | fault in errors |"
    yield "|---|---|---|---|---|---|"
    for name, scale in _scales(p, square).items():
        ratio, paired, alone = _jackknife(gap, gaps, scale, data.prompt)
        z = gap / scale
        moved = [_jackknife(gap + 0.04 * (1 - p) * rng.standard_normal(len(p)), gaps, scale, data.prompt)[0]
                 for _ in range(20)]  # fmt: skip
        kurtosis = float((z**4).mean() / (z**2).mean() ** 2)
        power = (float(np.mean(moved)) - ratio) / (ratio * paired)
        yield f"| {name} | {ratio:.3f} | {paired:.4f} | {alone:.4f} | {kurtosis:.1f} | {power:.1f} |"


def _scales(p: FloatArray, square: FloatArray) -> dict[str, FloatArray]:
    edges = np.array(EDGES)
    bins = np.searchsorted(edges, p, side="right") - 1
    deciles = np.searchsorted(np.quantile(p, np.linspace(0.1, 0.9, 9)), p)
    twenty = np.searchsorted(np.quantile(p, np.linspace(0.05, 0.95, 19)), p)
    shape = 1 - p + SHAPE

    def level(b: IntArray, w: FloatArray | float = 1.0) -> FloatArray:
        means = np.bincount(b, square / w**2) / np.maximum(np.bincount(b), 1)
        return np.sqrt(means[b]) * w

    return {
        "none (plain RMS)": np.ones_like(p),
        "ten bins of probability": level(deciles),
        "twenty bins": level(twenty),
        "1 - p alone": shape,
        "the floor's bins, flat": level(bins),
        "the floor's bins, each with 1 - p inside": level(bins, shape),
    }


def _jackknife(gap: FloatArray, gaps: FloatArray, scale: FloatArray, cluster: IntArray) -> tuple[float, float, float]:
    """(ratio, its relative error with both sides deleted together, the gap's own)."""
    a, b = (np.bincount(cluster, x) for x in ((gap / scale) ** 2, ((gaps / scale) ** 2).mean(0)))
    left = 0.5 * np.log((a.sum() - a) / (b.sum() - b))
    alone = 0.5 * np.log(a.sum() - a)
    n = len(a)
    spread = lambda x: float(np.sqrt((n - 1) / n * ((x - x.mean()) ** 2).sum()))
    return float(np.sqrt(a.sum() / b.sum())), spread(left), spread(alone)


# -- which margin ------------------------------------------------------------------------------------------------------


def margins(data: Healthy, draws: int) -> Iterator[str]:
    """False drift and undecided of healthy draws, for the plain and the standardised size, with and without a margin.

    The draws are of a population whose true ratio is set to 1.10 by scaling the sampler's error, as two engines may
    honestly differ a little more than one engine's kernels do."""
    yield "| tokens | test | margin | pass | inconclusive | drift |"
    yield "|---|---|---|---|---|---|"
    for tokens in (512, 32_000, 262_000):
        for name in ("plain", "standardised"):
            for margin in (1.0, 1.25):
                counts = Counter(_size_test(data, seed, tokens, name, margin) for seed in range(draws))
                row = " | ".join(f"{counts[k] / draws:.0%}" for k in ("pass", "inconclusive", "drift"))
                yield f"| {tokens:,} | {name} | {margin:g} | {row} |"


def _size_test(data: Healthy, seed: int, tokens: int, name: str, margin: float) -> str:
    from onepolicy.intervals import t_quantile

    at, cluster = resampled(data, np.random.default_rng(seed), tokens)
    column = {k: v[at] for k, v in data.columns.items()}
    names = list(KERNELS)
    gaps = np.array([column[x] - column[y] for i, x in enumerate(names) for y in names[i + 1 :]])
    gap = column["full"] - column["sampler"]
    p = np.exp(column["fp32"])
    scale = _scales(p, (gaps**2).mean(0))["the floor's bins, each with 1 - p inside" if name == "standardised" else
                                          "none (plain RMS)"]  # fmt: skip
    whole = _jackknife(data.columns["full"] - data.columns["sampler"], *_population(data, name), data.prompt)[0]
    ratio, error, _ = _jackknife(gap * 1.10 / whole, gaps, scale, cluster)
    width = t_quantile(0.99, cluster[-1]) * error
    low, high = np.log(ratio) - width, np.log(ratio) + width
    return "pass" if high <= np.log(margin) else "drift" if low > np.log(margin) else "inconclusive"


def _population(data: Healthy, name: str) -> tuple[FloatArray, FloatArray]:
    names = list(KERNELS)
    gaps = np.array([data.columns[x] - data.columns[y] for i, x in enumerate(names) for y in names[i + 1 :]])
    scales_ = _scales(np.exp(data.columns["fp32"]), (gaps**2).mean(0))
    return gaps, scales_["none (plain RMS)" if name == "plain" else "the floor's bins, each with 1 - p inside"]


# -- the data ----------------------------------------------------------------------------------------------------------


def record(model: str, out: Path) -> None:
    """Draws and scores; each engine is started once for each precision."""
    from onepolicy.engines.base import SamplingParams
    from onepolicy.engines.open import open_engine
    from onepolicy.record import record_rollouts

    rollouts = record_rollouts(f"vllm:{model}", params=SamplingParams(max_tokens=64, seed=5, samples=3))
    wanted: dict[str, list[tuple[str, dict[str, Any]]]] = {
        f"hf:{model}": [("full", {}), ("eager", {"attention": "eager"}), ("decode", {"path": "decode"})],
        f"hf:{model}?dtype=float32&rounded_to=bfloat16": [("fp32", {})],
    }
    on = rollouts.drawn
    found = {"sampler": rollouts.scorings["sampler"].logprobs.values[on]}
    for spec, tasks in wanted.items():
        with open_engine(spec, timeout=3600) as engine:
            for name, using in tasks:
                found[name] = engine.score(rollouts, using=using).logprobs.values[on]
    sequence = np.repeat(np.arange(len(rollouts)), rollouts.lengths)
    position = np.arange(rollouts.n_tokens) - np.repeat(rollouts.offsets[:-1], rollouts.lengths)
    prompt = np.array([int(rollouts.record("group_id", i)) for i in range(len(rollouts))])[sequence]
    more = {"sequence": sequence, "prompt": prompt, "position": position}
    columns = {k: v.astype(np.float32) for k, v in found.items()}
    np.savez_compressed(out, **columns, **{k: v[on].astype(np.int16) for k, v in more.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "scales", "margins"))
    parser.add_argument("--model", default="build/models/smollm2")
    parser.add_argument("--draws", type=int, default=200)
    args = parser.parse_args()
    if args.what == "record":
        record(args.model, DATA)
        return
    lines = scales(read()) if args.what == "scales" else margins(read(), args.draws)
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    main()
