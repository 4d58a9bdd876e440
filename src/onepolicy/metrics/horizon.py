"""What a per-token gap does to a whole answer.

With independent errors of sd s and E[ratio] = 1, the log-ratio of an answer of n tokens is normal with mean -s^2 n / 2
and standard deviation s sqrt(n); sequence weights e^D then have an effective share of e^(-s^2 n). The textbook walk
leaves the drift out and gives a typical factor of e^(s sqrt(n)) either way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from onepolicy.types import Measurement


def answer(sd: float, length: int) -> dict[str, float]:
    """The answer of `length` tokens at a per-token sd of `sd` nats: `drift`, `spread` (nats), `median_ratio`,
    `ess_share`, and `walk_factor` of the textbook walk without the drift."""
    variance = sd * sd * length
    return {
        "length": length,
        "sd": sd,
        "drift": -variance / 2,
        "spread": math.sqrt(variance),
        "median_ratio": math.exp(-variance / 2) if variance < 1400 else 0.0,
        "ess_share": math.exp(-variance) if variance < 700 else 0.0,
        "walk_factor": math.exp(min(math.sqrt(variance), 700)),
    }


def answer_from(measurements: Mapping[str, Measurement], length: int) -> dict[str, float]:
    """`answer` at the measured per-token sd, with the measured share of ratios outside 1 +- 0.2 and Var(D) / T.

    Empty when there is nothing to compute it from.
    """
    rms, mean = (measurements.get(key) for key in ("log_ratio/rms", "log_ratio/mean"))
    if rms is None or mean is None or rms.value is None or mean.value is None:
        return {}
    out = answer(math.sqrt(max(rms.value**2 - mean.value**2, 0.0)), length)
    for name, key in (
        ("outside_clip_share", "outside_clip/share"),
        ("variance_per_token", "length_scaling/variance_per_token"),
    ):
        m = measurements.get(key)
        if m is not None and m.value is not None:
            out[name] = m.value
    return out
