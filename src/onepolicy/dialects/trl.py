"""TRL: `sampling/*` of GRPO with vLLM (old against sampling log-probs).

Source: trl/trainer/grpo_trainer.py. A NaN log-prob of the sampler is left out of the differences, and its ratio is 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onepolicy.dialects.key import Option, Options, Part, dialect
from onepolicy.dialects.means import greatest, least, mean
from onepolicy.dialects.rounding import exp
from onepolicy.dialects.view import View

_RANKS = "each rank and generation batch counts alike; here all tokens are one"


def _gap(v: View, o: Options) -> Any:
    """`[M]` |d| without NaN."""
    gap = np.abs(v.d)
    return gap[~np.isnan(gap)]


def _ratio(v: View, o: Options) -> Any:
    """`[N]`, or `[S]` at sequence level (a sequence without tokens has the ratio 1): truncated or masked."""
    d = np.where(np.isnan(v.d), v.d.dtype.type(0), v.d)
    mode, low, high = (o[f"vllm_importance_sampling_{x}"] for x in ("mode", "clip_min", "clip_max"))
    level, act = mode.split("_")
    ratio = exp(v.sums(d) if level == "sequence" else d)
    low, high = -np.inf if low is None else low, np.inf if high is None else high
    if act == "truncate":
        return np.clip(ratio, low, high)
    return np.where((ratio < low) | (ratio > high), ratio.dtype.type(0), ratio)


_AFTER = "TRL's is after truncation or masking: at most clip_max, 0 where masked; in sequence modes one value each"
_RATIO: dict[str, Any] = {"direction": "scorer over sampler"}

TRL = dialect(
    "trl",
    "TRL",
    scorer="old",
    read="1.16.0; main f2cd577, 2026-07-24",
    checked="its own code, 1.16.0",
    keys=[
        mean(
            "sampling/sampling_logp_difference/mean",
            "mean over tokens of |d|",
            _gap,
            Part("tokens that are not NaN", "sum", lambda v, o: np.array([len(_gap(v, o))])),
            direction="none",
            quirks="TRL averages over ranks, each rank alike; here all tokens are one",
            ours="abs_log_ratio/mean",
        ),
        greatest(
            "sampling/sampling_logp_difference/max",
            "the greatest |d|",
            _gap,
            direction="none",
            ours="abs_log_ratio/max",
            same=True,
        ),
        least(
            "sampling/importance_sampling_ratio/min",
            "the least ratio",
            _ratio,
            quirks=_AFTER,
            ours="ratio/min",
            **_RATIO,
        ),
        mean(
            "sampling/importance_sampling_ratio/mean",
            "the mean ratio, over tokens or over sequences by the mode",
            _ratio,
            Part("ratios", "sum", lambda v, o: np.array([len(_ratio(v, o))])),
            quirks=f"{_AFTER}; {_RANKS}",
            ours="ratio/mean",
            **_RATIO,
        ),
        greatest(
            "sampling/importance_sampling_ratio/max",
            "the greatest ratio",
            _ratio,
            quirks=_AFTER,
            ours="ratio/max",
            **_RATIO,
        ),
    ],
    options={
        "vllm_importance_sampling_mode": Option(
            "sequence_mask",
            "level (sequence: the product of ratios) and act",
            "word",
            ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        ),
        "vllm_importance_sampling_clip_max": Option(3.0, "upper bound of the ratio", none=True),
        "vllm_importance_sampling_clip_min": Option(None, "lower bound of the ratio", none=True),
    },
    note="Where TRL has no tokens it logs 0.0; here nothing is measured.",
)
