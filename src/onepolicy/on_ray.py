"""The same shard list and the same worker function as plain Ray tasks (https://docs.ray.io/en/latest/ray-core/tasks.html)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from onepolicy.errors import EngineError, MissingExtra, UsageError

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
    try:
        import ray.exceptions
    except ImportError:
        raise MissingExtra("ray", "ray", f"--on {on}") from None
    try:
        with started(address):
            yield from _answers(ray, work, items)
    except (ray.exceptions.RayError, ConnectionError) as err:
        raise EngineError(f"--on {on}: {' '.join(str(err).split())[:300]}") from err


@contextlib.contextmanager
def started(address: str | None = None) -> Iterator[None]:
    """Ray at `address` (None: the running one, or a local one of our own, which listens on loopback alone), until the
    end of the block. A Ray that this process has joined already is left as it is."""
    import ray

    if ray.is_initialized():
        yield
        return
    own: dict[str, Any] = {} if address else {"_node_ip_address": "127.0.0.1"}
    quiet = {"log_to_driver": False, "include_dashboard": False, "logging_level": logging.ERROR}
    ray.init(address=address, **quiet, **own)
    try:
        yield
    finally:
        ray.shutdown()


def _answers(ray: Any, work: Callable[..., _T], items: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, _T]]:
    task = ray.remote(max_retries=RETRIES, num_cpus=1)(work)
    waiting = {task.remote(*item): i for i, item in enumerate(items)}
    while waiting:
        done, _ = ray.wait(list(waiting), num_returns=1)
        for ref in done:
            yield waiting.pop(ref), ray.get(ref)
