"""What a leg says: its two scorings aligned, added up, measured and judged by its own bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onepolicy.align import align
from onepolicy.codes import finding
from onepolicy.errors import AlignmentError, OnepolicyError
from onepolicy.gates.bounds import Preset, default_preset, load
from onepolicy.gates.judge import judge, worst
from onepolicy.legs.base import Leg
from onepolicy.metrics import METRICS
from onepolicy.metrics.floor import BUCKETS
from onepolicy.reduce import reduce
from onepolicy.rollouts import Rollouts
from onepolicy.types import (
    Finding,
    FloorColumns,
    Gate,
    LegResult,
    LogprobPairs,
    Outcome,
    Ran,
    Scoring,
)  # fmt: skip

#: What a leg is measured by. The pair under test has every metric; a leg answers one question.
METRICS_OF_LEGS = (
    "abs_log_ratio/mean",
    "abs_log_ratio/p99",
    "abs_log_ratio/max",
    "log_ratio/rms",
    "log_ratio/mean",
    "bit_equal/share",
    "gap_over_floor/rms",
    "gap_over_floor/p50",
    "gap_over_floor/p95",
    *(f"gap_over_floor_from_{low}/rms" for low in BUCKETS),
    *(f"log_ratio_from_{low}/rms" for low in BUCKETS),
)
#: A token this many times its own scale, or this far in nats where no scale is known, is bad by itself.
BAD_SCALES, BAD_NATS = 8.0, 0.5


def not_run(leg: Leg, why: str) -> LegResult:
    return LegResult(leg.key, leg.question, leg.factor, "", "", Ran.NOT, why)


def failed(leg: Leg, err: OnepolicyError) -> LegResult:
    return LegResult(leg.key, leg.question, leg.factor, "", "", Ran.FAILED, str(err))


def pairs_for(leg: Leg, rollouts: Rollouts, a: Scoring, b: Scoring, floor: FloorColumns | None) -> LogprobPairs:
    """Errors: `AlignmentError` for two scorings that are one."""
    names = ("sampler" if leg.a.recorded else "first", "second")
    both = rollouts.with_scoring(names[0], a).with_scoring(names[1], b)
    pairs = align(both, *names)
    positions = np.arange(rollouts.n_tokens) - np.repeat(rollouts.offsets[:-1], rollouts.lengths)
    return replace(pairs, floor=floor, positions=positions)


def result_of(
    leg: Leg,
    rollouts: Rollouts,
    a: Scoring,
    b: Scoring,
    words: tuple[str, str],
    floor: FloorColumns | None,
    view: str = "drawn",
) -> LegResult:
    """The leg, run. `words`: its two scorings, for people; `view`: which tokens, `fixed` where nothing is drawn."""
    try:
        pairs = pairs_for(leg, rollouts, a, b, floor)
    except AlignmentError as err:
        return not_run(leg, str(err))
    table = [METRICS[k] for k in METRICS_OF_LEGS]
    sums = reduce(pairs, table, "fixed" if leg.on == "texts" else view)
    report = judge(sums, bounds_of(leg, a, b, floor))
    said = [f for f in report.findings if not _is_edge(f, sums.counts.get("scored", 0))]
    outcome = worst([f.outcome for f in said]) if leg.code else Outcome.PASS
    place = first_bad(pairs, report.gates) if outcome in (Outcome.DRIFT, Outcome.ERROR) else ""
    facts: dict[str, Any] = {"findings": [f.code for f in said if f.outcome is not Outcome.PASS]}
    if leg.bounds == "function":
        facts["kernels"] = ", ".join(dict.fromkeys(kernels_of(x) for x in (a, b)))
    for scoring, side in ((a, "a"), (b, "b")):
        if "cached_tokens" in scoring.fingerprint:
            facts[f"cached_tokens_{side}"] = scoring.fingerprint["cached_tokens"]
    gates = tuple(g for g in report.gates if g.when != "alarm" or g.outcome is Outcome.DRIFT)
    return LegResult(
        leg.key, leg.question, leg.factor, *words, Ran.DONE, "", outcome, report.measurements, gates, place, facts,
        sums.to_dict(),
    )  # fmt: skip


#: Tokens that one kernel keeps in the nucleus and another does not are rounding up to this share.
_EDGE_SHARE = 0.02


def _is_edge(found: Finding, tokens: int) -> bool:
    """Drawn ids that one kernel, or both, leave out of the kept set when they are scored again."""
    counted = found.code in ("support-violation", "nonfinite-terms") and "metric" not in found.evidence
    return counted and found.evidence["tokens"] <= _EDGE_SHARE * tokens


def kernels_of(scoring: Scoring) -> str:
    """The kernels that a fingerprint tells of, in a few words."""
    said = scoring.fingerprint
    kernels = {k: v for k, v in (said.get("kernels") or {}).items() if k in _KERNELS}
    named = [f"{k} {str(v).lower()}" for k, v in kernels.items() if v is not None]
    words = [said.get("attention"), said.get("device"), *named]
    return " ".join([str(said.get("engine", "engine not known")), *(str(w) for w in words if w)])


#: Of the kernels in a fingerprint, those that decide what float32 means.
_KERNELS = ("cpu_capability", "tf32", "float32_matmul_precision", "matmul")


def bounds_of(leg: Leg, a: Scoring, b: Scoring, floor: FloorColumns | None) -> Preset:
    """The leg's own preset, else one and a half floors where there is a floor, else absolute bounds by precision."""
    if leg.bounds == "again":
        return again(a.dtype or b.dtype)
    if leg.bounds is not None:
        return load(leg.bounds)
    if floor is not None:
        return load("leg")
    known: list[str | None] = [x.dtype for x in (a, b) if x.dtype]
    return load(default_preset(known or ["bfloat16"]))


#: A rerun may be as far apart as two sound kernels are; finer precisions by their mantissas (bfloat16 has 8 bits).
_AGAIN = {"float16": 1 / 8, "float32": 2.0**-16, "float64": 2.0**-16}


def again(dtype: str | None) -> Preset:
    """The bounds of a repeat at a precision, those of bfloat16 where it is not known."""
    preset = load("again")
    bounds = tuple(replace(b, at_most=b.at_most * _AGAIN.get(dtype or "", 1.0)) for b in preset.bounds)
    return replace(preset, bounds=bounds)


def first_bad(pairs: LogprobPairs, gates: Sequence[Gate]) -> str:
    """The first token, in the order of the records, that is far beyond rounding by itself, or beyond the bound of a
    single token where there is one; else the worst one."""
    size = np.abs(np.nan_to_num(pairs.log_ratio, nan=0.0))
    limit: Any = next((g.bound for g in gates if g.metric == "abs_log_ratio/max"), BAD_NATS)
    if pairs.floor is not None:
        limit = BAD_SCALES * np.nan_to_num(pairs.floor.scale, nan=np.inf)
    bad = np.flatnonzero(size > limit)
    at = int(bad[0]) if len(bad) else int(size.argmax())
    s = int(np.searchsorted(pairs.offsets, at, side="right")) - 1
    how = "first bad token" if len(bad) else "largest gap"
    return f"{how}: record {pairs.record_ids[s]}, position {at - int(pairs.offsets[s])}"


def findings_of(leg: Leg, result: LegResult) -> list[Finding]:
    """What the leg makes of the verdict."""
    if result.ran is Ran.FAILED and not leg.code:
        more = {"outcome": Outcome.PASS, "origin": "run", "evidence": {"leg": leg.key}}
        return [finding("leg-failed", f"{leg.key}, which only informs: {result.why}", **more)]
    if result.ran is Ran.FAILED:
        code = "same-function-open" if leg.code == "different-function" else "leg-failed"
        return [finding(code, f"{leg.key}: {result.why}", origin="run", evidence={"leg": leg.key})]
    if result.ran is Ran.NOT or not leg.code:
        return []
    if result.outcome in (Outcome.DRIFT, Outcome.ERROR):
        return [finding(leg.code, _sentence(leg, result), origin="run", place=result.place, evidence=_numbers(result))]
    if result.outcome is Outcome.INCONCLUSIVE and leg.code == "different-function":
        why = "; ".join(f"{g.metric} {g.why}" for g in result.gates if g.why)
        message = f"{leg.key}: {why or ', '.join(result.facts['findings'])}"
        return [finding("same-function-open", message, origin="run", evidence=_numbers(result))]
    return _open_findings(leg, result) if result.outcome is Outcome.INCONCLUSIVE else []


def _open_findings(leg: Leg, result: LegResult) -> list[Finding]:
    """A leg that is short of tokens leaves nothing open that the pair does not; one that stands above its bound, or
    whose engine gave no values, does: a single sequence that is wholly wrong has no interval."""
    above = [g for g in result.gates if g.outcome is Outcome.INCONCLUSIVE and not (g.value or 0.0) <= g.bound]
    more: dict[str, Any] = {"origin": "run", "place": result.place, "evidence": _numbers(result)}
    if above:
        message = f"{leg.key}: {above[0].metric} is {above[0].value:.3g}, bound {above[0].bound:g}: {above[0].why}"
        return [finding("undecided", message, **more)]
    if "missing-logprobs" in result.facts.get("findings", ()):
        return [finding("leg-failed", f"{leg.key}: tokens without a log-prob", **more)]
    return []


def _numbers(result: LegResult) -> dict[str, Any]:
    keys = ("log_ratio/rms", "abs_log_ratio/mean", "abs_log_ratio/max", "gap_over_floor/rms")
    found = {k: m.value for k in keys if (m := result.measurements.get(k)) is not None and m.value is not None}
    return {"leg": result.key, "tokens": _n(result), **found}


def _n(result: LegResult) -> int:
    m = result.measurements.get("abs_log_ratio/mean")
    return 0 if m is None else m.n


def _sentence(leg: Leg, result: LegResult) -> str:
    m = result.measurements
    size = " and ".join(
        f"{name} {value:.2g}"
        for name, key in (("RMS", "log_ratio/rms"), ("max", "abs_log_ratio/max"))
        if (value := m[key].value) is not None
    )
    ratio = m["gap_over_floor/rms"].value if "gap_over_floor/rms" in m else None
    times = "" if ratio is None else f"{ratio:.2f}" if ratio < 10 else f"{ratio:,.0f}"
    over = f", {times} times what rounding predicts" if times else ""
    return f"{leg.factor}: {size} nats over {_n(result):,} tokens{over}" if size else f"{leg.factor}: {result.facts}"
