"""Alone against in a batch: kernels choose their tiles by the batch, and a broken one mixes its rows."""

from __future__ import annotations

from onepolicy.legs.base import Leg, Want
from onepolicy.types import Question

SAMPLER_BATCH = Leg(
    "sampler-batch",
    Question.ROUNDING,
    "the sampler: each reply alone against in a batch",
    Want("sampler", using=({"path": "decode", "batch_size": 1}, {"batch_size": 1})),
    Want("sampler", using=({"path": "decode", "batch_size": 0}, {"batch_size": 0})),
    "depends-on-batch",
    raw=True,
)
SCORER_BATCH = Leg(
    "scorer-batch",
    Question.ROUNDING,
    "the scorer: micro-batch 1 against N",
    Want("scorer", using=({"batch_size": 1},)),
    Want("scorer", using=({"batch_size": 16},)),
    "depends-on-batch",
)
