"""Against float32 on the same rounded weights: each side's own error, without what the cast of the weights does."""

from __future__ import annotations

from onepolicy.legs.base import Leg, Want
from onepolicy.types import Question

#: `{dtype}` is filled with the side's own precision when the leg is planned.
FLOAT32 = Want("scorer", load={"dtype": "float32", "rounded_to": "{dtype}"})

SCORER_PRECISION = Leg(
    "scorer-precision",
    Question.ROUNDING,
    "the scorer against its own float32, same rounded weights",
    Want("scorer"),
    FLOAT32,
    "",
    on="drawn",
)
SAMPLER_PRECISION = Leg(
    "sampler-precision",
    Question.ROUNDING,
    "the sampler against the scorer's float32, same rounded weights",
    Want("sampler", recorded=True),
    FLOAT32,
    "",
    on="drawn",
)
