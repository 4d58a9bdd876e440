"""Whole sequences are dropped: by the product or mean of their ratios, a divergence, one bad token, their advantage.

Numbers 7 to 12. A sequence without seen tokens is never called outside. `weight`: what kept tokens weigh, see
`masking`.
"""

from __future__ import annotations

import math
from typing import Any

from onepolicy.arrays import Array
from onepolicy.corrections.correction import correction, correction_of
from onepolicy.corrections.divergences import DIVERGENCES
from onepolicy.corrections.ratio import Ratio
from onepolicy.corrections.rule import State, Verdict, band, choice, log, number, raw_weights
from onepolicy.errors import UsageError


def _rows(ratio: Ratio, state: State, below: Array | None, above: Array | None, kind: str) -> Verdict:
    """Drop the sequences that are below or above (`[B]`)."""
    low = None if below is None else ratio.spread(below)
    high = None if above is None else ratio.spread(above)
    outside = low if high is None else high if low is None else low | high
    assert outside is not None
    return Verdict(raw_weights(kind, ratio, state), ~outside, low, high)


@correction
def sequence_reject(
    ratio: Ratio, state: State, *, low: float | None = None, high: float | None = 3.0, weight: str = "sequence"
) -> Verdict:
    """Sequence MIS: keep a sequence if low <= e^D <= high (the product of its ratios); kept tokens weigh e^D.

    The product decides by length: see `sequence_truncate`. Paper: "When Speed Kills Stability" (Seq-MIS). Default high
    3.0 without low: TRL `vllm_importance_sampling_mode="sequence_mask"` (TRL's default mode) with `clip_max` 3.0. verl
    `seq_sum_k1` and SkyRL `sequence_mask_metric=product`: 0.5 to 2.0, `weight="one"`.
    """
    least, most = band(low, high)
    total = ratio.per_row(ratio.log_ratio, state.seen)
    return _rows(ratio, state, total < log(least), total > log(most), weight)


@correction
def geometric_reject(
    ratio: Ratio, state: State, *, low: float | None = 0.999, high: float | None = 1.001, weight: str = "one"
) -> Verdict:
    """Geo-RS: keep a sequence if low <= e^(D / T) <= high. With `weight="token"` this is seq-mask-tis.

    Paper: "When Speed Kills Stability" (Geo-RS). Default 0.999 to 1.001: verl `decoupled_geo_rs`; NeMo-RL
    `seq-mask-tis` 0.999 to 1.002 with raw token weights, SkyRL 0.99 to 1.01. A band this narrow drops nearly all of a
    bf16 batch whose log-probs are biased by more than 0.001 nats; over T tokens noise of sd s moves D / T by
    s / sqrt(T).
    """
    least, most = band(low, high)
    mean = ratio.per_row(ratio.log_ratio, state.seen) / ratio.length(state.seen)
    return _rows(ratio, state, mean < log(least), mean > log(most), weight)


@correction
def divergence_reject(
    ratio: Ratio,
    state: State,
    *,
    at_most: float = 0.01,
    estimator: str = "k3",
    over: str = "mean",
    weight: str = "one",
) -> Verdict:
    """K2-RS, K3-RS: keep a sequence if the mean (sum, max) of its tokens' divergence is at most `at_most`.

    estimator: one of `DIVERGENCES`. Default: mean k3 at most 0.01, verl `decoupled_k3_rs` (`seq_mean_k3`); verl also
    has `seq_sum_k2`, `seq_max_k3`, ...; OpenRLHF's FlashREINFORCE is "binary_kl" over "mean". AReaL's k3 is
    "k3_reversed".
    """
    choice("estimator", estimator, tuple(DIVERGENCES))
    choice("over", over, ("mean", "sum", "max"))
    most = number("at_most", at_most)
    size = DIVERGENCES[estimator](ratio)
    if over == "max":
        value = ratio.rows.most(ratio.ops.where(state.seen, size, -math.inf))
    else:
        value = ratio.per_row(size, state.seen)
        value = value / ratio.length(state.seen) if over == "mean" else value
    return _rows(ratio, state, None, value > most, weight)


@correction
def veto(
    ratio: Ratio, state: State, *, low: float | None = 1e-4, high: float | None = None, weight: str = "one"
) -> Verdict:
    """Drop a sequence if any of its tokens has rho < low, or rho > high.

    Default 1e-4 without high: slime mis.py `rs_veto_threshold`; SkyRL `outlier_token_is_threshold_low/high` suggests
    1e-4 and 100. One token in ten thousand of a long reply is enough: the share that is dropped grows with length.
    """
    least, most = band(low, high)
    d = ratio.log_ratio
    below, above = ((ratio.rows.total(state.seen & x) > 0) for x in (d < log(least), d > log(most)))
    return _rows(ratio, state, below, above, weight)


@correction
def error_reject(ratio: Ratio, state: State, *, at_most: float = 2.0, weight: str = "one") -> Verdict:
    """Drop a sequence if the mean of e^|d| over its tokens, its multiplicative error, is above `at_most`.

    NeMo-RL `grpo.seq_logprob_error_threshold` (off by default; 1.5 to 2.0 in its recipes).
    """
    value = ratio.per_row(DIVERGENCES["multiplicative"](ratio), state.seen) / ratio.length(state.seen)
    return _rows(ratio, state, None, value > number("at_most", at_most), weight)


def _against_sampler_or_old(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """The one that current is held against, as `sampler`. Errors: `UsageError`."""
    if inputs.get("current") is None:
        raise UsageError(f"{name} needs current=: the policy that is being updated")
    if ("sampler" in inputs) == ("old" in inputs):
        raise UsageError(f"{name} needs exactly one of sampler= and old=, to hold current against")
    behind = inputs["sampler"] if "sampler" in inputs else inputs["old"]
    return {**{k: v for k, v in inputs.items() if k != "old"}, "sampler": behind}


@correction_of(_against_sampler_or_old)
def off_policy_reject(ratio: Ratio, state: State, *, delta: float = 1e-4, weight: str = "one") -> Verdict:
    """OPSM, the off-policy sequence mask: drop a sequence if A < 0 and its mean log(p_behind / p_current) > delta.

    It always needs `current=` and `advantages=` (with advantages per token, their signs decide per token), and either
    `sampler=` (sees engine mismatch too: TRL `off_policy_mask_threshold`, ms-swift `off_policy_sequence_mask_delta`) or
    `old=` (staleness only: slime `--use-opsm`). Paper: DeepSeek-V3.2 (arXiv 2512.02556), Eq. 9. Default 1e-4: slime
    `--opsm-delta`; up to 0.5 is seen. `combine` joins it with a correction of old against sampler.
    """
    mean = ratio.per_row(ratio.log_ratio, state.seen) / ratio.length(state.seen)
    far = ratio.spread(-mean > number("delta", delta)) & (ratio.signs("off_policy_reject") < 0)
    return Verdict(raw_weights(weight, ratio, state), ~far, far, None)
