"""What the tests of the command line share: two engines that agree, and what a command line gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SAMPLER = "fake:?seed=1&dtype=bfloat16"
SCORER = "fake:?seed=1&dtype=bfloat16&order=pairwise"


@dataclass(frozen=True)
class Ran:
    """What one command line gave."""

    code: int
    out: str
    err: str


Command = Callable[..., Ran]
