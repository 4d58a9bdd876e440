"""The same request twice: what an engine's values are worth at all."""

from __future__ import annotations

from onepolicy.legs.base import Leg, Want
from onepolicy.types import Question

# `run` gives the second scoring its own call, so equal wants are two requests. An engine that gives other values at
# every call has raised the floor itself, so a repeat has bounds of its own.
SAMPLER_AGAIN = Leg(
    "sampler-again",
    Question.ROUNDING,
    "the sampler, asked again",
    Want("sampler"),
    Want("sampler"),
    "not-repeatable",
    raw=True,
    bounds="again",
)
SCORER_AGAIN = Leg(
    "scorer-again",
    Question.ROUNDING,
    "the scorer, asked again",
    Want("scorer"),
    Want("scorer"),
    "not-repeatable",
    bounds="again",
)
