"""Scorers of a user's own with a fault, over the transformers engine; model and precision are in the environment.

`callable:fault_scorers:shifted`; each is `fn(list of int32 [T_i]) -> list of float [T_i]`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from onepolicy.engines.hf import HfEngine
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import Values

Ids = Sequence[NDArray[np.int32]]


@functools.cache
def _engine(packing: str = "alone") -> HfEngine:
    return HfEngine(os.environ["FAULTY_MODEL"], dtype=os.environ["FAULTY_DTYPE"], packing=packing)


def _scores(ids: Ids, packing: str = "alone") -> list[NDArray[np.float64]]:
    offsets = np.concatenate([[0], np.cumsum([len(x) for x in ids])]).astype(np.int64)
    records = {"logprob_semantics": column_values("logprob_semantics", ["raw"] * len(ids))}
    rollouts = Rollouts(offsets, {"token_ids": Values(np.concatenate(list(ids)).astype(np.int32))}, records)
    values = _engine(packing).score(rollouts).logprobs.values.astype(np.float64)
    return [values[rollouts.sequence(i)] for i in range(len(ids))]


def sound(ids: Ids) -> list[NDArray[np.float64]]:
    return _scores(ids)


def shifted(ids: Ids) -> list[NDArray[np.float64]]:
    """The value of token i stands at token i - 1: logits and labels were both shifted."""
    return [np.append(x[1:], x[-1]) for x in _scores(ids)]


def doubled_bos(ids: Ids) -> list[NDArray[np.float64]]:
    """One more token in front of every sequence, as a template and an encoder add that both put a BOS there."""
    return [x[1:] for x in _scores([np.concatenate([i[:1], i]) for i in ids])]


def unmasked(ids: Ids) -> list[NDArray[np.float64]]:
    """Packs what it is given into one row without a document mask."""
    return _scores(ids, "unmasked")


def sorted_by_length(ids: Ids) -> list[NDArray[np.float64]]:
    """Sorts by length for short padding, and does not sort back."""
    return _scores(sorted(ids, key=len))
