"""prime-rl: mismatch of the current policy against inference, and what its trust region masks.

Source: src/prime_rl/trainer/rl/loss.py. There are no old log-probs: staleness is in every number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onepolicy.dialects.key import Option, Options, Part, Term, dialect
from onepolicy.dialects.means import greatest, mean, ones, spread, token_mean
from onepolicy.dialects.view import View

_STALE = "the scorer is the current policy: staleness is in it"
_BATCHES = "the dashboard averages micro-batches, each alike; here all tokens are one"


def _kl(v: View, o: Options) -> Any:
    """rho - log rho - 1."""
    return v.r - v.d - 1


def _masked(v: View, o: Options) -> Any:
    """`[N]`: dropped by the trust region."""
    gap = v.q - v.p
    if o["loss"] == "ipo":
        return np.abs(gap) > o["ipo_threshold"]
    return np.where(v.advantages > 0, gap > o["dppo_mask_high"], gap < -o["dppo_mask_low"])


def _where(term: Term, among: Term) -> tuple[Term, Part]:
    """`term` over the tokens that are `among`, and their count."""
    return (
        lambda v, o: np.asarray(term(v, o), dtype=np.float64)[among(v, o)],
        Part(f"tokens {among.__name__}", "sum", lambda v, o: np.array([int(among(v, o).sum())])),
    )


def _kept(v: View, o: Options) -> Any:
    return ~_masked(v, o)


def _positive(v: View, o: Options) -> Any:
    return v.advantages > 0


def _negative(v: View, o: Options) -> Any:
    return v.advantages < 0


_BOTH: dict[str, Any] = {"needs": ("scorer", "advantages"), "direction": "scorer - sampler, in probabilities"}
_dppo = lambda o: o["loss"] == "dppo"

PRIME_RL = dialect(
    "prime_rl",
    "prime-rl",
    scorer="current",
    read="559b447, 2026-08-21",
    checked="numbers worked by hand after its published formulas",
    keys=[
        token_mean(
            "mismatch_kl/all/mean",
            "k3, mean over tokens of r - log r - 1",
            _kl,
            direction="KL(sampler || scorer)",
            quirks=_STALE,
            ours="kl_sampler_scorer_k3/mean",
        ),
        spread(
            "mismatch_kl/all/std", "standard deviation over tokens of it", _kl, quirks=f"{_STALE}; divides by n - 1"
        ),
        greatest("mismatch_kl/all/max", "the greatest token's", _kl, quirks=_STALE),
        mean(
            "masked_mismatch_kl/mean", "mean of it over masked tokens", *_where(_kl, _masked), quirks=_BATCHES, **_BOTH
        ),
        mean("unmasked_mismatch_kl/mean", "mean of it over kept tokens", *_where(_kl, _kept), quirks=_BATCHES, **_BOTH),
        token_mean(
            "is_masked/mean",
            "share of tokens masked: p_scorer - p_sampler above dppo_mask_high where A > 0, else below -dppo_mask_low",
            lambda v, o: ones(_masked(v, o)),
            quirks=_BATCHES,
            **_BOTH,
        ),
        token_mean(
            "is_masked_low/mean",
            "share of tokens masked with A < 0",
            lambda v, o: ones(_masked(v, o) & _negative(v, o)),
            quirks=_BATCHES,
            when=_dppo,
            **_BOTH,
        ),
        token_mean(
            "is_masked_high/mean",
            "share of tokens masked with A > 0",
            lambda v, o: ones(_masked(v, o) & _positive(v, o)),
            quirks=_BATCHES,
            when=_dppo,
            **_BOTH,
        ),
        mean(
            "masked_advantage_positive/mean",
            "share of masked tokens with A > 0",
            *_where(_positive, _masked),
            quirks=_BATCHES,
            when=_dppo,
            **_BOTH,
        ),
        mean(
            "masked_advantage_negative/mean",
            "share of masked tokens with A < 0",
            *_where(_negative, _masked),
            quirks=_BATCHES,
            when=_dppo,
            **_BOTH,
        ),
        token_mean(
            "entropy/all/mean",
            "mean over tokens of the scorer's entropy",
            lambda v, o: v.entropy,
            needs=("entropy",),
            direction="scorer alone",
        ),
    ],
    options={
        "loss": Option("dppo", "the trust region", "word", ("dppo", "ipo")),
        "dppo_mask_low": Option(0.2, "how far a probability may fall where A is not above 0"),
        "dppo_mask_high": Option(0.2, "how far it may rise where A is above 0"),
        "ipo_threshold": Option(0.1, "how far it may move, either way"),
    },
)
