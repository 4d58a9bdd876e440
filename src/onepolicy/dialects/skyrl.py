"""SkyRL: `policy/rollout_train_logprobs_abs_diff_*` and its off-policy correction's ratios.

Source: skyrl/train/trainer.py, skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py. Ratios are in float32
with d clamped to +-20. Order: outlier tokens, token mask, TIS on what is left, sequence mask.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from onepolicy.dialects.key import Key, Option, Options, Part, Term, dialect
from onepolicy.dialects.means import (
    WIDTH,
    N,
    S,
    greatest,
    least,
    mean,
    moments,
    ones,
    sequence_mean,
    spread,
    std,
    token_mean,
)
from onepolicy.dialects.rounding import exp
from onepolicy.dialects.view import View

BOUND = 20.0
_PADDED = "over the padded batch, where padding and masked tokens count as 0"
_BATCHES = (
    "the dashboard averages micro-batches, each alike; here all tokens are one batch, as wide as the longest reply"
)


def _exp(x: Any) -> Any:
    return exp(np.clip(x.astype(np.float32), -BOUND, BOUND)).astype(x.dtype)


def _ratio(v: View, o: Options) -> Any:
    return _exp(v.d)


def _gap(v: View, o: Options) -> Any:
    return np.abs(v.d)


def _padding(o: Options, low: float, n: float, s: float, width: float) -> float:
    return min(low, 0.0) if s * width > n else low


def _padded_std(o: Options, x: float, xx: float, n: float, s: float, width: float) -> float | None:
    return std(x, xx, max(n, s * width))


def _over(v: View, o: Options, name: str) -> Any:
    bound = o[name]
    return np.zeros(len(v.sampler), dtype=bool) if bound is None else _ratio(v, o) > bound


def _under(v: View, o: Options, name: str) -> Any:
    bound = o[name]
    return np.zeros(len(v.sampler), dtype=bool) if bound is None else _ratio(v, o) < bound


def _outlier(v: View, o: Options) -> Any:
    """`[S]`: a token of the sequence is an outlier."""
    return v.any(_over(v, o, "outlier_token_is_threshold_high") | _under(v, o, "outlier_token_is_threshold_low"))


def _token_dropped(v: View, o: Options) -> Any:
    if not _masks_tokens(o):
        return np.zeros(len(v.sampler), dtype=bool)
    return _over(v, o, "token_mask_is_threshold_high") | _under(v, o, "token_mask_is_threshold_low")


def _left(v: View, o: Options) -> Any:
    """`[N]` tokens after the outliers and the token mask."""
    return ~v.spread(_outlier(v, o)) & ~_token_dropped(v, o)


def _after_outliers(v: View, o: Options) -> Any:
    return ~v.spread(_outlier(v, o))


def _share(name: str, says: str, what: Term, among: Term, **more: Any) -> Key:
    count = Part(f"tokens of {name}", "sum", lambda v, o: np.array([int(among(v, o).sum())]))
    return mean(name, says, lambda v, o: ones(what(v, o) & among(v, o)), count, **more)


def _sequence_ratio(v: View, o: Options, geometric: bool) -> Any:
    """`[S]` over the tokens left; 1 where there are none."""
    left = _left(v, o)
    total = v.sums(np.where(left, v.d, v.d.dtype.type(0)))
    tokens = np.maximum(v.sums(left.astype(np.float64)), 1.0).astype(total.dtype)
    return _exp(total / tokens if geometric else total)


def _outliers(o: Options) -> bool:
    return o["outlier_token_is_threshold_low"] is not None or o["outlier_token_is_threshold_high"] is not None


def _masks_tokens(o: Options) -> bool:
    return o["token_mask_is_threshold_low"] is not None and o["token_mask_is_threshold_high"] is not None


def _enabled(o: Options) -> bool:
    return bool(o["tis_ratio_type"] or o["sequence_mask_metric"] or _outliers(o) or _masks_tokens(o))


def _sequence_masks(metric: str, prefix: str, high: str, low: str) -> list[Key]:
    geometric = metric == "geometric"
    ratio = lambda v, o: _sequence_ratio(v, o, geometric)
    above, below = (lambda v, o: ratio(v, o) > o[high]), (lambda v, o: ratio(v, o) < o[low])
    kind = "geometric mean" if geometric else "product"
    return [
        sequence_mean(
            f"{prefix}_{name}_ratio",
            f"share of sequences whose {kind} of ratios is {says}",
            lambda v, o, f=what: ones(f(v, o)),
            direction="scorer over sampler",
            quirks=_BATCHES,
            when=lambda o: o["sequence_mask_metric"] == metric,
        )
        for name, says, what in (
            ("masked", "outside the bounds", lambda v, o: above(v, o) | below(v, o)),
            ("over_high", "above the upper bound", above),
            ("under_low", "below the lower bound", below),
        )
    ]


_OVER = {"direction": "scorer over sampler", "quirks": _BATCHES}
CORRECTION = [
    token_mean(
        "is_ratio_mean",
        "mean over tokens of r",
        _ratio,
        direction="scorer over sampler",
        quirks=f"d clamped to +-20, in float32; before every mask; {_BATCHES}",
        ours="ratio/mean",
        when=_enabled,
    ),
    Key(
        "is_ratio_std",
        "standard deviation of r",
        (*moments("is_ratio", _ratio), N, S, WIDTH),
        _padded_std,
        direction="scorer over sampler",
        quirks=f"{_PADDED}; divides by all places less 1; {_BATCHES}",
        ours="ratio/std",
        when=_enabled,
    ),
    greatest(
        "is_ratio_max",
        "the greatest r",
        _ratio,
        ours="ratio/max",
        when=_enabled,
        direction="scorer over sampler",
        quirks="d clamped to +-20",
    ),
    Key(
        "is_ratio_min",
        "the least r",
        (Part("min is_ratio", "min", _ratio), N, S, WIDTH),
        _padding,
        direction="scorer over sampler",
        quirks=f"{_PADDED}: 0 as soon as anything is padded or masked",
        ours="ratio/min",
        when=_enabled,
    ),
    *(
        sequence_mean(
            f"outlier_seq_{name}_ratio",
            f"share of sequences with a token {says}",
            what,
            when=_outliers,
            **_OVER,
        )
        for name, says, what in (
            ("masked", "outside the outlier bounds", lambda v, o: ones(_outlier(v, o))),
            (
                "over_high",
                "above the upper one",
                lambda v, o: ones(v.any(_over(v, o, "outlier_token_is_threshold_high"))),
            ),
            (
                "under_low",
                "below the lower one",
                lambda v, o: ones(v.any(_under(v, o, "outlier_token_is_threshold_low"))),
            ),
        )
    ),
    _share(
        "token_mask_ratio",
        "share of the tokens left by the outlier mask whose r is outside the token bounds",
        _token_dropped,
        _after_outliers,
        when=_masks_tokens,
        **_OVER,
    ),
    _share(
        "tis_token_clip_high_ratio",
        "share of the tokens left by the masks whose r is above token_tis_ratio_clip_high",
        lambda v, o: _over(v, o, "token_tis_ratio_clip_high"),
        _left,
        when=lambda o: o["tis_ratio_type"] == "token",
        **_OVER,
    ),
    sequence_mean(
        "tis_seq_clip_high_ratio",
        "share of sequences whose product of ratios is above sequence_tis_ratio_clip_high",
        lambda v, o: ones(_sequence_ratio(v, o, False) > o["sequence_tis_ratio_clip_high"]),
        when=lambda o: o["tis_ratio_type"] == "sequence",
        **_OVER,
    ),
    *_sequence_masks("geometric", "geo_sequence_mask", "geo_mask_high", "geo_mask_low"),
    *_sequence_masks("product", "product_sequence_mask", "product_mask_high", "product_mask_low"),
]
_DIFF = "policy/rollout_train_logprobs_abs_diff"

SKYRL = dialect(
    "skyrl",
    "SkyRL",
    scorer="old",
    read="0.3.0; main a956457, 2026-08-21",
    checked="its own code, 0.3.0",
    keys=[
        token_mean(
            f"{_DIFF}_mean", "mean over tokens of |d|", _gap, direction="none", ours="abs_log_ratio/mean", same=True
        ),
        spread(
            f"{_DIFF}_std", "standard deviation over tokens of |d|", _gap, direction="none", quirks="divides by n - 1"
        ),
        greatest(f"{_DIFF}_max", "the greatest |d|", _gap, direction="none", ours="abs_log_ratio/max", same=True),
        least(f"{_DIFF}_min", "the least |d|", _gap, direction="none"),
        *(replace(k, also=(f"policy/{k.name}",)) for k in CORRECTION),
    ],
    options={
        "tis_ratio_type": Option(None, "level of the importance weights", "word", ("token", "sequence"), none=True),
        "token_tis_ratio_clip_high": Option(2.0, "cap of a token's weight"),
        "sequence_tis_ratio_clip_high": Option(5.0, "cap of a sequence's weight"),
        "sequence_mask_metric": Option(
            None, "what sequences are judged by", "word", ("product", "geometric"), none=True
        ),
        "geo_mask_high": Option(1.01, "upper bound of the geometric mean"),
        "geo_mask_low": Option(0.99, "lower bound of the geometric mean"),
        "product_mask_high": Option(2.0, "upper bound of the product"),
        "product_mask_low": Option(0.5, "lower bound of the product"),
        "outlier_token_is_threshold_low": Option(None, "one r below it drops the sequence", none=True),
        "outlier_token_is_threshold_high": Option(None, "one r above it drops the sequence", none=True),
        "token_mask_is_threshold_low": Option(None, "an r below it drops the token", none=True),
        "token_mask_is_threshold_high": Option(None, "an r above it drops the token", none=True),
    },
    note="Where the forward pass for old is skipped, `policy/minibatch_rollout_logprobs_abs_diff_*` are of the current "
    "policy: scorer=current. The sampler's non-finite log-probs are stored as -9999 and count.",
)
