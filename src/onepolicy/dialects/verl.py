"""verl: `rollout_corr/*` (old against rollout), its rejection statistics, and `training/rollout_probs_diff_*`.

Source: verl/trainer/ppo/rollout_corr_helper.py, verl/utils/debug/metrics.py. All of it before rejection shrinks the
mask. A sequence without trained tokens counts, with log-probs of 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onepolicy.dialects.key import Key, Option, Options, dialect
from onepolicy.dialects.means import N, clamped, greatest, k3, least, mean, pearson, sequence_mean, spread, token_mean
from onepolicy.dialects.rounding import exp
from onepolicy.dialects.verl_importance import IMPORTANCE
from onepolicy.dialects.verl_rejection import REJECTION
from onepolicy.dialects.view import View

BOUND = 20.0
_EMPTY = "a sequence without trained tokens counts as 0 nats"


def _log_ppl_diff(v: View, o: Options) -> Any:
    return v.means(v.sampler) - v.means(v.scorer)


OFF_POLICY = [
    sequence_mean(
        "rollout_corr/training_ppl",
        "perplexity by the scorer: mean over sequences of exp(-mean log p_scorer)",
        lambda v, o: exp(-v.means(v.scorer)),
        direction="scorer alone",
        quirks=_EMPTY,
        ours="ppl_scorer/mean",
        same=True,
    ),
    sequence_mean(
        "rollout_corr/training_log_ppl",
        "mean over sequences of -mean log p_scorer",
        lambda v, o: -v.means(v.scorer),
        direction="scorer alone",
        quirks=_EMPTY,
    ),
    token_mean(
        "rollout_corr/kl",
        "k1, mean over tokens of -d",
        lambda v, o: v.sampler - v.scorer,
        direction="KL(sampler || scorer)",
        quirks="may be negative",
        ours="kl_sampler_scorer_k1/mean",
        same=True,
    ),
    token_mean(
        "rollout_corr/k3_kl",
        "k3, mean over tokens of e^d - d - 1, not clamped",
        lambda v, o: k3(v.d),
        direction="KL(sampler || scorer)",
        quirks="in float32 the subtraction cancels where |d| is below about 1e-3",
        ours="kl_sampler_scorer_k3/mean",
        same=True,
    ),
    sequence_mean(
        "rollout_corr/rollout_ppl",
        "perplexity by the sampler: mean over sequences of exp(-mean log p_sampler)",
        lambda v, o: exp(-v.means(v.sampler)),
        direction="sampler alone",
        quirks=_EMPTY,
        ours="ppl_sampler/mean",
        same=True,
    ),
    sequence_mean(
        "rollout_corr/rollout_log_ppl",
        "mean over sequences of -mean log p_sampler",
        lambda v, o: -v.means(v.sampler),
        direction="sampler alone",
        quirks=_EMPTY,
    ),
    sequence_mean(
        "rollout_corr/log_ppl_diff",
        "mean over sequences of mean log p_sampler - mean log p_scorer, that is -mean d of the sequence",
        _log_ppl_diff,
        direction="sampler - scorer",
        quirks=f"verl's docs state the opposite sign; {_EMPTY}",
        ours="log_ppl_diff/mean",
        same=True,
    ),
    sequence_mean(
        "rollout_corr/log_ppl_abs_diff",
        "mean over sequences of |mean d|",
        lambda v, o: np.abs(_log_ppl_diff(v, o)),
        direction="none",
        quirks=_EMPTY,
    ),
    greatest(
        "rollout_corr/log_ppl_diff_max",
        "the greatest sequence's -mean d",
        _log_ppl_diff,
        direction="sampler - scorer",
        quirks=_EMPTY,
    ),
    least(
        "rollout_corr/log_ppl_diff_min",
        "the least sequence's -mean d",
        _log_ppl_diff,
        direction="sampler - scorer",
        quirks=_EMPTY,
    ),
    sequence_mean(
        "rollout_corr/ppl_ratio",
        "mean over sequences of exp(-mean d)",
        lambda v, o: exp(_log_ppl_diff(v, o)),
        direction="scorer's perplexity over sampler's",
        quirks=f"verl's docs say exp of the mean; {_EMPTY}",
        ours="ppl_ratio/mean",
        same=True,
    ),
    mean(
        "rollout_corr/chi2_token",
        "mean over tokens of r^2, less 1",
        lambda v, o: np.square(exp(clamped(v.d, BOUND))).astype(np.float64) - 1,
        N,
        direction="scorer over sampler",
        quirks="verl clamps d to +-20 first",
        ours="chi2_token/mean",
    ),
    sequence_mean(
        "rollout_corr/chi2_seq",
        "mean over sequences of e^(2 D), less 1; D the sum of d, so the product of ratios",
        lambda v, o: exp(2 * clamped(v.sums(v.d), BOUND)).astype(np.float64) - 1,
        direction="scorer over sampler",
        quirks="verl clamps D to +-20 first",
        ours="chi2_sequence_product/mean",
    ),
]

_DIFF = "a difference of probabilities, not of log-probs as its docstring says"


def _probability_gap(v: View, o: Options) -> Any:
    return np.abs(v.q - v.p)


DEBUG = [
    Key(
        "training/rollout_probs_diff_valid",
        "1 where there is a trained token, else 0",
        (N,),
        lambda o, n: 1.0 if n else 0.0,
        direction="none",
    ),
    greatest(
        "training/rollout_probs_diff_max",
        "the greatest |p_scorer - p_sampler|",
        _probability_gap,
        direction="none",
        quirks=_DIFF,
        ours="prob_abs_diff/max",
        same=True,
    ),
    token_mean(
        "training/rollout_probs_diff_mean",
        "mean over tokens of |p_scorer - p_sampler|",
        _probability_gap,
        direction="none",
        quirks=_DIFF,
        ours="prob_abs_diff/mean",
        same=True,
    ),
    spread(
        "training/rollout_probs_diff_std",
        "standard deviation over tokens of |p_scorer - p_sampler|",
        _probability_gap,
        direction="none",
        quirks=f"{_DIFF}; divides by n - 1",
    ),
    pearson(
        "training/rollout_actor_probs_pearson_corr",
        "Pearson correlation of p_scorer and p_sampler over tokens (MiniMax-M1)",
        direction="none",
        ours="prob_pearson/r",
        same=True,
    ),
]

VERL = dialect(
    "verl",
    "verl",
    scorer="old",
    read="0.9.1; main 1dda039, 2026-08-22",
    checked="its own code, 0.9.1",
    keys=[*OFF_POLICY, *IMPORTANCE, *REJECTION, *DEBUG],
    options={
        "rollout_is": Option(None, "level of the importance weights", "word", ("token", "sequence"), none=True),
        "rollout_is_threshold": Option("2.0", "upper bound of the weights; lower_upper is IcePop's band", "word"),
        "rollout_is_batch_normalize": Option(False, "weights divided by their mean", "bool"),
        "rollout_rs": Option(None, "rejection criteria, with commas, as seq_mean_k3,token_k1", "word", none=True),
        "rollout_rs_threshold": Option(None, "their bounds, with commas; lower_upper for k1", "word", none=True),
    },
    note="In bypass mode verl computes the same keys inside the update: `scorer=current`.",
)
