"""NeMo-RL: the engine metrics of its clipped policy loss and of its sequence masking.

Source: nemo_rl/algorithms/loss/loss_functions.py (ClippedPGLossFn), nemo_rl/algorithms/grpo.py. `prev_logprobs` is
`old`, `generation_logprobs` the sampler; the mask is token mask times sample mask.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from onepolicy.dialects.key import Key, Option, Options, Part, dialect
from onepolicy.dialects.means import greatest, k3, least, mean, ones, sequence_mean, token_mean
from onepolicy.dialects.rounding import exp, log
from onepolicy.dialects.view import View

_KINDS = {"k1": lambda d: -d, "k2": lambda d: d**2 / 2, "k3": k3}


def _kl(v: View, o: Options, sign: int) -> Any:
    return _KINDS[o["reference_policy_kl_type"]](sign * v.d)


def _js(v: View, o: Options) -> Any:
    mixture = log(0.5 * v.q + 0.5 * v.p)
    return 0.5 * k3(v.scorer - mixture) + 0.5 * k3(v.sampler - mixture)


def _zero(w: Any) -> Any:
    return np.where(np.isfinite(w), w, w.dtype.type(0))


def _kept(v: View, o: Options) -> Any:
    """`[N]`, or `[F]` for whole sequences: inside the bounds of the truncation type, which are kept themselves."""
    kind, low, high = _truncation(o)
    x = exp(v.means(_zero(v.d)))[v.filled] if kind == "seq-mask-tis" else _raw(v, o)
    return (x >= low) & (x <= high)


def _counted_kept(v: View, o: Options) -> Any:
    """As NeMo-RL counts them: sequences for seq-mask-tis, else tokens, also where a sequence has one weight."""
    keep = _kept(v, o)
    whole = o["sequence_level_importance_ratios"] and _truncation(o)[0] != "seq-mask-tis"
    return np.repeat(keep, v.lengths[v.filled]) if whole else keep


def _truncation(o: Options) -> tuple[str | None, float, float]:
    high, low = o["truncated_importance_sampling_ratio"], o["truncated_importance_sampling_ratio_min"]
    if high is None:
        return None, 0.0, np.inf
    return o["truncated_importance_sampling_type"], 0.0 if low is None else low, high


def _raw(v: View, o: Options) -> Any:
    """Weights `[N]`, or `[F]` of whole sequences (the product)."""
    return _zero(exp(v.sums(v.d)[v.filled] if o["sequence_level_importance_ratios"] else v.d))


def _weights(v: View, o: Options) -> Any:
    w, (kind, low, high) = _raw(v, o), _truncation(o)
    if kind is None:
        return w
    if kind == "tis":
        return np.clip(w, low, high)
    keep = _kept(v, o)
    return w * (np.repeat(keep, v.lengths[v.filled]) if kind == "seq-mask-tis" else keep)


def _units(v: View, o: Options) -> Any:
    return np.array([int(v.filled.sum()) if o["sequence_level_importance_ratios"] else len(v.sampler)])


def _update(v: View, o: Options) -> Any:
    if o["sequence_level_importance_ratios"]:
        return exp(v.spread(v.means(v.update)))
    return exp(v.update)


def _update_clamped(v: View, o: Options) -> Any:
    return np.clip(_update(v, o), 1 - o["ratio_clip_min"], 1 + o["ratio_clip_max"])


def _sequence_error(v: View, o: Options) -> Any:
    return v.means(exp(np.abs(v.d)))


def _sequence_kept(v: View, o: Options) -> Any:
    return _sequence_error(v, o)[_sequence_error(v, o) <= o["seq_logprob_error_threshold"]]


_OLD: dict[str, Any] = {"needs": ("current", "old"), "direction": "current over old: the update, not the engines"}
_EMPTY = "a sequence without trained tokens counts as 0"
_thresholded = lambda o: o["seq_logprob_error_threshold"] is not None

KEYS = [
    token_mean(
        "token_mult_prob_error",
        "mean over tokens of e^|d|, at least 1",
        lambda v, o: exp(np.abs(v.d)),
        direction="none",
        ours="mult_prob_error/mean",
        same=True,
    ),
    token_mean(
        "gen_kl_error",
        "k3, mean over tokens of e^d - d - 1 (reference_policy_kl_type: k1 -d, k2 d^2 / 2)",
        lambda v, o: _kl(v, o, 1),
        direction="KL(sampler || scorer)",
        quirks="with the k3 setting; it changes silently with reference_policy_kl_type",
        ours="kl_sampler_scorer_k3/mean",
        same=True,
    ),
    token_mean(
        "policy_kl_error",
        "mean over tokens of e^-d + d - 1",
        lambda v, o: _kl(v, o, -1),
        direction="called KL(scorer || sampler)",
        quirks="NeMo-RL has no importance weight, so it is not an estimate; one token can make all of it",
        ours="kl_scorer_sampler_weighted/mean",
    ),
    token_mean(
        "js_divergence_error",
        "mean over tokens of half k3(log p_scorer - log m) + half k3(log p_sampler - log m), m the mean probability",
        _js,
        direction="none",
        quirks="NeMo-RL's is a sampled-token proxy without weights, and may exceed log 2",
        ours="js_sampled/mean",
    ),
    mean(
        "sampling_importance_ratio",
        "mean over tokens of r, or over sequences of e^D",
        _weights,
        Part("units", "sum", _units),
        direction="scorer over sampler",
        quirks="after truncation when TIS is on; NaN and infinite weights are 0",
        ours="ratio/mean",
    ),
    Key(
        "is_oob_ratio",
        "1 less the share of tokens (seq-mask-tis: of sequences, by the geometric ratio) inside the bounds",
        (
            Part("sum kept", "sum", lambda v, o: ones(_counted_kept(v, o))),
            Part("units kept", "sum", lambda v, o: np.array([len(_counted_kept(v, o))])),
        ),
        lambda o, x, n: 1 - x / n if n else None,
        direction="scorer over sampler",
        quirks="of tokens even where a sequence has one weight, so that long ones count more; versions before the "
        "lower bound of tis count above it only",
        when=lambda o: _truncation(o)[0] is not None,
    ),
    token_mean(
        "approx_entropy",
        "mean over tokens of -e^(log p_current - log p_sampler) log p_current",
        lambda v, o: -exp(v.current - v.sampler) * v.current,
        needs=("current",),
        direction="current over sampler",
        quirks="an importance-weighted surprisal, not the entropy",
    ),
    token_mean("probs_ratio", "mean over tokens of e^(log p_current - log p_old)", _update, **_OLD),
    token_mean("probs_ratio_clamped", "the same, clipped to the loss's range", _update_clamped, **_OLD),
    least("probs_ratio_min", "the least of it", _update, **_OLD),
    greatest("probs_ratio_max", "the greatest of it", _update, **_OLD),
    least("probs_ratio_clamped_min", "the least of it, clipped", _update_clamped, **_OLD),
    greatest("probs_ratio_clamped_max", "the greatest of it, clipped", _update_clamped, **_OLD),
    greatest(
        "max_seq_mult_prob_error",
        "the greatest sequence mean of e^|d|",
        _sequence_error,
        direction="none",
        ours="mult_prob_error/sequence_max",
        same=True,
    ),
    sequence_mean(
        "mean_seq_mult_prob_error",
        "mean over sequences of the mean of e^|d|",
        _sequence_error,
        direction="none",
        quirks=_EMPTY,
    ),
    least(
        "min_seq_mult_prob_error", "the least sequence mean of e^|d|", _sequence_error, direction="none", quirks=_EMPTY
    ),
    greatest(
        "max_seq_mult_prob_error_after_mask",
        "the greatest of the sequences that are kept",
        _sequence_kept,
        when=_thresholded,
    ),
    mean(
        "mean_seq_mult_prob_error_after_mask",
        "the mean of the sequences that are kept",
        _sequence_kept,
        Part("kept sequences", "sum", lambda v, o: np.array([len(_sequence_kept(v, o))])),
        when=_thresholded,
    ),
    least(
        "min_seq_mult_prob_error_after_mask",
        "the least of the sequences that are kept",
        _sequence_kept,
        when=_thresholded,
    ),
    Key(
        "num_masked_seqs_by_logprob_error",
        "sequences whose mean e^|d| is above seq_logprob_error_threshold",
        (Part("masked", "sum", lambda v, o: ones(_sequence_error(v, o) > o["seq_logprob_error_threshold"])),),
        lambda o, x: x,
        when=_thresholded,
    ),
]
NEMO_RL = dialect(
    "nemo_rl",
    "NeMo-RL",
    scorer="old",
    read="main 7ea279a, 2026-08-22",
    checked="numbers worked by hand after its published formulas",
    keys=[replace(k, also=(f"train/{k.name}",)) for k in KEYS],
    options={
        "reference_policy_kl_type": Option("k3", "the estimator of both KL errors", "word", ("k1", "k2", "k3")),
        "truncated_importance_sampling_ratio": Option(None, "upper bound; none is no truncation", none=True),
        "truncated_importance_sampling_ratio_min": Option(None, "lower bound; none is 0", none=True),
        "truncated_importance_sampling_type": Option(
            "tis", "what the bounds do", "word", ("tis", "icepop", "seq-mask-tis")
        ),
        "sequence_level_importance_ratios": Option(False, "one weight a sequence, the product", "bool"),
        "seq_logprob_error_threshold": Option(None, "sequences with a greater mean e^|d| are masked", none=True),
        "ratio_clip_min": Option(0.2, "the loss's clip below 1"),
        "ratio_clip_max": Option(0.2, "the loss's clip above 1"),
    },
    note="On a dashboard the keys stand under `train/`. With force_on_policy_ratio, old is the current policy.",
)
