"""slime and miles: `train/*` of the policy loss and of the MIS helper.

Source: slime/backends/megatron_utils/loss.py, slime/utils/ppo_utils.py,
examples/train_infer_mismatch_helper/mis.py; miles/backends/training_utils/loss.py. Each number is the mean over all
sequences of the sequence's token mean (0 without tokens), or with per-token loss the mean over tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from onepolicy.dialects.key import Key, Option, Options, Part, Term, dialect
from onepolicy.dialects.means import clamped, divide, k3, ones
from onepolicy.dialects.rounding import exp
from onepolicy.dialects.view import View

BOUND = 20.0
_MEAN = "mean over sequences of the sequence mean, 0 without trained tokens"


def reduced(name: str, says: str, term: Term, *, quirks: str = "", **more: Any) -> Key:
    """`term` `[N]` under slime's reducer."""
    per_token = lambda o: o["calculate_per_token_loss"]
    part = Part(f"sum {name}", "sum", lambda v, o: term(v, o) if per_token(o) else v.means(_float(term(v, o))))
    count = Part("samples", "sum", lambda v, o: np.array([len(v.sampler) if per_token(o) else len(v.lengths)]))
    said = "; ".join(x for x in (_MEAN, quirks) if x)
    also = (name.removeprefix("train/"), *more.pop("also", ()))
    return Key(name, says, (part, count), lambda o, x, n: divide(x, n), quirks=said, also=also, **more)


def _float(x: Any) -> Any:
    return x if x.dtype.kind == "f" else x.astype(np.float64)


def _on(option: str) -> Callable[[Options], bool]:
    return lambda o: o[option] not in (None, False)


def _tis(v: View, o: Options) -> Any:
    return v.r


def _tis_changed(v: View, o: Options) -> Any:
    r = _tis(v, o)
    return ones(~((r >= o["tis_clip_low"]) & (r <= o["tis_clip"])))


def _opsm(v: View, o: Options) -> Any:
    return ones((v.advantages < 0) & (v.spread(v.means(-v.update)) > o["opsm_delta"]))


def _mis_ratio(v: View, level: str) -> Any:
    """`[N]` the ratio at a level, held in e^+-20."""
    d = v.d if level == "token" else v.spread(v.sums(v.d) if level == "sequence" else v.means(v.d))
    return exp(clamped(d, BOUND))


def _mis_raw(v: View, o: Options) -> Any:
    return _mis_ratio(v, o["tis_level"])


def _mis_bounds(o: Options) -> tuple[float, float]:
    high = o["tis_upper_bound"]
    return (1 / high if o["tis_lower_bound"] is None else o["tis_lower_bound"]), high


def _mis_weight(v: View, o: Options) -> Any:
    raw, (low, high) = _mis_raw(v, o), _mis_bounds(o)
    if o["tis_mode"] == "mask":
        return raw
    return np.clip(raw, 0.0 if o["tis_mode"] == "truncate" else low, high)


def _mis_outside(high: bool) -> Term:
    return lambda v, o: ones(_mis_raw(v, o) > _mis_bounds(o)[1] if high else _mis_raw(v, o) < _mis_bounds(o)[0])


def _rs_outside(high: bool) -> Term:
    def term(v: View, o: Options) -> Any:
        low, most = _mis_bounds(o)
        low = low if o["rs_lower_bound"] is None else o["rs_lower_bound"]
        most = most if o["rs_upper_bound"] is None else o["rs_upper_bound"]
        r = _mis_ratio(v, o["rs_level"])
        return ones(r > most if high else r < low)

    return term


def _norm(v: View, o: Options) -> Any:
    """What the batch's weights are divided by the mean of: `[N]`, or `[S]` at sequence level."""
    w = _mis_weight(v, o)
    return w if o["tis_level"] == "token" else v.means(w)


def _normalises(o: Options) -> bool:
    """The helper refuses to at geometric level."""
    return bool(o["tis_batch_normalize"]) and o["tis_level"] != "geometric"


_NORM = (
    Part("sum of the norm", "sum", _norm),
    Part("units of the norm", "sum", lambda v, o: np.array([len(_norm(v, o))])),
)


def _factor(o: Options, x: float, n: float) -> float:
    """The batch's mean weight; 1 where the helper leaves the weights alone."""
    mean = x / n if n else 0.0
    return mean if _normalises(o) and mean > 1e-8 else 1.0


def _mode(mode: str) -> Callable[[Options], bool]:
    return lambda o: o["mismatch_metrics"] and o["tis_mode"] == mode


def _mean_of(side: str) -> Term:
    return lambda v, o: v.spread(v.means(getattr(v, side)))


def _log_ppl_diff(v: View, o: Options) -> Any:
    return v.spread(v.means(v.sampler) - v.means(v.scorer))


def _catastrophic(v: View, o: Options) -> Any:
    return ones(v.d < np.log(o["rs_veto_threshold"]))


def _final(how: str) -> Term:
    def term(v: View, o: Options) -> Any:
        w = _mis_weight(v, o)
        if how == "mean":
            return v.spread(v.means(w))
        out = np.zeros(len(v.lengths), dtype=w.dtype)
        out[v.filled] = v.greatest(w) if how == "max" else -v.greatest(-w)
        return v.spread(out)

    return term


_on_mis = _on("mismatch_metrics")
_MIS: dict[str, Any] = {"when": _on_mis}
_SAMPLER_SCORER = "KL(sampler || scorer)"


def keys(abs_diff: Term, extra: tuple[Key, ...] = ()) -> list[Key]:
    """The keys that slime and miles share; `abs_diff` is what each makes of |d|."""
    return [
        reduced(
            "train/train_rollout_logprob_abs_diff",
            "|d| of a token",
            abs_diff,
            direction="none",
            quirks="with --use-rollout-logprobs the scorer is the current policy: scorer=current",
            ours="abs_log_ratio/mean",
        ),
        *extra,
        reduced(
            "train/ois",
            "e^(log p_current - log p_old) of a token",
            lambda v, o: exp(v.update),
            needs=("current", "old"),
            direction="current over old: the update, not the engines",
            when=_on("use_tis"),
        ),
        reduced(
            "train/tis",
            "r of a token",
            _tis,
            direction="scorer over sampler",
            quirks="raw",
            ours="ratio/mean",
            when=_on("use_tis"),
        ),
        reduced(
            "train/tis_clipfrac",
            "1 where r is outside tis_clip_low to tis_clip",
            _tis_changed,
            direction="scorer over sampler",
            when=_on("use_tis"),
        ),
        reduced(
            "train/tis_abs",
            "|r - 1| of a token",
            lambda v, o: np.abs(_tis(v, o) - 1),
            direction="none",
            when=_on("use_tis"),
        ),
        Key(
            "train/opsm_clipfrac",
            "share of a sequence's tokens with A < 0 where mean(log p_old - log p_current) > opsm_delta",
            (
                Part("sum opsm", "sum", lambda v, o: v.means(_opsm(v, o))),
                Part("sequences", "sum", lambda v, o: np.array([len(v.lengths)])),
            ),
            lambda o, x, n: divide(x, n),
            needs=("current", "old", "advantages"),
            direction="old over current: staleness, not the engines",
            quirks="a sum over sequences, which the log divides by their number; log-probs of the scorer only",
            when=_on("use_opsm"),
            also=("opsm_clipfrac",),
        ),
        *_mis_perplexity_keys(),
        *_mis_divergence_keys(),
        *_mis_weight_keys(),
    ]


def _mis(name: str, says: str, term: Any, **more: Any) -> Key:
    """A key of the MIS helper."""
    return reduced(f"train/mis_{name}", says, term, **{**_MIS, **more})


def _mis_perplexity_keys() -> list[Key]:
    """Of each side by itself."""
    return [
        _mis("training_log_ppl", "-mean log p_scorer of the sequence", lambda v, o: -_mean_of("scorer")(v, o)),
        _mis(
            "training_ppl",
            "exp(-mean log p_scorer) of the sequence",
            lambda v, o: exp(-_mean_of("scorer")(v, o)),
            ours="ppl_scorer/mean",
            same=True,
        ),
        _mis("rollout_log_ppl", "-mean log p_sampler of the sequence", lambda v, o: -_mean_of("sampler")(v, o)),
        _mis(
            "rollout_ppl",
            "exp(-mean log p_sampler) of the sequence",
            lambda v, o: exp(-_mean_of("sampler")(v, o)),
            ours="ppl_sampler/mean",
            same=True,
        ),
    ]


def _mis_divergence_keys() -> list[Key]:
    """Of scorer and sampler, before any correction."""
    return [
        _mis(
            "kl",
            "k1: -d of a token",
            lambda v, o: v.sampler - v.scorer,
            direction=_SAMPLER_SCORER,
            ours="kl_sampler_scorer_k1/sequence_mean",
            same=True,
        ),
        _mis(
            "k3_kl",
            "k3: e^d - d - 1 of a token",
            lambda v, o: k3(v.d),
            direction=_SAMPLER_SCORER,
            ours="kl_sampler_scorer_k3/sequence_mean",
            same=True,
        ),
        _mis(
            "log_ppl_diff",
            "-mean d of the sequence",
            _log_ppl_diff,
            direction="sampler - scorer",
            ours="log_ppl_diff/mean",
            same=True,
        ),
        _mis("log_ppl_abs_diff", "|mean d| of the sequence", lambda v, o: np.abs(_log_ppl_diff(v, o))),
        _mis(
            "ppl_ratio",
            "exp(-mean d) of the sequence",
            lambda v, o: exp(_log_ppl_diff(v, o)),
            ours="ppl_ratio/mean",
            same=True,
        ),
        _mis(
            "chi2_token",
            "r^2 - 1 of a token",
            lambda v, o: np.square(exp(clamped(v.d, BOUND))).astype(np.float64) - 1,
            quirks="d clamped to +-20",
            ours="chi2_token/mean",
        ),
        _mis(
            "chi2_seq",
            "e^(2 D) - 1 of the sequence, D the sum of d",
            lambda v, o: v.spread(exp(2 * clamped(v.sums(v.d), BOUND)).astype(np.float64) - 1),
            quirks="D clamped to +-20",
            ours="chi2_sequence_product/mean",
        ),
    ]


def _mis_weight_keys() -> list[Key]:
    """Of the correction: weights and what it drops; not there with --get-mismatch-metrics alone."""
    keys = [
        _mis(
            "tis_weight_before_bound", "the weight at tis_level before its bounds", _mis_raw, quirks="clamped to e^+-20"
        ),
        _mis(
            "tis_weight_after_bound",
            "the weight at tis_level after its bounds",
            _mis_weight,
            quirks="tis_mode=mask leaves it raw",
        ),
        _mis(
            "tis_truncate_fraction",
            "1 where the weight is above tis_upper_bound",
            _mis_outside(True),
            when=_mode("truncate"),
        ),
        *(
            _mis(f"tis_{act}_fraction_{word}", f"1 where the weight is {side}", _mis_outside(high), when=_mode(act))
            for act in ("clip", "mask")
            for word, high, side in (("low", False, "below the lower bound"), ("high", True, "above the upper bound"))
        ),
        *(
            _mis(name, says, term, when=lambda o: o["mismatch_metrics"] and o["rs_veto_threshold"] is not None)
            for name, says, term in (
                ("rs_catastrophic_token_fraction", "1 where r is below rs_veto_threshold", _catastrophic),
                (
                    "rs_catastrophic_seq_fraction",
                    "1 in a sequence with such a token",
                    lambda v, o: v.spread(ones(v.any(_catastrophic(v, o) > 0))),
                ),
            )
        ),
        *(
            _mis(
                f"rs_mask_fraction_{word}",
                f"1 where the ratio at rs_level is {side}",
                _rs_outside(high),
                when=lambda o: o["mismatch_metrics"] and o["use_rs"],
            )
            for word, high, side in (("low", False, "below the lower bound"), ("high", True, "above the upper bound"))
        ),
        _mis("is_ratio_mean_after_tis_rs", "the weight after its bounds, before it is normalised", _mis_weight),
        _normalised("batch_norm_factor", "the batch's mean weight, over tokens or over sequences", None),
        *(
            _normalised(
                f"is_ratio_{how}_final",
                f"the {how} of a sequence's weights after their bounds, and after tis_batch_normalize",
                _final(how),
            )
            for how in ("mean", "min", "max")
        ),
    ]
    return [replace(k, when=lambda o, when=k.when: when is not None and when(o) and o["use_tis"]) for k in keys]


def _normalised(name: str, says: str, term: Term | None) -> Key:
    """A key of weights that were divided by the batch's mean weight, or that mean itself."""
    of = reduced(f"train/mis_{name}", says, term or _mis_weight)
    batches = "each micro-batch has its own mean weight: here all is one batch"
    quirks = f"{of.quirks}; {batches}"
    if term is None:
        return replace(of, parts=_NORM, value=_factor, quirks=batches, when=lambda o: _on_mis(o) and _normalises(o))
    return replace(
        of,
        parts=(*of.parts, *_NORM),
        value=lambda o, x, n, w, units: x / n / _factor(o, w, units) if n else None,
        quirks=quirks,
        when=_on_mis,
    )


OPTIONS: dict[str, Option] = {
    "calculate_per_token_loss": Option(False, "means over tokens in place of sequences", "bool"),
    "use_tis": Option(True, "whether the loss is corrected; off in the framework, which then lacks the keys", "bool"),
    "tis_clip": Option(2.0, "upper bound of the ratio"),
    "tis_clip_low": Option(0.0, "lower bound of the ratio"),
    "use_opsm": Option(False, "off-policy sequence masking", "bool"),
    "opsm_delta": Option(1e-4, "its bound"),
    "mismatch_metrics": Option(False, "the MIS helper's keys (--get-mismatch-metrics, a custom TIS function)", "bool"),
    "tis_mode": Option("truncate", "the helper's act", "word", ("truncate", "clip", "mask")),
    "tis_level": Option("token", "the helper's level", "word", ("token", "sequence", "geometric")),
    "tis_upper_bound": Option(2.0, "the helper's upper bound"),
    "tis_lower_bound": Option(None, "the helper's lower bound; none is 1 over the upper one", none=True),
    "tis_batch_normalize": Option(False, "the helper divides its weights by their mean", "bool"),
    "use_rs": Option(False, "the helper also rejects by a ratio", "bool"),
    "rs_level": Option("token", "the level of that ratio", "word", ("token", "sequence", "geometric")),
    "rs_upper_bound": Option(None, "its upper bound; none is tis_upper_bound", none=True),
    "rs_lower_bound": Option(None, "its lower bound; none is the one of the weights", none=True),
    "rs_veto_threshold": Option(None, "ratio below which a token drops its sequence", none=True),
}

SLIME = dialect(
    "slime",
    "slime",
    scorer="old",
    read="main 624b824, 2026-08-21",
    checked="numbers worked by hand after its published formulas",
    keys=keys(lambda v, o: np.abs(v.d)),
    options=OPTIONS,
    note="Before its rejection shrinks the mask. The keys of the helper's README differ from those of its code.",
)
