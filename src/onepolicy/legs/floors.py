"""The floor of a check: which variants of the trusted side emulate the sampler, and what their gaps predict."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from onepolicy.floor import Variant, assumed, measured
from onepolicy.legs.attention import ANOTHER
from onepolicy.legs.base import CannotRun, On, Side, Want, using_for, values_of
from onepolicy.legs.plan import Party, Plan, Task, configured
from onepolicy.legs.precision import FLOAT32
from onepolicy.legs.routes import behind
from onepolicy.rollouts import Rollouts
from onepolicy.types import BoolArray, Floor, FloorColumns, Scoring

#: Distinct kernels: what they are called, and the live switches that choose them. Decode is too slow for long texts.
KERNELS: tuple[tuple[str, tuple[Mapping[str, Any], ...], frozenset[On]], ...] = (
    ("as configured", ({},), frozenset({"drawn", "texts"})),
    ("another attention", ANOTHER, frozenset({"drawn", "texts"})),
    ("full forward", ({"path": "prefill"},), frozenset({"drawn", "texts"})),
    ("KV decode", ({"path": "decode"},), frozenset({"drawn"})),
)
#: Precisions whose rounding is worth predicting; float32 has its own question.
ROUNDING = ("bfloat16", "float16")


@dataclass(slots=True)
class FloorPlan:
    """`variants`: (kernel, task, whether it computes at the sampler's precision). `why`: why there is no floor."""

    dtype: str = ""
    variants: list[tuple[str, Task, bool]] = field(default_factory=list[tuple[str, Task, bool]])
    reference: dict[str, Task] = field(default_factory=dict[str, Task])
    why: str = ""


def plan_floor(
    parties: Mapping[Side, Party], sampler: Mapping[str, Any], dtype: str | None, on: Sequence[On], plan: Plan
) -> FloorPlan:
    """The floor's tasks, added to `plan`. `sampler`: its fingerprint, `dtype`: the precision it declares. What cannot
    be emulated is said in `why`, and nothing is planned."""
    out = FloorPlan(dtype or "")
    own = parties["scorer"]
    party = parties.get("floor", own)
    out.why = _cannot(party, sampler, dtype)
    if out.why:
        return out
    try:
        emulating = configured(party, Want("floor", load=_emulation(sampler, dtype)))
    except CannotRun as err:
        out.why = str(err)
        return out
    precision = own.options.get("dtype") or dtype
    try:
        others = configured(party, Want("floor", load={"dtype": precision})) if precision != dtype else None
    except CannotRun:
        others = None
    for where in on:
        _plan_variants(out, emulating, others, where, plan)
        _plan_reference(out, emulating, where, plan)
    return out


def _cannot(party: Party, sampler: Mapping[str, Any], dtype: str | None) -> str:
    if dtype is None:
        return "the sampler does not declare its precision"
    if dtype not in ROUNDING:
        return f"the sampler computes in {dtype}, where bounds are absolute"
    kv = sampler.get("kv_cache_dtype")
    if kv not in (None, "auto", dtype):
        return f"the sampler keeps its KV cache in {kv}, which cannot be emulated"
    quantised = sampler.get("weight_quantization") or sampler.get("quantization")
    if quantised:
        return f"the sampler is quantised ({quantised}), which cannot be emulated"
    if "dtype" not in party.switches or not party.switches["dtype"].choices or "path" not in party.switches:
        return f"engine {party.spec.name!r} has no variants to measure it with (name one with --floor hf:MODEL)"
    return ""


def _emulation(sampler: Mapping[str, Any], dtype: str | None) -> dict[str, Any]:
    head = {"head_dtype": "float32"} if sampler.get("head_dtype") == "float32" and dtype != "float32" else {}
    return {"dtype": dtype, **head}


def _plan_variants(out: FloorPlan, party: Party, others: Party | None, on: On, plan: Plan) -> None:
    for kernel, using, grounds in KERNELS:
        if on not in grounds:
            continue
        try:
            live = using_for(Want("floor", using=using), party.spec.name, party.switches, party.options)
        except CannotRun:
            continue
        task = Task(party.config, tuple(sorted(live.items())), on)
        if task in (t for _, t, _ in out.variants):
            continue  # what is configured is one of the others
        if not live and "path" in party.switches:
            kernel = "KV decode" if party.options.get("path") == "decode" else "full forward"
        out.variants.append((kernel, plan.add(party, task), True))
    if others is not None:
        task = plan.add(others, Task(others.config, (), on))
        out.variants.append((f"full forward in {others.options['dtype']}", task, False))


def _plan_reference(out: FloorPlan, party: Party, on: On, plan: Plan) -> None:
    """The trusted side's own float32 on the same rounded weights, which the tokens are binned by. For long texts the
    float32 that another leg needs anyway will do: a bin is wider than what rounding the weights moves."""
    if on == "texts":
        same = next((p.b for p in plan.legs if p.leg.key == "same-function-texts"), None)
        if same is not None:
            out.reference[on] = same
        return
    try:
        exact = configured(party, Want("floor", load=FLOAT32.load))
    except CannotRun:
        return
    out.reference[on] = plan.add(exact, Task(exact.config, (), on))


def floor_of(
    planned: FloorPlan, scorings: Mapping[Task, Scoring], rollouts: Rollouts, on: On, mask: BoolArray
) -> tuple[Floor, FloorColumns | None]:
    """The floor over the tokens `on` under `mask` `[T]`, with its columns, from the tasks that were done."""
    if planned.why:
        return Floor("incomplete", planned.why, planned.dtype), None
    variants = [
        Variant(kernel, values_of(scorings[task]), emulates, behind(scorings[task].routes, rollouts))
        for kernel, task, emulates in planned.variants
        if task.on == on and task in scorings
    ]
    reference = scorings.get(planned.reference[on]) if on in planned.reference else None
    exact = None if reference is None else values_of(reference)
    emulating = [v for v in variants if v.emulates]
    mixed = len(emulating) < len(variants)
    if (len(emulating) > 1 or (mixed and emulating)) or exact is None or not variants:
        return measured(variants, exact, mask, planned.dtype)
    return assumed(variants[0].logprobs - exact, exact, mask, planned.dtype)


def part_of(columns: FloorColumns, index: Any) -> FloorColumns:
    """The columns of some tokens."""
    return replace(columns, scale=columns.scale[index], gaps=columns.gaps[:, index], counted=columns.counted[index])


def at_the_edge(planned: FloorPlan | None, scorings: Mapping[Task, Scoring], rollouts: Rollouts) -> int | None:
    """The most drawn tokens that one of the trusted side's kernels keeps in the nucleus and another one does not: what
    rounding does at the edge of a kept set. None where there are no two kernels."""
    if planned is None:
        return None
    found = [values_of(scorings[t]) for _, t, _ in planned.variants if t.on == "drawn" and t in scorings]
    if len(found) < 2:
        return None
    out = [np.isneginf(v) for v in found]
    return max(int(((x != y) & rollouts.drawn).sum()) for x, y in itertools.combinations(out, 2))
