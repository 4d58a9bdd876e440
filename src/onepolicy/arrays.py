"""The only place where numpy and torch are told apart.

Metric terms are written once as `term(xp, tokens)` with operators and `xp.<function>`; `xp` is chosen by the array's
own module. Torch is noticed through `sys.modules`, never imported: who passes a tensor has imported it already.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import numpy as np

Array = Any  # numpy.ndarray or torch.Tensor, float64


class Namespace(Protocol):
    """The elementwise functions that a term may use. Inputs and outputs keep their shape and are float64."""

    def exp(self, x: Array, /) -> Array: ...
    def expm1(self, x: Array, /) -> Array: ...
    def log(self, x: Array, /) -> Array: ...
    def log1p(self, x: Array, /) -> Array: ...
    def abs(self, x: Array, /) -> Array: ...
    def sqrt(self, x: Array, /) -> Array: ...
    def isfinite(self, x: Array, /) -> Array: ...
    def where(self, condition: Array, x: Array, y: Array, /) -> Array: ...
    def floor_at(self, x: Array, least: float, /) -> Array: ...
    def indicator(self, condition: Array, /) -> Array: ...


class _Numpy:
    exp, expm1, log, log1p = np.exp, np.expm1, np.log, np.log1p
    abs, sqrt, isfinite = np.abs, np.sqrt, np.isfinite
    where = staticmethod(np.where)  # not a ufunc: as a bare attribute it would bind `self`

    @staticmethod
    def floor_at(x: Array, least: float, /) -> Array:
        return np.maximum(x, least)

    @staticmethod
    def indicator(condition: Array, /) -> Array:
        return condition.astype(np.float64)


class _Torch:
    """`torch.where` wants tensors on both sides, `clamp_min` stands for `maximum`; nothing here syncs the device."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        for name in ("exp", "expm1", "log", "log1p", "abs", "sqrt", "isfinite"):
            setattr(self, name, getattr(torch, name))

    def where(self, condition: Array, x: Array, y: Array, /) -> Array:
        return self._torch.where(condition, x, y)

    @staticmethod
    def floor_at(x: Array, least: float, /) -> Array:
        return x.clamp_min(least)

    def indicator(self, condition: Array, /) -> Array:
        return condition.to(self._torch.float64)


NUMPY: Any = _Numpy()
_torch_namespace: Any = None


def is_torch(x: object) -> bool:
    """Whether `x` is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def namespace(x: Array) -> Any:
    """The namespace (`xp`) of an array: numpy's, or torch's for a tensor."""
    global _torch_namespace
    if not is_torch(x):
        return NUMPY
    if _torch_namespace is None:
        _torch_namespace = _Torch(sys.modules["torch"])
    return _torch_namespace


def numeric_identity() -> str:
    """numpy version and the CPU features its loops were dispatched for: what "same bits" is promised within."""
    try:
        from numpy._core._multiarray_umath import __cpu_features__ as features  # type: ignore[attr-defined]
    except ImportError:
        from numpy.core._multiarray_umath import __cpu_features__ as features  # type: ignore[attr-defined,no-redef]
    on = [name for name in ("AVX512_SPR", "AVX512_ICL", "AVX512_SKX", "AVX2", "SVE", "ASIMD") if features.get(name)]
    return f"numpy {np.__version__} {on[0] if on else 'baseline'}"
