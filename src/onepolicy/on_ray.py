"""The same shard list and the same worker function as plain Ray tasks (https://docs.ray.io/en/latest/ray-core/tasks.html)."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from onepolicy.errors import EngineError, MissingExtra, OnepolicyError, UsageError

_T = TypeVar("_T")
#: A task whose worker dies is run again this often.
RETRIES = 3


def address_of(on: str) -> str | None:
    """`ray` -> None (a local Ray, or the running one), `ray://host:port` -> itself. Errors: `UsageError`."""
    if on == "ray":
        return None
    if on.startswith("ray://") and len(on) > len("ray://"):
        return on
    raise UsageError(f"--on: got {on!r}, wanted local, ray or ray://HOST:PORT")


def over_ray(work: Callable[..., _T], items: Sequence[tuple[Any, ...]], on: str) -> Iterator[tuple[int, _T]]:
    """`(i, work(*items[i]))` as they are done. A Ray that was not running before is shut down at the end.

    Errors: `MissingExtra` without ray; `EngineError` for a task that fails for good, or a cluster that is not there.
    """
    address = address_of(on)
    _stay_on_loopback(address)
    try:
        import ray.exceptions
    except ImportError:
        raise MissingExtra("ray", "ray", f"--on {on}") from None
    try:
        with started(address):
            yield from _answers(ray, work, items)
    except (ray.exceptions.RayError, ConnectionError) as err:
        ours: Any = getattr(err, "cause", None)  # what the task raised
        if isinstance(ours, OnepolicyError):
            raise ours from None
        raise EngineError(f"--on {on}: {' '.join(str(err).split())[:300]}") from err


@contextlib.contextmanager
def started(address: str | None = None) -> Iterator[None]:
    """Ray at `address` (None: the running one, else one of our own), until the end of the block. A Ray that this
    process has joined already is left as it is."""
    _stay_on_loopback(address)
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(address=address, log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def _stay_on_loopback(address: str | None) -> None:
    """A local Ray of our own talks to itself over 127.0.0.1, as it does on a Mac: with the machine's own address it
    waits for ever where a firewall closes that, or the address changes. Ray reads the setting when it is imported."""
    folder = os.path.join(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray")
    running = "RAY_ADDRESS" in os.environ or os.path.exists(os.path.join(folder, "ray_current_cluster"))
    if address is None and not running and "ray" not in sys.modules:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def _answers(ray: Any, work: Callable[..., _T], items: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, _T]]:
    task = ray.remote(max_retries=RETRIES, num_cpus=1)(work)
    waiting = {task.remote(*item): i for i, item in enumerate(items)}
    while waiting:
        done, _ = ray.wait(list(waiting), num_returns=1)
        for ref in done:
            yield waiting.pop(ref), ray.get(ref)
