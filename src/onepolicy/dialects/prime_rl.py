"""prime-rl: mismatch of the current policy against inference, and what its trust region masks or clips.

Source: src/prime_rl/trainer/rl/loss.py, train.py. There are no old log-probs: staleness is in every number. The loss is
computed sample by sample (the packed sequences); what it logs is one number a sample, of which the dashboard has the
mean and the greatest, each sample alike. `mismatch_kl` and `entropy` are of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from onepolicy.dialects.key import Key, Option, Options, Part, Term, dialect
from onepolicy.dialects.means import N, greatest, ones, sequence_mean, spread, token_mean
from onepolicy.dialects.view import View

_STALE = "the scorer is the current policy: staleness is in it"
_SAMPLES = "each sample alike, however long; one without such tokens counts as 0"
#: What later versions hold a token's KL under.
LARGEST = 1e30
REGIONS = ("dppo", "ipo", "icepop")
CLIPS = ("ppo", "cispo")


def _kl(v: View, o: Options) -> Any:
    """`[N]` rho - log rho - 1."""
    if not o["expm1"]:
        return v.r - v.d - 1
    # rounded once in float32, as torch's expm1
    below = np.minimum(v.d, np.log(v.d.dtype.type(LARGEST)))
    return np.minimum(np.expm1(below.astype(np.float64)).astype(v.d.dtype) - v.d, v.d.dtype.type(LARGEST))


def _masked(v: View, o: Options) -> Any:
    """`[N]`: dropped by the trust region."""
    if o["loss"] == "icepop":
        low, high = np.log(v.d.dtype.type(o["ratio_low"])), np.log(v.d.dtype.type(o["ratio_high"]))
        return (v.d < low) | (v.d > high)
    gap = v.q - v.p
    if o["loss"] == "ipo":
        return np.abs(gap) > o["ipo_threshold"]
    return np.where(v.advantages > 0, gap > o["dppo_mask_high"], gap < -o["dppo_mask_low"])


def _clipped(v: View, o: Options) -> Any:
    """`[N]`: the surrogate's clip decides, or CISPO clips the weight."""
    low, high = np.log(v.d.dtype.type(o["ratio_low"])), np.log(v.d.dtype.type(o["ratio_high"]))
    if o["loss"] == "cispo":
        return (v.d > high) | (v.d < low)
    return ((v.advantages > 0) & (v.d > high)) | ((v.advantages < 0) & (v.d < low))


def _capped(v: View, o: Options) -> Any:
    return v.d > np.log(v.d.dtype.type(o["max_importance_ratio"]))


def _kept(v: View, o: Options) -> Any:
    return ~_masked(v, o)


def _share(what: Term, among: Term | None = None) -> Term:
    """`[S]`: the mean of `what` over a sample's tokens that are `among`; 0 where there are none."""

    def term(v: View, o: Options) -> Any:
        x, on = np.asarray(what(v, o)), None if among is None else among(v, o)
        x = ones(x) if x.dtype == bool else x
        if on is None:
            return v.means(x)
        return v.sums(np.where(on, x, x.dtype.type(0))) / np.maximum(v.sums(ones(on)), 1)

    return term


_POSITIVE: Term = lambda v, o: v.advantages > 0
_NEGATIVE: Term = lambda v, o: v.advantages < 0


def _both(name: str, says: str, term: Term, losses: tuple[str, ...], **more: Any) -> Iterator[Key]:
    """The mean over samples, and the greatest sample's."""
    more = {"when": lambda o: o["loss"] in losses, "quirks": _SAMPLES, **more}
    yield sequence_mean(f"{name}/mean", f"mean over samples of {says}", term, **more)
    yield greatest(f"{name}/max", f"the greatest over samples of {says}", term, **more)


def _signed(o: Options) -> tuple[str, ...]:
    """The columns that a loss looks at; dppo and ppo ask for the sign of the advantage."""
    return ("scorer", "advantages") if o["loss"] in ("dppo", "ppo") else ("scorer",)


def _region(name: str, says: str, term: Term, losses: tuple[str, ...] = REGIONS) -> Iterator[Key]:
    return _both(name, says, term, losses, needs=_signed, direction="scorer - sampler, in probabilities")


_RULE = (
    "dppo: p_scorer - p_sampler above dppo_mask_high where A > 0, else below -dppo_mask_low; ipo: |p - p| above "
    "ipo_threshold; icepop: r outside ratio_low to ratio_high"
)

PRIME_RL = dialect(
    "prime_rl",
    "prime-rl",
    scorer="current",
    read="559b447, 2026-08-21, and main, 2026-11",
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
        *_region("masked_mismatch_kl", "the mean of it over masked tokens", _share(_kl, _masked)),
        *_region("unmasked_mismatch_kl", "the mean of it over kept tokens", _share(_kl, _kept)),
        *_region("is_masked", f"the share of tokens masked ({_RULE})", _share(_masked)),
        *_region(
            "is_masked_low",
            "the share of tokens masked with A < 0",
            _share(lambda v, o: _masked(v, o) & (v.advantages < 0)),
            ("dppo",),
        ),
        *_region(
            "is_masked_high",
            "the share of tokens masked with A > 0",
            _share(lambda v, o: _masked(v, o) & (v.advantages > 0)),
            ("dppo",),
        ),
        *_region(
            "masked_advantage_positive",
            "the share of masked tokens with A > 0",
            _share(_POSITIVE, _masked),
            ("dppo",),
        ),
        *_region(
            "masked_advantage_negative",
            "the share of masked tokens with A < 0",
            _share(_NEGATIVE, _masked),
            ("dppo",),
        ),
        *_both(
            "is_clipped",
            "the share of tokens clipped: r above ratio_high (ppo: where A > 0) or below ratio_low (ppo: A < 0)",
            _share(_clipped),
            CLIPS,
            needs=_signed,
            direction="scorer over sampler",
        ),
        *_both(
            "ratio_capped",
            "the share of tokens with r above max_importance_ratio",
            _share(_capped),
            ("ppo",),
            direction="scorer over sampler",
        ),
        token_mean(
            "entropy/all/mean",
            "mean over tokens of the scorer's entropy",
            lambda v, o: v.entropy,
            needs=("entropy",),
            direction="scorer alone",
        ),
        Key(
            "kl_ent_ratio/mean",
            "mismatch_kl/all/mean over entropy/all/mean",
            (
                Part("sum kl of tokens", "sum", _kl),
                Part("sum entropy of tokens", "sum", lambda v, o: v.entropy),
                N,
            ),
            lambda o, kl, entropy, n: kl / entropy if n and entropy > 0 else None,
            needs=("scorer", "entropy"),
            direction="KL(sampler || scorer)",
            quirks=_STALE,
        ),
    ],
    options={
        "loss": Option("dppo", "the loss; later versions: ipo, icepop, ppo, cispo", "word", (*REGIONS, *CLIPS)),
        "dppo_mask_low": Option(0.2, "how far a probability may fall where A is not above 0"),
        "dppo_mask_high": Option(0.2, "how far it may rise where A is above 0"),
        "ipo_threshold": Option(0.1, "how far it may move, either way; later versions: eps, 0.3"),
        "ratio_low": Option(0.2, "lower bound of the ratio: icepop 0.2, ppo 0.8"),
        "ratio_high": Option(5.0, "upper bound of the ratio: icepop 5.0, ppo 1.2"),
        "max_importance_ratio": Option(1e4, "cap of the ratio in later versions"),
        "expm1": Option(False, "the KL of later versions: expm1(d) - d, held under 1e30", "bool"),
    },
    note="Padding that a micro-batch counts as a sample of its own adds a 0 to each mean over samples; it is not in "
    "a dump.",
)
