"""Requests to a server: time limits, retries while it is busy, and one clear line for everything that can go wrong.

The standard library's `http.client`; one connection a request. Every wait is bounded: `connect` seconds to reach the
host, `timeout` seconds for a whole answer, retries included.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import ipaddress
import json
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar
from urllib.parse import SplitResult, urlsplit

from onepolicy.errors import ContentError, EngineDied, EngineError, EngineTimeout, UsageError

#: Answers of a server that is alive and has no room: asked again. All others are final.
BUSY = (429, 503)
_LARGEST = 2**28  # bytes of one answer
_PAUSE, _LONGEST_PAUSE = 0.25, 10.0  # seconds before a busy server is asked again

Item = TypeVar("Item")
Out = TypeVar("Out")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: HTTP status, headers that matter, body."""

    status: int
    body: bytes
    retry_after: str | None = None
    location: str | None = None


@dataclass
class Client:
    """A server's address and how it is asked. Threads may share it; `abort` ends all that is under way.

    `key`: sent as a bearer token, and in no message. Errors of requests: `EngineError`, `EngineTimeout`, and
    `EngineDied` for a connection that breaks off; none of them names the server, callers do.
    """

    url: SplitResult
    connect: float = 5.0
    timeout: float = 300.0
    retries: int = 5
    key: str | None = field(default=None, repr=False)
    _live: set[socket.socket] = field(default_factory=set, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _ended: threading.Event = field(default_factory=threading.Event, repr=False)

    def twin(self) -> Client:
        """The same server; what is under way there is aborted apart from what is under way here."""
        return replace(self, _live=set(), _lock=threading.Lock(), _ended=threading.Event())

    def get(self, path: str) -> Any:
        """The JSON of an answer; None where the server has no such endpoint."""
        answer = self._ask("GET", path, None)
        return None if answer.status in (404, 405, 501) else self._json(answer, f"GET {path}")

    def post(self, path: str, body: Any, absent: str = "") -> Any:
        """The JSON of an answer. `absent`: what to do where the server has no such endpoint, as a `UsageError`."""
        answer = self._ask("POST", path, body)
        if absent and answer.status in (404, 405, 501):
            raise UsageError(f"the server has no {path}; {absent}")
        return self._json(answer, f"POST {path}")

    def stream(self, path: str, body: Any) -> Iterator[bytes]:
        """The lines of an answer as they arrive."""
        what, deadline = f"POST {path}", time.monotonic() + self.timeout
        with self._asked("POST", path, body, deadline) as response:
            if response.status != 200:
                self._refused(Answer(response.status, response.read(4096)), what)
            yield from response

    def together(self, fn: Callable[[Item], Out], items: Sequence[Item], n: int) -> list[Out]:
        """`fn` of each item in order, `n` at once. The first failure ends the others at once and is raised."""
        try:
            with concurrent.futures.ThreadPoolExecutor(max(1, min(n, len(items)))) as pool:
                futures = [pool.submit(fn, item) for item in items]
                try:
                    for future in concurrent.futures.as_completed(futures):
                        future.result()
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    self.abort()
                    raise
        finally:
            self._ended.clear()
        return [future.result() for future in futures]

    def abort(self) -> None:
        """Breaks every connection that is open; their threads end with an error, and no new one is opened."""
        self._ended.set()
        with self._lock:
            for sock in self._live:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    # inside

    def _ask(self, method: str, path: str, body: Any) -> Answer:
        """One answer; a busy server is asked again, at most `retries` times and within the time limit."""
        deadline = time.monotonic() + self.timeout
        for attempt in range(self.retries + 1):
            answer = self._once(method, path, body, deadline)
            pause = _pause(answer, attempt)
            if answer.status not in BUSY or attempt == self.retries or time.monotonic() + pause > deadline:
                break
            if self._ended.wait(pause):
                raise EngineError("it was interrupted")
        return answer

    def _once(self, method: str, path: str, body: Any, deadline: float) -> Answer:
        with self._asked(method, path, body, deadline) as response:
            data = _read(response, deadline)
            headers = (response.getheader(name) for name in ("Retry-After", "Location"))
            return Answer(response.status, data, *headers)

    @contextlib.contextmanager
    def _asked(self, method: str, path: str, body: Any, deadline: float) -> Iterator[http.client.HTTPResponse]:
        """The answer to one request, its body not read yet; what breaks is explained."""
        with self._connection() as (connection, prefix), self._explained(f"{method} {path}"):
            response = self._send(connection, method, prefix + path, body, deadline)
            with contextlib.closing(response):
                yield response

    @contextlib.contextmanager
    def _connection(self) -> Iterator[tuple[http.client.HTTPConnection, str]]:
        """An open connection and what stands before its paths."""
        if self._ended.is_set():
            raise EngineError("it was interrupted")
        connection, prefix = _build(self.url, self.connect)
        try:
            try:
                connection.connect()
            except OSError as err:
                self._unreachable(err, connection)
            with self._known(connection.sock):
                yield connection, prefix + self.url.path
        finally:
            connection.close()

    @contextlib.contextmanager
    def _known(self, sock: socket.socket) -> Iterator[None]:
        with self._lock:
            if self._ended.is_set():  # it was aborted while we connected
                raise EngineError("it was interrupted")
            self._live.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._live.discard(sock)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any, deadline: float
    ) -> http.client.HTTPResponse:
        connection.sock.settimeout(max(0.01, deadline - time.monotonic()))
        headers = {"Accept": "application/json", "Connection": "close"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        connection.request(method, path, data, headers)
        return connection.getresponse()

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError as err:
            raise EngineTimeout(f"no answer to {what} within {self.timeout:g} s; allow more time (timeout=)") from err
        except (OSError, http.client.HTTPException) as err:
            kind = type(err).__name__
            raise EngineDied(f"the connection broke off during {what} ({kind}); has the server died?") from err

    def _unreachable(self, err: OSError, connection: http.client.HTTPConnection) -> NoReturn:
        to = f"{connection.host} port {connection.port}"
        if isinstance(err, TimeoutError):
            raise EngineTimeout(f"no connection to {to} within {self.connect:g} s; is the host up?") from err
        if isinstance(err, ConnectionRefusedError):
            raise EngineError(f"{to} refused the connection; is the server running, and is this its port?") from err
        if isinstance(err, ssl.SSLCertVerificationError):
            said = f"{err.verify_message}; SSL_CERT_FILE names certificates of your own"
            raise EngineError(f"the certificate of {to} is not trusted: {said}") from err
        if isinstance(err, ssl.SSLError):
            raise EngineError(f"no TLS with {to}: {err.reason or err}; is it an http server?") from err
        raise EngineError(f"no connection to {to}: {err.strerror or err}") from err

    def _json(self, answer: Answer, what: str) -> Any:
        if answer.status != 200:
            self._refused(answer, what)
        try:
            return json.loads(answer.body)
        except ValueError as err:
            start = self._line(answer.body)
            raise EngineError(f"the answer to {what} is no JSON; it begins {start!r}; is this the API's port?") from err

    def _refused(self, answer: Answer, what: str) -> NoReturn:
        said = self._line(_message(answer.body))
        if answer.location:
            raise EngineError(f"{what} is answered by HTTP {answer.status}: moved to {answer.location}; use that")
        if answer.status in (401, 403):
            how = "it needs an API key; name the environment variable that holds it (api_key_env=)"
            raise UsageError(f"{what} is refused (HTTP {answer.status}: {said}); {how}")
        if answer.status in BUSY:
            raise EngineError(
                f"the server stayed busy (HTTP {answer.status} to {what}: {said}), asked {self.retries + 1}x"
            )
        if "out of vocabulary" in said:
            raise ContentError(f"{said}; the ids were made by another tokenizer or model")
        raise EngineError(f"{what} failed with HTTP {answer.status}: {said}")

    def _line(self, said: bytes | str) -> str:
        """The first line of what a server says, short, and without our key should it repeat it."""
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        text = text.replace(self.key, "(key)") if self.key else text
        return (text.strip().splitlines() or ["nothing"])[0][:300]


def split(scheme: str, target: str) -> SplitResult:
    """The address of `http:` + target. Errors: `UsageError` for one without a host, or with a key or query in it."""
    try:
        url = urlsplit(f"{scheme}:{target}")
        _ = url.port
    except ValueError as err:
        raise UsageError(f"engine {scheme}:{target}: {err}") from err
    if not url.hostname or url.fragment:
        raise UsageError(f"engine {scheme}:{target}: wanted {scheme}://HOST:PORT, as {scheme}://localhost:8000")
    if url.username is not None:
        raise UsageError(
            f"engine {scheme}://{url.hostname}: put the key into the environment and name it: api_key_env="
        )
    return url._replace(path=url.path.rstrip("/").removesuffix("/v1"))


def _build(url: SplitResult, connect: float) -> tuple[http.client.HTTPConnection, str]:
    """The connection, through the environment's proxy for other machines only; and what precedes its paths."""
    host, port = url.hostname or "", url.port
    proxy = None if _is_loopback(host) else _proxy(url.scheme, host)
    if url.scheme == "https":
        if proxy is None:
            return http.client.HTTPSConnection(host, port, timeout=connect), ""
        tunnel = http.client.HTTPSConnection(proxy.hostname or "", proxy.port, timeout=connect)
        tunnel.set_tunnel(host, port or 443)
        return tunnel, ""
    if proxy is None:
        return http.client.HTTPConnection(host, port, timeout=connect), ""
    through = http.client.HTTPConnection(proxy.hostname or "", proxy.port, timeout=connect)
    return through, f"http://{url.netloc}"


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _proxy(scheme: str, host: str) -> SplitResult | None:
    address = urllib.request.getproxies().get(scheme)
    if not address or urllib.request.proxy_bypass(host):
        return None
    return urlsplit(address if "//" in address else f"http://{address}")


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The whole body, in pieces: a server that only trickles is late as well."""
    data, left = bytearray(), response.length
    while left is None or left > 0:
        part = response.read1(2**16 if left is None else min(2**16, left))
        if not part:
            break
        data += part
        left = None if left is None else left - len(part)
        if len(data) > _LARGEST:
            raise EngineError(f"its answer is longer than {_LARGEST >> 20} MiB")
        if time.monotonic() > deadline:
            raise TimeoutError
    if left:
        raise http.client.IncompleteRead(b"", left)
    return bytes(data)


def _pause(answer: Answer, attempt: int) -> float:
    try:
        asked = float(answer.retry_after or 0)
    except ValueError:  # a date
        asked = 0.0
    return min(_LONGEST_PAUSE, max(asked, _PAUSE * 2**attempt))


def _message(body: bytes) -> bytes | str:
    """What a server says of an error: the text inside the usual JSON layouts, else the body."""
    try:
        said = json.loads(body)
    except ValueError:
        return body
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and said.get(key):
            said = said[key]
    return said if isinstance(said, str) else json.dumps(said)
