"""The sequences in reverse order: a scorer that sorts and forgets to sort back gives values of other sequences."""

from __future__ import annotations

from onepolicy.legs.base import Leg, Want
from onepolicy.types import Question

SCORER_ORDER = Leg(
    "scorer-order",
    Question.FUNCTION,
    "the scorer: sequences in order against in reverse",
    Want("scorer", using=({"reverse": False},)),
    Want("scorer", using=({"reverse": True},)),
    "depends-on-order",
)
