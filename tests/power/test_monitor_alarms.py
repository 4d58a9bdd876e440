"""The monitor's alarms on simulated runs: silent through 300 healthy ones, on time for stated drifts.

None of 300 says: at most 1% of healthy runs, with 95% confidence. The figures are those of `docs/monitor.md`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "lab"))

import monitor_study
from monitor_study import Fault

from onepolicy.monitor.alarms import STATE_SHARES, Alarms, Step
from onepolicy.monitor.vector import BINS, BUCKETS, bin_middles

LAB = Path(monitor_study.__file__)

pytestmark = [pytest.mark.power, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def table() -> Any:
    return monitor_study._table()


def test_300_healthy_runs_of_5000_steps() -> None:
    """In a process of its own, with one thread: about half a minute of one core."""
    command = [sys.executable, str(LAB), "--runs", "300", "--json", "--faults"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    rang = json.loads(ran.stdout)["healthy"]
    assert rang == dict.fromkeys(rang, 0)
    assert set(rang) == {"any", *monitor_study.FAILING}


#: fault -> (steps in which nine of ten runs have found it, the alarms one of which is the first)
STATED = {
    "gap x 2 at once": (40, {"jump", "grows"}),
    "gap x 3 at once": (15, {"jump", "grows", "bounds"}),
    "gap x 10 at once": (4, {"jump", "bounds"}),
    "gap grows 1% a step": (100, {"grows"}),
    "2% of tokens go 0.3 to 1 nat off": (10, {"tail"}),
    "3% of ratios become 5 to 50": (4, {"bounds", "over-two"}),
    "2% of log-probs are missing": (2, {"states"}),
}


@pytest.mark.parametrize("name", STATED)
def test_delays(name: str, table: Any) -> None:
    steps, alarms = STATED[name]
    fault = next(f for f in monitor_study.FAULTS if f.name == name)
    found = monitor_study.delay(fault, table, runs=40, at=120, after=steps + 20)
    assert found.nine_tenths is not None and found.nine_tenths <= steps, found
    assert found.first in alarms


def test_growth_from_the_first_steps(table: Any) -> None:
    """A sampler that gets no weights from the start: the baseline itself would be of the fault."""
    fault = Fault("10% a step from the first step on", scale=lambda t: 1.1**t)
    found = monitor_study.delay(fault, table, runs=40, at=0, after=40)
    assert found.nine_tenths is not None and found.nine_tenths <= 25


def test_a_large_jump_in_the_third_step(table: Any) -> None:
    """As with weights that a sleep mode drops: 0.010, 0.018, then 0.201 nats."""
    found = monitor_study.delay(Fault("x 12", scale=lambda t: 12.0), table, runs=40, at=2, after=10)
    assert found.nine_tenths is not None and found.nine_tenths <= 3


# -- each alarm alone, both ways -----------------------------------------------------------------------------------

_PEAK = np.exp(-0.5 * ((np.log(bin_middles()) - np.log(0.02)) / 0.8) ** 2)


def step(tokens: float = 2e5, times: float = 1.0, mix: int = 2, **change: Any) -> Step:
    """One run's step, without noise: gaps around 0.02 in bucket `mix`, a tenth of that in bucket 5."""
    bins = np.zeros((1, BUCKETS, BINS))
    for bucket, scale, share in ((mix, 1.0, 0.5), (5, 0.1, 0.5)):
        moved = np.interp(np.log(bin_middles()) - np.log(times * scale), np.log(bin_middles()), _PEAK, left=0, right=0)
        bins[0, bucket] = tokens * share * moved / moved.sum()
    one = lambda x: np.array([float(x)])
    quiet: dict[str, Any] = {
        "bins": bins,
        "rows": one(200),
        "error": one(0.02),
        "bounds": np.full((1, 3), -2.0),
        "bound_errors": np.full((1, 3), 0.05),
        "over_two": one(-5),
        "over_two_error": one(0.2),
        "ess": one(0.99),
        "states": np.zeros((1, len(STATE_SHARES))),
    }
    return Step(**{**quiet, **change})


def on_after(alarms: Alarms, steps: list[Step]) -> dict[str, int]:
    """alarm -> the first step in which it was on."""
    first: dict[str, int] = {}
    for i, s in enumerate(steps):
        for name, on in alarms.advance(s).items():
            if on.any():
                first.setdefault(name, i)
    return first


def warm() -> Alarms:
    alarms = Alarms(1, (False, False, True))
    assert on_after(alarms, [step() for _ in range(40)]) == {}
    return alarms


def test_quiet_stays_quiet_when_batches_change_size_and_entropy_falls() -> None:
    """The plain mean moves by a factor of four between these mixes; at a fixed mix nothing does."""
    changing = []
    for i in range(200):
        s = step(tokens=10 ** (4 + i % 3))
        changing.append(s)
        shift = i / 200
        s.bins[0, 2] *= 1 - shift
        s.bins[0, 5] *= 1 + shift
    assert on_after(warm(), changing) == {}


def test_growth_that_hides_behind_falling_entropy() -> None:
    """Every kind of token gets twice as bad while the plain mean stays where it is."""
    steps = []
    for i in range(80):
        s = step(times=min(1 + i / 40, 2.0))
        s.bins[0, 2] *= max(1 - i / 40, 0.3)
        steps.append(s)
    plain = [float((s.bins @ bin_middles()).sum() / s.bins.sum()) for s in (steps[0], steps[-1])]
    assert plain[1] < 1.25 * plain[0]
    assert "grows" in on_after(warm(), steps)


@pytest.mark.parametrize(
    ("bad", "name", "within"),
    [
        (step(times=3.0), "jump", 1),
        (step(times=2.0), "grows", 12),
        (step(bounds=np.array([[1.0, -2.0, -2.0]])), "bounds", 1),  # e times the bound: two steps
        (step(bounds=np.array([[3.5, -2.0, -2.0]])), "bounds", 0),  # 33 times: at once
        (step(bounds=np.array([[-2.0, -2.0, 1e-9]])), "bounds", 0),  # a maximum: at once
        (step(over_two=np.array([1.0])), "over-two", 1),
        (step(ess=np.array([0.2])), "ess", 2),
        (step(states=np.array([[0.02, 0, 0, 0, 0]])), "states", 1),
        (step(states=np.array([[0, 0.01, 0, 0, 0]])), "states", 1),
    ],
)
def test_each_alarm_alone(bad: Step, name: str, within: int) -> None:
    first = on_after(warm(), [bad] * (within + 3))
    assert first.get(name) == within or (name == "grows" and first[name] <= within), first


@pytest.mark.parametrize(
    "odd",
    [
        step(times=4.0),  # one odd batch
        step(bounds=np.array([[1.0, -2.0, -2.0]])),
        step(bounds=np.array([[5.0, -2.0, -2.0]]), bound_errors=np.full((1, 3), 0.9)),  # one token carries the mean
        step(ess=np.array([0.01])),
        step(states=np.array([[0.5, 0, 0, 0, 0]])),
        step(rows=np.array([0.0]), bins=np.zeros((1, BUCKETS, BINS)), error=np.array([np.inf]), ess=np.array([np.nan])),
    ],
)
def test_one_odd_step_is_no_alarm(odd: Step) -> None:
    assert on_after(warm(), [odd, *[step() for _ in range(20)]]) == {}


def test_a_value_at_its_bound_is_not_above_it() -> None:
    near = np.random.default_rng(1).normal(-0.02, 0.05, (3000, 1, 3))
    steps = [step(bounds=np.where([[True, True, False]], b, -1.0)) for b in near]
    assert on_after(warm(), steps) == {}


def test_a_jump_that_stays_is_in_the_end_the_new_level() -> None:
    alarms = warm()
    on = [bool(alarms.advance(step(times=3.0))["jump"][0]) for _ in range(60)]
    assert on[1] and on[20] and not on[-1]  # the trailing window has taken it over; the frozen baseline has not
    assert bool(alarms.advance(step(times=3.0))["grows"][0])


def test_alarms_end_when_the_fault_ends() -> None:
    alarms = warm()
    for _ in range(10):
        alarms.advance(step(times=3.0, bounds=np.array([[1.0, -2.0, -2.0]])))
    for _ in range(30):
        on = alarms.advance(step())
    assert not any(x.any() for x in on.values())


# -- harmless gaps -------------------------------------------------------------------------------------------------


def sized(mean: float, tail: float = 0.0, at: float = 0.3, tokens: float = 2e5, bucket: int = 6) -> Step:
    """A step of sure tokens with gaps around `mean` nats; a share `tail` of them lies around `at`."""
    s = step(tokens=tokens)
    s.bins[:] = 0.0
    for share, size in ((1 - tail, mean), (tail, at)):
        shape = np.exp(-0.5 * ((np.log(bin_middles()) - np.log(size)) / 0.3) ** 2)
        s.bins[0, bucket] += tokens * share * shape / shape.sum()
    return s


def warm_with(s: Step) -> Alarms:
    alarms = Alarms(1, (False, False, True))
    assert on_after(alarms, [s] * 40) == {}
    return alarms


def test_entropy_that_collapses_raises_no_tail() -> None:
    """What `examples/plain_torch.py` does at a learning rate of 1e-4: mean |d| falls from 0.02 to 2e-5, and what is
    far off at that scale is far below what it was."""
    falling = []
    for i in range(120):
        s = step(times=float(np.exp(-7 * min(i / 60, 1.0))))
        s.bins[0, 6] += sized(2e-5, tail=0.02, at=2e-3, tokens=2e5 * min(i / 60, 1.0)).bins[0, 6]
        falling.append(s)
    assert on_after(warm(), falling) == {}


@pytest.mark.parametrize(
    "later",
    [
        sized(1e-6, tail=0.05, at=1e-3),  # the tail alarm: harmless tokens, though 1,000 times the mean
        sized(3e-5),  # jump and growth: thirty times nearly nothing
    ],
)
def test_many_times_nearly_nothing_is_no_alarm(later: Step) -> None:
    assert on_after(warm_with(sized(1e-6)), [later] * 100) == {}


@pytest.mark.parametrize(
    ("before", "later", "name", "within"),
    [
        (1e-6, sized(1e-6, tail=0.05), "jump", 1),  # the same tail a third of a nat away: the mean jumps with it
        (1e-3, sized(1e-3, tail=0.001), "tail", 60),  # the mean hardly moves
        (1e-6, sized(2e-3), "jump", 1),
        (1.2e-4, sized(2.8e-4), "grows", 20),  # just above what is harmless
        (0.02, sized(0.001, tail=0.02), "tail", 6),  # under a mean that fell
    ],
)
def test_a_real_tail_jump_or_growth_from_nearly_nothing_rings(
    before: float, later: Step, name: str, within: int
) -> None:
    first = on_after(warm_with(sized(before)), [later] * 100)
    assert name in first and first[name] <= within, first


def test_a_long_fault_is_over_soon_after_it_is_mended() -> None:
    alarms = warm()
    bad = step(times=3.0, bounds=np.array([[1.0, -2.0, -2.0]]), over_two=np.array([1.0]))
    bad.bins[0, 6] += sized(1e-3, tail=0.02).bins[0, 6]
    for _ in range(300):
        on = alarms.advance(bad)
    assert on["grows"].any() and on["bounds"].any() and on["over-two"].any() and on["tail"].any()
    for _ in range(12):
        on = alarms.advance(step())
    assert not any(x.any() for x in on.values()), on


def test_nan_is_no_evidence_and_breaks_nothing() -> None:
    alarms = warm()
    bad = step(bounds=np.full((1, 3), np.nan), bound_errors=np.full((1, 3), np.inf), over_two=np.array([-np.inf]))
    assert on_after(alarms, [bad] * 5) == {}
    assert all(np.isfinite(x).all() for x in (alarms.counts.bounds, alarms.counts.grows, alarms.counts.tail))
