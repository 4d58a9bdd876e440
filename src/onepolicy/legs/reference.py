"""A third scoring of the same tokens: which side owns how much of the gap."""

from __future__ import annotations

from onepolicy.legs.base import Leg, Want
from onepolicy.types import Question

REFERENCE_SAMPLER = Leg(
    "reference-sampler",
    Question.ROUNDING,
    "the sampler against the reference",
    Want("sampler", recorded=True),
    Want("reference"),
    "",
    on="drawn",
)
REFERENCE_SCORER = Leg(
    "reference-scorer",
    Question.ROUNDING,
    "the scorer against the reference",
    Want("scorer"),
    Want("reference"),
    "",
    on="drawn",
)
