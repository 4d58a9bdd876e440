"""How often the monitor's alarms ring for nothing, and how late for something: the tables of `docs/monitor.md`.

    python lab/monitor_study.py --runs 300 --steps 5000

Runs are simulated step by step from what a step's merged vector holds, many runs at once, and go through the monitor's
own alarms. A healthy run has: rounding gaps that shrink with the token's probability (scale 1 - p, Student t of 4
degrees times a log-normal spread); entropy that falls over the run, so that sure tokens take over; a scale that wanders
(autocorrelation 0.95 with heavy-tailed steps, a slow swing besides, noise from step to step); batches from a few
thousand to a million tokens that change size, with rows alike within themselves; odd batches with up to 2.5 times the
gap, one step in a thousand; and single tokens that are nats away, one step in five hundred.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy: small products, whose threads would wait for each other

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from onepolicy.monitor.alarms import OVER_TWO, STATE_SHARES, Alarms, Step
from onepolicy.monitor.vector import BINS, BUCKETS, bin_edges, bin_middles

FAILING = ("bounds", "over-two", "ess", "states", "jump", "grows", "tail")
#: Bounds of `bf16`: mean k3, mean |d|, |mean ratio - 1|.
LIMITS = np.array([0.01, 0.1, 0.02])
#: A token's 1 - p by bucket of the sampler's probability: lowest and highest.
_ROOM = ((0.99, 1.0), (0.9, 0.99), (0.5, 0.9), (0.1, 0.5), (0.01, 0.1), (0.001, 0.01), (1e-5, 0.001))
#: The mix of buckets at the start and at the end of a run.
_START = np.array([0.02, 0.08, 0.22, 0.22, 0.20, 0.13, 0.13])
_END = np.array([0.005, 0.02, 0.08, 0.12, 0.155, 0.17, 0.45])
_LOG_SCALES = np.arange(-7.0, 3.0, 0.01)
_MIDDLES = bin_middles()
_ABOVE_TWO = np.log(_MIDDLES) > np.log(np.log(2))
_POOL = np.random.default_rng(2).standard_normal(1 << 22, dtype=np.float32) / np.float32(np.sqrt(2))


def _table() -> np.ndarray:
    """`[scales, BUCKETS, BINS]` probability of each bin of |d| at each log scale of the gap."""
    rng = np.random.default_rng(1)
    fine = np.arange(-30.0, 12.0, 0.01)
    below = np.log(bin_edges())
    out = np.zeros((len(_LOG_SCALES), BUCKETS, BINS))
    for bucket, (low, high) in enumerate(_ROOM):
        room = np.exp(rng.uniform(np.log(low), np.log(high), 400_000))
        size = np.abs(rng.standard_t(4, len(room))) * np.exp(0.4 * rng.standard_normal(len(room))) * room
        x = np.sort(np.log(size))
        share_below = np.searchsorted(x, fine) / len(x)
        for i, scale in enumerate(_LOG_SCALES):
            cdf = np.interp(below - scale, fine, share_below)
            cdf[0], cdf[-1] = 0.0, 1.0
            out[i, bucket] = np.diff(cdf)
    return out.astype(np.float32)


@dataclass
class Fault:
    """What goes wrong from step `at` on, as a function of the steps since then (0 at `at`)."""

    name: str
    scale: Callable[[int], float] = lambda _: 1.0
    tail: Callable[[int], float] = lambda _: 0.0  # share of tokens that are replaced by gaps of 0.3 to 1 nat
    far: Callable[[int], float] = lambda _: 0.0  # share of tokens with ratios of 5 to 50
    missing: Callable[[int], float] = lambda _: 0.0


HEALTHY = Fault("none")
FAULTS = [
    Fault("gap x 1.5 at once", scale=lambda t: 1.5),
    Fault("gap x 2 at once", scale=lambda t: 2.0),
    Fault("gap x 3 at once", scale=lambda t: 3.0),
    Fault("gap x 10 at once", scale=lambda t: 10.0),
    Fault("gap grows 1% a step", scale=lambda t: 1.01**t),
    Fault("gap grows 0.1% a step", scale=lambda t: 1.001**t),
    Fault("0.1% of tokens go 0.3 to 1 nat off", tail=lambda t: 0.001),
    Fault("0.5% of tokens go 0.3 to 1 nat off", tail=lambda t: 0.005),
    Fault("2% of tokens go 0.3 to 1 nat off", tail=lambda t: 0.02),
    Fault("0.1% of ratios become 5 to 50", far=lambda t: 0.001),
    Fault("3% of ratios become 5 to 50", far=lambda t: 0.03),
    Fault("2% of log-probs are missing", missing=lambda t: 0.02),
]


@dataclass
class Runs:
    """R simulated runs, advanced together."""

    runs: int
    seed: int
    steps: int
    tokens: tuple[float, float] = (3.7, 6.0)  # log10 of a batch's tokens
    table: np.ndarray = field(default_factory=_table)

    def __post_init__(self) -> None:
        self.rng = rng = np.random.default_rng(self.seed)
        r = self.runs
        self.log_gap = np.log(rng.uniform(0.03, 0.09, r))  # so that mean |d| is 0.01 to 0.04 at the start
        self.base_tokens = 10 ** rng.uniform(*self.tokens, r)
        self.length = 10 ** rng.uniform(2.3, 3.6, r)
        self.size = np.ones(r)
        self.wander, self.mix = np.zeros(r), np.zeros((r, BUCKETS))
        self.swing = rng.uniform(0, 0.08, r), rng.uniform(1000, 5000, r), rng.uniform(0, 2 * np.pi, r)
        self.falls = rng.uniform(0.2, 1.0, r), rng.uniform(0.2, 0.8, r)

    def step(self, t: int, fault: Fault, at: int) -> Step:
        rng, r = self.rng, self.runs
        since = t - at
        on = (lambda f: f(since)) if since >= 0 else (lambda _: 0.0)
        self.size = np.where(rng.random(r) < 1 / 500, 2.0 ** rng.integers(-2, 3, r), self.size)
        n = self.base_tokens * self.size * rng.uniform(0.8, 1.2, r)
        rows = np.maximum(np.round(n / self.length), 4)
        mix = self._mix(t)
        scale, error = self._scale(t, rows)
        if since >= 0:
            scale = scale + np.log(fault.scale(since))
        index = np.clip(np.round((scale - _LOG_SCALES[0]) * 100).astype(int), 0, len(_LOG_SCALES) - 1)
        expected = self.table[index] * (n[:, None] * mix).astype(np.float32)[..., None]
        expected = self._with_tail(expected, on(fault.tail), n, mix)
        bins = self._counted(expected)
        few = self._far(n, on(fault.far))
        reported = error * np.sqrt(rng.chisquare(rows - 1) / (rows - 1)) * np.sqrt(1 + 8 / rows)
        return self._statistics(bins, rows, reported, few, np.full(r, on(fault.missing)))

    def _mix(self, t: int) -> np.ndarray:
        depth, middle = self.falls
        done = depth / (1 + np.exp(-8 * (t / self.steps - middle)))
        self.mix = 0.9 * self.mix + 0.1 * self.rng.standard_normal(self.mix.shape)
        mix = (_START + (_END - _START) * done[:, None]) * np.exp(0.2 * self.mix)
        return mix / mix.sum(1, keepdims=True)

    def _scale(self, t: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(log scale of this step's gap, the standard error of its mean |d|)."""
        rng, r = self.rng, self.runs
        heavy = rng.standard_t(6, r) * np.sqrt(4 / 6)
        self.wander = 0.95 * self.wander + 0.08 * np.sqrt(1 - 0.95**2) * heavy
        height, period, phase = self.swing
        slow = height * (np.sin(2 * np.pi * t / period + phase) - np.sin(phase))
        odd = np.where(rng.random(r) < 1 / 1000, np.log(rng.uniform(1.2, 2.5, r)), 0.0)
        noise = 0.05 * rng.standard_t(4, r) / np.sqrt(2)
        error = 0.5 / np.sqrt(rows)  # rows are alike within themselves: their own means differ by half
        return self.log_gap + self.wander + slow + odd + noise + error * rng.standard_normal(r), error

    def _with_tail(self, expected: np.ndarray, share: float, n: np.ndarray, mix: np.ndarray) -> np.ndarray:
        if not share:
            return expected
        inside = (_MIDDLES > 0.3) & (_MIDDLES < 1.0)
        return expected * (1 - share) + share * np.float32(n[:, None, None] * mix[..., None] * inside / inside.sum())

    def _counted(self, expected: np.ndarray) -> np.ndarray:
        """Counts over-dispersed by 2: normal on the square-root scale, pairs of tokens where few are expected."""
        flat = expected.ravel()
        at = int(self.rng.integers(0, len(_POOL) - len(flat)))
        out = np.sqrt(flat)
        out += _POOL[at : at + len(flat)]  # drawn once: the alarms see sums over bins, runs start elsewhere in it
        np.maximum(out, 0, out=out)
        out *= out
        out -= 0.5
        small = flat < 1
        out[small] = 0
        few = np.flatnonzero(small & (flat > 1e-4))
        out[few] = 2 * (self.rng.random(len(few), dtype=np.float32) < flat[few] / 2)
        return np.maximum(out, 0, out=out).reshape(expected.shape)

    def _far(self, n: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens far off, the sum of their ratios, of the squares): one to five in an odd step, a share in a fault."""
        rng, r = self.rng, self.runs
        many = np.where(rng.random(r) < 1 / 500, rng.integers(1, 6, r), 0)
        d = rng.uniform(1.0, 6.0, r)
        faulty = share * n
        mean, square = 20.0, 600.0  # of ratios from 5 to 50
        return many + faulty, many * np.exp(d) + faulty * mean, many * np.exp(2 * d) + faulty * square

    def _statistics(
        self, bins: np.ndarray, rows: np.ndarray, error: np.ndarray, few: tuple[np.ndarray, ...], missing: np.ndarray
    ) -> Step:
        by_size = bins.sum(1, dtype=np.float64)
        n, size = by_size.sum(1), by_size @ _MIDDLES
        small = np.minimum(_MIDDLES, 1.5)
        k3 = by_size @ (np.cosh(small) - 1)  # signs are even
        chi2 = by_size @ (np.cosh(2 * small) - 2 * np.cosh(small) + 1)
        count, ratios, squares = few
        own = size / n
        lone = ratios / (k3 + ratios + 1e-300) / np.sqrt(np.maximum(count, 1))  # what far tokens do to the error
        k3_mean, k3_error = (k3 + ratios) / n, np.hypot(2 * error, lone)
        bias_error = np.sqrt(2 * chi2 / n / n + squares / n / n)
        bias = bias_error * self.rng.standard_normal(self.runs) + np.where(count > 50, ratios / n, 0.0)
        values = np.stack([k3_mean, own, np.abs(bias)], axis=1)
        errors = np.stack([k3_error, error, bias_error / np.abs(bias)], axis=1)
        mean = 1 + bias
        over = (by_size @ _ABOVE_TWO / 2 + count) / n
        with np.errstate(divide="ignore"):
            log_over = np.log(over / OVER_TWO)
        states = np.zeros((self.runs, len(STATE_SHARES)))
        states[:, 0] = missing
        return Step(
            bins,
            rows,
            error,
            np.log(values / LIMITS),
            errors,
            log_over,
            np.minimum(2 / np.sqrt(over * n + 1), 1.0),
            mean**2 / (mean**2 + (chi2 + squares) / n),
            states,
        )


def rings(runs: Runs, fault: Fault, at: int) -> dict[str, np.ndarray]:
    """name -> `[R]` the first step at which the alarm was on, -1 for never."""
    alarms = Alarms(runs.runs, (False,) * len(LIMITS))
    first = {name: np.full(runs.runs, -1) for name in FAILING}
    for t in range(runs.steps):
        for name, on in alarms.advance(runs.step(t, fault, at)).items():
            now = on if on.ndim == 1 else on.any(1)
            first[name] = np.where((first[name] < 0) & now, t, first[name])
    return first


#: Batches: log10 of their tokens, at the lowest and the highest.
LARGE, SMALL = (3.7, 6.0), (2.7, 3.3)


def healthy(runs: int, steps: int, seed: int, table: np.ndarray, tokens: tuple[float, float] = LARGE) -> dict[str, int]:
    """How many of the runs each alarm rang in."""
    counts = dict.fromkeys(("any", *FAILING), 0)
    for part in range(0, runs, 75):
        sim = Runs(min(75, runs - part), seed + part, steps, tokens, table)
        first = rings(sim, HEALTHY, steps)
        for name, found in first.items():
            counts[name] += int((found >= 0).sum())
        counts["any"] += int((np.stack(list(first.values())) >= 0).any(0).sum())
    return counts


@dataclass(frozen=True)
class Delay:
    """Steps from the first faulty one to the one whose judgement rings, it included; None where too few found it."""

    fault: str
    runs: int
    found: int
    half: int | None
    nine_tenths: int | None
    first: str  # the alarm that was first in most runs


def delay(
    fault: Fault, table: np.ndarray, *, runs: int = 100, at: int = 400, after: int = 1200, tokens: Any = LARGE
) -> Delay:
    sim = Runs(runs, 7, at + after, tokens, table)
    first = np.stack(list(rings(sim, fault, at).values()))
    late = np.where(first >= at, first - at + 1, 10**9)
    when = np.sort(late.min(0))
    names = [FAILING[i] for i in late.argmin(0)[late.min(0) < 10**9]]
    half, most = (int(when[int(q * runs) - 1]) for q in (0.5, 0.9))
    common = max(FAILING, key=names.count) if names else "-"
    known = lambda x: x if x < 10**9 else None
    return Delay(fault.name, runs, len(names), known(half), known(most), common)


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--runs", type=int, default=300)
    ask.add_argument("--steps", type=int, default=5000)
    ask.add_argument("--seed", type=int, default=1)
    ask.add_argument("--after", type=int, default=1200, help="steps that a fault is given to be found")
    ask.add_argument("--faults", nargs="*", default=[f.name for f in FAULTS])
    ask.add_argument("--small", action="store_true", help="batches of 500 to 2,000 tokens")
    ask.add_argument("--json", action="store_true")
    args = ask.parse_args()
    table, tokens = _table(), SMALL if args.small else LARGE
    quiet = healthy(args.runs, args.steps, args.seed, table, tokens) if args.runs else {}
    chosen = [f for f in FAULTS if f.name in args.faults]
    found = [delay(f, table, after=args.after, tokens=tokens) for f in chosen]
    if args.json:
        print(json.dumps({"healthy": quiet, "delays": [asdict(d) for d in found]}))
        return
    print(f"{args.runs} healthy runs of {args.steps} steps, alarms that rang: {quiet}\n")
    print("| what goes wrong | found | half of the runs | nine in ten | the first alarm |\n|---|---|---|---|---|")
    for d in found:
        half, most = (f"{x} steps" if x else "not found" for x in (d.half, d.nine_tenths))
        print(f"| {d.fault} | {d.found} of {d.runs} | {half} | {most} | {d.first} |")


if __name__ == "__main__":
    main()
