"""verl's `rollout_corr/rollout_is_*`: statistics of its importance weights, and what it truncates.

Source: verl/trainer/ppo/rollout_corr_helper.py. d, or at sequence level D, is clamped to +-20.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onepolicy.dialects.key import Key, Options, Part
from onepolicy.dialects.means import (
    N,
    S,
    clamped,
    ess,
    greatest,
    least,
    mean,
    moments,
    ones,
    sequence_mean,
    spread,
    std,
    token_mean,
)
from onepolicy.dialects.rounding import exp
from onepolicy.dialects.view import View
from onepolicy.errors import UsageError

BOUND = 20.0


def band(text: Any) -> tuple[float | None, float]:
    """(lower, upper) of a threshold: 2.0 truncates, "0.5_5.0" is IcePop's band. Errors: `UsageError`."""
    try:
        parts = [float(x) for x in str(text).split("_")]
    except ValueError:
        parts = []
    if len(parts) not in (1, 2) or not 0 < parts[0] <= parts[-1]:
        raise UsageError(f"rollout_is_threshold={text}: wanted a number above 0, or lower_upper")
    return (parts[0] if len(parts) == 2 else None), parts[-1]


def _is(o: Options) -> bool:
    return o["rollout_is"] is not None


def _raw(v: View, o: Options) -> Any:
    """`[N]` raw weights: of the token, or of its sequence's product."""
    d = v.d if o["rollout_is"] == "token" else v.spread(v.sums(v.d))
    return exp(clamped(d, BOUND))


def _weights(v: View, o: Options) -> Any:
    """`[N]` truncated weights, or IcePop's with 0 outside its band."""

    def make() -> Any:
        raw, (low, high) = _raw(v, o), band(o["rollout_is_threshold"])
        return np.minimum(raw, high) if low is None else np.where((raw >= low) & (raw <= high), raw, raw.dtype.type(0))

    return v.memo(("verl", o["rollout_is"], o["rollout_is_threshold"]), make)


def _low(o: Options) -> float:
    low, high = band(o["rollout_is_threshold"])
    return 1 / high if low is None else low


def _high(o: Options) -> float:
    return band(o["rollout_is_threshold"])[1]


def _exceeds(v: View, o: Options, high: bool) -> Any:
    """Units outside the band, `[N]` or `[S]`: raw, not truncated."""
    bound = _high(o) if high else _low(o)
    if o["rollout_is"] == "token":
        raw = _raw(v, o)
        return ones(raw > bound if high else raw < bound)
    total = v.sums(v.d)
    return ones(total > math.log(bound) if high else total < math.log(bound))


def _units(v: View, o: Options) -> Any:
    return np.array([len(v.sampler) if o["rollout_is"] == "token" else len(v.lengths)])


_UNITS = Part("units of rollout_is", "sum", _units)


def _extreme(v: View, o: Options, high: bool) -> Any:
    if o["rollout_is"] == "token":
        return _weights(v, o)
    total = v.sums(v.d)
    return exp(np.minimum(total, BOUND) if high else total)


def _std(o: Options, x: float, xx: float, n: float) -> float | None:
    return std(x, xx, n, unbiased=False, single=0.0)


def _sequence_weights(v: View, o: Options) -> Any:
    return v.means(_weights(v, o))


def _norm(v: View, o: Options) -> Any:
    w = _weights(v, o)
    return w if o["rollout_is"] == "token" else v.means(w)


def _is_key(make: Any, name: str, says: str, *args: Any, **more: Any) -> Key:
    more.setdefault("when", _is)
    return make(f"rollout_corr/rollout_is_{name}", says, *args, **more)


_TRUNCATED = "of the truncated weights, not of the raw ratios"
IMPORTANCE = [
    _is_key(
        token_mean,
        "mean",
        "mean over tokens of the weight",
        _weights,
        direction="scorer over sampler",
        quirks=f"{_TRUNCATED}; at sequence level long sequences count more",
        ours="ratio/mean",
    ),
    _is_key(
        greatest,
        "max",
        "the greatest weight",
        lambda v, o: _extreme(v, o, True),
        direction="scorer over sampler",
        quirks="token level: after truncation, so at most the threshold; sequence level: raw, up to e^20",
        ours="ratio/max",
    ),
    _is_key(
        least,
        "min",
        "the least weight",
        lambda v, o: _extreme(v, o, False),
        direction="scorer over sampler",
        quirks="token level: after truncation (IcePop's dropped tokens are 0); sequence level: raw, not clamped",
        ours="ratio/min",
    ),
    Key(
        "rollout_corr/rollout_is_std",
        "standard deviation of the weights over tokens",
        (*moments("rollout_is", _weights, 1.0), N),
        _std,
        direction="scorer over sampler",
        quirks=f"{_TRUNCATED}; divides by n, 0 for one token",
        ours="ratio/std",
        when=_is,
    ),
    Key(
        "rollout_corr/rollout_is_eff_sample_size",
        "1 / mean((w / mean w)^2) over tokens, a share in (0, 1]",
        (
            Part("sum weights", "sum", _weights),
            Part("sum2 weights", "sum", lambda v, o: np.square(_weights(v, o), dtype=np.float64)),
            N,
        ),
        ess,
        direction="scorer over sampler",
        quirks="verl's is of truncated weights, and over tokens at sequence level too: long sequences count more",
        ours="ess_token/share",
        when=_is,
    ),
    *(
        _is_key(
            mean,
            f"ratio_fraction_{word}",
            f"share of {side}",
            lambda v, o, high=high: _exceeds(v, o, high),
            _UNITS,
            direction="scorer over sampler",
            quirks="of raw ratios; of tokens, or of sequences at sequence level",
        )
        for word, high, side in (
            ("high", True, "ratios above the threshold"),
            ("low", False, "ratios below the lower threshold, else 1 over the upper one"),
        )
    ),
    _is_key(
        token_mean,
        "oob_ratio",
        "share of tokens outside IcePop's band",
        lambda v, o: ones((_raw(v, o) < _low(o)) | (_raw(v, o) > _high(o))),
        direction="scorer over sampler",
        when=lambda o: _is(o) and band(o["rollout_is_threshold"])[0] is not None,
    ),
    _is_key(
        sequence_mean,
        "seq_mean",
        "mean over sequences of the sequence's mean weight",
        _sequence_weights,
        direction="scorer over sampler",
        quirks=f"the arithmetic mean of token weights, {_TRUNCATED}; a sequence without trained tokens counts as 0",
    ),
    _is_key(
        spread,
        "seq_std",
        "standard deviation over sequences of the sequence's mean weight",
        _sequence_weights,
        S,
        1.0,
        0.0,
        direction="scorer over sampler",
        quirks=f"{_TRUNCATED}; divides by S - 1",
    ),
    _is_key(greatest, "seq_max", "the greatest sequence's mean weight", _sequence_weights, quirks=_TRUNCATED),
    _is_key(least, "seq_min", "the least sequence's mean weight", _sequence_weights, quirks=_TRUNCATED),
    _is_key(
        greatest,
        "seq_max_deviation",
        "the greatest |mean weight - 1| of a sequence",
        lambda v, o: np.abs(_sequence_weights(v, o) - 1),
        quirks=f"{_TRUNCATED}; a sequence without trained tokens deviates by 1",
    ),
    *(
        _is_key(
            sequence_mean,
            f"seq_fraction_{word}",
            f"share of sequences whose mean raw weight is {side}",
            lambda v, o, high=high: ones(v.means(_raw(v, o)) > _high(o) if high else v.means(_raw(v, o)) < _low(o)),
            quirks="of raw weights; a sequence without trained tokens counts as 0",
        )
        for word, high, side in (("high", True, "above the threshold"), ("low", False, "below the lower threshold"))
    ),
    _is_key(
        mean,
        "batch_norm_factor",
        "what weights are divided by: their mean over tokens, or over sequences",
        _norm,
        Part(
            "units of the norm",
            "sum",
            lambda v, o: np.array([len(v.sampler) if o["rollout_is"] == "token" else int(v.filled.sum())]),
        ),
        quirks=f"{_TRUNCATED}; over all ranks",
        when=lambda o: _is(o) and o["rollout_is_batch_normalize"],
    ),
]
