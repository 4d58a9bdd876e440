"""Scorer against sampler, on the sampler's prefill path and on fixed texts; its decode path is the pair itself."""

from __future__ import annotations

from onepolicy.legs.base import Leg, Want
from onepolicy.types import Question

ACROSS_PREFILL = Leg(
    "across-prefill",
    Question.ROUNDING,
    "the scorer against the sampler's prefill",
    Want("sampler", using=({"path": "prefill"}, {})),
    Want("scorer"),
    "beyond-rounding",
    raw=True,
)
FIXED_TEXTS = Leg(
    "fixed-texts",
    Question.ROUNDING,
    "the scorer against the sampler on the suite's fixed texts",
    Want("sampler", using=({"path": "prefill"}, {})),
    Want("scorer"),
    "texts-differ",
    on="texts",
    raw=True,
)
