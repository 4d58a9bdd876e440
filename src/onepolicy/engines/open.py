"""`open_engine`: from `name:target?key=value` to a running engine. Heavy ones run in a worker."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, cast

from onepolicy.engines import ENGINES
from onepolicy.engines.base import Engine, EngineSpec, options_of
from onepolicy.errors import EngineError, UnknownName

GROUP = "onepolicy.engines"


def engine_class(name: str) -> type[Any]:
    """The class of an engine's name. Entry points are consulted for names that the table does not have.

    Errors: `UnknownName` (did you mean); `EngineError` for a plugin that cannot be imported.
    """
    if name in ENGINES:
        module, _, attribute = ENGINES[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    plugins: dict[str, EntryPoint] = {p.name: p for p in entry_points(group=GROUP)}
    if name not in plugins:
        raise UnknownName("engine", name, [*ENGINES, *plugins])
    try:
        return plugins[name].load()
    except Exception as err:
        raise EngineError(f"engine {name!r}: its plugin {plugins[name].value} cannot be loaded: {err}") from err


@contextmanager
def open_engine(
    spec: str | EngineSpec,
    *,
    in_process: bool = False,
    worker: bool = False,
    log: str | Path | None = None,
    timeout: float = 600.0,
    python: str = sys.executable,
) -> Iterator[Engine]:
    """A running engine, closed (a worker: killed) when the block ends, however it ends.

    Heavy engines run in a worker unless `in_process`; light ones in this process unless `worker`. `timeout`: seconds
    for each request to a worker; `log`: file for its output; `python`: its interpreter.

    Errors: `UnknownName`, `UsageError` for a spec that is wrong; what the engine raises.
    """
    spec = EngineSpec.parse(spec) if isinstance(spec, str) else spec
    cls = engine_class(spec.name)
    options = options_of(cls, spec)
    if worker or (cls.HEAVY and not in_process):
        from onepolicy.engines.worker import WorkerEngine

        engine = cast(Engine, WorkerEngine(cls, spec.target, options, timeout=timeout, log=log, python=python))
    else:
        for key, value in getattr(cls, "ENVIRONMENT", {}).items():
            os.environ.setdefault(key, value)
        engine = cls(spec.target, **options)
    try:
        yield engine
    finally:
        engine.close()
