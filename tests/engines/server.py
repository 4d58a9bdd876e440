"""A real vLLM API server in a process group of its own, on the packaged model."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onepolicy import models

_START = 240.0  # seconds; 28 on an idle machine


@dataclass
class Server:
    """`url` without a path. `kill` ends every process of it at once."""

    process: subprocess.Popen[bytes]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def metric(self, name: str) -> float:
        """The sum of a metric's values over its labels."""
        lines = _get(f"{self.url}/metrics").decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


@contextlib.contextmanager
def serving(*options: str, model: str = "tiny", dtype: str = "float32") -> Iterator[Server]:
    """A server that is ready; `options` are more of vLLM's command line. Killed at the end, whatever happens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(models.path(model))]
    command += ["--served-model-name", model, "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    command += ["--enforce-eager", *options]
    own = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    with tempfile.TemporaryDirectory() as home, (Path(home) / "log").open("w+b") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **own, "TMPDIR": home}, stdout=log, stderr=log, start_new_session=True
        )
        server = Server(process, port)
        try:
            _wait(server, log.name)
            yield server
        finally:
            server.kill()
            process.wait()
            server.kill()  # its children, should they have outlived it


def _wait(server: Server, log: str) -> None:
    end = time.monotonic() + _START
    while time.monotonic() < end:
        if server.process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            _get(f"{server.url}/health")
            return
        time.sleep(0.2)
    raise RuntimeError(f"the server did not start; the end of its log: {Path(log).read_text()[-2000:]}")


def _get(url: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as answer:
        return answer.read()
