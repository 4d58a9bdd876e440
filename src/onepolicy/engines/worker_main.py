"""The child side of a worker: `python -m onepolicy.engines.worker_main FD SCRATCH`, started by `WorkerEngine`.

It holds one engine and answers one request at a time over the socket FD. stdout and stderr are the log: whatever a
library prints there cannot disturb the protocol. When the parent goes away, however it dies, the directory SCRATCH is
removed and the whole process group killed.
"""

from __future__ import annotations

import importlib
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any

import onepolicy
from onepolicy.engines import wire
from onepolicy.engines.base import SamplingParams
from onepolicy.errors import EngineError, OnepolicyError
from onepolicy.rollouts import Rollouts

Message = dict[str, Any]


def main(fd: int, scratch: str) -> None:
    """Serves until `close` or until the parent is gone."""
    os.set_inheritable(fd, False)  # an engine's own children must not keep the connection open
    link = socket.socket(fileno=fd)
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(link, inbox, scratch), daemon=True).start()
    _send(link, {"hello": {"version": onepolicy.__version__, "protocol": wire.PROTOCOL, "python": sys.version}})
    host = Host()
    while True:
        message = inbox.get()
        _send(link, _answer(host, message))
        if message["op"] == "close":
            sys.stdout.flush()
            os._exit(0)  # libraries' own exit handlers may hang; the parent kills what is left of the group


class Host:
    """The one engine of this process and the requests it answers."""

    def __init__(self) -> None:
        self.engine: Any = None

    def load(self, engine: str, target: str, options: Mapping[str, Any], path: list[str]) -> None:
        """Imports `module:class` and builds it. `path`: the parent's import path, added behind our own."""
        sys.path.extend(p for p in path if p not in sys.path)
        module, _, name = engine.partition(":")
        self.engine = getattr(importlib.import_module(module), name)(target, **options)

    def fingerprint(self) -> Any:
        return {**self.engine.fingerprint(), "worker": True}

    def encode(self, prompts: list[Any]) -> Any:
        return self.engine.encode(prompts)

    def decode(self, ids: list[int]) -> Any:
        return self.engine.decode(ids)

    def sample(self, prompts: list[list[int]], params: SamplingParams) -> Any:
        return self.engine.sample(prompts, params)

    def score(self, rollouts: Rollouts, distributions: bool, using: Mapping[str, Any]) -> Any:
        more = {"using": using} if using else {}
        return self.engine.score(rollouts, distributions=distributions, **more)

    def close(self) -> None:
        if self.engine is not None:
            self.engine.close()


_OPS = frozenset(name for name in vars(Host) if not name.startswith("_"))


def _answer(host: Host, message: Message) -> Message:
    try:
        if message["op"] not in _OPS:
            raise EngineError(f"worker: unknown request {message['op']!r}")
        return {"result": getattr(host, message["op"])(**message["args"])}
    except OnepolicyError as err:
        plain = {k: v for k, v in vars(err).items() if isinstance(v, str | int | None)}
        return {"error": {"type": type(err).__name__, "message": str(err), "attributes": plain}}
    except BaseException as err:  # a SystemExit of a library included
        traceback.print_exc()
        first = (str(err).strip().splitlines() or ["no message"])[0]
        text = f"{type(err).__name__}: {first[:400]}"
        return {"error": {"type": "EngineError", "message": text, "attributes": {}, "unexpected": True}}


def _send(link: socket.socket, message: Message) -> None:
    try:
        buffers = wire.pack(message)
    except EngineError as err:
        error = {"type": "EngineError", "message": str(err), "attributes": {}}
        buffers = wire.pack({"error": error})
    for buffer in buffers:
        link.sendall(buffer)


def _listen(link: socket.socket, inbox: queue.SimpleQueue[Message], scratch: str) -> None:
    """Reads requests while the engine works, so that a parent's death is seen at once; then nothing may survive."""

    def read(n: int) -> bytearray:
        out = bytearray(n)
        view, at = memoryview(out), 0
        while at < n:
            got = link.recv_into(view[at:])
            if not got:
                raise EOFError
            at += got
        return out

    try:
        while True:
            inbox.put(wire.unpack(read))
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
