"""The fake engine's faults, by name: what each one is, and how it changes what the engine does or reports."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from onepolicy.engines.fake_model import Tampering
from onepolicy.engines.fake_rounding import round_to
from onepolicy.engines.semantics import Rules
from onepolicy.errors import EngineError
from onepolicy.types import BoolArray

#: Where a fault acts. `weights` and `forward`: the model itself, so draws and reports agree with each other. `draw`:
#: only which tokens are drawn. `report`: only the log-probs, entropies and distributions that are given. `record`:
#: the finished column of log-probs. `score`: only when given ids are scored, and only at the live switches that its
#: meaning names. `process`: it gives no numbers at all.
Stage = Literal["none", "weights", "forward", "draw", "report", "record", "score", "process"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: where it acts and what it does."""

    stage: Stage
    meaning: str


FAULTS: dict[str, Fault] = {
    "none": Fault("none", "healthy"),
    "stale": Fault("weights", "every weight moved by 2% of its tensor's standard deviation, as one update would"),
    "eps_norm": Fault("forward", "RMSNorm with epsilon 1e-5 instead of 1e-6"),
    "logits_times_two": Fault("forward", "all logits doubled"),
    "logits_plus_hundred": Fault("forward", "100 added to all logits: no fault, the softmax takes it out again"),
    "drawn_at_0.7": Fault("draw", "draws at 0.7 times the temperature that it declares and reports"),
    "drawn_top_p_0.9": Fault("draw", "draws from the top 90% of the mass, but declares and reports no such cut"),
    "temperature": Fault("report", "reports the log-probs of logits / 0.7"),
    "shift": Fault("record", "the log-prob of token i is reported at token i + 1"),
    "zero_fill": Fault("record", "every tenth log-prob is 0.0, as a missing value that was filled"),
    "nan": Fault("record", "one log-prob, in the middle, is NaN"),
    "support": Fault("record", "one drawn token, in the middle, has log-prob -inf"),
    "late_positions": Fault("forward", "another function from position 256 on, as a wrong RoPE scaling makes"),
    "unstable": Fault("forward", "every call gives other values, about 0.2 nats RMS apart"),
    "leaks_neighbours": Fault("score", "sequences after the first of a batch or packed row see the one before them"),
    "left_padding": Fault("score", "with padding_side=left, positions count the padding too"),
    "decode_cache": Fault("score", "with path=decode, a gap that grows with the position"),
    "hangs": Fault("process", "scoring does not end within an hour"),
    "oom": Fault("process", "out of memory as soon as dtype is float32"),
}

_TAMPERING = {
    "eps_norm": Tampering(eps=1e-5),
    "logits_times_two": Tampering(times=2.0),
    "logits_plus_hundred": Tampering(plus=100.0),
    "late_positions": Tampering(late=0.3),
    "unstable": Tampering(noise=0.0027),
}

#: What is changed on one path only.
_ON_PATH = {("decode_cache", "decode"): Tampering(cache=0.003)}


def tampering(fault: str, path: str = "prefill") -> Tampering:
    """What the fault changes inside the forward pass."""
    return _ON_PATH.get((fault, path)) or _TAMPERING.get(fault, Tampering())


def fail(fault: str, dtype: str) -> None:
    """Errors: `EngineError` for a fault that keeps the engine from starting at this dtype."""
    if fault == "oom" and dtype == "float32":
        raise EngineError("fake engine: out of memory at dtype=float32 (fault=oom)")


def hang(fault: str) -> None:
    """Sleeps for an hour, if that is the fault."""
    if fault == "hangs":
        time.sleep(3600)


def moved(checkpoint: dict[str, NDArray[np.float32]], fault: str, seed: int) -> dict[str, NDArray[np.float32]]:
    """The weights that are really loaded."""
    if fault != "stale":
        return checkpoint
    rng = np.random.default_rng([0x57A1E, seed])
    step = lambda w: (w + 0.02 * w.std() * rng.normal(size=w.shape)).astype(np.float32)
    return {name: round_to(step(w), "bfloat16") for name, w in checkpoint.items()}


def drawing(rules: Rules, fault: str) -> Rules:
    """The rules that tokens are really drawn by."""
    if fault == "drawn_at_0.7":
        return replace(rules, temperature=0.7 * rules.temperature)
    return replace(rules, top_p=min(rules.top_p, 0.9)) if fault == "drawn_top_p_0.9" else rules


def reporting(rules: Rules, fault: str) -> Rules:
    """The rules that reported numbers have really been through."""
    return replace(rules, temperature=0.7 * rules.temperature) if fault == "temperature" else rules


def spoil(
    fault: str, logprobs: NDArray[np.floating], valid: BoolArray, drawn: BoolArray
) -> tuple[NDArray[np.floating], BoolArray]:
    """The finished column `[T]` and its validity, as the fault leaves them. Index 0 of each sequence is null."""
    if FAULTS[fault].stage != "record":
        return logprobs, valid
    out, out_valid = logprobs.copy(), valid.copy()
    if fault == "shift":
        out[1:], out_valid[1:] = logprobs[:-1], valid[:-1] & valid[1:]
    elif fault == "zero_fill":
        out[np.flatnonzero(valid)[::10]] = 0.0
    else:
        places = np.flatnonzero(valid & drawn if (valid & drawn).any() else valid)
        out[places[len(places) // 2 : len(places) // 2 + 1]] = np.nan if fault == "nan" else -np.inf
    return out, out_valid
