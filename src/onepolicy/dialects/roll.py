"""ROLL: ratios and probability differences at four levels, a KL, and the pass rates of its filters.

Source: roll/utils/train_infer_corrections.py, functionals.py. Levels: token; geometric (mean of d); sequence (sum of
d); segment (mean over an unbroken run of trained tokens).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onepolicy.dialects.key import Key, Option, Options, dialect
from onepolicy.dialects.means import FILLED, clamped, greatest, k3, least, mean, ones, token_mean
from onepolicy.dialects.rounding import exp
from onepolicy.dialects.view import View

LEVELS = ("token", "geometric", "sequence", "segment")
_SPREAD = {
    "token": lambda v, x: x,
    "geometric": lambda v, x: v.spread(v.means(x)),
    "sequence": lambda v, x: v.spread(v.sums(x)),
    "segment": lambda v, x: v.run_means(x),
}


_PASS = (
    "a PASS rate: 1 is healthy; other frameworks log what is dropped; later versions add the padding's passes "
    "to the sum, so theirs may exceed 1"
)


def _ratio(v: View, level: str) -> Any:
    """`[N]`, not clamped: may be infinite."""
    return exp(_SPREAD[level](v, v.d))


def _diff(v: View, level: str) -> Any:
    """`[N]` p_scorer - p_sampler, signed."""
    return _SPREAD[level](v, v.q - v.p)


def _passes(v: View, o: Options, what: str, level: str) -> Any:
    x = _ratio(v, level) if what == "ratio" else _diff(v, level)
    return (x >= o[f"{what}_low"]) & (x <= o[f"{what}_high"])


def _kl(v: View, o: Options) -> Any:
    """`[F]` sequence means of e^-d - 1 + d, clamped twice."""
    return v.means(clamped(k3(clamped(-v.d, 20.0)), 10.0))[v.filled]


def _final(v: View, o: Options) -> Any:
    out = np.ones(len(v.sampler), dtype=bool)
    for what in ("ratio", "diff"):
        if o[f"{what}_enabled"]:
            out &= _passes(v, o, what, o["agg_type"])
    return ones(out)


def _values(level: str) -> list[Key]:
    token = level == "token"
    per = lambda x: lambda v, o: v.means(x(v, level))[v.filled]
    note = "mean over sequences of the sequence mean"
    return [
        mean(
            f"actor/train_infer_ratio_{level}_mean",
            f"mean of r, {level} level",
            per(_ratio),
            FILLED,
            direction="scorer over sampler",
            quirks=f"{note}; not clamped, so it may be infinite",
            ours="ratio/mean" if token else "geometric_ratio/mean" if level == "geometric" else "",
            same=level == "geometric",
            also=(f"actor/train_infer_ratio_{level}_mean@sum",),
        ),
        mean(
            f"actor/train_infer_diff_{level}_mean",
            f"mean of p_scorer - p_sampler, {level} level",
            per(_diff),
            FILLED,
            direction="scorer - sampler, in probabilities",
            quirks=f"{note}; signed, of probabilities"
            + ("; a sum, not a mean, over the sequence" * (level == "sequence")),
            ours="prob_diff/mean" if token else "",
            also=(f"actor/train_infer_diff_{level}_mean@sum",),
        ),
    ]


def _rates(level: str) -> list[Key]:
    return [
        token_mean(
            f"actor/train_infer_{level}_{what}_mask_mean",
            f"share of tokens whose {what}, {level} level, is inside the bounds",
            lambda v, o, what=what: ones(_passes(v, o, what, level)),
            direction="scorer over sampler",
            quirks=_PASS,
            when=lambda o, what=what: o["agg_type"] == level and o[f"{what}_enabled"],
            also=(f"actor/train_infer_{level}_{what}_mask_mean@sum",),
        )
        for what in ("ratio", "diff")
    ]


ROLL = dialect(
    "roll",
    "ROLL",
    scorer="old",
    read="main 8eb27cc, 2026-08-19",
    checked="numbers worked by hand after its published formulas",
    keys=[
        *(key for level in LEVELS for key in _values(level)),
        mean(
            "actor/train_infer_kl",
            "k3 the other way round: mean of e^-d - 1 + d",
            _kl,
            FILLED,
            direction="called the KL; KL(scorer || sampler), which the sampler's tokens do not estimate",
            quirks="mean over sequences of the sequence mean; without a weight one token can make all of it; d clamped "
            "to +-20, then each token's value to +-10; only in later versions",
            ours="kl_scorer_sampler_weighted/mean",
            also=("actor/train_infer_kl@sum",),
        ),
        greatest(
            "actor/train_infer_ratio_token_max",
            "the greatest r",
            lambda v, o: _ratio(v, "token"),
            direction="scorer over sampler",
            quirks="raw; only in later versions",
            ours="ratio/max",
            same=True,
            also=("actor/train_infer_ratio_token_max@max",),
        ),
        least(
            "actor/train_infer_ratio_token_min",
            "the least r",
            lambda v, o: _ratio(v, "token"),
            direction="scorer over sampler",
            quirks="raw; only in later versions",
            ours="ratio/min",
            same=True,
            also=("actor/train_infer_ratio_token_min@min",),
        ),
        *(key for level in LEVELS for key in _rates(level)),
        token_mean(
            "actor/train_infer_final_mask_mean",
            "share of tokens that pass every filter",
            _final,
            quirks="a PASS rate",
            when=lambda o: o["ratio_enabled"] or o["diff_enabled"],
        ),
        token_mean(
            "actor/is_weight_clipfrac",
            "share of tokens whose weight is above upper_bound",
            lambda v, o: ones(_ratio(v, o["weight_type"]) > o["upper_bound"]),
            direction="scorer over sampler",
            when=lambda o: o["is_weight"],
            also=("actor/is_weight_clipfrac@sum",),
        ),
    ],
    options={
        "is_weight": Option(False, "importance weights on", "bool"),
        "weight_type": Option("token", "their level", "word", LEVELS),
        "upper_bound": Option(1.2, "their cap"),
        "agg_type": Option("token", "level of the filter", "word", LEVELS),
        "ratio_enabled": Option(False, "a filter of ratios", "bool"),
        "ratio_low": Option(0.8, "its lower bound"),
        "ratio_high": Option(1.2, "its upper bound"),
        "diff_enabled": Option(False, "a filter of probability differences", "bool"),
        "diff_low": Option(-0.2, "its lower bound"),
        "diff_high": Option(0.2, "its upper bound"),
    },
    note="One filter; of several, each has the keys of its level, and the final rate is of all of them.",
)
