"""miles: slime's keys, with what it makes of NaN and infinities, a clamped KL, and an effective sample size.

Source: miles/backends/training_utils/loss.py, miles/utils/ppo_utils.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onepolicy.dialects.key import Key, Options, Part, dialect
from onepolicy.dialects.means import divide
from onepolicy.dialects.rounding import exp
from onepolicy.dialects.slime import OPTIONS, keys, reduced
from onepolicy.dialects.view import View

CLAMP = 10.0
_HIDES = "NaN and infinite values count as 0, so an infinite mismatch disappears"


def _finite(x: Any) -> Any:
    return np.where(np.isfinite(x), x, x.dtype.type(0))


def _kl(v: View, o: Options) -> Any:
    d = (v.scorer - v.sampler).astype(np.float32)
    return _finite(np.clip(exp(d) - 1 - d, -CLAMP, CLAMP))


def _ess(v: View, o: Options) -> Any:
    """`[S]`, or weighted by tokens with per-token loss."""
    w = exp(v.update.astype(np.float32)).astype(np.float64)
    tokens = np.maximum(v.lengths, 1)
    out = v.sums(w) ** 2 / (tokens * np.maximum(v.sums(w * w), 1e-8))
    return out * tokens if o["calculate_per_token_loss"] else out


MILES = dialect(
    "miles",
    "miles",
    scorer="old",
    read="0.0.2; main 31f1ca9, 2026-08-21",
    checked="its own code, 0.0.2 (of the MIS helper: by hand)",
    keys=keys(
        lambda v, o: _finite(np.abs(v.d)),
        (
            reduced(
                "train/train_rollout_kl",
                "k3: e^d - d - 1 of a token",
                _kl,
                direction="KL(sampler || scorer)",
                quirks=f"clamped to +-10 after the subtraction; {_HIDES}; always in float32",
                ours="kl_sampler_scorer_k3/mean",
            ),
            Key(
                "train/ess_ratio",
                "mean over sequences of (sum w)^2 / (T sum w^2), w = e^(log p_current - log p_old)",
                (
                    Part("sum ess", "sum", _ess),
                    Part(
                        "samples",
                        "sum",
                        lambda v, o: np.array([len(v.sampler) if o["calculate_per_token_loss"] else len(v.lengths)]),
                    ),
                ),
                lambda o, x, n: divide(x, n),
                needs=("current", "old"),
                direction="current over old: the update, not the engines",
                quirks="one share a sequence, then their mean; always in float32",
                also=("ess_ratio",),
            ),
        ),
    ),
    options=OPTIONS,
    note=f"|d| and the KL: {_HIDES}.",
)
