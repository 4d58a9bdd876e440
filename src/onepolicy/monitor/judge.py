"""From one merged step to findings. Decisions use merged numbers only, so every rank comes to the same ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onepolicy.codes import CODES, finding
from onepolicy.errors import UsageError
from onepolicy.gates.bounds import Bound, Preset
from onepolicy.metrics import METRICS
from onepolicy.monitor import alarms
from onepolicy.monitor.alarms import Alarms, Step
from onepolicy.monitor.numbers import measurable, numbers
from onepolicy.monitor.series import TAILS
from onepolicy.monitor.vector import ROWED, Merged
from onepolicy.types import Finding, Outcome, Severity

#: A bound's metric -> the rowed term that its standard error comes from, and how many times that error it has.
_ERRORS = {
    "abs_log_ratio/mean": ("abs_log_ratio", 1.0),
    "log_ratio/rms": ("abs_log_ratio", 1.0),
    "kl_sampler_scorer_k3/mean": ("k3", 1.0),
    "ratio_bias/mean": ("ratio_minus_one", 1.0),
    "ratio/mean": ("ratio_minus_one", 1.0),
}
#: Of metrics whose error is not known: they need a few steps.
_UNKNOWN_ERROR = 0.25
_BOUND_CODES = {
    "abs_log_ratio/mean": "gap-above-bound",
    "log_ratio/rms": "gap-above-bound",
    "abs_log_ratio/max": "token-above-bound",
    "ratio_bias/mean": "ratio-biased",
    "ratio/mean": "ratio-biased",
}
#: state -> (finding code, the counts it is made of, in words)
_STATES = {
    "missing": ("missing-logprobs", ("null",), "have no log-prob"),
    "nonfinite": ("nonfinite-logprob", ("pos_inf",), "have the log-prob +inf"),
    "support": ("support-violation", ("neg_inf",), "have probability zero"),
    "positive": ("positive-logprob", ("positive",), "have a log-prob above 0"),
    "placeholder": ("placeholder-logprob", ("placeholder",), "have a fill value for a log-prob (0.0, or below -1000)"),
}
#: Versions of the scorer without a newer one of the sampler before the engine is said to stand still.
MAX_LAG = 16


def said(code: str, message: str, **more: Any) -> Finding:
    """A `Finding` of the loop, with the code's severity, outcome and advice unless given otherwise."""
    return finding(code, message, origin="run", **more)


def rank_of(found: Finding) -> int:
    """Its place in the order of suspicion."""
    return CODES[found.code].rank


def loop_bounds(preset: Preset) -> tuple[list[Bound], list[Bound]]:
    """(the bounds that the loop can judge, the ones that it cannot). Errors: `UsageError` for a required one."""
    judged, left = list[Bound](), list[Bound]()
    for bound in preset.bounds:
        name = next((n for n in (bound.metric, bound.otherwise) if n and measurable(n)), None)
        if name is not None:
            judged.append(bound)
        elif bound.when == "required":
            what = f"bounds {preset.name!r}: {bound.metric} is required, and cannot be measured in the loop"
            raise UsageError(f'{what}; leave it to `onepolicy check`, or set when = "if_measured"')
        else:
            left.append(bound)
    if not judged:
        raise UsageError(f"bounds {preset.name!r} hold nothing that can be measured in the loop")
    return judged, left


def metric_of(bound: Bound) -> str:
    """The metric that is judged in the loop: the bound's own, or the one that stands in for it."""
    return bound.metric if measurable(bound.metric) else str(bound.otherwise)


@dataclass
class Judged:
    """What one step came to."""

    numbers: dict[str, float | None]
    findings: list[Finding] = field(default_factory=list[Finding])


class Judge:
    """The alarms of one run, its versions, and the words for them."""

    def __init__(self, preset: Preset, max_lag: int = MAX_LAG) -> None:
        self.bounds, self.not_covered = loop_bounds(preset)
        self.max_lag = max_lag
        exact = tuple(METRICS[metric_of(b)].reducer in ("max", "min") for b in self.bounds)
        self.alarms = Alarms(1, exact)
        self.newest, self.seen, self.still = math.nan, math.nan, 0
        self.tokens = 0.0

    def judge(self, merged: Merged) -> Judged:
        """One step. Its alarms change; call it once a step."""
        out = Judged(numbers(merged))
        self.tokens += merged["scored"]
        step = self.step_of(merged, out.numbers)
        on = {name: x[0] for name, x in self.alarms.advance(step).items()}
        for say in _SAY:
            out.findings += say(self, merged, out.numbers, on)
        out.findings.sort(key=lambda f: (f.severity is not Severity.FAIL, rank_of(f)))
        return out

    def step_of(self, merged: Merged, found: Mapping[str, float | None]) -> Step:
        """The statistics that the alarms look at, as arrays of one run."""
        pairs = [self._bound(merged, found, b) for b in self.bounds]
        share = found["over_two/share"]
        over = math.log(share / alarms.OVER_TWO) if share else -math.inf
        tokens = merged["tokens"]
        states = [_state(merged, name) / tokens if tokens else math.nan for name in _STATES]
        array = lambda *x: np.array(x, dtype=np.float64)
        return Step(
            merged.bins[None],
            array(merged["rows_scored"]),
            array(merged.relative_error("abs_log_ratio")),
            array([y for y, _ in pairs]),
            array([e for _, e in pairs]),
            array(over),
            array(merged.relative_error("over_two")),
            array(_or_nan(found["ess_token/share"])),
            array(states),
        )

    def _bound(self, merged: Merged, found: Mapping[str, float | None], bound: Bound) -> tuple[float, float]:
        """(log(value / bound), its standard error). Values are counted from what two equal sides would give."""
        key = metric_of(bound)
        value, metric = found.get(key), METRICS[key]
        if value is None or self.tokens < bound.min_tokens:
            return math.nan, math.inf
        ideal = metric.ideal or 0.0
        size, limit = value - ideal, bound.at_most - ideal
        size = abs(size) if bound.absolute or ideal else size
        if not size > 0:
            return -math.inf, 0.0
        y = math.log(size / limit) if limit > 0 else math.inf
        if metric.reducer in ("max", "min"):
            return y, 0.0
        rowed, times = _ERRORS.get(key, (None, 0.0))
        return y, _UNKNOWN_ERROR if rowed is None else times * merged.relative_error(rowed)

    def to_dict(self) -> dict[str, Any]:
        numbers = {"newest": self.newest, "seen": self.seen, "still": self.still, "tokens": self.tokens}
        judged = [metric_of(b) for b in self.bounds]
        numbers = {k: None if x != x else x for k, x in numbers.items()}
        return {"alarms": self.alarms.to_dict(), "judged": judged, **numbers}

    def load(self, data: Mapping[str, Any]) -> None:
        """Errors: `ValueError`, `KeyError`, `TypeError` for what is no state of these bounds."""
        judged = [metric_of(b) for b in self.bounds]
        if data["judged"] != judged:
            raise ValueError(f"it judged {', '.join(data['judged'])}, this one {', '.join(judged)}")
        self.alarms.load(data["alarms"])
        for name in ("newest", "seen", "still", "tokens"):
            setattr(self, name, math.nan if data[name] is None else data[name])

    def follow(self, merged: Merged) -> float | None:
        """How many versions the scorer has gone through since the sampler's newest changed; None without versions."""
        told = [x for x, seen in zip(merged.own("version"), merged.own("observes"), strict=True) if seen and x == x]
        if not told or not merged["versions:known"]:
            return None
        version, newest = max(told), merged.greatest("newest_version")
        if not newest <= self.newest or version < self.seen:  # the first one, a newer one, or the trainer went back
            self.newest, self.still = newest, 0
        elif version > self.seen:
            self.still += 1
        self.seen = version
        return self.still


def _or_nan(x: float | None) -> float:
    return math.nan if x is None else x


def _state(merged: Merged, name: str) -> float:
    return sum(merged[f"{kind}_{side}"] for kind in _STATES[name][1] for side in ("sampler", "old"))


Say = Callable[[Judge, Merged, Mapping[str, float | None], Mapping[str, Any]], list[Finding]]


def _say_states(judge: Judge, merged: Merged, found: Mapping[str, Any], on: Mapping[str, Any]) -> list[Finding]:
    out = list[Finding]()
    for i, (name, (code, kinds, words)) in enumerate(_STATES.items()):
        n = _state(merged, name)
        if not n:
            continue
        sides = ", ".join(f"{s} {merged[f'{k}_{s}']:,.0f}" for k in kinds for s in ("sampler", "old"))
        message = f"{n:,.0f} values of {merged['tokens']:,.0f} tokens {words} ({sides})"
        grave = bool(on["states"][i])
        how = {"severity": Severity.FAIL, "outcome": Outcome.ERROR} if grave else {}
        mild = {} if grave else {"severity": Severity.WARN, "outcome": Outcome.PASS}
        out.append(said(code, message, evidence={"values": n, "tokens": merged["tokens"]}, **how, **mild))
    return out


def _say_faults(judge: Judge, merged: Merged, found: Mapping[str, Any], on: Mapping[str, Any]) -> list[Finding]:
    faults = {rank: n for rank, n in enumerate(merged.own("faults")) if n}
    if not faults:
        return []
    ranks = ", ".join(str(rank) for rank in faults)
    n = sum(faults.values())
    message = f"observe failed {'once' if n == 1 else f'{n:,.0f} times'} in this step, on rank {ranks}"
    return [said("observe-failed", message, evidence={"ranks": list(faults)})]


def _say_uncorrected(judge: Judge, merged: Merged, found: Mapping[str, Any], on: Mapping[str, Any]) -> list[Finding]:
    """Old is current in at least one whole call, nothing weights the loss, and the sampler is another."""
    calls, bare = merged["updates:observes"], merged["updates:uncorrected"]
    everything = sum(merged.own("observes"))
    n, equal = merged["update:n"], merged["updates:equal"]
    if not n or not calls or bare < everything or merged["token:scored:bit_equal"] >= merged["scored"]:
        return []
    ranks = sum(x > 0 for x in merged.own("observes"))
    if equal < 0.99 * n * ranks / max(calls, ranks):
        return []
    k3 = found["kl_sampler_scorer_k3/mean"]
    message = (
        f"old and current log-probs are equal to the bit for {equal / n:.0%} of the tokens, and differ from the "
        f"sampler's (KL k3 {_or_nan(k3):.2g}): the ratio starts at 1 and no weight is applied"
    )
    return [said("uncorrected-off-policy", message, evidence={"equal": equal / n, "kl_k3": k3})]


def _say_weights(judge: Judge, merged: Merged, found: Mapping[str, Any], on: Mapping[str, Any]) -> list[Finding]:
    """One of them is enough to make every parameter NaN."""
    n = merged["corrected:nonfinite"]
    if not n:
        return []
    message = f"{n:,.0f} weights of {merged['corrected:n']:,.0f} tokens are NaN or infinite"
    return [said("nonfinite-weight", message, evidence={"weights": n, "tokens": merged["corrected:n"]})]


def _say_still(judge: Judge, merged: Merged, found: Mapping[str, Any], on: Mapping[str, Any]) -> list[Finding]:
    still = judge.follow(merged)
    if still is None or still <= judge.max_lag:
        return []
    message = (
        f"no token of a newer version than {judge.newest:.0f} for {still} versions of the scorer, now {judge.seen:.0f}"
    )
    evidence = {"newest": judge.newest, "scorer": judge.seen, "versions": still, "max_lag": judge.max_lag}
    return [said("engine-never-updated", message, evidence=evidence)]


def _say_mixed(judge: Judge, merged: Merged, found: Mapping[str, Any], on: Mapping[str, Any]) -> list[Finding]:
    """Replies that were drawn across an update of the weights."""
    mixed, rows = merged["versions:rows_mixed"], merged["rows_scored"]
    if not mixed:
        return []
    first, last = (found[f"mixed_version/{end}_change"] for end in ("first", "last"))
    message = f"{mixed:,.0f} of {rows:,.0f} replies hold tokens of more than one weight version; "
    message += "where it changes is not known" if first is None else f"it changes after {first:.0f} tokens"
    message += "" if first == last else f" at the earliest, {_or_nan(last):.0f} at the latest"
    sd = {name: found.get(f"{pair}.log_ratio/sd") for name, pair in (("sd_stale", "stale"), ("sd_lag_0", "lag_0"))}
    if None not in sd.values():
        message += f"; d spreads by {sd['sd_stale']:.2g} nats in tokens of older weights, "
        message += f"{sd['sd_lag_0']:.2g} in those of the scorer's own"
    evidence = {"replies": mixed, "of": rows, "first_change": first, "last_change": last, **sd}
    return [said("mixed-weight-versions", message, evidence=evidence)]


def _say_ahead(judge: Judge, merged: Merged, found: Mapping[str, Any], on: Mapping[str, Any]) -> list[Finding]:
    """A version that the scorer has not reached counts something else, such as calls of an update."""
    n = merged["versions:ahead"]
    if not n:
        return []
    newest = found["newest_version"]
    told = [x for x in merged.own("version") if x == x]
    scorer = max(told) if told else None
    share = n / merged["versions:known"]
    message = (
        f"{share:.0%} of the tokens carry a version that the scorer has not reached: up to {_or_nan(newest):.0f}, "
    )
    message += f"the scorer is at {_or_nan(scorer):.0f}"
    evidence = {"share": share, "newest": newest, "scorer": scorer}
    rivals = ("a label that counts calls of the weight update, not optimiser steps", "two counts that start elsewhere")
    return [said("version-ahead", message, evidence=evidence, rivals=rivals)]


def _say_bounds(judge: Judge, merged: Merged, found: Mapping[str, Any], on: Mapping[str, Any]) -> list[Finding]:
    out = list[Finding]()
    for bound, above in zip(judge.bounds, on["bounds"], strict=True):
        if not above:
            continue
        key = metric_of(bound)
        code = _BOUND_CODES.get(key, "kl-above-bound" if key.startswith("kl_") else "above-bound")
        value = _or_nan(found.get(key))
        evidence = {"metric": key, "value": value, "bound": bound.at_most, "tokens": found["scored"]}
        out.append(said(code, f"{key} is {value:.3g}, bound {bound.at_most:g}", evidence=evidence))
    return out


def _say_alarms(judge: Judge, merged: Merged, found: Mapping[str, Any], on: Mapping[str, Any]) -> list[Finding]:
    out, last = list[Finding](), judge.alarms.last
    times = {name: math.exp(min(float(last[name][0]), 700.0)) for name in ("jump", "grows")}
    evidence = {"mean_abs": found["abs_log_ratio/mean"]}
    if on["jump"]:
        message = f"at this step's mix of probabilities |d| is {times['jump']:.2g} times that of the steps before"
        out.append(said("gap-jumped", message, evidence={"times": times["jump"], **evidence}))
    if on["grows"]:
        out.append(_grows(judge, times["grows"], found))
    if on["tail"]:
        level = int(judge.alarms.counts.tail[0].argmax())
        more = math.exp(min(float(last["tail"][0, level]), 700.0))
        message = (
            f"{more:.2g} times as many tokens as at the run's start lie beyond what was the last {TAILS[level]:.2%} of "
            f"|d|, mean |d| is {_or_nan(found['abs_log_ratio/mean']):.2g}"
        )
        tail = {"times": more, "tail": TAILS[level], "p99.9": found["abs_log_ratio/p99.9"]}
        out.append(said("tail-rises", message, evidence={**tail, **evidence}))
    if on["ess"]:
        ess = _or_nan(found["ess_token/share"])
        message = f"the effective sample size of the raw token ratios is {ess:.1%} of the tokens, alarm below 30%"
        out.append(said("ess-collapse", message, evidence={"ess": ess, "max_ratio": found["ratio/max"]}))
    if on["over-two"]:
        share = _or_nan(found["over_two/share"])
        message = f"{share:.2%} of the ratios are above 2, alarm above {alarms.OVER_TWO:.0%}"
        out.append(said("ratios-over-two", message, evidence={"share": share, "alarm": alarms.OVER_TWO}))
    return out


def _grows(judge: Judge, times: float, found: Mapping[str, Any]) -> Finding:
    """Growth since the very first steps is what a sampler that gets no weights looks like, whatever its labels say."""
    early, lag = bool(judge.alarms.counts.early[0]), found.get("lag/mean")
    message = f"at this step's mix of probabilities |d| is {times:.2g} times that of the run's start"
    message += ", and it has grown from the first steps on" if early else ""
    message += "" if lag is None else f"; by their labels the tokens are {lag:.2g} versions behind"
    late = "weights that never reach the sampler, whatever its labels say"
    rivals = (late, "a cache that is not reset after an update", "a policy that grows more certain in low precision")
    evidence = {"times": times, "mean_abs": found["abs_log_ratio/mean"], "from_the_start": early, "lag": lag}
    return said("gap-grows", message, evidence=evidence, rivals=rivals)


def _say_recheck(judge: Judge, merged: Merged, found: Mapping[str, Any], on: Mapping[str, Any]) -> list[Finding]:
    worst = max(merged.own("recheck"))
    if worst < RECHECKED.index(Outcome.DRIFT):
        return []
    outcome = RECHECKED[int(worst)]
    return [said("recheck-drifted", f"the check of the live engines ended in {outcome}", outcome=outcome)]


#: How a check's outcome stands in the vector; 0 is no check.
RECHECKED: tuple[Any, ...] = (None, Outcome.PASS, Outcome.INCONCLUSIVE, Outcome.DRIFT, Outcome.ERROR)
_SAY: tuple[Say, ...] = (
    _say_states, _say_faults, _say_uncorrected, _say_weights, _say_still, _say_mixed, _say_ahead, _say_bounds,
    _say_alarms, _say_recheck,
)  # fmt: skip
assert set(_STATES) == set(alarms.STATE_SHARES)
assert all(rowed in ROWED for rowed, _ in _ERRORS.values())
