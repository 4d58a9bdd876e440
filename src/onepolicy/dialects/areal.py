"""AReaL: decoupled PPO's statistics (behave: the sampler; prox: old; theta: current).

Source: areal/utils/functional/functional.py, areal/trainer/ppo/actor.py. `/avg`, `/min` and `/max` of its tracker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from onepolicy.dialects.key import Key, Option, Options, Part, Term, dialect
from onepolicy.dialects.means import N, greatest, least, mean
from onepolicy.dialects.rounding import exp
from onepolicy.dialects.view import View

_KEPT = "over kept tokens only"


def _finite(x: Any) -> Any:
    return np.where(np.isfinite(x), x, x.dtype.type(0))


def _d(v: View) -> Any:
    return v.d.astype(np.float32)


_METRICS = {
    "ratio": lambda d: exp(_finite(d)),
    "kl_k1": lambda d: d,
    "kl_k2": lambda d: d**2 / 2,
    "kl_k3": lambda d: exp(-d) - 1 + d,
}


def _judged(v: View, o: Options) -> Any:
    """`[N]` the statistic that the bounds judge."""
    d = _d(v)
    x = _METRICS[o["metric"]](d)
    if o["level"] == "token":
        return x
    logs = o["metric"] == "ratio"
    per = _finite(d) if logs else x
    if o["agg"] == "max":
        out = np.zeros(len(v.lengths), dtype=per.dtype)
        out[v.filled] = v.greatest(per)
    else:
        out = v.sums(per) if o["agg"] == "sum" else v.means(per)
    return v.spread(exp(out) if logs else out)


def _inside(v: View, o: Options) -> Any:
    x, low = _judged(v, o), o["lower"]
    return (x <= o["upper"]) & (True if low is None else x >= low)


def _original(v: View, o: Options) -> Any:
    """`[N]` weights before masking or clamping: geometric for sequences judged by their ratio."""
    d = _finite(_d(v))
    return exp(v.spread(v.means(d)) if o["level"] == "sequence" and o["metric"] == "ratio" else d)


def _weights(v: View, o: Options) -> Any:
    w = _original(v, o)
    if o["action"] == "mask":
        return np.where(_inside(v, o), w, w.dtype.type(0))
    bounded = np.clip(w, 0.0 if o["lower"] is None else o["lower"], o["upper"])
    return bounded if o["level"] == "token" else np.where(_inside(v, o), w, bounded)


def _in(v: View, o: Options) -> Any:
    """`[N]` tokens with a weight."""
    return _weights(v, o) > 0


def _changed(v: View, o: Options) -> Any:
    return ~_inside(v, o) if o["action"] == "mask" else _weights(v, o) != _original(v, o)


_IN = Part("tokens with a weight", "sum", lambda v, o: np.array([int(_in(v, o).sum())]))


def _tracked(
    name: str, says: str, term: Term, kept: bool = True, ours: tuple[str, str, str] = ("", "", ""), **more: Any
) -> Iterator[Key]:
    """avg, min and max of a term `[N]`, over the kept tokens or over all."""
    picked = (lambda v, o: term(v, o)[_in(v, o)]) if kept else term
    scope = "compute_logp/" if name.startswith("kl_div") else ""
    for how, make in (("avg", None), ("min", least), ("max", greatest)):
        spelled = [f"{p}{scope}{name}/{how}" for p in ("", "ppo_actor/")] + [name] * (how == "avg")
        given = {**more, "also": tuple(x for x in spelled if x != f"{name}/{how}")}
        word = {"avg": "mean", "min": "least", "max": "greatest"}[how]
        text, ours_key = f"the {word} over tokens of {says}", ours[("avg", "min", "max").index(how)]
        if make is None:
            yield mean(f"{name}/{how}", text, picked, _IN if kept else N, ours=ours_key, **given)
        else:
            yield make(f"{name}/{how}", text, picked, ours=ours_key, **given)


def _update(v: View, o: Options) -> Any:
    ratio = exp(v.update)
    dropped = _dropped(v, o)
    return ratio if dropped is None else np.where(dropped, ratio.dtype.type(0), ratio)


def _dropped(v: View, o: Options) -> Any:
    return ~_inside(v, o) if o["rejection_sampling"] and o["action"] == "mask" else None


def _replay(name: str, says: str, term: Term, ours: tuple[str, str, str]) -> Iterator[Key]:
    """A key that AReaL logs with routes replayed: over all trained tokens, before any rejection."""
    for key in _tracked(
        f"r3/rollout_train_{name}",
        says,
        term,
        kept=False,
        ours=ours,
        direction="none" if "diff" in name or "frac" in name else "KL(sampler || scorer)",
        quirks="only in later versions, with routing replay",
        when=lambda o: o["enable_router_replay"],
    ):
        yield replace(key, also=(f"compute_logp/{key.name}",), same=bool(key.ours))


def _extreme(tau: float) -> Term:
    return lambda v, o: (np.abs(v.d) > np.log(tau)).astype(np.float64)


_on = lambda o: o["rejection_sampling"]

AREAL = dialect(
    "areal",
    "AReaL",
    scorer="old",
    read="1.0.4; main 4aef98d, 2026-05-21",
    checked="its own code, 1.0.4",
    keys=[
        *_tracked(
            "behave_imp_weight",
            "the behave weight, r (of sequences judged by their ratio: the geometric one)",
            _weights,
            direction="scorer over sampler",
            quirks=f"{_KEPT}; clamped where action=clamp; a non-finite d is 0; in float32",
            ours=("ratio/mean", "ratio/min", "ratio/max"),
            when=_on,
        ),
        *_tracked(
            "behave_approx_kl",
            "d",
            lambda v, o: v.d,
            direction="scorer - sampler: +d, the opposite sign of k1",
            quirks=_KEPT,
            ours=("log_ratio/mean", "", ""),
            when=_on,
        ),
        Key(
            "rs_filtered_fraction",
            "share of tokens masked, or whose weight is clamped",
            (Part("sum filtered", "sum", lambda v, o: _changed(v, o).astype(np.float64)), N),
            lambda o, x, n: x / n if n else 0.0,
            direction="scorer over sampler",
            quirks="kl_k1 is +d and kl_k3 is e^-d + d - 1, both the other way round than elsewhere",
            when=_on,
            also=("ppo_actor/rs_filtered_fraction",),
        ),
        *_tracked(
            "importance_weight",
            "e^(log p_current - log p_old)",
            _update,
            kept=False,
            needs=("current", "old", "scorer"),
            direction="current over old: the update, not the engines",
            quirks="tokens that rejection dropped count as 0",
        ),
        *_tracked(
            "approx_kl",
            "log p_current - log p_old",
            lambda v, o: v.update,
            kept=False,
            needs=("current", "old"),
            direction="current - old: the opposite sign of k1; the update, not the engines",
        ),
        *(
            key
            for name, says, term in (
                ("kl_div_direct", "-x, x = log p_current - log p_sampler", lambda x: -x),
                ("kl_div_taylor", "x^2 / 2", lambda x: x**2 / 2),
                ("kl_div_dual", "e^x - 1 - x", lambda x: exp(x) - 1 - x),
            )
            for key in _tracked(
                name,
                says,
                lambda v, o, f=term: f((v.current - v.sampler).astype(np.float32)),
                needs=("current", "scorer"),
                direction="KL(sampler || current)",
                quirks=f"{_KEPT}; staleness is in it; logged with prox_logp_method=loglinear or metrics",
                when=_on,
            )
        ),
        *_replay("k3_kl", "expm1(d) - d", lambda v, o: np.expm1(v.d) - v.d, ("kl_sampler_scorer_k3/mean", "", "")),
        *_replay("logp_abs_diff", "|d|", lambda v, o: np.abs(v.d), ("abs_log_ratio/mean", "", "abs_log_ratio/max")),
        *_replay("logp_sq_diff", "d^2", lambda v, o: v.d**2, ("", "", "")),
        *_replay("extreme_frac_tau2", "1 where |d| > log 2", _extreme(2), ("", "", "")),
        *_replay("extreme_frac_tau5", "1 where |d| > log 5", _extreme(5), ("", "", "")),
    ],
    options={
        "rejection_sampling": Option(
            True, "whether tokens are judged; without it the behave keys are not logged", "bool"
        ),
        "level": Option("token", "what is judged", "word", ("token", "sequence")),
        "action": Option("mask", "what happens outside the bounds", "word", ("mask", "clamp")),
        "metric": Option("ratio", "the statistic", "word", ("ratio", "kl_k1", "kl_k2", "kl_k3")),
        "agg": Option("mean", "how a sequence's is made of its tokens'", "word", ("sum", "mean", "max")),
        "upper": Option(5.0, "upper bound"),
        "lower": Option(None, "lower bound", none=True),
        "enable_router_replay": Option(False, "routing replay, with which the r3 keys are logged", "bool"),
    },
    note="Before 1.0 the options were behave_imp_weight_cap and behave_imp_weight_mode. Weights are always in float32.",
)
