"""onepolicy makes the two engines of LLM reinforcement learning one policy, or says exactly why they are not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onepolicy import corrections as corrections
    from onepolicy.monitor import Halted as Halted
    from onepolicy.monitor import Monitor as Monitor

__version__ = "0.1.0"

#: Names that are imported when they are first used: `import onepolicy` alone stays light.
_LAZY = {"Monitor": "onepolicy.monitor", "Halted": "onepolicy.monitor", "corrections": ""}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'onepolicy' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name) if _LAZY[name] else import_module(f"onepolicy.{name}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
