"""Other requests that keep a server busy while something is measured."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from onepolicy.engines.http_client import Client
from onepolicy.errors import EngineError, OnepolicyError

#: Path and body of a streamed request, for request number k.
Make = Callable[[int], tuple[str, dict[str, Any]]]


@contextlib.contextmanager
def busy(client: Client, make: Make, n: int) -> Iterator[None]:
    """`n` requests are being answered from before the block to its end; each that ends is followed by another.

    The block starts once every one has given its first piece of an answer, so the server really works on them.
    Errors: `EngineError` when the load does not start, or did not last.
    """
    load = _Load(client.twin(), make)
    threads = [threading.Thread(target=load.run, args=(k,), name=f"load-{k}", daemon=True) for k in range(n)]
    try:
        for thread in threads:
            thread.start()
        load.wait_started(n, client.connect + client.timeout + 1.0)  # later than a request's own limit
        yield
        load.require_healthy("it did not last")
    finally:
        load.stop()
        for thread in threads:
            thread.join(client.connect + 5.0)


class _Load:
    def __init__(self, client: Client, make: Make) -> None:
        self._client, self._make = client, make
        self._started = threading.Semaphore(0)
        self._over = threading.Event()
        self._failure: Exception | None = None

    def run(self, k: int) -> None:
        first = True
        while not self._over.is_set():
            try:
                for line in self._client.stream(*self._make(k)):
                    if first and line.strip():
                        first = False
                        self._started.release()
            except Exception as err:
                if not self._over.is_set():
                    self._failure = err
                    self._started.release()
                return

    def wait_started(self, n: int, timeout: float) -> None:
        for _ in range(n):
            if not self._started.acquire(timeout=timeout):
                raise EngineError(f"the load of {n} requests did not start within {timeout:g} s")
            self.require_healthy("it did not start")

    def require_healthy(self, what: str) -> None:
        if self._failure is not None:
            said = self._failure if isinstance(self._failure, OnepolicyError) else repr(self._failure)
            raise EngineError(f"the load beside the scoring failed, {what}: {said}")

    def stop(self) -> None:
        self._over.set()
        self._client.abort()
