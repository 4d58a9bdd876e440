"""tinker-cookbook: `optim/*` of its RL recipes (the training log-probs against the sampling ones).

Source: tinker_cookbook/rl/metrics.py (compute_kl_sample_train).
"""

from __future__ import annotations

from onepolicy.dialects.key import dialect
from onepolicy.dialects.means import token_mean

TINKER = dialect(
    "tinker",
    "tinker-cookbook",
    scorer="current",
    read="main 9dfcc3a, 2026-08-19",
    checked="numbers worked by hand after its published formulas",
    keys=[
        token_mean(
            "optim/kl_sample_train_v1",
            "k1, mean over tokens of -d",
            lambda v, o: v.sampler - v.scorer,
            direction="KL(sampler || scorer)",
            quirks="may be negative; a trainer's forward pass at the update",
            ours="kl_sampler_scorer_k1/mean",
            same=True,
        ),
        token_mean(
            "optim/kl_sample_train_v2",
            "k2, half of the mean over tokens of d^2",
            lambda v, o: 0.5 * (v.sampler - v.scorer) ** 2,
            direction="KL(sampler || scorer)",
            quirks="biased",
            ours="kl_sampler_scorer_k2/mean",
            same=True,
        ),
        token_mean(
            "optim/entropy",
            "mean over tokens of -log p_sampler",
            lambda v, o: -v.sampler,
            needs=(),
            direction="sampler alone",
            quirks="the surprisal of what was drawn, not the entropy",
        ),
    ],
)
