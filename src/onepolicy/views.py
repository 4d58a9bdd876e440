"""What a metric's term sees: tokens or sequences as columns, numpy or torch, one definition.

A term is `term(xp, x)` with x a `Tokens` or `Sequences`. Shared intermediate values (`ratio`, `probability_a`, ...) are
computed once. Which tokens a metric runs on is its `uses`:

- `scored`: both sides finite;
- `drawn`: drawn by the sampler besides (what surprisal needs, per side: `surprisal_a`, `surprisal_b`);
- `estimator`: side a drew them, from the distribution it reports: only here an estimator of KL exists;
- `exact`: full distributions of both sides are at hand;
- `position`: scored, where the pair carries positions;
- `floor`: scored, where the rounding that alone is predicted at the token is known.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from onepolicy.arrays import Array, namespace
from onepolicy.errors import UnknownName
from onepolicy.types import BoolArray, LogprobPairs

Uses = Literal["scored", "estimator", "surprisal_a", "surprisal_b", "exact", "position", "floor"]
View = Literal["drawn", "loss", "fixed"]
VIEWS = ("drawn", "loss", "fixed")


class Tokens:
    """Token columns, float64, all of one shape (`[T]` packed or `[B, T]` padded)."""

    def __init__(self, a: Array, b: Array, **more: Array) -> None:
        self.a, self.b, self._xp = a, b, namespace(a)
        for name, value in more.items():
            setattr(self, name, value)

    a_entropy: Array
    a_varentropy: Array
    b_entropy: Array
    b_varentropy: Array
    exact: Array  # dict of [T] columns from metrics.exact
    position: Array  # place in the sequence
    gap_z2: Array  # (d / scale)^2, 0 where the gap is not counted
    gap_n: Array  # 1 where it is counted
    floor_z2: Array  # sum over the pairs of variants of (their log-ratio / scale)^2
    floor_n: Array  # how many pairs of variants there are

    @cached_property
    def log_ratio(self) -> Array:
        """d = log p_scorer - log p_sampler."""
        return self.b - self.a

    @cached_property
    def abs_log_ratio(self) -> Array:
        return self._xp.abs(self.log_ratio)

    @cached_property
    def ratio_minus_one(self) -> Array:
        """e^d - 1, exact for small d where `ratio - 1` is not."""
        return self._xp.expm1(self.log_ratio)

    @cached_property
    def ratio(self) -> Array:
        return self._xp.exp(self.log_ratio)

    @cached_property
    def probability_a(self) -> Array:
        return self._xp.exp(self.a)

    @cached_property
    def probability_b(self) -> Array:
        return self._xp.exp(self.b)

    @cached_property
    def probability_diff(self) -> Array:
        """e^b - e^a; through expm1, since two near probabilities lose their difference to rounding."""
        return self.probability_a * self.ratio_minus_one


class Sequences:
    """Sequence columns `[S]`, float64: sums over the selected tokens of each sequence that has any.

    `tokens` T, and sums over the sequence: `log_ratio` D, `log_ratio_squared`, `k3`, `a` and `b` (log-probs),
    `mult_prob_error` (e^|d|).
    """

    log_ratio: Array
    log_ratio_squared: Array
    k3: Array
    a: Array
    b: Array
    mult_prob_error: Array

    def __init__(self, tokens: Array, sums: Mapping[str, Array]) -> None:
        self.tokens = tokens
        for name in SEQUENCE_TERMS:
            setattr(self, name, sums[name])

    @cached_property
    def mean_log_ratio(self) -> Array:
        """D / T."""
        return self.log_ratio / self.tokens


# Terms that several metrics share: one function object each, so that `reduce` evaluates and adds them once.


def log_ratio(xp: Any, x: Any) -> Array:
    return x.log_ratio


def log_ratio_squared(xp: Any, x: Any) -> Array:
    return x.log_ratio * x.log_ratio


def abs_log_ratio(xp: Any, x: Any) -> Array:
    return x.abs_log_ratio


def k3(xp: Any, x: Any) -> Array:
    return x.ratio_minus_one - x.log_ratio


def logprob_a(xp: Any, x: Any) -> Array:
    return x.a


def logprob_b(xp: Any, x: Any) -> Array:
    return x.b


def mult_prob_error(xp: Any, x: Any) -> Array:
    return xp.exp(x.abs_log_ratio)


#: The token sums that `Sequences` is made of.
SEQUENCE_TERMS: dict[str, Callable[[Any, Any], Any]] = {
    "log_ratio": log_ratio,
    "log_ratio_squared": log_ratio_squared,
    "k3": k3,
    "a": logprob_a,
    "b": logprob_b,
    "mult_prob_error": mult_prob_error,
}


@dataclass(frozen=True, slots=True)
class Within:
    """A term at the positions low <= position < high (None: no end), 0 elsewhere. `reduce` sums all the ranges of one
    term in one pass."""

    term: Callable[[Any, Any], Any]
    low: int
    high: int | None

    def __call__(self, xp: Any, x: Any) -> Array:
        inside = x.position >= self.low
        if self.high is not None:
            inside = inside & (x.position < self.high)
        return xp.where(inside, self.term(xp, x), xp.indicator(inside) * 0)


def view_mask(pairs: LogprobPairs, view: str) -> BoolArray:
    """`[T]` tokens that a view looks at. Errors: `UnknownName`."""
    if view == "drawn":
        return pairs.drawn
    if view == "loss":
        return pairs.drawn & (pairs.drawn if pairs.trained is None else pairs.trained)
    if view == "fixed":
        return ~pairs.drawn
    raise UnknownName("view", view, VIEWS)


def both_finite(pairs: LogprobPairs, base: BoolArray) -> BoolArray:
    """`[T]`: in `base`, scored by both sides with finite values."""
    return base & pairs.a_valid & pairs.b_valid & np.isfinite(pairs.a) & np.isfinite(pairs.b)


def uses_masks(pairs: LogprobPairs, view: str) -> dict[str, BoolArray]:
    """For each of `Uses` that this pair can serve, the `[T]` mask of its tokens."""
    scored = both_finite(pairs, view_mask(pairs, view))
    drawn = scored & pairs.drawn
    masks = {"scored": scored}
    if pairs.drawn_by == "a":
        masks["estimator"] = drawn & np.repeat(pairs.estimable, np.diff(pairs.offsets))
    for side in ("a", "b"):
        entropy, variance = getattr(pairs, f"{side}_entropy"), getattr(pairs, f"{side}_varentropy")
        if pairs.drawn_by and entropy is not None and variance is not None:
            masks[f"surprisal_{side}"] = drawn & np.isfinite(entropy) & np.isfinite(variance)
    if pairs.a_distributions is not None and pairs.b_distributions is not None:
        masks["exact"] = scored
    if pairs.positions is not None:
        masks["position"] = scored
    if pairs.floor is not None:
        masks["floor"] = scored & np.isfinite(pairs.floor.scale)
    return masks


def select_tokens(
    pairs: LogprobPairs, uses: Collection[str], mask: BoolArray, exact: dict[str, Any] | None = None
) -> Tokens:
    """The tokens under `mask` with the columns that all of `uses` read, as contiguous float64 copies: `exp` of a
    strided view differs in the last bit."""
    pick = lambda x: np.ascontiguousarray(x[mask], dtype=np.float64)
    more: dict[str, Any] = {}
    for side in ("a", "b"):
        if f"surprisal_{side}" in uses:
            more |= {f"{side}_{w}": pick(getattr(pairs, f"{side}_{w}")) for w in ("entropy", "varentropy")}
    if exact is not None:
        more["exact"] = {name: pick(column) for name, column in exact.items()}
    if pairs.positions is not None and ("position" in uses or "floor" in uses):
        more["position"] = pick(pairs.positions)
    if "floor" in uses:
        more |= {name: pick(column) for name, column in floor_columns(pairs).items()}
    return Tokens(pick(pairs.a), pick(pairs.b), **more)


def floor_columns(pairs: LogprobPairs) -> dict[str, Any]:
    """`[T]` each: the standardised gap squared, and that of the trusted side's variants, with their counts."""
    floor = pairs.floor
    assert floor is not None
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.where(floor.counted, (pairs.log_ratio / floor.scale) ** 2, 0.0)
        variants = np.where(floor.counted, (floor.gaps / floor.scale) ** 2, np.nan)
    return {
        "gap_z2": gap,
        "gap_n": floor.counted.astype(np.float64),
        "floor_z2": np.nansum(variants, axis=0),
        "floor_n": np.isfinite(variants).sum(axis=0).astype(np.float64),
    }
