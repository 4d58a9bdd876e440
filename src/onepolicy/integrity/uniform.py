"""One number at every token: an engine whose logits are constant gives -log V, whatever the token."""

from __future__ import annotations

import math

from onepolicy.codes import finding
from onepolicy.counted import Counted
from onepolicy.integrity.base import SIDES, Batch, Side, Told
from onepolicy.integrity.places import many
from onepolicy.types import Finding

#: -log V of any vocabulary lies between these: 20 to 5 million tokens.
UNIFORM_BELOW, UNIFORM_ABOVE = -3.0, -15.5
#: Spread of the values, as a share of their size, that rounding to bfloat16 gives; and tokens that it takes.
_SPREAD, _LEAST = 2.0**-7, 8


def look(batch: Batch) -> Counted:
    out = Counted()
    for side, x in batch.finite.items():
        if len(x):
            out.count(f"uniform:{side}:tokens", len(x))
            out.greatest(f"uniform:{side}:greatest", float(x.max()) + 0.0)
            out.greatest(f"uniform:{side}:least, negative", 0.0 - float(x.min()))
    return out


def judge(total: Counted, told: Told) -> list[Finding]:
    return [f for side in SIDES if (f := _judged(total, told, side)) is not None]


def _judged(total: Counted, told: Told, side: Side) -> Finding | None:
    n = total.counts.get(f"uniform:{side}:tokens", 0)
    if n < _LEAST:
        return None
    top, low = total.most[f"uniform:{side}:greatest"], -total.most[f"uniform:{side}:least, negative"]
    if top > UNIFORM_BELOW or low < UNIFORM_ABOVE or top - low > _SPREAD * -low:
        return None
    value = (top + low) / 2
    size = round(math.exp(-value))
    known = told.vocab_size
    fits = None if known is None else bool(abs(math.log(known) + value) <= _SPREAD * -value)
    message = f"{told.name(side)}: all {many(n, 'log-prob')} are {value:.6g}, which is -log {size:,}"
    message += "" if not fits else f": the model's vocabulary of {known:,}, drawn from uniformly"
    evidence = {"side": told.name(side), "tokens": n, "value": value, "least": low, "greatest": top,
                "vocabulary_that_fits": size, "vocab_size": known, "fits_vocab_size": fits}  # fmt: skip
    return finding("uniform-vocabulary", message, evidence=evidence, origin="run")
