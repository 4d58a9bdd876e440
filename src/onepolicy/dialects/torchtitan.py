"""torchtitan: `bit_wise/*` and `loss/*` of its DAPO loss (the current policy against the generator).

Source: torchtitan/experiments/rl/losses/dapo.py. A token whose generator value is not finite leaves sum and count.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onepolicy.dialects.key import Key, Option, Options, Part, Term, dialect
from onepolicy.dialects.means import N, greatest, mean, ones
from onepolicy.dialects.view import View


def _finite(term: Term) -> Term:
    return lambda v, o: term(v, o)[np.isfinite(v.sampler)]


_COUNT = Part("tokens with a finite value", "sum", lambda v, o: np.array([int(np.isfinite(v.sampler).sum())]))


def _ratio(v: View, o: Options) -> Any:
    return v.r


def _clipped(v: View, o: Options) -> Any:
    r = _ratio(v, o)
    return ones(np.abs(r - np.clip(r, 1 - o["clip_low"], 1 + o["clip_high"])) > 1e-6)


_STALE = "the scorer is the current policy: staleness is in it"

TORCHTITAN = dialect(
    "torchtitan",
    "torchtitan",
    scorer="current",
    read="main b5bcd76, 2026-08-21",
    checked="numbers worked by hand after its published formulas",
    keys=[
        mean(
            "bit_wise/logprob_diff/mean",
            "mean over tokens of d",
            _finite(lambda v, o: v.d),
            _COUNT,
            direction="scorer - sampler: +d, the opposite sign of k1",
            quirks=_STALE,
            ours="log_ratio/mean",
            same=True,
        ),
        greatest(
            "bit_wise/logprob_diff/max",
            "the greatest |d|",
            _finite(lambda v, o: np.abs(v.d)),
            direction="none",
            quirks=_STALE,
            ours="abs_log_ratio/max",
            same=True,
        ),
        mean(
            "bit_wise/ratio_tokens_different/mean",
            "share of tokens with |d| > 1e-6",
            _finite(lambda v, o: ones(np.abs(v.d) > 1e-6)),
            _COUNT,
            direction="none",
            quirks="a share of tokens, not a ratio of policies",
        ),
        mean(
            "loss/ratio_mean",
            "mean over tokens of r",
            _finite(_ratio),
            _COUNT,
            direction="scorer over sampler",
            quirks=_STALE,
            ours="ratio/mean",
            same=True,
        ),
        mean(
            "loss/ratio_clipped_frac",
            "share of tokens whose r the loss's range clips",
            _finite(_clipped),
            _COUNT,
            direction="scorer over sampler",
            quirks=_STALE,
        ),
        Key(
            "loss/generator_logprob_nan_frac",
            "tokens whose sampler's value is not finite, over those whose is",
            (Part("not finite", "sum", lambda v, o: ones(~np.isfinite(v.sampler))), _COUNT),
            lambda o, x, n: x / n if n else None,
            direction="sampler alone",
            quirks="over the tokens that stay, so it may exceed 1",
        ),
        mean(
            "trainer/entropy/mean",
            "mean over tokens of the scorer's entropy",
            lambda v, o: v.entropy,
            N,
            needs=("entropy",),
            direction="scorer alone",
        ),
    ],
    options={
        "clip_low": Option(0.2, "the loss's clip below 1"),
        "clip_high": Option(0.28, "the loss's clip above 1"),
    },
)
