"""ms-swift: `rollout_correction/*`, a variant of verl's metrics (old against rollout).

Source: swift/rlhf_trainers/grpo_trainer.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onepolicy.dialects.key import Key, Option, Options, Part, dialect
from onepolicy.dialects.means import N, clamped, ess, greatest, least, mean, ones, sequence_mean, token_mean
from onepolicy.dialects.rounding import exp, log
from onepolicy.dialects.view import View

BOUND = 20.0
_RANKS = "ranks and micro-batches count alike; here all tokens are one"
_EMPTY = "a sequence without trained tokens counts as 0 nats"


def _diff(v: View, o: Options) -> Any:
    return v.means(v.sampler) - v.means(v.scorer)


def _k3(v: View, o: Options) -> Any:
    d = clamped(v.d, BOUND)
    return np.clip(exp(d) - d - 1, -10, 10)


def _r(v: View) -> Any:
    return exp(clamped(v.d, BOUND))


def _sequence_ratio(v: View) -> Any:
    """`[S]` geometric mean of the clamped ratios."""
    return exp(v.means(log(np.maximum(_r(v), 1e-10))))


def _weights(v: View, o: Options) -> Any:
    mode, cap, r = o["rollout_importance_sampling_mode"], o["rollout_importance_sampling_threshold"], _r(v)
    if mode == "token_truncate":
        return np.minimum(r, cap)
    if mode == "token_mask":
        return np.where(r <= cap, r, r.dtype.type(0))
    whole = _sequence_ratio(v)
    return v.spread(np.minimum(whole, cap)) if mode == "sequence_truncate" else r * v.spread(whole <= cap)


def _for_ess(v: View, o: Options) -> Any:
    cap = o["rollout_importance_sampling_threshold"]
    return np.clip(_weights(v, o), 1 / cap, cap).astype(np.float64)


def _clipped(v: View, o: Options) -> Any:
    mode, cap = o["rollout_importance_sampling_mode"], o["rollout_importance_sampling_threshold"]
    if mode == "token_truncate":
        return ones(_r(v) > cap)
    return ones(_weights(v, o) == 0) if mode == "token_mask" else ones(_sequence_ratio(v) > cap)


def _clipped_units(v: View, o: Options) -> Any:
    return np.array([len(v.sampler if o["rollout_importance_sampling_mode"].startswith("token") else v.lengths)])


_on = lambda o: o["rollout_importance_sampling_mode"] is not None
_P = "rollout_correction"

MS_SWIFT = dialect(
    "ms_swift",
    "ms-swift",
    scorer="old",
    read="4.6.0; main 3602360, 2026-08-22",
    checked="its own code, 4.6.0",
    keys=[
        sequence_mean(
            f"{_P}/training_ppl",
            "mean over sequences of exp(-mean log p_scorer)",
            lambda v, o: exp(-v.means(v.scorer)),
            direction="scorer alone",
            quirks=_EMPTY,
            ours="ppl_scorer/mean",
            same=True,
        ),
        sequence_mean(
            f"{_P}/training_log_ppl",
            "mean over sequences of -mean log p_scorer",
            lambda v, o: -v.means(v.scorer),
            direction="scorer alone",
            quirks=_EMPTY,
        ),
        token_mean(
            f"{_P}/kl",
            "k1, mean over tokens of -d",
            lambda v, o: -v.d,
            direction="KL(sampler || scorer)",
            quirks=_RANKS,
            ours="kl_sampler_scorer_k1/mean",
            same=True,
        ),
        token_mean(
            f"{_P}/k3_kl",
            "k3, mean over tokens of e^d - d - 1",
            _k3,
            direction="KL(sampler || scorer)",
            quirks=f"d clamped to +-20, then each token's value to at most 10; {_RANKS}",
            ours="kl_sampler_scorer_k3/mean",
        ),
        sequence_mean(
            f"{_P}/rollout_ppl",
            "mean over sequences of exp(-mean log p_sampler)",
            lambda v, o: exp(-v.means(v.sampler)),
            direction="sampler alone",
            quirks=_EMPTY,
            ours="ppl_sampler/mean",
            same=True,
        ),
        sequence_mean(
            f"{_P}/rollout_log_ppl",
            "mean over sequences of -mean log p_sampler",
            lambda v, o: -v.means(v.sampler),
            direction="sampler alone",
            quirks=_EMPTY,
        ),
        sequence_mean(
            f"{_P}/log_ppl_diff",
            "mean over sequences of -mean d",
            _diff,
            direction="sampler - scorer",
            quirks=_EMPTY,
            ours="log_ppl_diff/mean",
            same=True,
        ),
        sequence_mean(
            f"{_P}/log_ppl_abs_diff",
            "mean over sequences of |mean d|",
            lambda v, o: np.abs(_diff(v, o)),
            direction="none",
            quirks=_EMPTY,
        ),
        greatest(
            f"{_P}/log_ppl_diff_max",
            "the greatest sequence's -mean d",
            _diff,
            direction="sampler - scorer",
            quirks=_EMPTY,
        ),
        least(
            f"{_P}/log_ppl_diff_min", "the least sequence's -mean d", _diff, direction="sampler - scorer", quirks=_EMPTY
        ),
        sequence_mean(
            f"{_P}/ppl_ratio",
            "mean over sequences of exp(-mean d)",
            lambda v, o: exp(_diff(v, o)),
            direction="scorer's perplexity over sampler's",
            quirks=_EMPTY,
            ours="ppl_ratio/mean",
            same=True,
        ),
        mean(
            f"{_P}/chi2_token",
            "mean over tokens of r^2, less 1",
            lambda v, o: np.square(_r(v)).astype(np.float64) - 1,
            N,
            direction="scorer over sampler",
            quirks="d clamped to +-20",
            ours="chi2_token/mean",
        ),
        sequence_mean(
            f"{_P}/chi2_seq",
            "mean over sequences of e^(2 D / T), less 1",
            lambda v, o: np.square(exp(clamped(v.means(v.d), BOUND))).astype(np.float64) - 1,
            direction="scorer over sampler",
            quirks="the GEOMETRIC mean; verl's key of that name and the docstring have the product; clamped to +-20",
            ours="chi2_sequence_geometric/mean",
        ),
        token_mean(
            f"{_P}/is_weight_mean",
            "mean over tokens of the weight",
            _weights,
            direction="scorer over sampler",
            quirks=f"after truncation or masking; sequence modes are geometric; {_RANKS}",
            ours="ratio/mean",
            when=_on,
        ),
        Key(
            f"{_P}/ess",
            "1 / mean((w / mean w)^2) over tokens",
            (Part("sum ess", "sum", _for_ess), Part("sum2 ess", "sum", lambda v, o: _for_ess(v, o) ** 2), N),
            ess,
            direction="scorer over sampler",
            quirks="of weights clamped to [1 / threshold, threshold], so masked tokens weigh 1 / threshold, not 0",
            ours="ess_token/share",
            when=_on,
        ),
        mean(
            f"{_P}/clipped_frac",
            "share of tokens (sequence modes: of sequences) above the threshold",
            _clipped,
            Part("clipped units", "sum", _clipped_units),
            direction="scorer over sampler",
            quirks=_RANKS,
            when=_on,
        ),
    ],
    options={
        "rollout_importance_sampling_mode": Option(
            None,
            "level (sequence: geometric) and act",
            "word",
            ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
            none=True,
        ),
        "rollout_importance_sampling_threshold": Option(2.0, "upper bound of the ratio"),
    },
    note="A batch in which a sequence's count of log-probs differs from its tokens is left out altogether.",
)
