"""Engines of transformers in the test's own process: what a check opens without a worker, which would load torch anew.

What a worker adds (its start, its death, its messages) is tested elsewhere; numbers do not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from onepolicy.engines.base import Engine, EngineSpec
from onepolicy.engines.open import open_engine
from onepolicy.legs import run


@contextmanager
def near() -> Iterator[None]:
    """While it lasts, checks open `hf:` engines in this process, and all others as they always do."""

    @contextmanager
    def opened(spec: str | EngineSpec, **more: Any) -> Iterator[Engine]:
        spec = EngineSpec.parse(spec) if isinstance(spec, str) else spec
        with open_engine(spec, in_process=spec.name == "hf", **more) as engine:
            yield engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "open_engine", opened)
        yield
