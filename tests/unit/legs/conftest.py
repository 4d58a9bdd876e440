"""Checks of two fake engines, small enough for many of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onepolicy.check import Choices, check_engines
from onepolicy.engines.base import SamplingParams
from onepolicy.types import Report
from small_suite import SAMPLER, SCORER, small


@pytest.fixture(scope="session")
def checked() -> Callable[..., Report]:
    """`checked(sampler options, scorer options, legs=...)`: the report; equal calls are run once."""
    done: dict[tuple[object, ...], Report] = {}

    def run(sampler: str = "", scorer: str = "", **more: object) -> Report:
        key = (sampler, scorer, *sorted((k, str(v)) for k, v in more.items()))
        if key not in done:
            given = {"params": SamplingParams(max_tokens=48, seed=3), "suite": small(), **more}
            done[key], _ = check_engines(SAMPLER + sampler, SCORER + scorer, choices=Choices(**given))  # type: ignore[arg-type]
        return done[key]

    return run
