"""What a correction returns, and the one engine that makes it from rules in order."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from onepolicy.arrays import Array
from onepolicy.corrections.effects import Applied, effects_of
from onepolicy.corrections.ops import ops_of
from onepolicy.corrections.ratio import INPUTS, Inputs, Ratio, ratio_of
from onepolicy.corrections.rule import REQUIRED, Rule, Stage, State, stage_of
from onepolicy.errors import ContentError, UsageError


class Effects(Mapping[str, Array]):
    """Side effects by name, each a 0-dim array on the device. Nothing is read before `floats`."""

    def __init__(self, ops: Any, values: Mapping[str, Array]) -> None:
        self._ops, self._values = ops, dict(values)

    def __getitem__(self, key: str) -> Array:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Effects({len(self)} values; .floats() reads them)"

    def floats(self) -> dict[str, float | None]:
        """All of them as floats, with one read of the device; what is not defined (0 / 0) is None."""
        numbers = self._ops.stack([self._ops.wide(x) for x in self._values.values()]).tolist() if self._values else []
        return {key: None if x != x else x for key, x in zip(self._values, numbers, strict=True)}


@dataclass(frozen=True, slots=True)
class Correction:
    """Weights and what is kept, ready for a loss: `(c.weights * c.keep * loss).sum() / c.denominator`.

    weights: `[B, T]` (or packed `[T]`), the dtype of the log-probs but at least float32; 0 where nothing is kept;
        detached unless `grad=True`. Multiply them with the clipped policy loss; add the KL term to a reference after.
    keep: the same shape, bool: trained and not dropped.
    denominator: 0-dim: trained tokens ("all") or kept tokens ("kept"), at least 1, or the number given (1 for 0).
    effects: 0-dim arrays by name; `effects.floats()` reads them.
    stages: what was applied, in order.
    """

    weights: Array
    keep: Array
    denominator: Array
    effects: Effects
    stages: tuple[str, ...] = ()
    over: str = "all"
    _ratio: Any = field(default=None, repr=False)

    def loss(self, per_token_loss: Array, per: str = "token") -> Array:
        """The mean loss, 0-dim; what is not kept is cut out before it is multiplied, so NaN there does no harm.

        per: "token": sum over kept tokens / `denominator`. "sequence": the mean over sequences of their token means,
        counted over trained tokens and sequences ("all") or kept ones ("kept").
        """
        ops = ops_of(self.weights)
        if tuple(per_token_loss.shape) != tuple(self.weights.shape):
            raise ContentError(f"loss: got shape {tuple(per_token_loss.shape)}, wanted {tuple(self.weights.shape)}")
        if per not in ("token", "sequence"):
            raise UsageError(f"per is {per!r}, wanted 'token' or 'sequence'")
        terms = self.weights * ops.where(self.keep, per_token_loss, 0.0)
        if per == "token":
            return ops.as_like(ops.total(terms), terms) / self.denominator
        mask, rows = self._ratio
        counted = rows.total(self.keep if self.over == "kept" else mask)
        means = rows.total(terms) / ops.clip(counted, 1.0, float("inf"))
        return ops.as_like(ops.total(means) / ops.clip(ops.count(counted > 0), 1.0, float("inf")), terms)


class Correct(Protocol):
    """A correction as users call it: inputs by keyword (`Inputs`), and the rule's own options."""

    __name__: str
    rule: Rule
    options: Mapping[str, Any]

    def __call__(self, **inputs: Any) -> Correction: ...


Prepare = Callable[[str, dict[str, Any]], dict[str, Any]]


def correction(rule: Rule) -> Correct:
    """The function that users call, made of a rule `(ratio, state, *, options)`."""
    return correction_of(lambda name, inputs: inputs)(rule)


def correction_of(prepare: Prepare) -> Callable[[Rule], Correct]:
    """As `correction`, for a rule whose policies are named otherwise: `prepare(name, inputs)` gives the usual names."""

    def made(rule: Rule) -> Correct:
        own = list(inspect.signature(rule).parameters.values())[2:]
        options = {p.name: REQUIRED if p.default is inspect.Parameter.empty else p.default for p in own}

        def run(**given: Any) -> Correction:
            stage = stage_of(rule.__name__, rule, options, {k: v for k, v in given.items() if k not in INPUTS})
            inputs = {k: v for k, v in given.items() if k in INPUTS and v is not None}
            return correct([stage], cast(Inputs, prepare(rule.__name__, inputs)), name=rule.__name__)

        return _like(rule, run, own, options)

    return made


def _like(rule: Rule, run: Any, own: list[inspect.Parameter], options: Mapping[str, Any]) -> Correct:
    """`run` under the rule's name, docstring and a signature that lists inputs and options."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    first = [inspect.Parameter(n, keyword) for n in ("sampler", "mask")]
    rest = [inspect.Parameter(n, keyword, default=None) for n in INPUTS if n not in ("sampler", "mask")]
    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        setattr(run, name, getattr(rule, name))
    run.__dict__.update(rule=rule, options=options)
    run.__signature__ = inspect.Signature([*first, *own, *rest])
    return cast(Correct, run)


def correct(stages: Sequence[Stage], inputs: Inputs, sees: str = "kept", name: str = "correction") -> Correction:
    """Run rules in order. `sees`: "kept": each rule sees what the ones before it kept; "all": every trained token."""
    with ops_of(inputs.get("sampler")).tracking(bool(inputs.get("grad", False))):
        ratio = ratio_of(inputs, name)
        state = State(ratio.valid, ratio.valid)
        applied = Applied()
        for stage in stages:
            _apply(stage, ratio, state, applied)
            state.seen = state.keep if sees == "kept" else ratio.valid
        return _finished(ratio, state, applied, tuple(map(str, stages)), inputs)


def _apply(stage: Stage, ratio: Ratio, state: State, applied: Applied) -> None:
    verdict = stage.rule(ratio, state, **stage.options)
    if verdict.weights is not None:
        state.weights = verdict.weights if state.weights is None else _product(ratio, state.weights, verdict.weights)
    if verdict.keep is not None:
        state.keep = state.keep & verdict.keep
    applied.add(stage.name, state.keep, verdict)


def _product(ratio: Ratio, a: Array, b: Array) -> Array:
    """a * b, held under what the dtype can hold: times a mask of 0 an infinity would be NaN."""
    return ratio.ops.clip(a * b, 0.0, math.exp(ratio.ops.limit(ratio.log_ratio)))


def _finished(ratio: Ratio, state: State, applied: Applied, stages: tuple[str, ...], inputs: Inputs) -> Correction:
    ops, keep = ratio.ops, state.keep
    weights = ops.as_like(keep, ratio.log_ratio) if state.weights is None else ops.kept(state.weights, keep)
    state.weights = None
    asked = inputs.get("denominator", "all")
    denominator = _denominator(ratio, keep, asked)
    values: dict[str, Array] = {}
    if inputs.get("effects", True):
        with ops.tracking(False):
            values = effects_of(ratio, ops.detach(weights), keep, applied, inputs.get("rewards"), inputs.get("groups"))
    over = "kept" if isinstance(asked, str) and asked == "kept" else "all"
    return Correction(weights, keep, denominator, Effects(ops, values), stages, over, (ratio.mask, ratio.rows))


def _denominator(ratio: Ratio, keep: Array, asked: Any) -> Array:
    """0-dim, never 0: a batch without tokens has the loss 0. Errors: `UsageError` for another word, or what is no
    single number."""
    ops = ratio.ops
    if isinstance(asked, str):
        if asked not in ("all", "kept"):
            raise UsageError(f"denominator is {asked!r}, wanted 'all', 'kept', or a number of tokens")
        count = ops.count(ratio.mask if asked == "all" else keep)
        return ops.as_like(ops.clip(count, 1.0, float("inf")), ratio.log_ratio)
    known = isinstance(asked, numbers.Real) and not isinstance(asked, bool)
    shape = None if known else getattr(asked, "shape", None)
    if not (0 <= cast(float, asked) < math.inf if known else shape is not None and len(shape) == 0):
        what = repr(asked) if shape is None else f"of shape {tuple(shape)}"
        raise UsageError(f"denominator is {what}, wanted 'all', 'kept', or one number of tokens, 0 or more")
    given = ops.as_like(asked, ratio.log_ratio)
    return ops.where(given == 0, 1.0, given)
