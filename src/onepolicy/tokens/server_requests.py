"""Requests to a tokenizer server: JSON over HTTP with a time limit, and one clear line for what goes wrong."""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from onepolicy.errors import EngineError, EngineTimeout, UsageError

_LARGEST = 2**28  # bytes of one answer
_TIMEOUT = 30.0


class _Still(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: a key would go along."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Server:
    """An address and how it is asked. `key` is sent as a bearer token and shown in no message."""

    address: str
    timeout: float = _TIMEOUT
    key: str | None = field(default=None, repr=False)

    @classmethod
    def at(cls, address: str, options: Mapping[str, str]) -> Server:
        """Errors: `UsageError` for what is no address, a time limit that is none, or a key that is not there."""
        try:
            url = urlsplit(address)
            _ = url.port
        except ValueError as err:
            raise UsageError(f"tokenizer {address}: {err}") from err
        if url.scheme not in ("http", "https") or not url.hostname or url.username is not None:
            raise UsageError(f"tokenizer {address}: wanted http://HOST:PORT, and a key only by api_key_env=VARIABLE")
        variable = options.get("api_key_env")
        if variable and not os.environ.get(variable):
            raise UsageError(f"tokenizer {address}: the environment has no {variable}, which api_key_env names")
        key = os.environ[variable] if variable else None
        return cls(address.rstrip("/").removesuffix("/v1"), _seconds(address, options.get("timeout")), key)

    def __str__(self) -> str:
        return f"tokenizer server {self.address}"

    def get(self, path: str) -> Any:
        """The JSON of an answer, None where the server has no such endpoint or gives nothing of use."""
        try:
            return self._asked("GET", path, None)
        except EngineTimeout:
            raise
        except (EngineError, UsageError):
            return None

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON of an answer. Errors: `UsageError` for no such endpoint, `EngineError`, `EngineTimeout`."""
        return self._asked("POST", path, json.dumps(body).encode())

    def _asked(self, method: str, path: str, data: bytes | None) -> Any:
        what = f"{method} {path}"
        try:
            with self._opener().open(self._request(method, path, data), timeout=self.timeout) as answer:
                content = answer.read(_LARGEST + 1)
        except urllib.error.HTTPError as err:
            raise self._refused(what, err) from None
        except (OSError, http.client.HTTPException) as err:
            raise self._unreachable(what, err) from err
        if len(content) > _LARGEST:
            raise EngineError(f"{self}: its answer to {what} is longer than {_LARGEST >> 20} MiB")
        try:
            return json.loads(content)
        except ValueError as err:
            raise EngineError(f"{self}: its answer to {what} is no JSON; it begins {self._line(content)!r}") from err

    def _request(self, method: str, path: str, data: bytes | None) -> urllib.request.Request:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        return urllib.request.Request(self.address + path, data=data, headers=headers, method=method)

    def _opener(self) -> urllib.request.OpenerDirector:
        """Through the environment's proxy for other machines only."""
        proxies = [urllib.request.ProxyHandler({})] if _is_loopback(self.address) else []
        return urllib.request.build_opener(_Still, *proxies)

    def _refused(self, what: str, err: urllib.error.HTTPError) -> EngineError | UsageError:
        with err:
            said = self._line(err.read(4096))
        if err.code in (404, 405, 501):
            return UsageError(
                f"{self} has no {what} (HTTP {err.code}: {said}); is it a vLLM, SGLang or llama.cpp server?"
            )
        if err.code in (401, 403):
            return UsageError(
                f"{self}: {what} is refused (HTTP {err.code}: {said}); name the key with api_key_env=VARIABLE"
            )
        return EngineError(f"{self}: {what} failed with HTTP {err.code}: {said}")

    def _unreachable(self, what: str, err: Exception) -> EngineError:
        inner = getattr(err, "reason", err)
        if isinstance(inner, TimeoutError):
            return EngineTimeout(f"{self}: no answer to {what} within {self.timeout:g} s; allow more with timeout=")
        if isinstance(inner, ConnectionRefusedError):
            return EngineError(f"{self} refused the connection; is it running, and is this its port?")
        return EngineError(f"{self}: {what} failed: {self._line(str(inner) or type(inner).__name__)}")

    def _line(self, said: bytes | str) -> str:
        """The first line of what a server says, short, and without our key should it repeat it."""
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        text = text.replace(self.key, "(key)") if self.key else text
        return (text.strip().splitlines() or ["nothing"])[0][:200]


def _seconds(address: str, text: str | None) -> float:
    try:
        seconds = float(text) if text else _TIMEOUT
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e6:
        raise UsageError(f"tokenizer {address}: timeout: got {text!r}, wanted seconds")
    return seconds


def _is_loopback(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
