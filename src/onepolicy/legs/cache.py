"""A prompt computed anew against one that is served from the prefix cache."""

from __future__ import annotations

from onepolicy.legs.base import Leg, Want
from onepolicy.types import Question

SAMPLER_CACHE = Leg(
    "sampler-cache",
    Question.ROUNDING,
    "the sampler: cold against cached prefix",
    Want("sampler", using=({"path": "decode", "cache": "cold"},)),
    Want("sampler", using=({"path": "decode", "cache": "warm"},)),
    "depends-on-cache",
    raw=True,
)
