"""Exact divergences from full distributions, in float64 with both sides renormalised.

Source: definitions. A float32 log-softmax gives slightly negative KL, hence the renormalisation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.errors import AlignmentError
from onepolicy.types import FloatArray

_ROWS = 4096


def exact_divergences(a: NDArray[Any] | None, b: NDArray[Any] | None) -> dict[str, FloatArray]:
    """Per-token divergences of two distributions given as log-probs or logits `[T, V]` (a sampler, b scorer).

    Returns `[T]` columns in nats: `kl_ab` = KL(a || b), `kl_ba`, `js` (Jensen-Shannon), and `tv` (total variation,
    0 to 1). Rows with a NaN (no distribution at this position) give NaN. Errors: `AlignmentError` for vocabularies
    that differ in size.
    """
    if a is None or b is None:
        return {}
    if a.shape != b.shape:
        raise AlignmentError(f"distributions have shapes {a.shape} and {b.shape}: vocabularies that differ")
    out = {name: np.empty(len(a)) for name in ("kl_ab", "kl_ba", "js", "tv")}
    for lo in range(0, len(a), _ROWS):
        rows = slice(lo, lo + _ROWS)
        for name, column in _rows(normalised(a[rows]), normalised(b[rows])).items():
            out[name][rows] = column
    return out


def normalised(x: NDArray[Any]) -> FloatArray:
    """`[N, V]` log-probs in float64, each row summing to one."""
    x = np.ascontiguousarray(x, dtype=np.float64)  # sums of a strided row differ in the last bit
    top = x.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        shifted = x - top
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _rows(a: FloatArray, b: FloatArray) -> dict[str, FloatArray]:
    p, q = np.exp(a), np.exp(b)
    with np.errstate(invalid="ignore"):  # a row without a distribution is NaN
        middle = np.logaddexp(a, b) - np.log(2.0)
    return {
        "kl_ab": _relative(p, a, b),
        "kl_ba": _relative(q, b, a),
        "js": 0.5 * _relative(p, a, middle) + 0.5 * _relative(q, b, middle),
        "tv": 0.5 * np.abs(p - q).sum(axis=1),
    }


def _relative(p: FloatArray, a: FloatArray, b: FloatArray) -> FloatArray:
    """Sum of p (a - b) as p (expm1(b - a) - (b - a)): equal in exact arithmetic, never negative in float64."""
    with np.errstate(invalid="ignore", over="ignore"):
        d = b - a
        # far apart, expm1 may overflow where p is tiny: there q - p is exact enough
        terms = np.where(np.abs(d) < 1, p * (np.expm1(d) - d), (np.exp(b) - p) - p * d)
        terms = np.where(p > 0, terms, 0.0)
        # b = -inf where p > 0: the divergence is infinite, p * (-1 + inf) says so
        missing = np.where(p > 0, 0.0, np.exp(b)).sum(axis=1)
    return terms.sum(axis=1) + missing
