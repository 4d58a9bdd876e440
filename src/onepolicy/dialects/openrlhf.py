"""OpenRLHF: what its PPO loss logs of the engines, and only with importance correction on.

Source: openrlhf/models/loss.py (PolicyLoss).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onepolicy.dialects.key import Option, Options, Part, dialect
from onepolicy.dialects.means import mean, ones, token_mean
from onepolicy.dialects.rounding import exp, log
from onepolicy.dialects.view import View

_BATCHES = "the dashboard averages micro-batches, each alike; here all tokens are one"


def _binary_kl(p: Any, q: Any) -> Any:
    p, q = np.clip(p, 1e-6, 1 - 1e-6), np.clip(q, 1e-6, 1 - 1e-6)
    return p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))


def _statistic(v: View, o: Options) -> Any:
    """`[N]`, or `[F]` of the sequences with tokens."""
    gating, whole = o["is_correction_gating"], o["is_correction_level"] == "seq"
    if gating == "ratio":
        return exp(v.means(v.d)[v.filled] if whole else v.d)
    p, q = v.p, v.q
    x = _binary_kl(p, q) if gating == "binary_kl" else np.abs(p - q)
    return v.means(x)[v.filled] if whole else x


def _filtered(v: View, o: Options) -> Any:
    x = _statistic(v, o)
    return ones((x < o["is_correction_low"]) | (x > o["is_correction_high"]))


_on = lambda o: o["is_correction_level"] != "off"

OPENRLHF = dialect(
    "openrlhf",
    "OpenRLHF",
    scorer="old",
    read="0.11.2; main 3c3be62, 2026-08-13",
    checked="its own code, 0.11.2",
    keys=[
        token_mean(
            "vllm_kl",
            "k1, mean over tokens of -d",
            lambda v, o: v.sampler - v.scorer,
            direction="KL(sampler || scorer)",
            quirks=_BATCHES,
            ours="kl_sampler_scorer_k1/mean",
            same=True,
            when=_on,
        ),
        mean(
            "is_filter_ratio",
            "share of tokens, or of sequences, whose statistic is outside the bounds",
            _filtered,
            Part("units", "sum", lambda v, o: np.array([len(_statistic(v, o))])),
            direction="scorer over sampler",
            quirks=f"at sequence level the geometric ratio, or the mean divergence; {_BATCHES}",
            when=_on,
        ),
        token_mean(
            "ppo_kl",
            "mean over tokens of -(log p_current - log p_old)",
            lambda v, o: -v.update,
            needs=("current", "old"),
            direction="old over current: the update, not the engines",
            quirks=_BATCHES,
        ),
    ],
    options={
        "is_correction_level": Option(
            "token",
            "level of the correction; off in the framework, which then lacks the keys",
            "word",
            ("off", "token", "seq"),
        ),
        "is_correction_gating": Option("ratio", "the statistic", "word", ("ratio", "binary_kl", "tv")),
        "is_correction_low": Option(0.5, "its lower bound (the first of is_correction_threshold)"),
        "is_correction_high": Option(5.0, "its upper bound (the second)"),
    },
    note="A missing log-prob of the sampler is stored as 0.0, probability 1, and counts as such.",
)
