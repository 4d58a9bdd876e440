"""The alarms, with an error budget: at most 1% of healthy runs of 5,000 steps may raise a failing one.

Slow alarms are CUSUMs of log likelihood ratios between the edge of what is allowed (`low`) and what should be found
(`high`), on the log scale of a ratio, with each step's own standard error. Over N steps such a CUSUM passes h with
probability at most N e^-h (every start of it is a nonnegative supermartingale: Ville), so h = log(N / share of the
budget). That holds for independent normal steps; for heavy tails, autocorrelation and wander it is a figure of
simulation (`lab/monitor_study.py`, `docs/monitor.md`): steps are capped, scales have floors, and `low` leaves room.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from onepolicy.monitor.series import (
    EARLY,
    HARMLESS_MEAN,
    LEAST,
    TAILS,
    TRAILING,
    Baseline,
    State,
    Trailing,
    by_bucket,
    means,
    standardised,
)
from onepolicy.types import BoolArray, FloatArray, IntArray

#: The error budget: the share of healthy runs of so many steps that may raise a failing alarm.
BUDGET, STEPS = 0.01, 5000
#: How the budget is dealt out. Bounds share one part; the streaks' parts are what simulation shows they need.
SHARES = {"bounds": 0.2, "grows": 0.2, "tail": 0.2, "over-two": 0.1, "jump": 0.2, "streaks": 0.1}


@dataclass(frozen=True, slots=True)
class Slow:
    """A CUSUM: what ratio is allowed, what ratio should be found, the least standard deviation of a step's log ratio,
    how many steps it takes at least."""

    low: float
    high: float
    floor: float
    least_steps: int

    def advance(self, cusum: FloatArray, y: FloatArray, error: FloatArray, limit: float, cap: Any = None) -> FloatArray:
        """The CUSUM after a step with log ratio `y` and standard error `error`; NaN changes nothing. It ends at twice
        the limit, so that an alarm is over soon after its fault is."""
        low, high = math.log(self.low), math.log(self.high)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            step = (high - low) / (error**2 + self.floor**2) * (y - (low + high) / 2)
        cap = limit / self.least_steps if cap is None else cap
        return np.clip(cusum + np.clip(np.nan_to_num(step, nan=0.0), -cap, cap), 0.0, 2 * limit)


#: A bound: 1 is the bound itself; one CUSUM for a little more, one for much more, which small batches need. It takes
#: two steps, so that one odd batch stops nothing; one at `FAR` times the bound, with `ROWS` sequences or more and a
#: relative error below `SURE`: no matter of a few tokens.
BOUNDS = (Slow(1.0, 1.5, 0.1, 2), Slow(1.0, 4.0, 0.1, 2))
ROWS, FAR, SURE = 20, 20.0, 0.2
#: Growth against the frozen baseline: wander of 1.3 times is allowed; below 1.6 times the baseline nothing is called.
GROWS = Slow(1.3, 1.9, 0.2, 3)
#: The tail: tokens beyond the baseline's last half percent, and its last half thousandth, at the step's own scale.
TAIL = Slow(1.5, 3.0, 0.25, 3)
#: Tail tokens come in clusters: their variance is so many times that of independent ones.
CLUSTERED = 4.0
#: A jump against the trailing window: times more, standard deviations, the least that one is taken to be; steps in a
#: row. While the window holds fewer than `LEAST` steps, at least two, only a large jump counts.
JUMP, JUMP_DEVIATIONS, JUMP_FLOOR, JUMP_STEPS = 2.0, 6.0, 0.1, 2
LARGE_JUMP, LARGE_FLOOR, LARGE_LEAST = 5.0, 0.25, 2
#: Growth within the warm-up, its last steps against its first: times more at its end, and before; standard deviations.
EARLY_GROWTH, EARLIER_GROWTH, EARLY_DEVIATIONS = 1.8, 2.5, 4.0
#: Effective sample size of the raw token ratios below this, steps in a row (verl's guide: alarm below 0.3).
ESS_LEAST, ESS_STEPS = 0.3, 3
#: Ratios above 2: one token in a hundred (ours; healthy bf16 pairs have fewer than one in 10,000).
OVER_TWO = 0.01
#: A state of values that no healthy run has: the share of tokens that fails, two steps in a row.
STATE_SHARES = {"missing": 0.01, "nonfinite": 0.001, "support": 0.001, "positive": 0.001, "placeholder": 0.001}
STATE_STEPS = 2


def _above(cusums: FloatArray, y: FloatArray, error: FloatArray, rows: FloatArray, limit: float) -> BoolArray:
    """Whether a bound is crossed, after a step with log(value / bound) `y`. Advances `cusums` `[2, ...]` in place."""
    with np.errstate(invalid="ignore"):
        at_once = (rows >= ROWS) & (error < SURE) & (y > math.log(FAR))
    for cusum, slow in zip(cusums, BOUNDS, strict=True):
        cap = limit / np.where(at_once, 1, slow.least_steps)
        cusum[...] = slow.advance(cusum, y, error, limit, cap)
    return np.logical_or.reduce(cusums >= limit, axis=0)


def _harmless(tokens: FloatArray, sums: FloatArray) -> BoolArray:
    """`[R]` where mean |d| is so small that no growth of it matters."""
    return sums.sum(-1) < HARMLESS_MEAN * tokens.sum(-1)


@dataclass(frozen=True, slots=True)
class Step:
    """One step's statistics, arrays over R runs. See `judge.step_of` for a merged vector's."""

    bins: FloatArray  # [R, BUCKETS, BINS] tokens
    rows: FloatArray  # [R] sequences
    error: FloatArray  # [R] relative standard error of mean |d|
    bounds: FloatArray  # [R, bounds] log(value / bound), NaN where not measured
    bound_errors: FloatArray  # [R, bounds] relative standard errors; 0 for maxima, which are judged as they are
    over_two: FloatArray  # [R] log(share / OVER_TWO)
    over_two_error: FloatArray
    ess: FloatArray  # [R]
    states: FloatArray  # [R, states] shares


@dataclass
class _Counts(State):
    """The CUSUMs and streaks."""

    bounds: FloatArray
    over_two: FloatArray
    grows: FloatArray
    tail: FloatArray
    jump: IntArray
    held_out: IntArray
    ess: IntArray
    states: IntArray
    early: BoolArray


class Alarms:
    """All alarms of R runs. `advance` takes one step and says which are on."""

    def __init__(self, runs: int, exact: tuple[bool, ...], *, budget: float = BUDGET, steps: int = STEPS) -> None:
        """`exact`: for every bound, whether it is a maximum's, which one token violates."""
        self.exact = np.array(exact, dtype=bool)
        self.limits = {name: math.log(steps / (budget * share)) for name, share in SHARES.items()}
        self.limits["bounds"] += math.log(len(BOUNDS) * max(1, len(exact)))
        self.limits["over-two"] += math.log(len(BOUNDS))
        self.limits["tail"] += math.log(len(TAILS))
        self.baseline, self.trailing = Baseline.of(runs), Trailing.of(runs)
        floats = lambda *more: np.zeros((runs, *more))
        whole = lambda *more: np.zeros((runs, *more), dtype=np.int64)
        self.counts = _Counts(
            np.zeros((len(BOUNDS), runs, len(exact))),
            np.zeros((len(BOUNDS), runs)),
            floats(),
            floats(len(TAILS)),
            whole(),
            whole(),
            whole(),
            whole(len(STATE_SHARES)),
            np.zeros(runs, dtype=bool),
        )
        #: what the last step looked like, for messages: y against both baselines, the tail's
        self.last: dict[str, FloatArray] = {}

    def advance(self, step: Step) -> dict[str, BoolArray]:
        """name -> `[R]` (bounds, states: `[R, n]`) whether it is on after this step."""
        used = step.rows > 0
        tokens, sums = by_bucket(step.bins)
        on = {"bounds": self._bounds(step), "over-two": self._over_two(step)}
        on |= self._streaks(step, used)
        on["jump"] = self._jump(step, tokens, sums, used)
        on["grows"], on["tail"] = self._slow(step, tokens, sums, used)
        return on

    def _bounds(self, step: Step) -> BoolArray:
        rows = step.rows[:, None]
        above = _above(self.counts.bounds, step.bounds, step.bound_errors, rows, self.limits["bounds"])
        with np.errstate(invalid="ignore"):
            return np.where(self.exact, step.bounds > 0, above)

    def _over_two(self, step: Step) -> BoolArray:
        limit = self.limits["over-two"]
        return _above(self.counts.over_two, step.over_two, step.over_two_error, step.rows, limit)

    def _streaks(self, step: Step, used: BoolArray) -> dict[str, BoolArray]:
        """Too many of them in a row: chances of single steps do not add up."""
        c = self.counts
        with np.errstate(invalid="ignore"):
            c.ess = np.where(used, np.where(step.ess < ESS_LEAST, c.ess + 1, 0), c.ess)
            above = step.states > np.array(list(STATE_SHARES.values()))
        # a step in which nothing could be scored says all the more about the states
        seen = np.isfinite(step.states)
        c.states = np.where(seen, np.where(above, c.states + 1, 0), c.states)
        return {"ess": c.ess >= ESS_STEPS, "states": c.states >= STATE_STEPS}

    def _jump(self, step: Step, tokens: FloatArray, sums: FloatArray, used: BoolArray) -> BoolArray:
        """A candidate is kept out of the window, so that the new level is not taken for the old one; after as many
        steps as the window holds it is accepted."""
        c, window = self.counts, self.trailing
        y = window.gap(tokens, sums)
        enough = window.count >= LEAST
        spread = np.maximum(window.spread(), np.where(enough, JUMP_FLOOR, LARGE_FLOOR))
        times = np.where(enough, math.log(JUMP), math.log(LARGE_JUMP))
        with np.errstate(invalid="ignore"):
            far = (y > times) & (y / np.hypot(spread, step.error) > JUMP_DEVIATIONS) & ~_harmless(tokens, sums)
        candidate = used & far & (window.count >= LARGE_LEAST)
        c.jump = np.where(used, np.where(candidate, c.jump + 1, 0), c.jump)
        c.held_out = np.where(used, np.where(candidate, c.held_out + 1, 0), c.held_out)
        window.add(tokens, sums, np.nan_to_num(y), used & (~candidate | (c.held_out > TRAILING)))
        self.last["jump"] = y
        return c.jump >= JUMP_STEPS

    def _slow(self, step: Step, tokens: FloatArray, sums: FloatArray, used: BoolArray) -> tuple[BoolArray, BoolArray]:
        c, base = self.counts, self.baseline
        frozen = base.frozen.copy()
        fresh = base.add(step.bins, tokens, sums, used & (c.jump == 0))
        if (used & ~frozen).any():
            c.early |= used & ~frozen & self._early_growth(step.error, fresh)
        ready = used & frozen
        if not ready.any():
            self.last["tail"] = np.full((len(used), len(TAILS)), np.nan)
            return c.early.copy(), np.zeros(len(used), dtype=bool)
        y = np.where(ready, base.gap(tokens, sums), np.nan)
        harmless = _harmless(tokens, sums)
        c.grows = GROWS.advance(c.grows, np.where(harmless, np.minimum(y, 0.0), y), step.error, self.limits["grows"])
        tail, predicted = base.tail(step.bins, tokens, y)
        tail = np.where(ready[:, None] & (predicted > 0), tail, np.nan)
        c.tail = TAIL.advance(c.tail, tail, np.sqrt(CLUSTERED / (predicted + 0.5)), self.limits["tail"])
        c.early &= ~(y < math.log(GROWS.low)) & ~(ready & harmless)
        self.last |= {"grows": y, "tail": tail}
        return (c.grows >= self.limits["grows"]) | c.early, np.logical_or.reduce(c.tail >= self.limits["tail"], axis=1)

    def _early_growth(self, error: FloatArray, fresh: BoolArray) -> BoolArray:
        """Whether the warm-up itself grew, which would make a baseline of the fault: its last steps against its first.
        Where it did at the end (`fresh`), the first ones become the baseline."""
        base, window = self.baseline, self.trailing
        back = (window.count[:, None] - 1 - np.arange(EARLY)[None, :]) % TRAILING
        late = [np.take_along_axis(x, back[..., None], 1).sum(1) for x in (window.tokens, window.sums)]
        y = standardised(late[0], late[1], means(base.early_tokens, base.early_sums))
        spread = np.hypot(np.maximum(window.spread(), JUMP_FLOOR), error)
        times = np.where(fresh, math.log(EARLY_GROWTH), math.log(EARLIER_GROWTH))
        with np.errstate(invalid="ignore"):
            grew = (window.count >= LEAST) & (y > times) & (y / spread > EARLY_DEVIATIONS) & ~_harmless(*late)
        done = grew & fresh
        base.tokens[done], base.sums[done] = base.early_tokens[done], base.early_sums[done]
        self.last["grows"] = y
        return grew

    # -- state -----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name).to_dict() for name in ("baseline", "trailing", "counts")}

    def load(self, data: Mapping[str, Any]) -> None:
        for name in ("baseline", "trailing", "counts"):
            getattr(self, name).load(data[name])
