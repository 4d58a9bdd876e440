"""The real model, drawn from and scored once for each precision."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from onepolicy.check import check
from onepolicy.engines.base import SamplingParams
from onepolicy.types import Report

sys.path.insert(0, str(Path(__file__).parent))
from recordings import MODEL, recording, spec

#: Drawn tokens of each reply at most. float16 is slow on a CPU, and 1,000 tokens are enough for every bound.
LENGTHS = {"float32": 64, "bfloat16": 64, "float16": 24}


@pytest.fixture(scope="session")
def checked() -> Callable[[str], Report]:
    """dtype -> the report of vLLM's replies scored by transformers in the same dtype, under `strict`."""
    assert MODEL.is_dir(), "build/models/smollm2 is not there: run `make models`"

    @cache
    def once(dtype: str) -> Report:
        rollouts = recording(dtype, SamplingParams(max_tokens=LENGTHS[dtype]))
        report, _ = check(rollouts, spec("hf", dtype), bounds="strict")
        return report

    return once
