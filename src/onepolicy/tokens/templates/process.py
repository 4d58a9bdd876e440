"""The parent's side of the child that renders: started once, used many times, killed for sure when it misbehaves.

    with Child() as child:
        text = child.ask("render", template="{{ messages[0].content }}", variables={...}, now=None, output=1000)["text"]

Whatever a template does, the parent goes on: an endless loop, a memory bomb, a huge output or a crash ends in one
`TemplateFailure`, and the next request starts a new child.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onepolicy.errors import ContentError, MissingExtra, UsageError
from onepolicy.tokens.templates import child as child_side

_START = 60.0  # seconds until a fresh interpreter has loaded jinja2, on a busy machine

#: How a render can fail -> what is said of it, before the template's own words.
KINDS: dict[str, str] = {
    "refused": "refuses the conversation",
    "syntax": "is no valid Jinja",
    "undefined": "uses something that is not there",
    "security": "does what the sandbox forbids",
    "error": "fails",
    "cpu": "was stopped: more than {cpu_seconds:g} s of CPU time (an endless loop?)",
    "wall": "was stopped: no answer after {wall_seconds:g} s",
    "memory": "was stopped: more than {memory_mb} MB of memory",
    "output": "was stopped: more than {output_chars:,} characters of output",
    "died": "was stopped: its process died",
    "continue": "cannot continue the final message",
}
#: Kinds after which the child is not trusted any more.
_FATAL = frozenset({"cpu", "wall", "memory", "died"})
#: Kinds that are the limits' doing.
STOPPED = _FATAL | {"output"}


class TemplateFailure(ContentError):
    """A template that gave no text. `kind`: a key of `KINDS`; `line`: of the template, if known; `why`: its words."""

    def __init__(self, kind: str, why: str = "", line: int | None = None, limits: Limits | None = None) -> None:
        self.kind, self.why, self.line = kind, why, line
        what = KINDS[kind].format(**(limits or Limits()).words())
        super().__init__(f"chat template{f', line {line}' if line else ''} {what}{f': {why}' if why else ''}")

    @property
    def stopped(self) -> bool:
        """By a limit, not by itself."""
        return self.kind in STOPPED


@dataclass(frozen=True, slots=True)
class Limits:
    """For one render: CPU seconds (whole ones, rounded up), wall-clock seconds, characters of output. Memory is the
    address space of the whole child, its interpreter (about 30 MB) included. Errors: `UsageError`."""

    cpu_seconds: float = 2.0
    wall_seconds: float = 20.0
    memory_mb: int = 512
    output_chars: int = 16_000_000

    def __post_init__(self) -> None:
        for name, value in self.words().items():
            if not value > 0:
                raise UsageError(f"template limit {name}: got {value}, wanted a number above 0")
        if self.memory_mb < 64:
            raise UsageError(f"template limit memory_mb: got {self.memory_mb}; the child needs 64 to start")

    def words(self) -> dict[str, Any]:
        return {
            "cpu_seconds": self.cpu_seconds,
            "wall_seconds": self.wall_seconds,
            "memory_mb": self.memory_mb,
            "output_chars": self.output_chars,
        }


class Child:
    """One child process, started at the first request and again after it was killed. Threads take turns.

    `starts` counts the processes so far. Errors: `MissingExtra` without jinja2.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise MissingExtra("jinja2", "tokenizers", "rendering a chat template")
        self.limits, self.starts = limits or Limits(), 0
        self._lock, self._owner = threading.Lock(), os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._reaper: Any = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def ask(self, op: str, **request: Any) -> dict[str, Any]:
        """One request and its answer. Errors: `TemplateFailure`."""
        with self._lock:
            self._ready()
            try:
                answer = self._exchange({"op": op, "cpu": self.limits.cpu_seconds, **request})
            except BaseException:  # an interrupt included: a late answer would be taken for the next one's
                self.close()
                raise
        if "error" not in answer:
            return answer
        error = answer["error"]
        if error["kind"] in _FATAL:
            self.close()
        raise TemplateFailure(error["kind"], error["message"], error["line"], self.limits)

    def close(self) -> None:
        """Kills the process and waits for its end. Safe to call twice; a later request starts a new one."""
        if self._reaper is not None:
            self._reaper()
        self._process, self._link, self._reaper = None, None, None

    def _ready(self) -> None:
        if self._owner != os.getpid():  # after a fork the connection belongs to the other process
            if self._reaper is not None:
                self._reaper.detach()
            self._process, self._link, self._reaper, self._owner = None, None, None, os.getpid()
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        memory = self.limits.memory_mb * 2**20
        command = [sys.executable, "-P", child_side.__file__, str(theirs.fileno()), str(memory), *_homes()]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=_environment(),
            )
        self._link, self.starts = ours, self.starts + 1
        self._reaper = weakref.finalize(self, _end, self._process, ours)
        self._receive(time.monotonic() + _START)

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._link is not None
        until = time.monotonic() + self.limits.wall_seconds
        try:
            self._link.settimeout(self.limits.wall_seconds)
            child_side.send(self._link, request)
        except TimeoutError:
            raise TemplateFailure("wall", limits=self.limits) from None
        except OSError:
            self._dead()
        return self._receive(until)

    def _receive(self, until: float) -> dict[str, Any]:
        assert self._link is not None
        try:
            return child_side.receive(_Patient(self._link, until))  # type: ignore[arg-type]
        except TimeoutError:
            raise TemplateFailure("wall", limits=self.limits) from None
        except (EOFError, OSError):
            return self._dead()

    def _dead(self) -> Any:
        """Raises what the kernel's signal says."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.poll()
        if code == -int(getattr(signal, "SIGXCPU", 0) or -1):
            raise TemplateFailure("cpu", limits=self.limits)
        raise TemplateFailure("died", _how(code), limits=self.limits)


class _Patient:
    """A socket whose every read stops at one point in time."""

    def __init__(self, link: socket.socket, until: float) -> None:
        self._link, self._until = link, until

    def recv(self, n: int) -> bytes:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._link.settimeout(left)
        return self._link.recv(n)


def _how(code: int | None) -> str:
    if code is None:
        return "it closed its connection"
    if code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"signal {-code}"


def _end(process: subprocess.Popen[bytes], link: socket.socket) -> None:
    link.close()
    if process.returncode is None:  # not reaped yet, so its group id cannot belong to anybody else
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _homes() -> list[str]:
    """Where jinja2 and what it needs lie, whatever put them on our path."""
    specs = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    return sorted({str(Path(s.origin).parents[1]) for s in specs if s and s.origin})


def _environment() -> dict[str, str]:
    """Little of ours: nothing that a template could read out."""
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "PYTHONHOME", "SYSTEMROOT", "LD_LIBRARY_PATH", "TZ")}
    return {**kept, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
