"""Why a list of log-probs has another length than its tokens: each way to lay it beside the other side's list is tried.

An explanation is named when the values bear it out, against the spread that neighbouring tokens have. Nothing is cut
because of it: the record stays out of every number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from onepolicy.types import BoolArray, FloatArray

#: A placing fits when its mean gap is under this share of the gap between neighbouring tokens.
_FITS = 0.25
#: With fewer values than the first it takes a closer fit; fewer than the second, or flatter ones (nats), fit anything.
_FEW, _LEAST, _FLAT = 4, 2, 0.05
_FITS_FEW = 0.05
#: A single token that stands out by this factor (and nats) was re-encoded.
_STANDS_OUT, _NATS = 5.0, 0.2

Told = dict[str, Any]


def explain(x: FloatArray, y: FloatArray | None, n: int, prompt: int, trained: BoolArray | None) -> Told:
    """`x` `[M]`: the list that does not fit; `y` `[n]`: the other side's values of the n tokens, None if there are
    none; `prompt`: tokens of the prompt; `trained` `[n]`: of a reply, which are.

    Returns `explanation` (`None` where nothing or more than one thing fits), a word for it in `kind`, and its numbers.
    """
    extra = len(x) - n
    counted = _by_counts(x, n, prompt, trained)
    if y is None or min(len(x), n) < _LEAST or not _contrast(y) > _FLAT:
        return counted
    found = sorted(_placings(x, y, prompt, trained), key=lambda p: p[0])
    limit = (_FITS if min(len(x), n) >= _FEW else _FITS_FEW) * _contrast(y)
    if found and found[0][0] <= limit:
        return found[0][1]
    more = _cut(x, y) if extra > 0 else {}
    return counted | more


def _by_counts(x: FloatArray, n: int, prompt: int, trained: BoolArray | None) -> Told:
    m = len(x)
    if m == 0:
        return {"kind": "empty", "explanation": "the list is empty"}
    if prompt and m == n + prompt:
        return {"kind": "prompt", "explanation": "as many as prompt and reply together"}
    if trained is not None and m == int(trained.sum()):
        return {"kind": "trained", "explanation": "as many as tokens in the loss mask"}
    if m in (2 * n, 2 * n + 1):
        told = "twice as many" if m == 2 * n else "twice as many and one"
        return {"kind": "doubled", "explanation": f"{told}: two lists in one"}
    return {"kind": "unexplained", "explanation": None}


def _contrast(y: FloatArray) -> float:
    step = np.abs(np.diff(y))
    step = step[np.isfinite(step)]
    return float(np.minimum(step, 20.0).mean()) if len(step) else 0.0


def _gaps(x: FloatArray, y: FloatArray) -> FloatArray:
    """|x - y| of the first tokens of both, where y is known."""
    k = min(len(x), len(y))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.abs(x[:k] - y[:k])


def _mean(gaps: FloatArray) -> float:
    known = gaps[np.isfinite(gaps)]
    return float(np.minimum(known, 20.0).mean()) if len(known) >= _LEAST else np.inf


def _most(gaps: FloatArray) -> float:
    known = gaps[np.isfinite(gaps)]
    return round(float(known.max()), 6) if len(known) else 0.0


def _cut(x: FloatArray, y: FloatArray) -> Told:
    return {f"max_abs_if_cut_to_{len(y)}": _most(_gaps(x, y))}


def _placings(x: FloatArray, y: FloatArray, prompt: int, trained: BoolArray | None) -> Iterator[tuple[float, Told]]:
    """(mean gap, what it is) of every placing that the two lengths allow."""
    m, n = len(x), len(y)
    if m > n:
        split = _split(x, y, m - n)
        yield from _longer(x, y, prompt, split)
    else:
        split = _split(y, x, n - m)
        yield from _shorter(x, y, split)
    if trained is not None and m == int(trained.sum()) != n:
        gaps = _gaps(x, y[trained])
        yield (
            _mean(gaps) / 2,  # it says more than "one became several", which leaves a token out to fit as well
            _told("trained", "one value for each token in the loss mask", max_abs_at_trained=_most(gaps)),
        )


def _told(kind: str, explanation: str, usable: bool = True, **numbers: Any) -> Told:
    return {"kind": kind, "explanation": explanation, "usable": usable, **numbers}


def _longer(x: FloatArray, y: FloatArray, prompt: int, split: tuple[int, float]) -> Iterator[tuple[float, Told]]:
    m, n = len(x), len(y)
    extra, (k, cost) = m - n, split
    tail, head = _gaps(x, y), _gaps(x[extra:], y)
    if not _one_stands_out(tail, k):
        yield _mean(tail), _told("tail", "tail", max_abs_after_drop_tail=_most(tail))
    if extra == prompt and prompt > 1:
        yield _mean(head), _told("prompt", "the list begins with the prompt", max_abs_after_drop_prompt=_most(head))
    elif not _one_stands_out(head, k):
        yield _mean(head), _told("head", "head", max_abs_after_drop_head=_most(head))
    if m in (2 * n, 2 * n + 1):
        yield from _doubled(x, y)
    if 0 < k < n - 1 or _one_stands_out(tail, k) or _one_stands_out(head, k):
        yield cost * 1.001, _merged(x, y, k, extra)


def _one_stands_out(gaps: FloatArray, k: int) -> bool:
    """Everything fits but token k."""
    if not 0 <= k < len(gaps) or not np.isfinite(gaps[k]):
        return False
    return bool(gaps[k] > _STANDS_OUT * _most(np.delete(gaps, k)) + _NATS)


def _doubled(x: FloatArray, y: FloatArray) -> Iterator[tuple[float, Told]]:
    n = len(y)
    both = np.fmax(_gaps(x[:n], y), _gaps(x[-n:], y))
    # it says more than "the rest is surplus", which fits as well
    yield _mean(both) / 2, _told("doubled", "two lists in one: the same values twice", max_abs_of_each=_most(both))
    every = np.fmax(_gaps(x[::2], y), _gaps(x[1::2], y))
    yield _mean(every) / 2, _told("doubled", "two lists in one: each value twice", max_abs_of_each=_most(every))


def _split(longer: FloatArray, shorter: FloatArray, extra: int) -> tuple[int, float]:
    """(k, mean gap): `longer[i]` fits `shorter[i]` before k and `longer[i + extra]` after it; k itself is left out."""
    before, after = (np.nan_to_num(_gaps(longer[e:], shorter), nan=0.0, posinf=20.0) for e in (0, extra))
    before, after = np.minimum(before, 20.0), np.minimum(after, 20.0)
    upto = np.concatenate([[0.0], np.cumsum(before)])
    rest = np.concatenate([[0.0], np.cumsum(after)])
    cost = upto[:-1] + rest[-1] - rest[1:]
    k = int(cost.argmin())
    return k, float(cost[k]) / max(len(shorter) - 1, 1)


def _merged(x: FloatArray, y: FloatArray, k: int, extra: int) -> Told:
    n = len(y)
    words = {1: "two", 2: "three", 3: "four"}.get(extra, str(extra + 1))
    return _told(
        "re-encoded",
        f"ids were re-encoded: {words} sampled tokens became id {k}",
        usable=False,
        **{
            f"max_abs_first_{k}": _most(_gaps(x[:k], y)),
            f"lag{extra}_fits_from_id": k + 1,
            f"max_abs_with_lag{extra}_from_id_{k + 1}": _most(_gaps(x[k + 1 + extra :], y[k + 1 :])),
            f"max_abs_if_cut_to_{n}": _most(_gaps(x, y)),
        },
    )


def _shorter(x: FloatArray, y: FloatArray, split: tuple[int, float]) -> Iterator[tuple[float, Told]]:
    missing, (k, cost) = len(y) - len(x), split
    head, tail = _gaps(x, y), _gaps(x, y[missing:])
    last = "the last token has" if missing == 1 else f"the last {missing} tokens have"
    first = "token 0 has" if missing == 1 else f"the first {missing} tokens have"
    if not _one_stands_out(head, k):
        yield _mean(head), _told("no tail", f"{last} no value", max_abs_of_the_first=_most(head))
    if not _one_stands_out(tail, k):
        yield _mean(tail), _told("no head", f"{first} no value", max_abs_of_the_rest=_most(tail))
    if 0 < k < len(x) - 1 or _one_stands_out(head, k) or _one_stands_out(tail, k):
        words = {1: "two", 2: "three", 3: "four"}.get(missing, str(missing + 1))
        explanation = f"ids were re-encoded: one sampled token became {words} ids from {k}"
        numbers = {
            f"max_abs_first_{k}": _most(_gaps(x[:k], y)),
            f"lag{missing}_fits_from_value": k + 1,
            f"max_abs_with_lag{missing}_from_value_{k + 1}": _most(_gaps(x[k + 1 :], y[k + 1 + missing :])),
        }
        yield cost * 1.001, _told("re-encoded", explanation, usable=False, **numbers)
