"""The judge: Sums and a preset in, findings and one of four outcomes out.

Pass: every required metric measured, every one-sided 99% limit within its bound, nothing non-finite. Drift: one-sided
tests of "value <= bound", Holm at 1%, or a failing finding. Else inconclusive, with what would decide. A maximum has no
interval: one violation is drift, a pass needs the minimum tokens. NaN never passes: comparisons are written
`not (x <= bound)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from onepolicy.codes import CODES, by_rank, finding
from onepolicy.estimate import LEAST_CLUSTERS, measure, quantile_p_value
from onepolicy.gates.bounds import Bound, Preset
from onepolicy.gates.states import state_findings
from onepolicy.intervals import CONFIDENCE, holm, t_cdf, t_quantile
from onepolicy.metrics import METRICS
from onepolicy.sums import Quantile, Sums
from onepolicy.types import Finding, Gate, Measurement, Outcome, Report, Severity

#: Surprisal counts as significant below this p (its z has no bound of its own, so the false-alarm budget is here).
SURPRISAL_LEVEL = 1e-4
#: Power at which `smallest_seen` is stated.
_POWER = NormalDist().inv_cdf(0.9)
#: Above p99 a quantile only informs below this many tokens.
TAIL_TOKENS = 65_000

_PRECEDENCE = (Outcome.ERROR, Outcome.DRIFT, Outcome.INCONCLUSIVE, Outcome.PASS)


def judge(
    sums: Sums,
    preset: Preset,
    *,
    fingerprints: Mapping[str, Mapping[str, Any]] | None = None,
    run_findings: Sequence[Finding] = (),
    reply_length: int | None = None,
    context: Mapping[str, Any] | None = None,
) -> Report:
    """A `Report`: the gates of `preset` on `sums`, the findings that the counts show, and the outcome of all.

    `run_findings`: what was seen while running (an engine that died, digests that differ); kept as they are.
    """
    measurements = measure(sums)
    found = [*run_findings, *state_findings(sums, measurements)]
    gates = judge_bounds(sums, preset, measurements)
    if any(CODES[f.code].withholds and f.severity is Severity.FAIL for f in found):
        gates = [replace(g, outcome=Outcome.PASS, why="unjudged: a finding above withholds it") for g in gates]
    else:
        found += _gate_findings(gates, sums) + _unjudged(gates, preset)
    return Report(
        outcome=worst([f.outcome for f in found]),
        preset=preset.name,
        findings=tuple(by_rank(found)),
        measurements=measurements,
        sums=sums,
        fingerprints=fingerprints or {},
        gates=tuple(gates),
        reply_length=reply_length,
        context=context or {},
    )


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome that wins: error > drift > inconclusive > pass."""
    return next((o for o in _PRECEDENCE if o in outcomes), Outcome.PASS)


def judge_bounds(sums: Sums, preset: Preset, measurements: Mapping[str, Measurement]) -> list[Gate]:
    """Every bound of the preset as a `Gate`; bounds that fixed texts cannot have are left out."""
    applicable = [b for b in preset.bounds if _applies(b, sums)]
    family = sum(b.when != "alarm" and METRICS[b.metric].reducer not in ("max", "min") for b in applicable)
    gates = [_gate(b, sums, measurements, max(family, 1)) for b in applicable]
    # alarms are a family of their own: many of them must not make the bounds blunt
    rejected = set[str]()
    for alarm in (False, True):
        rejected |= holm(
            {
                str(i): g.p_value
                for i, g in enumerate(gates)
                if g.p_value is not None and not _is_surprisal(g) and (g.when == "alarm") is alarm
            }
        )
    gates = [replace(g, outcome=Outcome.DRIFT, why="") if str(i) in rejected else g for i, g in enumerate(gates)]
    gates = [_alarm(g) for g in gates]
    numeric = any(g.outcome is Outcome.DRIFT and not _is_surprisal(g) for g in gates)
    # the tokens came from the sampler: a scorer that drifts is surprised by them, and that is said already
    return [replace(g, outcome=Outcome.PASS, why=_EXPLAINED) if numeric and _explained(g) else g for g in gates]


def _alarm(gate: Gate) -> Gate:
    """A bound that can only raise an alarm leaves nothing open."""
    if gate.when == "alarm" and gate.outcome is Outcome.INCONCLUSIVE:
        return replace(gate, outcome=Outcome.PASS, why="informs only: an alarm", would_decide=None)
    return gate


_EXPLAINED = "significant, explained by the drift of the scorer"


def _explained(gate: Gate) -> bool:
    return gate.metric == "surprisal_scorer/excess" and gate.outcome is Outcome.DRIFT


def _applies(bound: Bound, sums: Sums) -> bool:
    """On tokens that side a did not draw there is no KL estimator and no surprisal: those bounds do not exist there."""
    needs_draw = METRICS[bound.metric].uses in ("estimator", "surprisal_a", "surprisal_b")
    nothing_drawn = sums.counts.get("drawn_by_a", 0) == 0
    return not (needs_draw and nothing_drawn)


def _is_surprisal(gate: Gate) -> bool:
    return gate.metric.startswith("surprisal_")


def _gate(bound: Bound, sums: Sums, measurements: Mapping[str, Measurement], family: int) -> Gate:
    """One bound, held against its measurement. `family`: how many are tested together."""
    m = measurements.get(bound.metric)
    if (m is None or m.value is None) and bound.otherwise:
        m = measurements.get(bound.otherwise)
    gate = Gate(
        m.metric if m else bound.metric, bound.at_most, bound.when, Outcome.INCONCLUSIVE, None, None, 0, 0.0,
        source=f"{bound.source} ({bound.date})",
    )  # fmt: skip
    if m is None or m.value is None:
        undefined = m is not None and (m.n_nonfinite > 0 or (m.n > 0 and METRICS[m.metric].reducer == "sum"))
        open_or_not = Outcome.INCONCLUSIVE if bound.when == "required" or undefined else Outcome.PASS
        return replace(gate, outcome=open_or_not, why=f"not measured: {m.why if m else 'not in these sums'}")
    gate = replace(gate, value=m.value, n=m.n, effective_clusters=m.effective_clusters)
    if _is_surprisal(gate):
        return _surprisal_gate(gate, measurements)
    if METRICS[m.metric].reducer in ("max", "min"):
        return _maximum_gate(gate, m, bound)
    return _interval_gate(gate, m, bound, sums, family)


def _maximum_gate(gate: Gate, m: Measurement, bound: Bound) -> Gate:
    assert m.value is not None
    gate = replace(gate, limit=m.value)
    if not (m.value <= bound.at_most):
        return replace(gate, outcome=Outcome.DRIFT, why="one violation is enough")
    return _passed_unless_short(gate, m, bound)


def _interval_gate(gate: Gate, m: Measurement, bound: Bound, sums: Sums, family: int) -> Gate:
    """Limits, test and what would decide, on the metric's own scale."""
    assert m.value is not None
    if m.why:
        return replace(gate, why=m.why)
    if m.effective_clusters < LEAST_CLUSTERS:
        need = _scaled(m, LEAST_CLUSTERS / max(m.effective_clusters, 1.0))
        return replace(
            gate, would_decide=need, why=f"{m.effective_clusters:.1f} effective clusters of {LEAST_CLUSTERS}"
        )
    read = METRICS[m.metric].quantile
    if read is not None and read.q > 0.99 and m.n < TAIL_TOKENS:
        return replace(gate, outcome=Outcome.PASS, why=f"informs only, below {TAIL_TOKENS} tokens")
    if read is not None and read.over is None:
        return _quantile_gate(gate, m, bound, sums, read)
    if m.std_error is None or m.upper is None or m.lower is None:
        return replace(gate, why="no interval: a value with one cluster left out is not finite")
    limit = max(abs(m.lower), abs(m.upper)) if bound.absolute else m.upper
    distance, df = _distance(m, bound), m.effective_clusters - 1
    p = _p_value(distance, m.std_error, df)
    if bound.absolute and m.scale == "linear":  # as far on the other side of zero would have been a violation too
        p = min(1.0, p + _p_value(distance + 2 * bound.at_most, m.std_error, df))
    width = t_quantile(CONFIDENCE, df) * m.std_error
    # what would be called at the first, strictest step of Holm's procedure
    strict = t_quantile(1 - (1 - CONFIDENCE) / family, df) * m.std_error
    gate = replace(gate, limit=limit, p_value=p, smallest_seen=_smallest(m, bound, strict))
    if limit <= bound.at_most:
        return _passed_unless_short(gate, m, bound)
    times = (width / distance) ** 2 if distance else math.inf
    return replace(gate, would_decide=_scaled(m, times), why="the interval holds the bound")


def _quantile_gate(gate: Gate, m: Measurement, bound: Bound, sums: Sums, read: Quantile) -> Gate:
    if m.upper is None or m.lower is None:
        return replace(gate, why="no interval: too few groups of clusters")
    gate = replace(gate, limit=m.upper)
    if m.upper <= bound.at_most:
        return _passed_unless_short(gate, m, bound)
    return replace(gate, p_value=quantile_p_value(sums, read, bound.at_most), why="the interval holds the bound")


def _passed_unless_short(gate: Gate, m: Measurement, bound: Bound) -> Gate:
    if m.n_nonfinite:
        return replace(gate, why=f"{m.n_nonfinite} terms are not finite")
    if m.n < bound.min_tokens:
        clusters = max(math.ceil(m.clusters * bound.min_tokens / max(m.n, 1)), LEAST_CLUSTERS)
        return replace(gate, would_decide=(bound.min_tokens, clusters), why=f"{m.n} tokens of {bound.min_tokens}")
    return replace(gate, outcome=Outcome.PASS)


def _surprisal_gate(gate: Gate, measurements: Mapping[str, Measurement]) -> Gate:
    """Drift only if significant *and* larger than the bound: z alone grows with the number of tokens."""
    z = measurements[gate.metric.replace("/excess", "/z")].value
    assert gate.value is not None
    if z is None or math.isnan(z):
        return replace(gate, outcome=Outcome.PASS, why="not measured: the reported variance is zero")
    p = 2 * NormalDist().cdf(-abs(z))
    sd = abs(gate.value / z) if z else 0.0
    seen = max(gate.bound, NormalDist().inv_cdf(1 - SURPRISAL_LEVEL / 2) * sd) + _POWER * sd
    drift = p <= SURPRISAL_LEVEL and abs(gate.value) > gate.bound
    return replace(gate, p_value=p, smallest_seen=seen, outcome=Outcome.DRIFT if drift else Outcome.PASS)


def _distance(m: Measurement, bound: Bound) -> float:
    """How far the value is above the bound, in units of the metric's scale."""
    assert m.value is not None
    value = abs(m.value) if bound.absolute else m.value
    if m.scale == "log":
        return math.log(value) - math.log(bound.at_most) if bound.at_most > 0 else math.inf
    return value - bound.at_most


def _p_value(distance: float, se: float, df: float) -> float:
    if se == 0:
        return 0.0 if distance > 0 else 1.0
    return t_cdf(-distance / se, df)


def _smallest(m: Measurement, bound: Bound, width: float) -> float:
    more = width + _POWER * (m.std_error or 0.0)
    return bound.at_most * math.exp(min(more, 700)) if m.scale == "log" else bound.at_most + more


def _scaled(m: Measurement, times: float) -> tuple[int, int] | None:
    """(tokens, clusters) if both grew by `times`, in round figures."""
    if not math.isfinite(times):
        return None
    return math.ceil(m.n * max(times, 1.0)), math.ceil(m.clusters * max(times, 1.0))


# -- findings of gates -------------------------------------------------------------------------------------------------

#: How `why` begins where an optional or informing bound passed without being held against a value.
_NOT_HELD = ("not measured", "informs only")

_DRIFT_CODES = {
    "ratio_bias/mean": "ratio-biased",
    "abs_log_ratio/max": "token-above-bound",
    "abs_log_ratio/mean": "gap-above-bound",
    "log_ratio/rms": "gap-above-bound",
}


def _gate_findings(gates: Sequence[Gate], sums: Sums) -> list[Finding]:
    return [f for g in gates if (f := _gate_finding(g, sums)) is not None]


def _gate_finding(gate: Gate, sums: Sums) -> Finding | None:
    evidence = {"metric": gate.metric, "value": gate.value, "limit": gate.limit, "bound": gate.bound, "tokens": gate.n}
    if gate.outcome is Outcome.DRIFT or gate.why == _EXPLAINED:
        if _is_surprisal(gate):
            return _surprisal_finding(gate, evidence)
        if gate.metric.startswith("gap_over_floor"):
            return _floor_finding(gate, evidence, sums)
        code = _DRIFT_CODES.get(gate.metric, "kl-above-bound" if gate.metric.startswith("kl_") else "above-bound")
        message = f"{gate.metric} is {gate.value:.3g}, bound {gate.bound:g}"
        return finding(code, message, evidence=evidence, place=_at(sums))
    if gate.outcome is Outcome.INCONCLUSIVE:
        return finding(_open_code(gate), _open_message(gate), evidence=evidence)
    if gate.why.startswith("not measured") and gate.when != "alarm":
        return finding("not-covered", f"{gate.metric} {gate.why}", evidence=evidence)
    return None


def _floor_finding(gate: Gate, evidence: dict[str, Any], sums: Sums) -> Finding:
    start = gate.metric.partition("_from_")[2].partition("/")[0]
    where = f" from position {start} on" if start else f" ({gate.metric.rpartition('/')[2]})"
    message = f"the gap is {gate.value:.3g} times what rounding predicts{where}, bound {gate.bound:g}"
    code = "beyond-rounding-late" if start not in ("", "0") else "beyond-rounding"
    return finding(code, message, evidence=evidence, place=_at(sums))


def _unjudged(gates: Sequence[Gate], preset: Preset) -> list[Finding]:
    """A preset of which no bound was held against a number says nothing, so it cannot pass."""
    if any(g.outcome is not Outcome.PASS or not g.why.startswith(_NOT_HELD) for g in gates):
        return []
    why = "; ".join(f"{g.metric} {g.why}" for g in gates) or "none of them exists for tokens that were not drawn"
    return [finding("not-measured", f"no bound of {preset.name!r} was judged: {why}")]


def _at(sums: Sums) -> str:
    worst_token = next(iter(sums.worst.get("tokens", [])), None)
    return f"record {worst_token.record}, position {worst_token.position}" if worst_token else ""


def _surprisal_finding(gate: Gate, evidence: dict[str, Any]) -> Finding:
    side = "scorer" if "scorer" in gate.metric else "sampler"
    direction = "more certain" if (gate.value or 0) < 0 else "less certain"
    message = (
        f"drawn tokens are {direction} than the {side}'s entropy by {abs(gate.value or 0):.3g} nats a token "
        f"(p = {gate.p_value:.1g})"
    )
    rivals = ("selection of rollouts by reward or by length", "greedy or truncated sampling", "filtered tokens")
    if gate.why == _EXPLAINED:
        return finding(
            "not-drawn-from-reported", message + "; the drift of the scorer explains it", evidence=evidence,
            rivals=rivals, severity=Severity.INFO, outcome=Outcome.PASS,
        )  # fmt: skip
    return finding("not-drawn-from-reported", message, evidence=evidence, rivals=rivals)


def _open_code(gate: Gate) -> str:
    for words, code in (
        ("not measured", "not-measured"),
        ("effective clusters", "too-few-clusters"),
        ("tokens of", "too-few-tokens"),
        ("not finite", "nonfinite-terms"),
    ):
        if words in gate.why:
            return code
    return "undecided"


def _open_message(gate: Gate) -> str:
    value = "" if gate.value is None else f" is {gate.value:.3g}, bound {gate.bound:g}"
    need = gate.would_decide
    decide = f"; about {need[0]:,} tokens in {need[1]:,} clusters would decide" if need else ""
    return f"{gate.metric}{value}: {gate.why}{decide}"
