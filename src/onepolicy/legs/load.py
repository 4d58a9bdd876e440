"""A server that is idle against one that is busy with other requests."""

from __future__ import annotations

from onepolicy.legs.base import Leg, Want
from onepolicy.types import Question

SAMPLER_LOAD = Leg(
    "sampler-load",
    Question.ROUNDING,
    "the sampler's server: idle against loaded",
    Want("sampler", using=({"load": "idle"},)),
    Want("sampler", using=({"load": "loaded"},)),
    "depends-on-load",
    raw=True,
)
