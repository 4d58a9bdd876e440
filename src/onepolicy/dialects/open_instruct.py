"""open-instruct: `debug/vllm_*` (the current policy against vLLM) and `val/rho_*` (old against vLLM).

Source: open_instruct/grpo_utils.py. A NaN log-prob of the sampler is left out of the debug keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onepolicy.dialects.key import Key, Option, Options, Part, Term, dialect
from onepolicy.dialects.means import clamped, greatest, mean, moments, ones, std, token_mean
from onepolicy.dialects.rounding import exp
from onepolicy.dialects.view import View

BOUND = 10.0
_WEIGHTED = (
    "weighted by p although the tokens were drawn from it already, so no estimate of a KL; later versions have no "
    "weight, which is k1: weighted_reverse_kl=false"
)
_BATCHES = "the dashboard averages micro-batches, each alike; here all tokens are one"


def _known(term: Term) -> Term:
    """`term` where the sampler has a value."""
    return lambda v, o: term(v, o)[~np.isnan(v.sampler)]


_gap = _known(lambda v, o: np.abs(v.d))
_KNOWN = Part("tokens with a value", "sum", lambda v, o: np.array([int((~np.isnan(v.sampler)).sum())]))


def _reverse(v: View, o: Options) -> Any:
    return (v.p if o["weighted_reverse_kl"] else 1) * (v.sampler - v.scorer)


def _d(v: View) -> Any:
    return clamped(v.old - v.sampler, BOUND)


def _rho(v: View, o: Options) -> Any:
    """`[N]` the ratio that is clamped: of the token, or of its sequence (geometric)."""
    return exp(v.spread(v.means(_d(v))) if o["rho_mask_sequence_level"] else _d(v))


def _dropped(v: View, o: Options, high: bool) -> Any:
    """`[N]`: outside the mask's bound on that side; with the divergence only tokens that the update pushes out."""
    bound, away = o["rho_mask_upper_bound" if high else "rho_mask_lower_bound"], True
    if not bound:
        return np.zeros(len(v.sampler), dtype=bool)
    x = _rho(v, o)
    if o["rho_mask_tv_divergence"]:
        x, away = v.spread(v.means(np.abs(exp(_d(v)) - 1))), np.sign(_d(v)) * v.advantages > 0
    return (x > bound if high else x < bound) & away


def _clamped(v: View, o: Options) -> Any:
    low, high = o["rho_clamp_lower_bound"], o["rho_clamp_upper_bound"]
    return np.clip(_rho(v, o), low if low > 0 else -np.inf, high if high > 0 else np.inf)


def _weight(v: View, o: Options) -> Any:
    w = _clamped(v, o)
    return np.where(_dropped(v, o, True) | _dropped(v, o, False), w.dtype.type(0), w)


_RHO: dict[str, Any] = {
    "needs": lambda o: ("old", "advantages") if o["rho_mask_tv_divergence"] else ("old",),
    "direction": "old over sampler",
    "when": lambda o: o["use_rho_correction"],
}

OPEN_INSTRUCT = dialect(
    "open_instruct",
    "open-instruct",
    scorer="current",
    read="main e6c3044, 2026-08-20",
    checked="numbers worked by hand after its published formulas",
    keys=[
        mean(
            "debug/vllm_vs_local_logprob_diff_mean",
            "mean over tokens of |d|",
            _gap,
            _KNOWN,
            direction="none",
            quirks="of the current policy; tokens without a sampler's value are left out",
            ours="abs_log_ratio/mean",
            same=True,
        ),
        greatest(
            "debug/vllm_vs_local_logprob_diff_max",
            "the greatest |d|",
            _gap,
            direction="none",
            ours="abs_log_ratio/max",
            same=True,
        ),
        Key(
            "debug/vllm_vs_local_logprob_diff_std",
            "standard deviation over tokens of |d|",
            (*moments("gap", _gap), _KNOWN),
            lambda o, x, xx, n: std(x, xx, n, single=0.0),
            direction="none",
            quirks="divides by n - 1",
        ),
        mean(
            "debug/vllm_local_reverse_kl",
            "mean over tokens of p_sampler (log p_sampler - log p_scorer)",
            _known(_reverse),
            _KNOWN,
            direction="sampler - scorer",
            quirks=_WEIGHTED,
            ours="kl_sampler_scorer_k1/mean",
        ),
        token_mean(
            "val/rho_drop_frac",
            "share of tokens whose rho is outside the mask bounds",
            lambda v, o: ones(_dropped(v, o, True) | _dropped(v, o, False)),
            quirks=_BATCHES,
            **_RHO,
        ),
        token_mean(
            "val/rho_drop_low_frac",
            "share of tokens whose rho is below rho_mask_lower_bound",
            lambda v, o: ones(_dropped(v, o, False)),
            quirks=_BATCHES,
            also=("val/rho_drop_frac_low",),
            **_RHO,
        ),
        token_mean(
            "val/rho_drop_high_frac",
            "share of tokens whose rho is above rho_mask_upper_bound",
            lambda v, o: ones(_dropped(v, o, True)),
            quirks=_BATCHES,
            also=("val/rho_drop_frac_high",),
            **_RHO,
        ),
        token_mean(
            "val/rho_weight",
            "mean over tokens of the weight",
            _weight,
            quirks=f"clamped, 0 where dropped; d clamped to +-10; {_BATCHES}",
            ours="ratio/mean",
            **_RHO,
        ),
        token_mean(
            "val/rho_clipfrac",
            "share of tokens whose rho the clamp changes",
            lambda v, o: ones(_clamped(v, o) != _rho(v, o)),
            quirks=_BATCHES,
            **_RHO,
        ),
    ],
    options={
        "weighted_reverse_kl": Option(True, "the reverse KL of versions before its weight was removed", "bool"),
        "use_rho_correction": Option(True, "the correction on", "bool"),
        "rho_clamp_lower_bound": Option(0.0, "lower clamp; 0 is off"),
        "rho_clamp_upper_bound": Option(2.0, "upper clamp; 0 is off"),
        "rho_mask_lower_bound": Option(0.0, "below it tokens are dropped; 0 is off"),
        "rho_mask_upper_bound": Option(0.0, "above it tokens are dropped; 0 is off"),
        "rho_mask_sequence_level": Option(False, "the geometric ratio of the sequence in place of the token's", "bool"),
        "rho_mask_tv_divergence": Option(
            False, "the mask asks for the sequence's mean |rho - 1|, and drops only tokens with A d > 0 (VACO)", "bool"
        ),
    },
    note="Later versions mask by rho_mask_metric (ratio, or tv and kl of probabilities), do not clamp d, and count "
    "what is not finite as 0: not computed here.",
)
