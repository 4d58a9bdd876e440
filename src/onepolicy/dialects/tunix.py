"""tunix: `sampler_trainer/*` and `sampler_is/*` of its agentic GRPO learner.

Source: tunix/rl/agentic/agentic_grpo_learner.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onepolicy.dialects.key import Option, Options, dialect
from onepolicy.dialects.means import clamped, greatest, ones, pearson, token_mean
from onepolicy.dialects.rounding import exp
from onepolicy.dialects.view import View

_BATCHES = "the dashboard averages micro-batches, each alike; here all tokens are one"


def _gap(v: View, o: Options) -> Any:
    return np.abs(v.d)


def _probability_gap(v: View, o: Options) -> Any:
    return np.abs(v.p - v.q)


def _r(v: View) -> Any:
    return exp(clamped(v.d, 20.0))


def _weight(v: View, o: Options) -> Any:
    return np.minimum(_r(v), o["sampler_is_threshold"])


_IS: dict[str, Any] = {"direction": "scorer over sampler", "when": lambda o: o["sampler_is"] == "token"}

TUNIX = dialect(
    "tunix",
    "tunix",
    scorer="old",
    read="main c7d8950, 2026-08-21",
    checked="numbers worked by hand after its published formulas",
    keys=[
        token_mean(
            "sampler_trainer/logp_diff_mean",
            "mean over tokens of |d|",
            _gap,
            direction="none",
            quirks=_BATCHES,
            ours="abs_log_ratio/mean",
            same=True,
        ),
        greatest(
            "sampler_trainer/logp_diff_max",
            "the greatest |d|",
            _gap,
            direction="none",
            ours="abs_log_ratio/max",
            same=True,
        ),
        token_mean(
            "sampler_trainer/prob_diff_mean",
            "mean over tokens of |p_sampler - p_scorer|",
            _probability_gap,
            direction="none",
            quirks=_BATCHES,
            ours="prob_abs_diff/mean",
            same=True,
        ),
        greatest(
            "sampler_trainer/prob_diff_max",
            "the greatest |p_sampler - p_scorer|",
            _probability_gap,
            direction="none",
            ours="prob_abs_diff/max",
            same=True,
        ),
        pearson(
            "sampler_trainer/probs_pearson_corr",
            "Pearson correlation of the probabilities over tokens",
            1e-12,
            direction="none",
            quirks=f"the product of variances is at least 1e-12; {_BATCHES}",
            ours="prob_pearson/r",
            same=True,
        ),
        token_mean(
            "sampler_is/weight_mean",
            "mean over tokens of min(r, threshold)",
            _weight,
            quirks="after truncation; d clamped to +-20",
            ours="ratio/mean",
            **_IS,
        ),
        greatest(
            "sampler_is/weight_max",
            "the greatest min(r, threshold)",
            _weight,
            quirks="after truncation",
            ours="ratio/max",
            **_IS,
        ),
        token_mean(
            "sampler_is/frac_clipped_at_threshold",
            "share of tokens with r above the threshold",
            lambda v, o: ones(_r(v) > o["sampler_is_threshold"]),
            quirks=_BATCHES,
            **_IS,
        ),
    ],
    options={
        "sampler_is": Option("token", "importance weights", "word", ("token", "none")),
        "sampler_is_threshold": Option(2.0, "their cap"),
    },
)
