"""Prefill against decode: whole sequences at once, or token by token through the KV cache with the ids forced."""

from __future__ import annotations

from onepolicy.legs.base import Leg, Want
from onepolicy.types import Question

SAMPLER_PATH = Leg(
    "sampler-path",
    Question.ROUNDING,
    "the sampler: prefill against decode by forced ids",
    Want("sampler", using=({"path": "prefill"},)),
    Want("sampler", using=({"path": "decode"},)),
    "depends-on-path",
    raw=True,
)
SCORER_PATH = Leg(
    "scorer-path",
    Question.ROUNDING,
    "the scorer: full forward against KV decode",
    Want("scorer", using=({"path": "prefill"},)),
    Want("scorer", using=({"path": "decode"},)),
    "depends-on-path",
    on="drawn",
)
