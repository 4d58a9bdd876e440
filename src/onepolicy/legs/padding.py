"""Left against right padding: positions and masks that padding must not move."""

from __future__ import annotations

from onepolicy.legs.base import Leg, Want
from onepolicy.types import Question

SCORER_PADDING = Leg(
    "scorer-padding",
    Question.ROUNDING,
    "the scorer: right against left padding",
    Want("scorer", using=({"padding_side": "right"},)),
    Want("scorer", using=({"padding_side": "left"},)),
    "depends-on-padding",
)
