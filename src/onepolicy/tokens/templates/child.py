"""The child that renders templates: `python -P child.py FD MEMORY HOME...`, started by `process.Child`.

It holds the Jinja environment that transformers gives to chat templates and answers one request at a time over the
socket FD. It imports nothing of onepolicy, so that it starts quickly, and it takes its limits before it reads the first
template: address space once, CPU seconds and output anew for each render. A limit of the kernel kills it; the parent
says which one it was. When the parent goes away it ends.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Iterable
from datetime import datetime
from typing import Any, ClassVar

LENGTH = struct.Struct("!Q")
_KEPT_TEMPLATES = 32  # compiled ones, oldest out first
_MESSAGE = 300  # characters of a template's own message that are passed on


class TooLong(Exception):
    """The output passed its limit."""


class Clock:
    """What `strftime_now` reads: the time given with the request, or the real one."""

    frozen: datetime | None = None

    def strftime(self, form: str) -> str:
        return (self.frozen or datetime.now()).strftime(form)


def tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As transformers' filter: no HTML escapes, and the options of `json.dumps`."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def make_environment(clock: Clock) -> Any:
    """`ImmutableSandboxedEnvironment` with the extensions, filters and globals that transformers gives."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Refused(jinja2.TemplateError):
        """The template called `raise_exception`."""

    def raise_exception(message: Any) -> None:
        raise Refused(str(message))

    extensions = [make_generation_tag(), loopcontrols]
    environment: Any = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = clock.strftime
    environment.refused = Refused
    return environment


def make_generation_tag() -> Any:
    """The tag `generation` ... `endgeneration`: its text stays, and `environment.spans` gets its [start, stop)."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags: ClassVar[set[str]] = {"generation"}

        def __init__(self, environment: Any) -> None:
            super().__init__(environment)
            environment.extend(written=0, spans=[])

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

        @jinja2.pass_eval_context
        def _note(self, context: Any, caller: Any) -> str:
            text, start = caller(), self.environment.written  # type: ignore[attr-defined]
            self.environment.spans.append([start, start + len(text)])  # type: ignore[attr-defined]
            return text

    return GenerationTag


class Host:
    """The environment, the compiled templates, and the requests that are answered."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.environment = make_environment(self.clock)
        self._compiled: dict[str, Any] = {}

    def render(self, template: str, variables: dict[str, Any], now: str | None, output: int) -> dict[str, Any]:
        self.clock.frozen = None if now is None else datetime.fromisoformat(now)
        compiled = self._compile(template)
        self.environment.written, self.environment.spans = 0, []
        return {"text": self._collect(compiled.generate(**variables), output), "spans": self.environment.spans}

    def variables(self, template: str) -> dict[str, Any]:
        """Names that the template reads from outside."""
        from jinja2 import meta, nodes

        tree = self.environment.parse(template)
        stored = {n.name for n in tree.find_all(nodes.Name) if n.ctx == "store"}
        asked = {n.node.name for n in tree.find_all((nodes.Test, nodes.Filter)) if _asks_whether_given(n)}
        # Jinja also lists names that are set in one branch and read behind it
        names = meta.find_undeclared_variables(tree) - (stored - asked)
        return {"names": sorted(names)}

    def _compile(self, template: str) -> Any:
        if template not in self._compiled:
            if len(self._compiled) >= _KEPT_TEMPLATES:
                self._compiled.pop(next(iter(self._compiled)))
            self._compiled[template] = self.environment.from_string(template)
        return self._compiled[template]

    def _collect(self, blocks: Iterable[str], limit: int) -> str:
        out: list[str] = []
        for block in blocks:
            out.append(block)
            self.environment.written += len(block)
            if self.environment.written > limit:
                raise TooLong
        return "".join(out)


def _asks_whether_given(node: Any) -> bool:
    """`x is defined` and `x | default(...)`: x may come from outside although the template sets it too."""
    return node.name in ("defined", "undefined", "default", "d") and type(node.node).__name__ == "Name"


def answer(host: Host, request: dict[str, Any]) -> dict[str, Any]:
    """The result of a request, or {"error": {"kind", "message", "line"}}."""
    try:
        return getattr(host, {"render": "render", "variables": "variables"}[request.pop("op")])(**request)
    except MemoryError:
        return {"error": {"kind": "memory", "message": "", "line": None}}
    except Exception as err:
        kind, line = kind_of(err, host.environment), line_of(err)
        return {"error": {"kind": kind, "message": first_line(err, kind), "line": line}}


def kind_of(err: Exception, environment: Any) -> str:
    """A key of `process.KINDS`."""
    import jinja2
    from jinja2.exceptions import SecurityError

    kinds: list[tuple[Any, str]] = [
        (environment.refused, "refused"),
        (TooLong, "output"),
        (jinja2.TemplateSyntaxError, "syntax"),
        (SecurityError, "security"),
        (jinja2.UndefinedError, "undefined"),
    ]
    return next((kind for cls, kind in kinds if isinstance(err, cls)), "error")


def first_line(err: Exception, kind: str) -> str:
    text = " ".join(str(getattr(err, "message", None) or err).split())[:_MESSAGE]
    return f"{type(err).__name__}: {text}" if kind == "error" else text


def line_of(err: BaseException) -> int | None:
    """The innermost line of the template in the traceback; Jinja maps generated code back to it."""
    line, trace = getattr(err, "lineno", None), err.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def limit_process(memory: int) -> None:
    """Address space, and no files: a template has no business there. A limit that the system lacks is left out."""
    try:
        import resource
    except ImportError:
        return
    wanted = {"RLIMIT_AS": memory, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}
    for name, value in wanted.items():
        if hasattr(resource, name):
            _, hard = resource.getrlimit(getattr(resource, name))
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(getattr(resource, name), (value, value))


def limit_cpu(seconds: float) -> None:
    """The kernel ends this process (SIGXCPU) after so many more seconds, rounded up to a whole one."""
    try:
        import resource
    except ImportError:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(time.process_time() + seconds)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def receive(link: socket.socket) -> Any:
    """One message: its length in 8 bytes, then JSON. Errors: `EOFError` when the other side is gone."""

    def exactly(n: int) -> bytes:
        out = bytearray()
        while len(out) < n:
            got = link.recv(min(n - len(out), 1 << 20))
            if not got:
                raise EOFError
            out += got
        return bytes(out)

    return json.loads(exactly(LENGTH.unpack(exactly(LENGTH.size))[0]))


def send(link: socket.socket, message: Any) -> None:
    body = json.dumps(message).encode()
    link.sendall(LENGTH.pack(len(body)) + body)


def main(fd: int, memory: int, homes: list[str]) -> None:
    """Serves until the parent is gone. `homes`: where jinja2 lies, behind our own path."""
    sys.path.extend(home for home in homes if home not in sys.path)
    link = socket.socket(fileno=fd)
    host = Host()
    host.environment.from_string("{% for m in messages %}{{ m.role }}{% endfor %}").render(messages=[])  # late imports
    limit_process(memory)
    send(link, {"hello": 1})
    with contextlib.suppress(EOFError, OSError):
        while True:
            request = receive(link)
            limit_cpu(request.pop("cpu"))
            reply(link, answer(host, request))
    os._exit(0)


def reply(link: socket.socket, message: dict[str, Any]) -> None:
    try:
        send(link, message)
    except MemoryError:
        send(link, {"error": {"kind": "memory", "message": "", "line": None}})


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
