"""tunix: `sampler_trainer/*`, `sampler_is/*` and `sampler_rs/*` of its agentic GRPO learner.

Source: tunix/rl/agentic/agentic_grpo_learner.py; later versions have their own file for the agreement of the two sides.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onepolicy.dialects.key import Key, Option, Options, Part, dialect
from onepolicy.dialects.means import FILLED, clamped, greatest, mean, ones, pearson, token_mean
from onepolicy.dialects.rounding import exp
from onepolicy.dialects.view import View

_BATCHES = "the dashboard averages micro-batches, each alike; here all tokens are one"


def _gap(v: View, o: Options) -> Any:
    return np.abs(v.d)


def _probability_gap(v: View, o: Options) -> Any:
    return np.abs(v.p - v.q)


def _r(v: View) -> Any:
    return exp(clamped(v.d, 20.0))


def _geometric(v: View) -> Any:
    """`[S]` e^(mean d), the mean held in +-20."""
    return exp(clamped(v.means(v.d), 20.0))


def _error(v: View, o: Options) -> Any:
    """`[N]` e^|d|, at most e^20."""
    return exp(np.minimum(_gap(v, o), 20.0))


def _sequence_error(v: View, o: Options) -> Any:
    """`[F]` 1 where a sequence's mean e^|d| is above the threshold."""
    return ones(v.means(_error(v, o))[v.filled] > o["seq_logprob_error_threshold"])


def _rejected(v: View, o: Options) -> Any:
    """`[N]`, or `[F]` for whole sequences: outside the band of the rejection."""
    x = _geometric(v)[v.filled] if o["sampler_rs"] == "geometric" else _r(v)
    return ones((x < o["sampler_rs_min"]) | (x > o["sampler_rs_max"]))


def _weight(v: View, o: Options) -> Any:
    w = np.minimum(_r(v), o["sampler_is_threshold"]) if o["sampler_is"] == "token" else np.ones_like(_r(v))
    if o["sampler_rs"] == "none":
        return w
    out = _rejected(v, o) > 0
    return np.where(np.repeat(out, v.lengths[v.filled]) if o["sampler_rs"] == "geometric" else out, 0, w)


_IS: dict[str, Any] = {"direction": "scorer over sampler", "when": lambda o: o["sampler_is"] == "token"}
_ANY: dict[str, Any] = {
    "direction": "scorer over sampler",
    "when": lambda o: o["sampler_is"] == "token" or o["sampler_rs"] != "none",
}
_NEW = "only in later versions"
_ERRORS: dict[str, Any] = {
    "direction": "none",
    "quirks": _NEW,
    "when": lambda o: o["seq_logprob_error_threshold"] is not None,
}

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
            "sampler_trainer/mult_prob_error_mean",
            "mean over tokens of e^|d|",
            _error,
            direction="none",
            quirks=f"|d| held under 20; {_NEW}",
            ours="mult_prob_error/mean",
        ),
        greatest(
            "sampler_trainer/mult_prob_error_max",
            "the greatest e^|d|",
            _error,
            direction="none",
            quirks=f"|d| held under 20; {_NEW}",
        ),
        mean(
            "sampler_trainer/seq_error_masked_frac",
            "share of sequences whose mean e^|d| is above seq_logprob_error_threshold",
            _sequence_error,
            FILLED,
            **_ERRORS,
        ),
        Key(
            "sampler_trainer/seq_error_masked_count",
            "sequences whose mean e^|d| is above it",
            (Part("sum masked by error", "sum", _sequence_error),),
            lambda o, x: x,
            **_ERRORS,
        ),
        mean(
            "sampler_is/seq_kl_mean",
            "mean over sequences of -mean d",
            lambda v, o: -v.means(v.d)[v.filled],
            FILLED,
            direction="KL(sampler || scorer)",
            quirks=f"{_NEW}; of the sequences that seq_logprob_error_threshold keeps",
            ours="log_ppl_diff/mean",
            same=True,
        ),
        mean(
            "sampler_is/seq_geo_ratio_mean",
            "mean over sequences of e^(D / T)",
            lambda v, o: _geometric(v)[v.filled],
            FILLED,
            direction="scorer over sampler",
            quirks=f"D / T clamped to +-20; {_NEW}",
            ours="geometric_ratio/mean",
        ),
        greatest(
            "sampler_is/seq_geo_ratio_max",
            "the greatest sequence's e^(D / T)",
            lambda v, o: _geometric(v)[v.filled],
            direction="scorer over sampler",
            quirks=f"D / T clamped to +-20; {_NEW}",
        ),
        mean(
            "sampler_rs/rejected_fraction",
            "share of tokens (geometric: of sequences) whose ratio is outside sampler_rs_min to sampler_rs_max",
            _rejected,
            Part("units of sampler_rs", "sum", lambda v, o: np.array([len(_rejected(v, o))])),
            direction="scorer over sampler",
            quirks=_NEW,
            when=lambda o: o["sampler_rs"] != "none",
        ),
        token_mean(
            "sampler_is/weight_mean",
            "mean over tokens of min(r, threshold)",
            _weight,
            quirks="after truncation, 0 where sampler_rs rejects; d clamped to +-20",
            ours="ratio/mean",
            **_ANY,
        ),
        greatest(
            "sampler_is/weight_max",
            "the greatest min(r, threshold)",
            _weight,
            quirks="after truncation, 0 where sampler_rs rejects",
            ours="ratio/max",
            **_ANY,
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
        "sampler_rs": Option("none", "rejection", "word", ("none", "token", "geometric")),
        "sampler_rs_min": Option(0.5, "its lower bound; there is no default"),
        "sampler_rs_max": Option(2.0, "its upper bound; there is no default"),
        "seq_logprob_error_threshold": Option(None, "sequences with a greater mean e^|d| are masked", none=True),
    },
)
