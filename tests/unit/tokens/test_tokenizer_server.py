"""A server's tokenizer in the three forms, by servers in a thread that answer like vLLM, SGLang and llama.cpp.

Behind each stands the packaged model's tokenizer, so the same ids and texts must come back. The real vLLM is asked in
`tests/engines/test_tokenizer_server_live.py`.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from onepolicy.errors import ContentError, EngineError, EngineTimeout, UnknownName, UsageError
from onepolicy.tokens.base import PARTS
from onepolicy.tokens.open import open_tokenizer
from onepolicy.tokens.server import FORMS, ServerTokenizer
from tokenizer_families import opened, random_ids, texts

Routes = dict[str, Callable[[Any], Any]]
INFO = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}


class Refused(Exception):
    """An answer other than 200: status, body, headers."""


def vllm() -> Routes:
    tiny = opened("tiny")
    return {
        "/tokenize": lambda body: {
            "tokens": tiny.encode([body["prompt"]])[0],
            "count": 0,
            "max_model_len": 9,
            "token_strs": None,
        },
        "/detokenize": lambda body: {"prompt": tiny.decode([body["tokens"]])[0]},
        "/tokenizer_info": lambda _: {**INFO, "added_tokens_decoder": {"1": "<|im_start|>", "2": "<|im_end|>"}},
    }


def sglang() -> Routes:
    tiny = opened("tiny")

    def detokenize(body: Any) -> Any:
        lists = body["tokens"] if body["tokens"] and isinstance(body["tokens"][0], list) else [body["tokens"]]
        out = tiny.decode(lists, skip_special=body.get("skip_special_tokens", True))
        return {"text": out if lists is body["tokens"] else out[0]}

    def tokenize(body: Any) -> Any:
        many = isinstance(body["prompt"], list)
        ids = tiny.encode(body["prompt"] if many else [body["prompt"]])
        return {"tokens": ids if many else ids[0], "count": 0, "max_model_len": -1}

    return {"/tokenize": tokenize, "/detokenize": detokenize}


def llamacpp() -> Routes:
    tiny = opened("tiny")

    def tokenize(body: Any) -> Any:
        [ids] = tiny.encode([body["content"]], parse_special=body.get("parse_special", True))
        return {"tokens": [1, *ids] if body.get("add_special") else ids}

    return {
        "/tokenize": tokenize,
        "/detokenize": lambda body: {"content": tiny.decode([body["tokens"]])[0]},
        "/props": lambda _: INFO,
        "/v1/models": lambda _: {"data": [{"id": "m", "meta": {"n_vocab": 512}}]},
    }


@contextmanager
def serving(routes: Routes, seen: list[Any] | None = None) -> Iterator[str]:
    """A server on a free port; `seen` gets (path, body, headers) of every request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            if seen is not None:
                seen.append((self.path, body, dict(self.headers)))
            status, headers = 200, {}
            try:
                answer = routes[self.path](body)
            except KeyError:
                status, answer = 404, {"detail": "Not Found"}
            except Refused as err:
                status, answer, headers = err.args
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            with contextlib.suppress(BrokenPipeError):  # it was asked to hurry, and is late
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


KINDS: dict[str, Callable[[], Routes]] = {"vllm": vllm, "sglang": sglang, "llamacpp": llamacpp}


@pytest.fixture(params=KINDS)
def server(request: pytest.FixtureRequest) -> Iterator[ServerTokenizer]:
    with serving(KINDS[request.param]()) as url:
        tokenizer: Any = open_tokenizer(f"{url}/v1")
        assert tokenizer.form == request.param and tokenizer.name == f"{url}/v1"
        yield tokenizer


def test_ids_and_texts_are_those_of_the_tokenizer_behind_it(server: ServerTokenizer) -> None:
    tiny = opened("tiny")
    assert server.encode(texts()) == tiny.encode(texts()) and server.encode([]) == []
    ids = [*random_ids(tiny, 40), [], [1]]
    assert server.decode(ids) == tiny.decode(ids) and server.decode([]) == [] and server.decode([[]]) == [""]


def test_a_mode_that_it_does_not_have_is_a_usage_error(server: ServerTokenizer) -> None:
    tiny, form = opened("tiny"), FORMS[server.form]
    if form.parse:
        assert server.encode(["a<|im_end|>"], parse_special=False) == tiny.encode(["a<|im_end|>"], parse_special=False)
    else:
        with pytest.raises(UsageError, match=f"form {server.form} always reads special tokens"):
            server.encode(["a"], parse_special=False)
    if form.skip:
        assert server.decode([[67, 2]], skip_special=True) == ["a"]
    else:
        with pytest.raises(UsageError, match=f"form {server.form} always shows special tokens"):
            server.decode([[67, 2]], skip_special=True)


def test_what_it_can_tell_of_the_vocabulary(server: ServerTokenizer) -> None:
    tiny = opened("tiny")
    assert server.size == 512
    assert [server.exists(i) for i in (0, 511, 512, -1, 2**33, True)] == [True, True, False, False, False, False]
    whole = [i for i in range(0, 512, 37) if "\ufffd" not in tiny.decode([[i]])[0]]
    assert [server.token_bytes(i) for i in whole] == [tiny.token_bytes(i) for i in whole]
    assert server.token_bytes(600) is None


def test_its_parts_say_what_is_known(server: ServerTokenizer) -> None:
    parts = server.parts()
    assert sorted(parts) == sorted(PARTS) and all(p.known or p.why for p in parts.values())
    known = {name for name, part in parts.items() if part.known}
    told = {"special_ids", "template_defaults", "chat_template"}
    assert known == {"post_processor"} | (set() if server.form == "sglang" else told)
    before = {"before": ["<|im_start|>"], "after": []} if server.form == "llamacpp" else None
    assert parts["post_processor"].content == before
    if server.form != "sglang":
        assert server.special_ids() == {"bos": 1, "eos": 2, "pad": None, "unk": None}
        assert server.chat_template == "{{ messages }}"
    assert [t.content for t in server.added.values()] == (INFO_ADDED if server.form == "vllm" else [])


INFO_ADDED = ["<|im_start|>", "<|im_end|>"]


def test_what_is_no_text_or_id_never_reaches_it(server: ServerTokenizer) -> None:
    with pytest.raises(ContentError, match="text 0: half of a surrogate pair"):
        server.encode(["\ud800"])
    with pytest.raises(ContentError, match="ids 0, position 1: got -1"):
        server.decode([[1, -1]])


def test_the_key_and_the_model_go_along_and_the_key_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sesame")
    seen: list[Any] = []

    def refuse(_: Any) -> Any:
        raise Refused(401, {"error": "wrong key sesame"}, {})

    with serving(vllm(), seen) as url:
        tokenizer = ServerTokenizer(f"{url}?api_key_env=MY_KEY&model=tiny&form=vllm")
        tokenizer.encode(["a"])
    assert seen[0][1]["model"] == "tiny" and seen[0][2]["Authorization"] == "Bearer sesame"
    with serving({"/tokenize": refuse}) as url, pytest.raises(UsageError) as caught:
        ServerTokenizer(f"{url}?api_key_env=MY_KEY")
    assert "wrong key (key)" in str(caught.value) and "sesame" not in str(caught.value)


def moved(_: Any) -> Any:
    raise Refused(307, b"", {"Location": "http://elsewhere.invalid/tokenize"})


def busy(_: Any) -> Any:
    raise Refused(503, b"loading\nmore", {})


@pytest.mark.parametrize(
    ("routes", "error", "says"),
    [
        ({}, UsageError, r"has no POST /tokenize \(HTTP 404.*is it a vLLM, SGLang or llama.cpp server"),
        ({"/tokenize": moved}, EngineError, "POST /tokenize failed with HTTP 307"),
        ({"/tokenize": busy}, EngineError, "failed with HTTP 503: loading$"),
        ({"/tokenize": lambda _: b"<html>"}, EngineError, "is no JSON; it begins '<html>'"),
        ({"/tokenize": lambda _: {"ids": [1]}}, EngineError, "wanted an object with tokens"),
        ({"/tokenize": lambda _: [1]}, EngineError, "wanted an object with tokens"),
        ({"/tokenize": lambda _: {"tokens": [1]}}, UsageError, "has no POST /detokenize"),
        (
            {"/tokenize": lambda _: {"tokens": [1]}, "/detokenize": lambda _: {"words": "a"}},
            UsageError,
            r"answers with words, wanted one of prompt \(vllm\), text \(sglang\), content \(llamacpp\)",
        ),
    ],
)
def test_a_server_of_another_kind_is_an_error_of_one_line(routes: Routes, error: type, says: str) -> None:
    with serving(routes) as url, pytest.raises(error, match=says) as caught:
        open_tokenizer(url)
    assert url in str(caught.value) and "\n" not in str(caught.value)


def test_fewer_answers_than_texts_are_not_taken() -> None:
    with serving({**sglang(), "/tokenize": lambda _: {"tokens": [[1]]}}) as url:
        tokenizer = ServerTokenizer(f"{url}?form=sglang")
        with pytest.raises(EngineError, match="1 answers to 2 texts"):
            tokenizer.encode(["a", "b"])


def test_a_server_that_is_late_or_not_there() -> None:
    with serving({"/tokenize": lambda _: time.sleep(3)}) as url:
        start = time.monotonic()
        with pytest.raises(EngineTimeout, match=r"no answer to POST /tokenize within 0\.2 s"):
            open_tokenizer(f"{url}?timeout=0.2")
        assert time.monotonic() - start < 2.8
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EngineError, match="refused the connection; is it running"):
        open_tokenizer(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("target", "error", "says"),
    [
        ("http://", UsageError, "wanted http://HOST:PORT"),
        ("http://me:secret@host", UsageError, "a key only by api_key_env"),
        ("http://host:port", UsageError, "[Pp]ort"),
        ("http://host?timeout=no", UsageError, "timeout: got 'no', wanted seconds"),
        ("http://host?api_key_env=NO_SUCH_KEY", UsageError, "the environment has no NO_SUCH_KEY"),
        ("http://host?form=triton", UnknownName, "unknown form of a tokenizer server 'triton'"),
        ("http://host?speed=1", UnknownName, "option of the tokenizer backend 'server' 'speed'"),
    ],
)
def test_an_address_that_is_none(target: str, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        open_tokenizer(target)
