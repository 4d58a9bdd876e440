"""Several corrections in a visible order (number 17), and several over different ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from onepolicy.corrections.correction import Correct, Correction, Effects, correct
from onepolicy.corrections.ops import ops_of
from onepolicy.corrections.ratio import INPUTS, Inputs
from onepolicy.corrections.rule import Stage, stage_of
from onepolicy.errors import ContentError, UnknownName, UsageError

SEES = ("kept", "all")
BEHIND = ("sampler", "old")
MODES = ("", "decoupled", "bypass")


@dataclass(frozen=True)
class Composition:
    """Stages in order, called like one correction: weights multiply, `keep` is the AND.

    sees: "kept": a stage looks at what the ones before it kept (SkyRL); "all": every stage looks at every trained token
    (verl, slime). mode: "decoupled" wants old=, "bypass" wants current=, "" takes either. behind: "old" for a rule that
    holds current against old (slime's OPSM). denominator: used unless the call says another. note: what differs from
    the origin, for a preset.
    """

    stages: tuple[Stage, ...]
    sees: str = "kept"
    denominator: str = "all"
    mode: str = ""
    behind: str = "sampler"
    name: str = "composition"
    source: str = ""
    date: str = ""
    note: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, known in (("sees", SEES), ("denominator", SEES), ("mode", MODES), ("behind", BEHIND)):
            if getattr(self, key) not in known:
                raise UnknownName(key, str(getattr(self, key)), known)
        one = np.zeros((1, 1))
        batch: Inputs = {"sampler": one, "old": one, "mask": one == 0, "advantages": one + 1}
        correct(self.stages, batch, self.sees, self.name)

    def __call__(self, **inputs: Any) -> Correction:
        """A `Correction` of these inputs (`Inputs`). Errors: `UsageError` for a policy that the mode does not have."""
        given = {k: v for k, v in inputs.items() if v is not None}
        for key in given:
            if key not in INPUTS:
                raise UnknownName(f"option of {self.name}", key, INPUTS)
        wanted = {"decoupled": "old", "bypass": "current"}.get(self.mode)
        if wanted and wanted not in given:
            raise UsageError(f"{self.name} is of {self.mode} mode: it needs {wanted}=")
        if self.behind == "old":
            if "sampler" in given or "old" not in given:
                raise UsageError(f"{self.name} holds current against old: it needs current= and old=, and no sampler=")
            given["sampler"] = given.pop("old")
        return correct(self.stages, cast(Inputs, {"denominator": self.denominator, **given}), self.sees, self.name)

    def __str__(self) -> str:
        return " -> ".join(map(str, self.stages)) or "nothing"


def compose(*stages: Correct | tuple[Correct, Mapping[str, Any]], sees: str = "kept") -> Composition:
    """Corrections as one, applied in this order: `compose(geometric_reject, (truncate, {"cap": 2.0}))`.

    Usually a rejection first, then the weights (AReaL #1218, SkyRL). Errors: `UsageError` for options that a stage does
    not have or that make no sense: raised here, not in the loop.
    """
    return Composition(tuple(_stage(x) for x in stages), sees)


def _stage(x: Any) -> Stage:
    f, options = x if isinstance(x, tuple) else (x, {})
    if not hasattr(f, "rule"):
        raise UsageError(f"compose: {f!r} is no correction; wanted one of `CORRECTIONS`, or (correction, options)")
    return stage_of(f.__name__, f.rule, f.options, options)


def combine(*corrections: Correction) -> Correction:
    """Corrections of the same tokens over different ratios as one: weights multiply, `keep` is the AND.

    For example old against sampler, and current against old. The denominator is counted anew in the way of the first;
    effects are those of each, numbered `1/...`, `2/...`. Errors: `UsageError` for none, `ContentError` for other
    shapes.
    """
    if not corrections:
        raise UsageError("combine needs one correction or more")
    first = corrections[0]
    weights, keep = first.weights, first.keep
    for other in corrections[1:]:
        if tuple(other.weights.shape) != tuple(weights.shape):
            raise ContentError(f"combine: shapes {tuple(weights.shape)} and {tuple(other.weights.shape)} differ")
        weights, keep = weights * other.weights, keep & other.keep
    ops = ops_of(weights)
    weights = ops.where(keep, weights, 0.0)
    denominator = first.denominator
    if first.over == "kept":
        denominator = ops.as_like(ops.clip(ops.count(keep), 1.0, float("inf")), weights)
    values = {f"{i}/{key}": x for i, c in enumerate(corrections, 1) for key, x in c.effects.items()}
    stages = tuple(s for c in corrections for s in c.stages)
    return Correction(weights, keep, denominator, Effects(ops, values), stages, first.over, first._ratio)


def as_stage(table: Mapping[str, Any], known: Mapping[str, Correct]) -> Stage:
    """A stage from data: `{"correction": name, option: value, ...}`."""
    options: dict[str, Any] = dict(table)
    name = options.pop("correction")
    if name not in known:
        raise UnknownName("correction", name, known)
    f = known[name]
    return stage_of(name, f.rule, f.options, options)


__all__: Sequence[str] = ("Composition", "as_stage", "combine", "compose")
