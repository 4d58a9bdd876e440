"""The same terms on padded `[B, T]` arrays, torch on any device or numpy: float64 sums, one transfer at the end.

Agreement with `reduce` on packed numpy: means within 1e-12 * mean|term| + 2^-62.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from onepolicy.arrays import Array, is_torch, namespace
from onepolicy.errors import ContentError
from onepolicy.sums import Metric
from onepolicy.views import SEQUENCE_TERMS, Sequences, Tokens

#: What a padded batch can serve: KL estimators take side a's own draws for granted, entropies are optional.
_OFFLINE = ("exact", "position", "floor")
_ENTROPY = {"surprisal_a": ("a_entropy", "a_varentropy"), "surprisal_b": ("b_entropy", "b_varentropy")}


class PaddedTotals:
    """Totals of one metric's terms as floats; has the methods that `Metric.compute` uses on sums."""

    def __init__(self, values: Mapping[str, tuple[float, float]]) -> None:
        self._values = values

    def sum(self, term: str) -> float:
        return self._values[term][0]

    def n(self, term: str) -> float:
        return self._values[term][1]

    def mean(self, term: str) -> float:
        return self.divide(self.sum(term), self.n(term))

    @staticmethod
    def divide(x: float, y: float) -> float:
        return x / y if y else float("nan")


def padded_metrics(a: Array, b: Array, mask: Array, metrics: Iterable[Metric], **entropies: Array) -> dict[str, float]:
    """Metrics whose reducer is a sum, of `a` (sampler) and `b` (scorer) log-probs `[B, T]` where `mask` is true.

    `entropies`: `a_entropy`, `a_varentropy`, `b_entropy`, `b_varentropy`, `[B, T]`; without them surprisal is left out.
    Masked places may hold anything, NaN included. No boolean indexing; the device is read once, at the end.
    Errors: `ContentError` for shapes that differ.
    """
    if not (tuple(a.shape) == tuple(b.shape) == tuple(mask.shape)):
        raise ContentError(
            f"shapes differ: {tuple(a.shape)}, {tuple(b.shape)}, mask {tuple(mask.shape)}; wanted one [B, T]"
        )
    chosen = [m for m in metrics if m.reducer == "sum" and _can(m, entropies)]
    xp = namespace(a)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        tokens, keep = _tokens(xp, a, b, mask, entropies)
        sequences, rows = _sequences(xp, tokens, keep)
        found: dict[str, tuple[Array, Array]] = {}
        for m in chosen:
            used = rows if m.level == "sequence" else _used(xp, m.uses, keep, entropies)
            view = sequences if m.level == "sequence" else tokens
            for name, key in m.term_keys().items():
                if key not in found:
                    found[key] = _total(xp, m.terms[name](xp, view), used)
    read = _transfer(found)
    return {
        m.key: float(m.compute(PaddedTotals({name: read[key] for name, key in m.term_keys().items()}))) for m in chosen
    }


def _can(m: Metric, entropies: Mapping[str, Array]) -> bool:
    return m.uses not in _OFFLINE and all(name in entropies for name in _ENTROPY.get(m.uses, ()))


def _used(xp: Any, uses: str, keep: Array, entropies: Mapping[str, Array]) -> Array:
    """Tokens of a metric: surprisal needs entropy and varentropy besides."""
    for name in _ENTROPY.get(uses, ()):
        keep = keep & xp.isfinite(entropies[name])
    return keep


def _tokens(xp: Any, a: Array, b: Array, mask: Array, entropies: Mapping[str, Array]) -> tuple[Tokens, Array]:
    wide = [_float64(x) for x in (a, b)]
    keep = mask & xp.isfinite(wide[0]) & xp.isfinite(wide[1])
    zero = wide[0].new_zeros(()) if is_torch(a) else np.zeros(())
    clean = [xp.where(keep, x, zero) for x in wide]
    more = {name: xp.where(keep, _float64(x), zero) for name, x in entropies.items()}
    return Tokens(clean[0], clean[1], **more), keep


def _float64(x: Array) -> Array:
    return x.double() if is_torch(x) else np.asarray(x, dtype=np.float64)


def _sequences(xp: Any, tokens: Tokens, keep: Array) -> tuple[Sequences, Array]:
    """Row sums; rows without tokens get T = 1 so that nothing divides by zero, and are left out of every total."""
    kept = xp.indicator(keep)
    length = kept.sum(-1)
    rows = length > 0
    sums = {name: (xp.where(keep, term(xp, tokens), tokens.a * 0)).sum(-1) for name, term in SEQUENCE_TERMS.items()}
    return Sequences(xp.floor_at(length, 1.0), sums), rows


def _total(xp: Any, x: Array, keep: Array) -> tuple[Array, Array]:
    used = keep & xp.isfinite(x)
    return xp.where(used, x, xp.indicator(used) * 0).sum(), xp.indicator(used).sum()


def _transfer(found: Mapping[str, tuple[Array, Array]]) -> dict[str, tuple[float, float]]:
    flat = [x for pair in found.values() for x in pair]
    if flat and is_torch(flat[0]):
        import sys

        numbers: list[float] = sys.modules["torch"].stack(flat).tolist()
    else:
        numbers = [float(x) for x in flat]
    return {key: (numbers[2 * i], numbers[2 * i + 1]) for i, key in enumerate(found)}
