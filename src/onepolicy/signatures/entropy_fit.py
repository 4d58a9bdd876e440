"""A temperature from one side's entropies: moments of d against a + H, and the fit that they give.

With beta = T_a / T_b the scorer's distribution is the sampler's to the power beta, renormalised:

    d = (beta - 1) a - log sum p^beta  =  c (a + H) - c^2 V / 2 + ...        c = beta - 1

with H and V the sampler's entropy and varentropy; from the scorer's side d = c (b + H) + c^2 V / 2 + ... with its own H
and V and c = 1 - 1 / beta. Which T explains the gap is found with that; its value comes from the slope of d on a + H,
which is c without a remainder where this side drew the tokens (the constant of a context has no covariance with
a + H), or over tokens weighted as if it had.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from onepolicy.counted import Counted
from onepolicy.profiles.base import Seen
from onepolicy.signatures.adding import keep, keep_gram, of_sequences, read, spread
from onepolicy.types import FloatArray

#: T_scorer / T_sampler that is tried.
RANGE = (0.2, 5.0)
#: Entropies of a vocabulary of at most e^30 tokens; what lies outside is none.
MOST_ENTROPY = 30.0
#: Contexts are cut in two at this entropy: a temperature is the same in both, what bends the logits is not.
OPEN = 1.0
_PRODUCTS = ("dd", "dx", "xx", "dv", "xv", "vv")


def look(out: Counted, side: str, own: FloatArray, seen: Seen) -> None:
    """Adds a side's moments, where its entropies are recorded. `own` `[N]`: its log-probs."""
    told = getattr(seen.pairs, f"{side}_entropy")
    if told is None:
        return
    entropy = told[seen.at]
    use = (entropy >= 0.0) & (entropy < MOST_ENTROPY)
    varentropy = getattr(seen.pairs, f"{side}_varentropy")
    v = np.zeros(len(own)) if varentropy is None else np.nan_to_num(varentropy[seen.at])
    d, x, v = seen.clipped[use], np.maximum(own[use], -100.0) + entropy[use], np.clip(v[use], 0.0, 1e3)
    wide = entropy[use] >= OPEN
    products = {"dd": d * d, "dx": d * x, "xx": x * x, "dv": d * v, "xv": x * v, "vv": v * v}
    for name, group in (("", slice(None)), ("closed", ~wide), ("open", wide)):
        out.count(f"{side}{name}:tokens", len(d[group]))
        keep(out, **{f"{side}{name}:{k}": values[group] for k, values in products.items()})
    weight = np.exp(np.clip(d if side == "b" else -d, -5.0, 5.0))
    slopes = {k: products[k] for k in ("dx", "xx", "xv")} | {"x": x}
    slopes |= {f"w{k}": weight * values for k, values in slopes.items()}
    keep(out, **{f"{side}:{k}": slopes[k] for k in ("x", "wx", "wdx", "wxx", "wxv")})
    keep_gram(out, side, {k: of_sequences(seen, values, use) for k, values in slopes.items()})


@dataclass(frozen=True, slots=True)
class Fit:
    """T_scorer / T_sampler, the share of the mean square gap that it explains, z of the slope (0: not known).

    `groups`: the same ratio from contexts of low and of high entropy, NaN where there are too few.
    """

    ratio: float
    share: float
    z: float
    n: int
    by: str
    groups: tuple[float, float] = (math.nan, math.nan)

    @property
    def bent(self) -> bool:
        """The two groups want different temperatures: no temperature is at work."""
        a, b = self.groups
        if math.isnan(a) or math.isnan(b):
            return False
        return abs(math.log(a / b)) > 0.35 * max(abs(math.log(self.ratio)), abs(math.log(a)), 0.1)


def fit(seen: Counted, side: str) -> Fit | None:
    """The best temperature by a side's entropies; None where they are not recorded."""
    best = _searched(seen, side, side)
    if best is None:
        return None
    ratio, share, n = best
    slope, z = _slope(seen, side, ratio)
    groups = [_searched(seen, side + name, side) for name in ("closed", "open")]
    return Fit(
        _of_slope(slope, side) or ratio,
        share,
        z,
        n,
        "sampler's entropy" if side == "a" else "scorer's entropy",
        tuple(math.nan if g is None or g[2] < 20 else g[0] for g in groups),  # pyright: ignore[reportArgumentType]
    )


def _searched(seen: Counted, name: str, side: str) -> tuple[float, float, int] | None:
    """(ratio, share explained, tokens) of the least residual to second order."""
    n = seen.counts.get(f"{name}:tokens", 0)
    dd, dx, xx, dv, xv, vv = (read(seen, f"{name}:{k}") for k in _PRODUCTS)
    if n == 0 or xx <= 0 or dd <= 0:
        return None
    ratios = np.exp(np.linspace(math.log(RANGE[0]), math.log(RANGE[1]), 2001))
    c = 1 / ratios - 1 if side == "a" else 1 - ratios
    half = (0.5 if side == "a" else -0.5) * c * c  # d = c x - half v
    left = dd - 2 * c * dx + c * c * xx + 2 * half * dv - 2 * c * half * xv + half * half * vv
    best = int(np.argmin(left))
    return float(ratios[best]), max(0.0, 1 - float(left[best]) / dd), n


def _slope(seen: Counted, side: str, ratio: float) -> tuple[float | None, float]:
    """The slope that has no remainder, None where neither this side nor the other drew the tokens; and its z.

    What is known of the constants (half of c^2 V at the ratio that was found) is taken off d first: it has no
    covariance with a + H either, and leaves less noise.
    """
    total = {k: read(seen, f"{side}:{k}") for k in ("x", "dx", "xx", "xv", "wx", "wdx", "wxx", "wxv")}
    half = 0.5 * (1 / ratio - 1) ** 2 if side == "a" else -0.5 * (1 - ratio) ** 2
    for w in ("", "w"):
        if abs(total[f"{w}x"]) <= 3 * spread(seen, side, {f"{w}x": 1.0}) and total[f"{w}xx"] > 0:
            return _with_z(seen, side, w, total, half)
    return None, _with_z(seen, side, "", total, half)[1]


def _with_z(seen: Counted, side: str, w: str, total: Mapping[str, float], half: float) -> tuple[float, float]:
    dx, xx, xv = f"{w}dx", f"{w}xx", f"{w}xv"
    slope = (total[dx] + half * total[xv]) / total[xx]
    error = spread(seen, side, {dx: 1.0, xv: half, xx: -slope}) / total[xx]
    return slope, abs(slope) / error if error > 0 else 0.0


def _of_slope(slope: float | None, side: str) -> float | None:
    """T_scorer / T_sampler, where the slope can be one."""
    if slope is None or (side == "a" and slope <= -1):
        return None
    ratio = 1 / (1 + slope) if side == "a" else 1 - slope
    return ratio if RANGE[0] <= ratio <= RANGE[1] else None
