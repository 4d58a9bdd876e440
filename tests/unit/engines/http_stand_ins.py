"""Small servers in a thread that answer in the layouts of vLLM, SGLang and llama.cpp; no model is behind them.

The SGLang one follows its documentation and source: the real one does not install on a machine without CUDA.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EOS = 9


def logprob(before: int, token: int) -> float:
    """The stand-ins' only knowledge: a log-prob of a token after another."""
    return -1.0 - ((before * 7 + token * 3) % 11) / 4


def logprobs_of(ids: list[int]) -> list[float | None]:
    return [None, *(logprob(a, b) for a, b in itertools.pairwise(ids))]


def drawn(prompt: list[int], n: int, ignore_eos: bool) -> list[int]:
    """Counts on from the prompt's last id; stops at EOS."""
    ids = [(prompt[-1] + 1 + k) % 20 for k in range(n)]
    return ids[: ids.index(EOS) + 1] if EOS in ids and not ignore_eos else ids


@dataclass
class Raw:
    """An answer that is not just 200 and JSON. `cut`: the connection closes after so many bytes."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    trickle: float = 0.0


Route = Callable[[Any], Any]


@dataclass
class StandIn:
    """`routes`: path -> function of the JSON body. `seen`: (path, body, headers) of every request."""

    routes: dict[str, Route]
    seen: list[tuple[str, Any, dict[str, str]]] = field(default_factory=list)
    port: int = 0

    def bodies(self, path: str) -> list[Any]:
        return [body for at, body, _ in self.seen if at == path]


@contextmanager
def serve(routes: dict[str, Route]) -> Iterator[StandIn]:
    stand_in, over = StandIn(routes), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: Any) -> None:
            stand_in.seen.append((self.path, body, dict(self.headers)))
            route = stand_in.routes.get(self.path)
            out = Raw(b'{"detail":"Not Found"}', 404) if route is None else route(body)
            if not isinstance(out, Raw):
                out = Raw(json.dumps(out).encode())
            self.send_response(out.status)
            for name, value in {"Content-Length": str(len(out.body)), **out.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if out.trickle:
                for byte in out.body:
                    self.wfile.write(bytes([byte]))
                    if over.wait(out.trickle):
                        return
            self.wfile.write(out.body[: out.cut])
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads, block_on_close = True, False

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # clients that go away are part of the tests

    with Server(("127.0.0.1", 0), Handler) as server:
        stand_in.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield stand_in
        finally:
            over.set()
            server.shutdown()


def models(*names: str, owner: str = "vllm", length: int = 128) -> Route:
    return lambda _: {"data": [{"id": n, "owned_by": owner, "max_model_len": length} for n in names]}


def vllm_completion(body: Any) -> Any:
    ids = drawn(body["prompt"], body["max_tokens"], body.get("ignore_eos", False))
    values = logprobs_of([*body["prompt"], *ids])[len(body["prompt"]) :]
    if body.get("stream"):
        return Raw(b'data: {"choices":[{"text":"x"}]}\n\ndata: [DONE]\n\n')
    choice: dict[str, Any] = {
        "token_ids": ids,
        "prompt_token_ids": body["prompt"],
        "finish_reason": "stop" if ids[-1] == EOS else "length",
        "logprobs": {"token_logprobs": values, "tokens": [f"token_id:{i}" for i in ids]},
    }
    if body.get("prompt_logprobs") is not None:
        pairs = zip(body["prompt"], logprobs_of(body["prompt"]), strict=True)
        choice["prompt_logprobs"] = [None if lp is None else {str(i): {"logprob": lp}} for i, lp in pairs]
    return {"choices": [choice], "usage": {"prompt_tokens_details": None}}


def vllm_routes() -> dict[str, Route]:
    return {
        "/v1/models": models("tiny"),
        "/version": lambda _: {"version": "0.0"},
        "/tokenize": lambda body: {"tokens": [ord(c) % 20 for c in body.get("prompt") or str(body["messages"])]},
        "/detokenize": lambda body: {"prompt": chr(65 + body["tokens"][0])},
        "/v1/completions": vllm_completion,
    }


def sglang_generate(body: Any) -> Any:
    ids, params = body["input_ids"], body["sampling_params"]
    out = drawn(ids, params["max_new_tokens"], params.get("ignore_eos", False)) if params["max_new_tokens"] else []
    if body.get("stream"):
        return Raw(b'data: {"text":"x"}\n\ndata: [DONE]\n\n')
    every = [[lp, i, None] for lp, i in zip(logprobs_of([*ids, *out]), [*ids, *out], strict=True)]
    stopped = bool(out) and out[-1] == EOS
    return {
        "text": "x",
        "output_ids": out,
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": EOS} if stopped else {"type": "length", "length": len(out)},
            "cached_tokens": 1,
            "input_token_logprobs": every[: len(ids)] if body["logprob_start_len"] == 0 else [],
            "output_token_logprobs": every[len(ids) :],
        },
    }


def sglang_routes() -> dict[str, Route]:
    return {
        "/v1/models": models("tiny", owner="sglang"),
        "/get_server_info": lambda _: {"version": "0.5", "dtype": "bfloat16", "kv_cache_dtype": "auto"},
        "/generate": sglang_generate,
    }


def llama_completion(body: Any) -> Any:
    ids = drawn(body["prompt"], body["max_tokens"], body.get("ignore_eos", False))
    values = logprobs_of([*body["prompt"], *ids])[len(body["prompt"]) :]
    content = [{"id": i, "token": "x", "logprob": lp} for i, lp in zip(ids, values, strict=True)]
    return {"choices": [{"text": "x", "logprobs": {"content": content}, "finish_reason": "length"}]}


def llama_routes() -> dict[str, Route]:
    return {
        "/v1/models": models("tiny", owner="llamacpp"),
        "/v1/completions": llama_completion,
        "/tokenize": lambda body: {"tokens": [ord(c) % 20 for c in body["content"]]},
        "/detokenize": lambda body: {"content": chr(65 + body["tokens"][0])},
    }
