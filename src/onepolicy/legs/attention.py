"""Another attention kernel, the same model."""

from __future__ import annotations

from onepolicy.legs.base import Leg, Other, Want
from onepolicy.types import Question

ANOTHER = ({"attention": Other(("eager", "sdpa"))}, {"order": Other(("pairwise", "forward"))})

SCORER_ATTENTION = Leg(
    "scorer-attention",
    Question.ROUNDING,
    "the scorer: another attention kernel",
    Want("scorer"),
    Want("scorer", using=ANOTHER),
    "depends-on-kernel",
    on="drawn",
)
