"""Every leg, in one table: key -> `Leg`. A leg scores the same ids twice and changes one factor.

To add one: a file with its factor, and a line here.
"""

from __future__ import annotations

from onepolicy.legs.across import ACROSS_PREFILL, FIXED_TEXTS
from onepolicy.legs.again import SAMPLER_AGAIN, SCORER_AGAIN
from onepolicy.legs.attention import SCORER_ATTENTION
from onepolicy.legs.base import Leg
from onepolicy.legs.batch import SAMPLER_BATCH, SCORER_BATCH
from onepolicy.legs.cache import SAMPLER_CACHE
from onepolicy.legs.load import SAMPLER_LOAD
from onepolicy.legs.order import SCORER_ORDER
from onepolicy.legs.packing import SCORER_PACKING
from onepolicy.legs.padding import SCORER_PADDING
from onepolicy.legs.path import SAMPLER_PATH, SCORER_PATH
from onepolicy.legs.precision import SAMPLER_PRECISION, SCORER_PRECISION
from onepolicy.legs.reference import REFERENCE_SAMPLER, REFERENCE_SCORER
from onepolicy.legs.same_function import SAME_FUNCTION, SAME_FUNCTION_SETTINGS, SAME_FUNCTION_TEXTS

LEGS: dict[str, Leg] = {
    "same-function": SAME_FUNCTION,
    "same-function-settings": SAME_FUNCTION_SETTINGS,
    "same-function-texts": SAME_FUNCTION_TEXTS,
    "sampler-again": SAMPLER_AGAIN,
    "sampler-batch": SAMPLER_BATCH,
    "sampler-path": SAMPLER_PATH,
    "sampler-cache": SAMPLER_CACHE,
    "sampler-load": SAMPLER_LOAD,
    "scorer-again": SCORER_AGAIN,
    "scorer-order": SCORER_ORDER,
    "scorer-batch": SCORER_BATCH,
    "scorer-padding": SCORER_PADDING,
    "scorer-packing": SCORER_PACKING,
    "scorer-path": SCORER_PATH,
    "scorer-attention": SCORER_ATTENTION,
    "scorer-precision": SCORER_PRECISION,
    "sampler-precision": SAMPLER_PRECISION,
    "across-prefill": ACROSS_PREFILL,
    "fixed-texts": FIXED_TEXTS,
    "reference-sampler": REFERENCE_SAMPLER,
    "reference-scorer": REFERENCE_SCORER,
}

#: Legs that are no pair of scorings: asked for by name like the others, run by a function of their own.
SPECIAL: dict[str, str] = {
    "contract": "what the sampler's log-probs mean, by probing",
    "routes": "mixture models: how often the engines choose other experts",
    "step-0": "a trainer's values before its first update: ratio 1, nothing clipped, KL to the reference at the floor",
}
