"""From what the user hands over to one clean log ratio: checked inputs, the layout, the policy for missing values.

The one policy for values that are no ratio. A trained token (mask true) of which a log-prob is NaN (that is what null
becomes), +inf or -inf has no ratio: it is dropped (weight 0, keep false, left out of its sequence's sums and length)
and counted as `missing` (NaN) or `infinite`. A finite log ratio whose exp overflows is no such thing: it is a ratio
above every bound, so it is capped, masked or rejected as such, and counted as `overflow`. What stands where the mask is
false is never looked at. Others differ: TRL sets the ratio of a NaN to 1, AReaL and miles set the log ratio of any
non-finite value to 0 (weight 1), NeMo-RL sets the weight to 0 and keeps the token in the denominator, torchtitan drops
it from both, OpenRLHF writes 0.0 for a missing log-prob (p = 1), verl and SkyRL clamp log ratios to +-20.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Required, TypedDict

import numpy as np

from onepolicy.arrays import Array, is_torch
from onepolicy.corrections.ops import ops_of
from onepolicy.corrections.rows import PackedRows, PaddedRows, Rows
from onepolicy.errors import ContentError, UnknownName, UsageError


class Inputs(TypedDict, total=False):
    """What every correction takes, by keyword. Arrays: torch on one device, or numpy; padded `[B, T]`, or packed `[T]`.

    sampler: log-probs of the engine that drew the tokens, nats.
    old: the scorer's before the update: decoupled mode, ratio = exp(old - sampler), to be multiplied with a clipped
        loss of current against old. current: the scorer's now: bypass mode, ratio = exp(current - sampler), for a loss
        without another ratio. Exactly one of the two.
    mask: true where a token is trained (and was drawn by the sampler); bool, or numbers of which 0 is false.
    offsets: packed: `[S + 1]`, where each sequence begins, then the end (`cu_seqlens`). sequence_ids: packed: `[T]`,
        whole numbers from 0 up to `n_sequences` - 1; without `n_sequences` any numbers, each run of equal ones is a
        sequence, and nothing can be given per sequence.
    advantages: `[B]`, `[B, 1]` or `[B, T]` (packed: `[S]` or `[T]`). rewards: `[B]` (`[S]`). groups: `[B]` (`[S]`),
        whole numbers: the prompt that a sequence answers.
    denominator: "all" (the default: every trained token), "kept", or a number of your own (the global token count).
    grad: True lets gradients flow through the weights. effects: False skips the statistics.
    reduce: sums a `[2]` array over ranks (returns it, or None if it works in place); only for `normalise`.
    """

    sampler: Required[Array]
    mask: Required[Array]
    old: Array
    current: Array
    offsets: Array
    sequence_ids: Array
    n_sequences: int
    advantages: Array
    rewards: Array
    groups: Array
    denominator: Literal["all", "kept"] | float | Array
    grad: bool
    effects: bool
    reduce: Callable[[Array], Array | None]


INPUTS = tuple(Inputs.__annotations__)


@dataclass(slots=True)
class Ratio:
    """The log ratio of a batch, policy against sampler, and all that rules may ask. Shapes: `[B, T]` or `[T]`.

    `log_ratio` is 0 where `valid` is false; `valid` = mask and both log-probs finite.
    """

    ops: Any
    rows: Rows
    sampler: Array
    policy: Array
    log_ratio: Array
    mask: Array
    valid: Array
    advantages: Array | None = None
    reduce: Callable[[Array], Array | None] | None = None

    def per_row(self, x: Array, seen: Array) -> Array:
        """Sum of `x` over the seen tokens of each sequence, `[B]`."""
        return self.rows.total(self.ops.where(seen, x, 0.0))

    def length(self, seen: Array) -> Array:
        """Seen tokens of each sequence, at least 1, `[B]`."""
        return self.ops.clip(self.rows.total(seen), 1.0, math.inf)

    def spread(self, x: Array) -> Array:
        """A value per sequence, as its tokens see it; numbers in the dtype of the log ratio."""
        return self.rows.spread(x if "bool" in str(x.dtype) else self.ops.as_like(x, self.log_ratio))

    def exp(self, x: Array, low: float = 0.0, high: float = math.inf) -> Array:
        """exp(x) clamped to [low, high], never infinite, with finite gradients (0 where clamped)."""
        least = math.log(low) - 1e-3 if low > 0 else -math.inf
        most = min(math.log(high) + 1e-3 if high < math.inf else math.inf, self.ops.limit(x))
        return self.ops.exp_between(x, (least, most), (low, high))

    def probabilities(self) -> tuple[Array, Array]:
        """Probabilities of sampler and policy, 0.5 on both sides where there is none."""
        logs = (self.ops.where(self.valid, self.ops.floats(x), math.log(0.5)) for x in (self.sampler, self.policy))
        sampler, policy = (self.ops.exp(x) for x in logs)
        return sampler, policy

    def signs(self, name: str) -> Array:
        """The advantages, broadcastable to the tokens. Errors: `UsageError` if there are none."""
        if self.advantages is None:
            raise UsageError(f"{name} needs advantages= ([B] or [B, T]): it asks for their sign")
        return self.advantages


def ratio_of(inputs: Inputs, name: str = "correction") -> Ratio:
    """The clean log ratio of `inputs`. Errors: `UsageError`, `ContentError`, one line."""
    sampler, policy = _policies(inputs, name)
    ops = ops_of(sampler)
    mask = inputs["mask"]
    _same_kind({k: v for k, v in inputs.items() if k in ("sampler", "old", "current", "mask")})
    if not is_torch(sampler):
        sampler, policy, mask = ops.floats(sampler), ops.floats(policy), np.asarray(mask)
    _same_shape(sampler, policy, mask)
    rows = _rows(inputs, ops, sampler)
    mask = ops.bools(mask)
    log_ratio = ops.floats(policy) - (sampler if sampler.dtype != policy.dtype else ops.floats(sampler))
    valid = mask & ops.isfinite(log_ratio)
    log_ratio = ops.where(valid, log_ratio, 0.0)
    advantages = inputs.get("advantages")
    if advantages is not None:
        advantages = _per_token(advantages, rows, ops, mask)
    return Ratio(ops, rows, sampler, policy, log_ratio, mask, valid, advantages, inputs.get("reduce"))


def _policies(inputs: Inputs, name: str) -> tuple[Array, Array]:
    for key in inputs:
        if key not in INPUTS:
            raise UnknownName(f"option of {name}", key, INPUTS)
    for key in ("sampler", "mask"):
        if inputs.get(key) is None:
            raise UsageError(f"{name} needs {key}=")
    old, current = inputs.get("old"), inputs.get("current")
    if (old is None) == (current is None):
        raise UsageError(
            f"{name}: got {'neither' if old is None else 'both'} of old= and current=; give old= to correct old "
            "against sampler (decoupled), or current= to correct current against sampler (bypass)"
        )
    if getattr(inputs["sampler"], "requires_grad", False):
        raise UsageError(
            f"{name}: sampler= requires grad, but the sampler's log-probs are data; are two policies swapped? "
            "Else pass sampler.detach()"
        )
    policy = current if old is None else old
    assert policy is not None
    return inputs["sampler"], policy


def _same_kind(arrays: dict[str, Any]) -> None:
    """Errors: `ContentError` for numpy beside torch, two devices, or whole numbers as log-probs."""
    torches = {k: v for k, v in arrays.items() if is_torch(v)}
    if torches and len(torches) < len([v for v in arrays.values() if v is not None]):
        other = next(k for k, v in arrays.items() if v is not None and k not in torches)
        raise ContentError(f"{other}= is no torch tensor, {next(iter(torches))}= is one; wanted all of one kind")
    devices = {k: str(v.device) for k, v in torches.items()}
    if len(set(devices.values())) > 1:
        raise ContentError(f"arrays on several devices: {', '.join(f'{k}= {v}' for k, v in devices.items())}")
    for key, x in arrays.items():
        kind = x.dtype.is_floating_point if is_torch(x) else getattr(getattr(x, "dtype", None), "kind", "f") in "fO"
        if key != "mask" and x is not None and not kind:
            raise ContentError(f"{key}= has dtype {x.dtype}; log-probs are floating point")
    if not is_torch(arrays["mask"]) and np.asarray(arrays["mask"]).dtype.kind not in "biufO":
        raise ContentError(f"mask= has dtype {np.asarray(arrays['mask']).dtype}; wanted bool, or numbers")


def _same_shape(sampler: Array, policy: Array, mask: Array) -> None:
    shapes = [tuple(x.shape) for x in (sampler, policy, mask)]
    if len(set(shapes)) > 1 or len(shapes[0]) not in (1, 2):
        raise ContentError(
            f"shapes: sampler {shapes[0]}, old or current {shapes[1]}, mask {shapes[2]}; wanted one [B, T], or one [T]"
        )


def _rows(inputs: Inputs, ops: Any, x: Array) -> Rows:
    offsets, ids = inputs.get("offsets"), inputs.get("sequence_ids")
    if x.ndim == 2:
        if offsets is not None or ids is not None:
            raise UsageError("offsets= and sequence_ids= are for packed [T] arrays, these are [B, T]")
        return PaddedRows(ops, x.shape[0])
    if (offsets is None) == (ids is None):
        raise UsageError("packed [T] arrays need one of offsets= ([S + 1], cu_seqlens) and sequence_ids= ([T])")
    n = x.shape[0]
    if ids is not None:
        ids = ops.integers(ids, x)
        if tuple(ids.shape) != (n,):
            raise ContentError(f"sequence_ids: got shape {tuple(ids.shape)}, wanted ({n},)")
        return _by_ids(ops, ids, inputs.get("n_sequences"))
    return _by_offsets(ops, ops.integers(offsets, x), n)


def _by_ids(ops: Any, ids: Array, n: int | None) -> Rows:
    """Without a count, the runs of equal ids are counted up; there are at most as many as tokens."""
    if n is None:
        changes = ops.joined([ids[:1] != ids[:1], ids[1:] != ids[:-1]])
        return PackedRows(ops, ops.cumsum(changes), max(1, ids.shape[0]))
    seen = ops.on_host(ids)
    if seen is not None and seen.shape[0] and not 0 <= seen.min() <= seen.max() < n:
        raise ContentError(f"sequence_ids: got {seen.min()} to {seen.max()}, wanted 0 to {n - 1} (n_sequences={n})")
    return PackedRows(ops, ids, n)


def _by_offsets(ops: Any, offsets: Array, n: int) -> Rows:
    if offsets.ndim != 1 or offsets.shape[0] < 2:
        raise ContentError(f"offsets: got shape {tuple(offsets.shape)}, wanted [S + 1] with S from 1 up")
    seen = ops.on_host(offsets)
    if seen is not None and (seen[0] != 0 or seen[-1] != n or (np.diff(seen) < 0).any()):
        raise ContentError(f"offsets: wanted 0 first, {n} last and none smaller than the one before")
    return PackedRows(ops, ops.ids_of_offsets(offsets, n), offsets.shape[0] - 1)


def _per_token(x: Any, rows: Rows, ops: Any, mask: Array) -> Array:
    """Advantages as they broadcast to the tokens. A value per sequence is spread."""
    x = x if is_torch(x) else np.asarray(x)
    shape, n = tuple(x.shape), mask.shape[0]
    if shape == tuple(mask.shape) or (mask.ndim == 2 and shape == (n, 1)):
        return x
    if shape == (rows.n,):
        return rows.spread(x)
    wanted = f"({rows.n},) or {tuple(mask.shape)}"
    raise ContentError(f"advantages: got shape {shape}, wanted {wanted}")
