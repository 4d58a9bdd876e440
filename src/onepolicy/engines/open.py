"""`open_engine`: from `name:target?key=value` to a running engine. Heavy ones run in a worker.

`worker:` before a spec runs any engine in a worker, with `python=` in another Python environment:
`worker:callable:my.trainer:logprobs?python=/envs/trainer/bin/python&timeout=120`.
"""

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
from onepolicy.engines.base import Engine, EngineSpec, Switch, options_of
from onepolicy.errors import EngineError, UnknownName, UsageError

GROUP = "onepolicy.engines"
_PREFIX = "worker"

#: The switches of `worker:`, before those of the engine.
WORKER_SWITCHES: dict[str, Switch] = {
    "python": Switch(str, "", "interpreter of the environment that the engine runs in; empty is this one"),
    "timeout": Switch(float, 0.0, "seconds for each request; 0 is the default of the command"),
}


def engine_class(name: str) -> type[Any]:
    """The class of an engine's name. Entry points are consulted for names that the table does not have.

    `worker:NAME` is the class of NAME with the switches of a worker besides.

    Errors: `UnknownName` (did you mean); `EngineError` for a plugin that cannot be imported.
    """
    if name.startswith(f"{_PREFIX}:"):
        return _hosted(engine_class(name.partition(":")[2]))
    if name == _PREFIX:
        raise UsageError(f"engine {name!r} is a prefix: worker:ENGINE:TARGET?python=PATH")
    if name in ENGINES:
        module, _, attribute = ENGINES[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    plugins: dict[str, EntryPoint] = {p.name: p for p in entry_points(group=GROUP)}
    if name not in plugins:
        raise UnknownName("engine", name, [*ENGINES, *plugins, _PREFIX])
    try:
        return plugins[name].load()
    except Exception as err:
        raise EngineError(f"engine {name!r}: its plugin {plugins[name].value} cannot be loaded: {err}") from err


def _hosted(cls: type[Any]) -> type[Any]:
    """The class as `worker:` declares it; it is never built itself."""
    switches = {**cls.SWITCHES, **WORKER_SWITCHES}
    return type(cls.__name__, (cls,), {"SWITCHES": switches, "HEAVY": True, "HOSTED": cls})


def named(spec: EngineSpec) -> EngineSpec:
    """The spec with the prefix `worker` in its name, where `engine_class` reads it: `worker:hf`, target `DIR`.

    Errors: `UsageError` for a worker of nothing.
    """
    if spec.name != _PREFIX:
        return spec
    name, colon, target = spec.target.partition(":")
    if not name or not colon or name == _PREFIX:
        wanted = "wanted worker:ENGINE:TARGET?python=PATH, as worker:hf:DIR?python=/envs/hf/bin/python"
        raise UsageError(f"engine {str(spec)!r}: {wanted}")
    return EngineSpec(f"{_PREFIX}:{name}", target, spec.options)


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

    Heavy engines run in a worker unless `in_process`; light ones in this process unless `worker`; those of a spec
    `worker:...` in a worker always. `timeout`: seconds for each request to a worker, unless the spec says; `log`: file
    for its output; `python`: its interpreter, unless the spec says.

    Errors: `UnknownName`, `UsageError` for a spec that is wrong; what the engine raises.
    """
    spec = named(EngineSpec.parse(spec) if isinstance(spec, str) else spec)
    cls = engine_class(spec.name)
    options = options_of(cls, spec)
    if hosted := getattr(cls, "HOSTED", None):
        cls, worker = hosted, True
        python = os.path.expanduser(options["python"]) or python
        timeout = _seconds(spec, options["timeout"]) or timeout
        options = {name: options[name] for name in cls.SWITCHES if name not in WORKER_SWITCHES}
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


def _seconds(spec: EngineSpec, value: float) -> float:
    if not 0 <= value < 1e7:
        raise UsageError(f"engine {str(spec)!r}: timeout: got {value}, wanted seconds")
    return value
