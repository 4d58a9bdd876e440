"""The order in which records changed places, in words, where it is a simple one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from onepolicy.types import BoolArray, IntArray

#: Fewer records than this show no order, but for two that changed places.
_LEAST = 6
#: Share of records or of neighbours that an order must explain. A roll leaves the end of each batch over, an
#: interleaving the end of each rank's part.
_NEARLY, _MOSTLY, _ROLLED = 0.9, 0.75, 0.5


def pattern(
    rows: IntArray, other: IntArray, order: IntArray, tokens: IntArray, groups: Sequence[str], sure: BoolArray
) -> str:
    """`rows` `[N]`: records of which the first side is that of `other` `[N]`'s second side; `sure` `[N]`: no third one
    fits as well. `order` `[S]`: where each record stands in the dump, -1 unknown (then as they come); `tokens` `[S]`,
    `groups` `[S]` (empty: unknown)."""
    rows, other = rows[sure], other[sure]
    place = np.argsort(np.argsort(order, kind="stable")) if (order >= 0).all() else np.arange(len(order))
    by_place = np.argsort(place[rows], kind="stable")
    rows, other = rows[by_place], other[by_place]
    at, to = place[rows], place[other]
    words = _moved(at, to) or _by_length(to, tokens[rows], tokens[other])
    words = words or ("in no simple order" if len(at) >= _LEAST else "too few to show an order")
    return words + (", each within its group" if _in_groups(rows, other, groups) else "")


def _moved(at: IntArray, to: IntArray) -> str | None:
    """`at` `[N]` ascending: a place in the dump, `to` `[N]`: the one that fits it."""
    goes = dict(zip(at.tolist(), to.tolist(), strict=True))
    back = [goes[t] == i for i, t in goes.items() if t in goes]
    swapped = len(back) >= _NEARLY * len(at) / 2 and bool(np.mean(back or [False]) >= _NEARLY)
    if len(at) == 2 and swapped:
        return "two records changed places"
    if len(at) < _LEAST:
        return None
    size, of_size = _commonest(np.abs(to - at))
    if swapped and of_size >= _NEARLY:
        return "neighbours are swapped in pairs" if size == 1 else f"blocks of {size:,} records are swapped"
    step, of_steps = _steps(at, to)
    if step == -1 and of_steps >= _MOSTLY:
        return "their order is reversed"
    move, of_moves = _commonest(to - at)
    if of_moves >= _ROLLED:
        return f"rolled by {'one record' if abs(move) == 1 else f'{abs(move):,} records'}"
    if step > 1 and of_steps >= _MOSTLY:
        return f"neighbours of one side stand {step:,} apart on the other, as when parts of ranks are laid together"
    return None


def _steps(at: IntArray, to: IntArray) -> tuple[int, float]:
    """How far apart neighbours of one side stand on the other, and in which share: of the two sides, the clearer."""
    turned = np.argsort(to, kind="stable")
    both = [np.diff(y)[np.diff(x) == 1] for x, y in ((at, to), (to[turned], at[turned]))]
    return max((_commonest(steps) for steps in both if len(steps) >= _LEAST - 1), key=lambda x: x[1], default=(0, 0.0))


def _commonest(x: IntArray) -> tuple[int, float]:
    """(value, its share); (0, 0.0) of none."""
    if not len(x):
        return 0, 0.0
    value, n = Counter(x.tolist()).most_common(1)[0]
    return int(value), n / len(x)


def _by_length(to: IntArray, own: IntArray, others: IntArray) -> str | None:
    """One side stands in order of length and the other does not: whichever of the two it is. `own`, `others`: tokens of
    each record and of the one that fits it."""
    if not _sorted(own) and (_sorted(others) or _sorted(own[np.argsort(to, kind="stable")])):
        return "one side is sorted by length"
    return None


def _sorted(lengths: IntArray) -> bool:
    """Up or down, but for the ends of batches; equal lengths are no order."""
    step = np.diff(lengths)
    step = step[step != 0]
    return len(step) >= _LEAST - 1 and bool(max(np.mean(step > 0), np.mean(step < 0)) >= _NEARLY)


def _in_groups(rows: IntArray, other: IntArray, groups: Sequence[str]) -> bool:
    """Records changed places within groups of more than one, and never beyond."""
    same = [groups[i] != "" and groups[i] == groups[j] for i, j in zip(rows.tolist(), other.tolist(), strict=True)]
    return len(same) >= 2 and all(same) and len(set(groups)) > 1
