"""Both engines in float32: healthy ones agree to about 1e-5, and a wrong setting stands out a thousandfold."""

from __future__ import annotations

from onepolicy.legs.base import Leg, Want
from onepolicy.types import Question

_SAMPLER = Want("sampler", load={"dtype": "float32"}, using=({"path": "prefill"}, {}))
_SCORER = Want("scorer", load={"dtype": "float32"})

SAME_FUNCTION = Leg(
    "same-function",
    Question.FUNCTION,
    "both engines in float32, on drawn tokens",
    _SAMPLER,
    _SCORER,
    "different-function",
    raw=True,
    bounds="function",
)
SAME_FUNCTION_SETTINGS = Leg(
    "same-function-settings",
    Question.FUNCTION,
    "both engines in float32, with the temperature and truncation of the draw",
    Want("sampler", load={"dtype": "float32"}, using=({"path": "decode"},)),
    _SCORER,
    "different-function",
    bounds="function",
    only_set=True,
)
SAME_FUNCTION_TEXTS = Leg(
    "same-function-texts",
    Question.FUNCTION,
    "both engines in float32, on the suite's fixed texts",
    _SAMPLER,
    _SCORER,
    "different-function",
    on="texts",
    raw=True,
    bounds="function",
)
