"""Packed with other sequences against alone: a document mask that is missing or wrong shows here."""

from __future__ import annotations

from onepolicy.legs.base import Leg, Want
from onepolicy.types import Question

SCORER_PACKING = Leg(
    "scorer-packing",
    Question.ROUNDING,
    "the scorer: alone against packed with others",
    Want("scorer", using=({"packing": "alone"},)),
    Want("scorer", using=({"packing": "packed"},)),
    "depends-on-packing",
)
