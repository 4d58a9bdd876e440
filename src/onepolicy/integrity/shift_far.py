"""Lists that lie further apart than a token or two: by the prompt's length, or by a few tokens that one side counts."""

from __future__ import annotations

import numpy as np

from onepolicy.counted import Counted
from onepolicy.integrity.base import Batch
from onepolicy.integrity.places import spot_records
from onepolicy.integrity.shift_inside import TELLING, Part, near, shifted
from onepolicy.types import BoolArray, FloatArray, IntArray

#: Lags that are tried besides those of the prompts.
LAGS = (*range(-8, -2), *range(3, 9))
#: Mean gap (nats, each counted up to 1) of a record that is looked at.
_APART = 0.3
#: Telling pairs that it takes, the share of them that fits, and the share of that which may fit another lag.
_LEAST, _FITS, _RIVAL = 8, 0.85, 0.6
#: Spread (nats) of the telling values, so that no number that comes again fits by itself.
_SPREAD = 0.3


def look_far(out: Counted, batch: Batch, part: Part, which: BoolArray) -> None:
    """Counts the records of `which` `[R]` that one further lag explains: `shifts:far:{lag}`, `shifts:far:prompt` for
    minus the prompt's length, `shifts:far:-prompt` for plus."""
    gap = np.minimum(np.abs(part.b - part.a), 1.0)
    which = which & (np.add.reduceat(gap, part.starts) > _APART * part.lengths)
    if not which.any():
        return
    prompts = batch.prompts[part.rows]
    tried = {"prompt": -prompts, "-prompt": prompts} | {str(k): np.full(len(prompts), k) for k in LAGS}
    near_by = np.array([_share(part, np.full(len(prompts), k)) for k in range(-2, 3)]).max(axis=0)
    far = {name: np.abs(lag) > 2 for name, lag in tried.items()}
    shares = np.array([np.where(far[name], _share(part, lag), 0.0) for name, lag in tried.items()])
    lags = np.array(list(tried.values()))
    best = shares.argmax(axis=0)
    share, lag = (np.take_along_axis(x, best[None], axis=0)[0] for x in (shares, lags))
    rival = np.maximum(np.where(lags == lag, 0.0, shares).max(axis=0), near_by)  # text that repeats itself fits several
    rows = np.flatnonzero(which & (share >= _FITS) & (rival <= _RIVAL * share))
    if not len(rows):
        return
    for k in np.unique(best[rows]).tolist():
        out.count(f"shifts:far:{list(tried)[k]}", int((best[rows] == k).sum()))
    out.greatest("shifts:far longest", float(np.abs(lag[rows]).max()))
    spot_records(out, "shifts:far", batch, part.rows[rows], {"best_lag": lag[rows]})


def _share(part: Part, lag: IntArray) -> FloatArray:
    """`[R]` the share of each record's telling tokens that fit at its lag; 0 where too few tell."""
    x, y, there = shifted(part.a, part.b, part.at, np.repeat(lag, part.lengths), part.starts, part.lengths)
    telling = there & (np.minimum(x, y) < TELLING)
    add = lambda v: np.add.reduceat(np.where(telling, v, 0.0), part.starts)
    n = add(1.0)
    low = np.maximum(x, -20.0)
    spread = add(low * low) / np.maximum(n, 1) - (add(low) / np.maximum(n, 1)) ** 2
    good = (n >= _LEAST) & (spread > _SPREAD**2)
    return np.where(good, add(near(x, y).astype(np.float64)) / np.maximum(n, 1), 0.0)
