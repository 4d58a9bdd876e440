"""verl's `rollout_corr/rollout_rs_*`: what its rejection criteria measure and how much they drop.

Source: verl/trainer/ppo/rollout_corr_helper.py. d is clamped to +-20 token by token. Bounds of k1 are of -d, so the
band that is kept is 1 / upper to 1 / lower of the ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from onepolicy.dialects.key import Key, Options
from onepolicy.dialects.means import FILLED, N, greatest, k3, least, mean, moments, ones, sequence_mean, std, token_mean
from onepolicy.dialects.view import View
from onepolicy.errors import UnknownName, UsageError

BOUND = 20.0
CRITERIA = (
    *(f"token_k{i}" for i in (1, 2, 3)),
    *(f"seq_sum_k{i}" for i in (1, 2, 3)),
    *(f"seq_mean_k{i}" for i in (1, 2, 3)),
    *(f"seq_max_k{i}" for i in (2, 3)),
)


def criteria(o: Options) -> dict[str, tuple[float | None, float]]:
    """criterion -> (lower, upper) in the unit of its statistic. Errors: `UnknownName`, `UsageError`."""
    if o["rollout_rs"] is None:
        return {}
    names = list(dict.fromkeys(x.strip() for x in o["rollout_rs"].split(",") if x.strip()))
    for name in names:
        if name not in CRITERIA:
            raise UnknownName("rollout_rs", name, CRITERIA)
    bounds = [x.strip() for x in (o["rollout_rs_threshold"] or "").split(",") if x.strip()]
    if len(bounds) not in (1, len(names)):
        raise UsageError(f"rollout_rs_threshold={o['rollout_rs_threshold']}: wanted one bound, or one a criterion")
    bounds = bounds * len(names) if len(bounds) == 1 else bounds
    return {name: _bounds(name, text) for name, text in zip(names, bounds, strict=True)}


def _bounds(name: str, text: str) -> tuple[float | None, float]:
    try:
        parts = [float(x) for x in text.split("_")]
    except ValueError:
        parts = []
    one = not name.endswith("k1")
    if len(parts) not in ((1,) if one else (1, 2)) or not 0 < parts[0] <= parts[-1]:
        raise UsageError(
            f"rollout_rs_threshold={text} of {name}: wanted {'one' if one else 'lower_upper or one'} above 0"
        )
    if one:
        return None, parts[0]
    low, high = parts if len(parts) == 2 else (1 / parts[0], parts[0])
    return math.log(low), math.log(high)


def _token(v: View, name: str) -> Any:
    """`[N]` k1, k2 or k3 of each token."""
    d = np.clip(v.d, -BOUND, BOUND)
    return {"k1": lambda: -d, "k2": lambda: 0.5 * d**2, "k3": lambda: k3(d)}[name[-2:]]()


def _sequence(v: View, name: str) -> Any:
    """`[F]` of the sequences with tokens: the criterion's statistic, or the mean of a token criterion's."""
    x = _token(v, name)
    if name.startswith("seq_sum"):
        return v.sums(x)[v.filled]
    return v.greatest(x) if name.startswith("seq_max") else v.means(x)[v.filled]


def _statistic(v: View, name: str) -> Any:
    """`[N]`: what each token is judged by."""
    return _token(v, name) if name.startswith("token") else np.repeat(_sequence(v, name), v.lengths[v.filled])


def _kept(v: View, o: Options, names: tuple[str, ...]) -> Any:
    """`[N]`: kept by all of these criteria."""
    keep = np.ones(len(v.sampler), dtype=bool)
    for name in names:
        low, high = criteria(o)[name]
        x = _statistic(v, name)
        keep &= (x <= high) & (True if low is None else x >= low)
    return keep


def _outside(x: Any, o: Options, name: str, high: bool) -> Any:
    low, upper = criteria(o)[name]
    if high:
        return ones(x > upper)
    return np.zeros(len(x)) if low is None else ones(x < low)


def _key(name: str, make: Callable[..., Key], stat: str, says: str, *args: Any, quirks: str = "") -> Key:
    return make(
        f"rollout_corr/rollout_rs_{name}_{stat}",
        says,
        *args,
        direction="-d, then the bounds" if name.endswith("k1") else "KL(sampler || scorer)",
        quirks=quirks,
        when=lambda o: name in criteria(o),
    )


def _of_criterion(name: str) -> Iterator[Key]:
    per_token = name.startswith("token")
    unit = (lambda v: _statistic(v, name)) if per_token else (lambda v: _sequence(v, name))
    count, whose = (N, "token") if per_token else (FILLED, "sequence")
    yield _key(name, token_mean, "mean", f"{name}: mean over tokens", lambda v, o: _statistic(v, name))
    yield _key(name, greatest, "max", f"{name}: the greatest {whose}'s", lambda v, o: unit(v))
    yield _key(name, least, "min", f"{name}: the least {whose}'s", lambda v, o: unit(v))
    for word, high in (("high", True), ("low", False)):
        side = "above its upper" if high else "below its lower"
        term = lambda v, o, high=high: _outside(unit(v), o, name, high)
        yield _key(name, mean, f"fraction_{word}", f"{name}: share of {whose}s {side} bound", term, count)
    yield _clamped_std(name)
    yield from _by_sequence(name)
    dropped = lambda v, o: ones(~_kept(v, o, (name,)))
    yield _key(name, token_mean, "masked_fraction", f"{name}: share of tokens that it drops", dropped)
    any_dropped = lambda v, o: ones(v.any(~_kept(v, o, (name,))))
    says = f"{name}: share of sequences of which it drops a token"
    yield _key(name, mean, "seq_masked_fraction", says, any_dropped, FILLED, quirks="one dropped token is enough")


def _clamped_std(name: str) -> Key:
    def term(v: View, o: Options) -> Any:
        low, high = criteria(o)[name]
        return np.clip(_statistic(v, name), 0.0 if low is None else low, high)

    make = lambda key, says, **more: Key(
        key, says, (*moments(key, term), N), lambda o, x, xx, n: std(x, xx, n, False, 0.0), **more
    )
    return _key(name, make, "std", f"{name}: standard deviation over tokens", quirks="of values clamped to the bounds")


def _by_sequence(name: str) -> Iterator[Key]:
    unit = lambda v, o: _sequence(v, name)
    yield _key(name, mean, "seq_mean", f"{name}: mean over sequences", unit, FILLED)
    make = lambda key, says, **more: Key(
        key, says, (*moments(key, unit), FILLED), lambda o, x, xx, n: std(x, xx, n, single=0.0), **more
    )
    yield _key(name, make, "seq_std", f"{name}: standard deviation over sequences")
    yield _key(name, greatest, "seq_max", f"{name}: the greatest sequence's", unit)
    yield _key(name, least, "seq_min", f"{name}: the least sequence's", unit)
    yield _key(
        name,
        greatest,
        "seq_max_deviation",
        f"{name}: the greatest sequence's, without its sign",
        lambda v, o: np.abs(unit(v, o)),
    )
    for word, high in (("high", True), ("low", False)):
        if high or name.endswith("k1"):
            term = lambda v, o, high=high: _outside(unit(v, o), o, name, high)
            side = "above its upper" if high else "below its lower"
            yield _key(name, mean, f"seq_fraction_{word}", f"{name}: share of sequences {side} bound", term, FILLED)


def _all(o: Options) -> tuple[str, ...]:
    return tuple(criteria(o))


REJECTION = [
    *(key for name in CRITERIA for key in _of_criterion(name)),
    token_mean(
        "rollout_corr/rollout_rs_masked_fraction",
        "share of tokens that some criterion drops",
        lambda v, o: ones(~_kept(v, o, _all(o))),
        when=lambda o: bool(criteria(o)),
    ),
    sequence_mean(
        "rollout_corr/rollout_rs_seq_masked_fraction",
        "share of sequences of which a criterion drops a token",
        lambda v, o: ones(v.any(~_kept(v, o, _all(o)))),
        quirks="one dropped token is enough; sequences without trained tokens count as kept",
        when=lambda o: bool(criteria(o)),
    ),
]
