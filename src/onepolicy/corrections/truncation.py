"""Weights that are capped: of tokens, sequences (product and geometric mean), segments. Numbers 1 to 4 and 16.

d = log p_policy - log p_sampler of a token, D its sum over a sequence, T the sequence's length, rho = e^d. Each rule
becomes a function of the same name, called with the inputs by keyword: see `Inputs`.
"""

from __future__ import annotations

import math

from onepolicy.arrays import Array
from onepolicy.corrections.correction import correction
from onepolicy.corrections.ratio import Ratio
from onepolicy.corrections.rows import segments
from onepolicy.corrections.rule import State, Verdict, choice, log, number
from onepolicy.errors import UsageError


@correction
def truncate(ratio: Ratio, state: State, *, cap: float | None = 2.0, floor: float | None = 0.0) -> Verdict:
    """Token TIS: w = min(rho, cap), or with `floor` clamp(rho, floor, cap). Nothing is dropped.

    Paper: Ionides 2008, "Truncated Importance Sampling"; Yao et al. 2025, "Your Efficient RL Framework Secretly Brings
    You Off-Policy RL Training". Default cap 2.0: verl `rollout_is_threshold`, slime `--tis-clip`, SkyRL
    `token_tis_ratio_clip_high`, open-instruct `rho_clamp_upper_bound` (1.2 to 8 are seen); two-sided 0.5 to 5.0 in
    OpenRLHF. A cap of None or inf leaves the raw ratio.
    """
    low, high = _bounds(cap, floor)
    d = ratio.log_ratio
    return Verdict(ratio.exp(d, low, high), None, d < log(low) if low else None, d > log(high))


@correction
def sequence_truncate(ratio: Ratio, state: State, *, cap: float | None = 2.0, floor: float | None = 0.0) -> Verdict:
    """Sequence TIS: w = min(e^D, cap), the product of a sequence's ratios, on each of its tokens.

    Length decides: a per-token bias of 0.006 nats makes 5.4 of 280 tokens, so at long replies nearly every weight is at
    the cap or near 0. Paper: Liu, Li et al. 2025, "When Speed Kills Stability" (Seq-TIS). Default 2.0: verl
    `rollout_is=sequence`; SkyRL `sequence_tis_ratio_clip_high` 5.0, TRL `sequence_truncate` 3.0.
    """
    return _by_row(ratio, ratio.per_row(ratio.log_ratio, state.seen), cap, floor)


@correction
def geometric_truncate(ratio: Ratio, state: State, *, cap: float | None = 2.0, floor: float | None = 0.0) -> Verdict:
    """Geometric TIS: w = min(e^(D / T), cap) on each token: the mean ratio in log space, free of length.

    Biased (it is no importance weight of the sequence). Default 2.0: ms-swift
    `rollout_importance_sampling_threshold`, whose `sequence_truncate` is this.
    """
    mean = ratio.per_row(ratio.log_ratio, state.seen) / ratio.length(state.seen)
    return _by_row(ratio, mean, cap, floor)


@correction
def segment_truncate(ratio: Ratio, state: State, *, cap: float | None = 1.2, floor: float | None = 0.0) -> Verdict:
    """Turn TIS: w = min(e^(mean d), cap) of each run of trained tokens (a turn between tool outputs).

    A run is contiguous in the mask; tokens that an earlier rule dropped, or that have no ratio, count as part of their
    run but not in its mean. Default 1.2: ROLL `train_infer_correction.is_weight.upper_bound`, `weight_type: segment`.
    """
    low, high = _bounds(cap, floor)
    ops, shape = ratio.ops, ratio.log_ratio.shape
    runs = segments(ops, ratio.rows, ratio.mask)
    seen = state.seen.reshape(-1)
    total = runs.total(ops.where(seen, ratio.log_ratio.reshape(-1), 0.0))
    mean = total / ops.clip(runs.total(seen), 1.0, math.inf)
    spread = ops.as_like(runs.spread(mean), ratio.log_ratio).reshape(shape)
    return Verdict(ratio.exp(spread, low, high), None, spread < log(low) if low else None, spread > log(high))


@correction
def normalise(ratio: Ratio, state: State, *, per: str = "token", over: str = "trained") -> Verdict:
    """Self-normalised weights: w / mean(w), with the weights of the stages before; raw token ratios if none gave any.

    per: "token": the mean over tokens; "sequence": over sequences, of each one's mean weight. over: "trained": every
    trained token, a dropped one as 0, to go with `denominator="all"`; "kept": kept tokens, to go with "kept". Either
    makes the loss sum(w l) / sum(w). Over ranks: give `reduce=` (an all-reduce of a `[2]` array), else the mean is of
    this rank. A mean of 1e-8 or less is left alone. verl `rollout_is_batch_normalize` (default false), slime
    `tis_batch_normalize`, is this between truncation and rejection.
    """
    ops = ratio.ops
    choice("per", per, ("token", "sequence"))
    choice("over", over, ("trained", "kept"))
    raw = ratio.exp(ratio.log_ratio) if state.weights is None else state.weights
    kept = ops.where(state.keep, raw, 0.0)
    counted = ratio.valid if over == "trained" else state.keep
    numbers = _sequence_sums(ratio, kept, counted) if per == "sequence" else [ops.total(kept), ops.count(counted)]
    numbers = _reduced(ratio, ops.stack([ops.wide(x) for x in numbers]))
    mean = numbers[0] / ops.clip(numbers[1], 1.0, math.inf)
    factor = ops.as_like(1.0 / ops.where(mean > 1e-8, mean, 1.0), ratio.log_ratio)
    return Verdict(raw * factor if state.weights is None else factor)


def _sequence_sums(ratio: Ratio, kept: Array, counted: Array) -> list[Array]:
    length = ratio.rows.total(counted)
    means = ratio.rows.total(kept) / ratio.ops.clip(length, 1.0, math.inf)
    return [ratio.ops.total(means), ratio.ops.count(length > 0)]


def _reduced(ratio: Ratio, numbers: Array) -> Array:
    if ratio.reduce is None:
        return numbers
    out = ratio.reduce(numbers)
    return numbers if out is None else out


def _bounds(cap: float | None, floor: float | None) -> tuple[float, float]:
    low = number("floor", 0.0 if floor is None else floor)
    high = number("cap", math.inf if cap is None else cap)
    if low > high or not high:
        raise UsageError(f"cap={cap} and floor={floor}: wanted 0 <= floor <= cap, and cap above 0")
    return low, high


def _by_row(ratio: Ratio, log_weight: Array, cap: float | None, floor: float | None) -> Verdict:
    low, high = _bounds(cap, floor)
    top = min(high, math.exp(ratio.ops.limit(ratio.log_ratio) - 1))
    below = ratio.spread(log_weight < log(low)) if low else None
    return Verdict(ratio.spread(ratio.exp(log_weight, low, top)), None, below, ratio.spread(log_weight > log(high)))
