"""How often the one-sided 99% limits miss: the table of `docs/coverage.md`.

    python lab/coverage.py --runs 2000 --out docs/coverage.md

Clusters share a random effect (a prompt makes its replies alike), and their sizes are mildly uneven (1 to 3), uneven
(1 to 20) or very uneven (log-normal, sigma 1.5). Two metrics: k3, positive and skewed, on the log scale; the bias of
the mean ratio, on the linear scale. A miss: the true value is above the upper limit, or below the lower.
"""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path

import numpy as np

from onepolicy.align import align
from onepolicy.estimate import measure
from onepolicy.metrics import METRICS
from onepolicy.reduce import reduce
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring, Values

KEYS = ("kl_sampler_scorer_k3/mean", "ratio_bias/mean")
SIZES = ("mild", "uneven", "very uneven")
SD = 0.05  # of a token's gap, nats
#: sd, between clusters, of the log of that sd. Recordings of the packaged model show about 0.1.
EFFECTS = {"alike": 0.15, "differ": 0.3}


def sizes(kind: str, clusters: int, rng: np.random.Generator) -> np.ndarray:
    """Tokens of each cluster."""
    if kind == "mild":
        return rng.integers(30, 91, clusters)
    if kind == "uneven":
        return rng.integers(10, 201, clusters)
    return np.maximum(5, np.exp(rng.normal(np.log(40), 1.5, clusters))).astype(int)


def sample(kind: str, clusters: int, effect: float, rng: np.random.Generator) -> Rollouts:
    lengths = sizes(kind, clusters, rng)
    scale = SD * np.exp(effect * rng.standard_normal(clusters) - effect**2)
    sd = np.repeat(scale, lengths)
    d = rng.standard_normal(int(lengths.sum())) * sd - sd**2 / 2  # so that E r = 1
    a = np.full(len(d), -5.0)
    n = np.ones(len(d), dtype=bool)
    return Rollouts(
        np.concatenate([[0], np.cumsum(lengths)]),
        {"token_ids": Values(np.zeros(len(d), dtype=np.int32)), "drawn": Values(n)},
        {"group_id": Values(np.array([str(i) for i in range(clusters)], dtype=object))},
        {},
        {"sampler": Scoring(Values(a), scoring_id="a"), "old": Scoring(Values(a + d), scoring_id="b")},
    )


def truth(key: str) -> float:
    """k3: E r = 1, so its mean is -E d = E sd^2 / 2, with E e^(2 effect z - 2 effect^2) = 1. Bias: 0."""
    return SD**2 / 2 if key.startswith("kl_") else 0.0


def misses(
    kind: str, clusters: int, runs: int, effect: float = EFFECTS["alike"], seed: int = 0
) -> dict[str, tuple[float, float]]:
    """metric -> (share of runs with the truth above the upper limit, below the lower)."""
    rng = np.random.default_rng([seed, clusters, SIZES.index(kind)])
    above, below = dict.fromkeys(KEYS, 0), dict.fromkeys(KEYS, 0)
    table = {key: METRICS[key] for key in KEYS}
    for _ in range(runs):
        found = measure(reduce(align(sample(kind, clusters, effect, rng)), table.values()), table)
        for key in KEYS:
            m = found[key]
            assert m.lower is not None
            assert m.upper is not None
            above[key] += m.upper < truth(key)
            below[key] += m.lower > truth(key)
    return {key: (above[key] / runs, below[key] / runs) for key in KEYS}


def table(runs: int) -> str:
    lines = [
        "# Coverage of the intervals",
        "",
        f"Simulated, {runs} runs a row (`python lab/coverage.py`, {datetime.date.today()}). Limits are one-sided 99%, "
        "so 1% of misses on each side is nominal. Under 20 effective clusters a gate is inconclusive whatever its "
        "interval says. The upper limit of k3 misses more than it should (a skewed mean, few clusters): at most 2% "
        "where prompts are alike and mildly uneven, up to 4% where they differ; the limits of the bias keep their 1%.",
        "",
        *(f"`{name}`: the noise of prompts varies by an sd of {sd} in its log." for name, sd in EFFECTS.items()),
        "",
        "| prompts | sizes | clusters | k3: above upper | k3: below lower | bias: above upper | bias: below lower |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, effect in EFFECTS.items():
        for kind in SIZES:
            for clusters in (8, 20, 40, 100):
                row = misses(kind, clusters, runs, effect)
                cells = [f"{x:.1%}" for key in KEYS for x in row[key]]
                lines.append(f"| {name} | {kind} | {clusters} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    text = table(args.runs)
    print(text)
    if args.out:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
