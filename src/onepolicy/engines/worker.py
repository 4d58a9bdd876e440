"""An engine in a child process: a check survives its death, and it is killed for sure.

`WorkerEngine` has the methods of an engine. Each request has a time limit; a child that dies, hangs or talks
nonsense ends in one clear error, and its whole process group (vLLM starts children of its own) goes with it.
Work is sent shard by shard, so what was scored before a death is kept: see `shards.score_shards`.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import onepolicy
from onepolicy import errors
from onepolicy.engines import wire
from onepolicy.engines.base import SamplingParams, using_of
from onepolicy.engines.shards import shard_slices
from onepolicy.errors import EngineDied, EngineError, EngineTimeout, MissingExtra, OnepolicyError, UsageError
from onepolicy.rollouts import Rollouts, concat_scorings
from onepolicy.types import Scoring

_TICK = 0.2  # seconds between looks at the child while waiting
_START = 60.0  # seconds until a fresh interpreter says hello
_FAREWELL = 10.0  # seconds an idle engine gets to close by itself
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class WorkerEngine:
    """The engine class `engine` (any, heavy or not) with parsed `options`, in a process of its own.

    `timeout`: seconds for each request, loading included. `log`: file that takes the child's stdout and stderr; by
    default a temporary one that is kept only when something went wrong. `python`: the child's interpreter.

    Errors: `EngineDied`, `EngineTimeout`, and whatever the engine itself raises, as the same class.
    """

    HEAVY = True

    def __init__(
        self,
        engine: type[Any],
        target: str,
        options: Mapping[str, Any],
        *,
        timeout: float = 600.0,
        log: str | Path | None = None,
        python: str = sys.executable,
    ) -> None:
        self.NAME, self.SWITCHES = engine.NAME, engine.SWITCHES
        self.SAMPLES, self.SCORES = engine.SAMPLES, engine.SCORES
        self.timeout, self._busy = timeout, False
        self._process: subprocess.Popen[bytes] | None = None
        self._what = f"engine {engine.NAME}:{target}"
        self.log, self._log_is_ours = (_new_log(engine.NAME), True) if log is None else (Path(log), False)
        self._python, self._elsewhere = python, python != sys.executable
        self._scratch = tempfile.mkdtemp(prefix="onepolicy-")  # sockets and files that a killed engine leaves behind
        self._link, self._theirs = socket.socketpair()
        try:
            self._start(dict(getattr(engine, "ENVIRONMENT", {})))
            path = [] if self._elsewhere else sys.path
            name = f"{engine.__module__}:{engine.__qualname__}"
            self._ask("load", engine=name, target=target, options=dict(options), path=[p for p in path if p])
        except BaseException:
            self.kill()
            raise

    # the methods of an engine

    def fingerprint(self) -> Mapping[str, Any]:
        return self._ask("fingerprint")

    def encode(self, prompts: Sequence[str | list[dict[str, str]]]) -> list[list[int]]:
        return self._ask("encode", prompts=list(prompts))

    def decode(self, ids: Sequence[int]) -> list[str]:
        return self._ask("decode", ids=[int(i) for i in ids])

    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Rollouts:
        """As the engine's own. One request: `shards.sample_shards` splits large work."""
        return self._ask("sample", prompts=[[int(i) for i in p] for p in prompts], params=params)

    def score(
        self, rollouts: Rollouts, *, distributions: bool = False, using: Mapping[str, Any] | None = None
    ) -> Scoring:
        """As the engine's own, sent in shards so that the time limit is one shard's."""
        using = using_of(self, using)
        parts = [rollouts.take(range(at.start, at.stop)) for at in shard_slices(rollouts.lengths)] or [rollouts]
        done: list[Scoring] = [
            self._ask("score", rollouts=_bare(p), distributions=distributions, using=using) for p in parts
        ]
        same = [replace(scoring, scoring_id=done[0].scoring_id) for scoring in done]
        return concat_scorings(same, [p.n_tokens for p in parts])

    def close(self) -> None:
        """Lets an idle engine close itself, then kills its process group. Safe to call twice."""
        if self._process is None:
            return
        try:
            with contextlib.suppress(OnepolicyError):  # it is killed next; nothing is asked of it any more
                if not self._busy:
                    self._ask("close", limit=_FAREWELL)
        finally:
            self.kill()

    def kill(self) -> int | None:
        """Kills the process group at once; the child's return code (negative: the signal), None if there is none."""
        process, self._process = self._process, None
        self._link.close()
        code = None
        if process is not None:
            # the leader is not reaped yet, so its group id cannot belong to anybody else
            _signal_group(process.pid)
            code = process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)
        if self._log_is_ours:
            self.log.unlink(missing_ok=True)
        return code

    @property
    def pid(self) -> int | None:
        """The child's process id, which is also its process group's."""
        return None if self._process is None else self._process.pid

    # the process

    def _start(self, environment: dict[str, str]) -> None:
        own = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", "TMPDIR": self._scratch}
        env = {**_kept_caches(), **environment, **os.environ, **own}
        if self._elsewhere:
            env.pop("PYTHONHOME", None)  # this interpreter's own library
        else:
            roots = [str(Path(onepolicy.__file__).parents[1]), env.get("PYTHONPATH", "")]
            env["PYTHONPATH"] = os.pathsep.join(r for r in roots if r)
        # -P: a folder called `vllm` or a `types.py` in the working directory must not be imported
        command = [self._python, "-P", "-m", "onepolicy.engines.worker_main", str(self._theirs.fileno()), self._scratch]
        with self._theirs as theirs, self.log.open("wb") as out:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env=env,
                )
            except OSError as err:
                raise UsageError(
                    f"{self._what}: its interpreter {self._python} cannot be started: {err.strerror or err}; "
                    "python= names the bin/python of an environment"
                ) from err
        self._check_hello(self._receive("start", min(_START, self.timeout)))

    def _check_hello(self, message: Any) -> None:
        hello = message.get("hello", {})
        got = (hello.get("version"), hello.get("protocol"))
        if got != (onepolicy.__version__, wire.PROTOCOL):
            raise EngineError(
                f"{self._what}: its process runs onepolicy {got[0]} (protocol {got[1]}), this one "
                f"{onepolicy.__version__} (protocol {wire.PROTOCOL}); install the same version in both environments"
            )

    def _ask(self, op: str, *, limit: float | None = None, **args: Any) -> Any:
        """One request and its answer. Any failure of the process itself kills it."""
        if self._process is None:
            raise EngineError(f"{self._what}: it is closed")
        if self._busy:  # the answer to an interrupted request would be taken for this one's
            self.kill()
            raise EngineError(f"{self._what}: its last request was interrupted, so it was closed; open it again")
        limit = self.timeout if limit is None else limit
        frame = wire.pack({"op": op, "args": args})
        self._busy = True
        self._send(frame, op, limit)
        answer = self._receive(op, limit)
        self._busy = False
        if "error" in answer:
            raise self._error(answer["error"])
        return answer["result"]

    def _send(self, frame: list[Any], op: str, limit: float) -> None:
        self._link.settimeout(limit)
        try:
            for buffer in frame:
                self._link.sendall(buffer)
        except TimeoutError:
            self._late(op, limit)
        except OSError:
            self._dead(op)

    def _receive(self, op: str, limit: float) -> Any:
        deadline = time.monotonic() + limit

        def read(n: int) -> bytearray:
            out = bytearray(n)
            view, at = memoryview(out), 0
            while at < n:
                at += self._some(view[at:], op, deadline, limit)
            return out

        try:
            return wire.unpack(read)
        except (ValueError, TypeError, KeyError, IndexError) as err:
            self.kill()
            raise EngineError(f"{self._what}: a malformed answer to {op} ({err}), so it was killed") from err

    def _some(self, view: memoryview, op: str, deadline: float, limit: float) -> int:
        """Reads what there is, at least one byte. A dead child is noticed even if its own children hold the socket."""
        while True:
            gone = self._ended()
            self._link.settimeout(_TICK)
            try:
                got = self._link.recv_into(view)
                return got or self._dead(op)
            except TimeoutError:
                if gone:
                    self._dead(op)
                if time.monotonic() > deadline:
                    self._late(op, limit)
            except OSError:
                self._dead(op)

    def _ended(self) -> bool:
        """Whether the child has ended, without reaping it."""
        assert self._process is not None
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def _dead(self, op: str) -> NoReturn:
        deadline = time.monotonic() + 2.0  # the socket closes a moment before the process has ended
        while not self._ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        ended, lacks = self._ended(), self._lacks() if op == "start" else None
        self._log_is_ours = self._log_is_ours and bool(lacks)  # else the message names the log, so it is kept
        code = self.kill()
        if lacks:
            raise UsageError(f"{self._what}: {lacks}")
        how = _how(code) if ended else "closed its connection"
        raise EngineDied(f"{self._what}: its process {how} during {op}; {self._log_line()}")

    def _late(self, op: str, limit: float) -> NoReturn:
        self._log_is_ours = False
        self.kill()
        raise EngineTimeout(
            f"{self._what}: no answer to {op} within {limit:g} s, so it was killed; allow more time; {self._log_line()}"
        )

    def _error(self, error: Mapping[str, Any]) -> OnepolicyError:
        """The child's error as the same class here. Built without its constructor, whose signature may differ."""
        cls = getattr(errors, str(error["type"]), None)
        if not (isinstance(cls, type) and issubclass(cls, OnepolicyError)):
            cls = EngineError
        text = f"{self._what}: {error['message']}; see {self.log}" if error.get("unexpected") else str(error["message"])
        if self._elsewhere and issubclass(cls, MissingExtra):
            text += f", with {self._python} -m pip"
        self._log_is_ours = self._log_is_ours and not error.get("unexpected")
        out = cls.__new__(cls, text)
        out.args = (text,)
        for name, value in error["attributes"].items():
            setattr(out, name, value)
        return out

    def _lacks(self) -> str | None:
        """What the interpreter's environment lacks to say hello at all, and how to install it there."""
        said = self._log_tail()
        if "Unknown option: -P" in said:
            return f"{self._python} is older than Python 3.11; make an environment with a newer one"
        missing = re.findall(r"No module named '?([A-Za-z_]\w*)", said)
        if not missing:
            return None
        package = f"onepolicy=={onepolicy.__version__}" if missing[-1] == "onepolicy" else missing[-1]
        other = " with this worker (another version)" if re.search(r"No module named '?onepolicy\.", said) else ""
        where = f"the environment of {self._python} has no {missing[-1]}{other}"
        return f"{where}; install it there: {self._python} -m pip install {package}"

    def _log_line(self) -> str:
        return f"see {self.log}, whose last line is {self._last_line()}"

    def _last_line(self) -> str:
        lines = re.split(r"[\r\n]", self._log_tail())  # \r: progress bars
        written = [line.strip() for line in lines if line.strip()]
        return repr(written[-1][:300]) if written else "missing"

    def _log_tail(self) -> str:
        """The end of the log as text, empty if there is none."""
        try:
            with self.log.open("rb") as f:
                f.seek(max(0, f.seek(0, os.SEEK_END) - 8192))
                return _ANSI.sub("", f.read().decode(errors="replace"))
        except OSError:
            return ""


def _new_log(name: str) -> Path:
    descriptor, path = tempfile.mkstemp(prefix=f"onepolicy-{name}-", suffix=".log")
    os.close(descriptor)
    return Path(path)


def _bare(rollouts: Rollouts) -> Rollouts:
    """Without scorings: a scorer needs the ids and what was declared, not what others said."""
    return Rollouts(rollouts.offsets, rollouts.tokens, rollouts.records, rollouts.lists)


def _kept_caches() -> dict[str, str]:
    """Compiled kernels are worth keeping, so they do not go to the scratch directory. torch's own default place."""
    user = re.sub(r"\W", "_", getpass.getuser())
    return {"TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), f"torchinductor_{user}")}


def _signal_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _how(code: int | None) -> str:
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = " (often: out of memory)" if name == "SIGKILL" else ""
    return f"was killed by signal {-code}, {name}{hint},"
