"""One call's arrays: what they must be. Looks at shapes, kinds and devices, never at values."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

from onepolicy.arrays import Array, is_torch
from onepolicy.errors import ContentError


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded `[B, T]` columns of one micro-batch, all of one kind on one device.

    `sampler`, `old`, `current`, `reference`: log-probs, nats. `advantages`, `versions`: `[B, T]` or `[B, 1]`.
    `version`: the scorer's own version, None if not told. `weights`, `keep`: what the loss is multiplied by.
    """

    sampler: Array
    old: Array
    mask: Array
    current: Array | None = None
    reference: Array | None = None
    advantages: Array | None = None
    versions: Array | None = None
    version: float | None = None
    weights: Array | None = None
    keep: Array | None = None
    corrected: bool = False


def batch_of(
    sampler: Array,
    old: Array | None,
    mask: Array,
    *,
    current: Array | None,
    reference: Array | None,
    advantages: Array | None,
    versions: Array | int | None,
    version: int | None,
    correction: Any,
    corrected: bool,
) -> Batch:
    """The checked columns. Errors: `ContentError` saying which column, got, wanted."""
    bypass = old is None
    if bypass:  # the loss compares the current policy with the sampler's own values
        old, current = current, None
    if old is None:
        raise ContentError("old_logprobs is None: wanted them, or current_logprobs in its place (bypass mode)")
    if old is sampler or _same_memory(old, sampler):
        what = "sampler_logprobs and old_logprobs are one array, so there is nothing to compare"
        raise ContentError(f"{what}; in bypass mode pass old_logprobs=None and current_logprobs=")
    _require_shape("sampler_logprobs", sampler)
    columns = {"sampler_logprobs": sampler, "old_logprobs": old}
    columns |= {n: x for n, x in (("current_logprobs", current), ("reference_logprobs", reference)) if x is not None}
    for name, x in columns.items():
        _require_logprobs(name, x, sampler)
    # the current policy's own values may require grad, as itself, as old and in old's place: nothing is taken from them
    for name in ("sampler_logprobs",) if bypass else ("sampler_logprobs", "old_logprobs"):
        if is_torch(columns[name]) and columns[name].requires_grad and columns[name] is not current:
            why = "they are constants of the loss" if name[0] == "s" else "the policy before the update is a constant"
            raise ContentError(f"{name} requires grad: {why}; pass {name}.detach(), or were the columns swapped?")
    _require_like("mask", mask, sampler)
    if not is_torch(mask) and mask.dtype.kind not in "biufO":
        raise ContentError(f"mask has dtype {mask.dtype}, wanted bool, or numbers of which 0 is false")
    weights, keep = _correction(correction, sampler)
    return Batch(
        sampler,
        old,
        mask,
        current,
        reference,
        _by_row("advantages", advantages, sampler),
        _by_row("policy_version", versions, sampler),
        _number("scorer_version", version),
        weights,
        keep,
        corrected or weights is not None,
    )


def _require_shape(name: str, x: Any) -> None:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise ContentError(f"{name} is a {type(x).__name__}, wanted a torch tensor or numpy array [B, T]")
    if len(x.shape) != 2:
        raise ContentError(f"{name} has shape {tuple(x.shape)}, wanted padded [B, T]: one sequence a row")


def _require_like(name: str, x: Any, like: Array) -> None:
    """One kind, one device, one shape."""
    if is_torch(x) is not is_torch(like) or not hasattr(x, "shape"):
        raise ContentError(f"{name} is a {type(x).__name__}, sampler_logprobs a {type(like).__name__}; wanted one kind")
    if tuple(x.shape) != tuple(like.shape):
        raise ContentError(
            f"{name} has shape {tuple(x.shape)}, sampler_logprobs {tuple(like.shape)}; wanted one [B, T]"
        )
    if is_torch(x) and x.device != like.device:
        raise ContentError(f"{name} is on {x.device}, sampler_logprobs on {like.device}; wanted one device")


def _require_logprobs(name: str, x: Any, like: Array) -> None:
    _require_shape(name, x)
    _require_like(name, x, like)
    floating = x.dtype.is_floating_point if is_torch(x) else x.dtype.kind == "f"
    if not floating:
        raise ContentError(f"{name} has dtype {x.dtype}, wanted floating point log-probs")


def _same_memory(x: Any, y: Any) -> bool:
    """Two views of the same values. Metadata alone."""
    if is_torch(x) and is_torch(y):
        both = x.data_ptr() == y.data_ptr() != 0
        return both and x.shape == y.shape and x.stride() == y.stride() and x.dtype == y.dtype
    return False


def _number(name: str, x: Any) -> float | None:
    """NaN is not told."""
    if x is None or (isinstance(x, numbers.Real) and x != x):
        return None
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        raise ContentError(f"{name} is a {type(x).__name__}, wanted a plain number, or None where it is not known")
    return float(x)


def _by_row(name: str, x: Any, like: Array) -> Array | None:
    """`[B, T]` as it is; `[B]` as `[B, 1]`; one number for all rows."""
    if x is None:
        return None
    if isinstance(x, numbers.Real):
        return like.new_full((like.shape[0], 1), float(x)) if is_torch(like) else _numpy_full(like, float(x))
    if is_torch(x) is not is_torch(like) or not hasattr(x, "shape"):
        raise ContentError(f"{name} is a {type(x).__name__}, sampler_logprobs a {type(like).__name__}; wanted one kind")
    if is_torch(x) and x.device != like.device:
        raise ContentError(f"{name} is on {x.device}, sampler_logprobs on {like.device}; wanted one device")
    rows, tokens = like.shape
    if tuple(x.shape) == ():
        return _numpy_full(like, x) if not is_torch(x) else x.reshape(1, 1).expand(rows, 1)
    if tuple(x.shape) == (rows,):
        return x.reshape(rows, 1)
    if tuple(x.shape) in ((rows, tokens), (rows, 1)):
        return x
    raise ContentError(f"{name} has shape {tuple(x.shape)}, wanted [B] = ({rows},) or [B, T] = ({rows}, {tokens})")


def _numpy_full(like: Array, x: float) -> Array:
    import numpy as np

    return np.full((like.shape[0], 1), x)


def _correction(correction: Any, like: Array) -> tuple[Array | None, Array | None]:
    """`weights` and `keep` of whatever carries them (`onepolicy.corrections`), or an array of weights alone."""
    if correction is None:
        return None, None
    bare = hasattr(correction, "shape")
    weights, keep = (correction, None) if bare else (getattr(correction, n, None) for n in ("weights", "keep"))
    if weights is None and keep is None:
        raise ContentError(f"correction is a {type(correction).__name__}, wanted .weights and .keep, or weights [B, T]")
    return _by_row("correction.weights", weights, like), _by_row("correction.keep", keep, like)
