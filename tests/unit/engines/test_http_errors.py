"""Everything that a server or the way to it can do wrong ends in one clear line, in bounded time."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from http_stand_ins import Raw, llama_routes, logprobs_of, models, serve, sglang_routes, vllm_routes
from test_http import address, fixed

from onepolicy.engines.base import SamplingParams
from onepolicy.engines.open import open_engine
from onepolicy.errors import (
    ContentError,
    EngineDied,
    EngineError,
    EngineTimeout,
    OnepolicyError,
    UnknownName,
    UsageError,
)

COMPLETIONS = "/v1/completions"


def scored(routes: dict[str, Any], rows: tuple[list[int], ...] = ([1, 2, 3],), **switches: object) -> OnepolicyError:
    """What is raised when the rows are scored; it names the server and is one line."""
    with serve(routes) as server:
        with pytest.raises(OnepolicyError) as caught, open_engine(address(server.port, **switches)) as engine:
            engine.score(fixed(*rows))
        assert str(caught.value).startswith(f"http://127.0.0.1:{server.port}: ") and "\n" not in str(caught.value)
    return caught.value


def drawn(routes: dict[str, Any], **switches: object) -> OnepolicyError:
    with (
        serve(routes) as server,
        pytest.raises(OnepolicyError) as caught,
        open_engine(address(server.port, **switches)) as engine,
    ):
        engine.sample([[1, 2]], SamplingParams(max_tokens=3))
    assert "\n" not in str(caught.value)
    return caught.value


def changed(**fields: Any) -> dict[str, Any]:
    """vLLM whose choices have other fields than they should."""

    def completion(body: Any) -> Any:
        out = vllm_routes()[COMPLETIONS](body)
        for name, value in fields.items():
            out["choices"][0][name] = value(body) if callable(value) else value
        return out

    return vllm_routes() | {COMPLETIONS: completion}


def pairs(values: list[Any]) -> Callable[[Any], Any]:
    """`prompt_logprobs` with these values."""
    return lambda body: [None, *({str(i): {"logprob": x}} for i, x in zip(body["prompt"][1:], values, strict=True))]


def raw(status: int, body: str, **headers: str) -> dict[str, Any]:
    answer = Raw(body.encode(), status, {k.replace("_", "-"): v for k, v in headers.items()})
    return vllm_routes() | {COMPLETIONS: lambda _: answer}


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EngineError) as caught, open_engine(address(port)):
        pass
    said = f"http://127.0.0.1:{port}: 127.0.0.1 port {port} refused the connection; is the server running"
    assert str(caught.value).startswith(said) and caught.value.exit_code == 4


def test_a_host_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_name(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_such_name)
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(EngineError, match=r"no connection to no\.such port 80: Name or service not known"):
        open_engine("http://no.such").__enter__()


def test_a_host_that_takes_no_connection() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(("127.0.0.1", port))
        begun = time.monotonic()
        with pytest.raises(
            EngineTimeout, match=r"no connection to 127\.0\.0\.1 port \d+ within 0\.3 s; is the host up"
        ):
            open_engine(address(port, connect_timeout=0.3)).__enter__()
        assert time.monotonic() - begun < 3
        for each in waiting:
            each.close()


@pytest.mark.parametrize("trickle", [0.0, 0.05])
def test_a_server_that_hangs_or_only_trickles(trickle: float) -> None:
    over = threading.Event()

    def hang(_: Any) -> Any:
        if not trickle:
            over.wait(30)
        return Raw(b" " * 2000, trickle=trickle)

    begun = time.monotonic()
    rows = ([1, 2],) * 40
    error = scored(vllm_routes() | {COMPLETIONS: hang}, rows, timeout=0.5, concurrency=4)
    over.set()
    assert isinstance(error, EngineTimeout) and "no answer to POST /v1/completions within 0.5 s" in str(error)
    assert time.monotonic() - begun < 5  # forty of them would take five seconds at four a time


def test_one_failure_ends_the_others_at_once_and_the_engine_works_on() -> None:
    broken = [True]

    def some(body: Any) -> Any:
        if broken[0]:
            if body["prompt"] == [4, 4]:
                return Raw(b'{"error":{"message":"boom"}}', 500)
            time.sleep(20)
        return vllm_routes()[COMPLETIONS](body)

    with serve(vllm_routes() | {COMPLETIONS: some}) as server, open_engine(address(server.port)) as engine:
        begun = time.monotonic()
        with pytest.raises(EngineError, match=r"record '1': POST /v1/completions failed with HTTP 500: boom"):
            engine.score(fixed([1, 2], [4, 4], [5, 6]))
        assert time.monotonic() - begun < 5
        broken[0] = False
        assert engine.score(fixed([1, 2])).logprobs.values[1] == logprobs_of([1, 2])[1]


@pytest.mark.parametrize(
    ("routes", "kind", "says"),
    [
        ({}, EngineError, "it lists no models at /v1/models; is it an inference server, and still loading"),
        ({"/v1/models": models()}, EngineError, "it lists no models"),
        ({"/v1/models": lambda _: Raw(b"<html>\nhello")}, EngineError, "GET /v1/models is no JSON; it begins '<html>'"),
        (vllm_routes() | {COMPLETIONS: lambda _: Raw(b"nope", 404)}, EngineError, "failed with HTTP 404: nope"),
        (raw(500, '{"error":{"message":"first line\\nsecond"}}'), EngineError, "HTTP 500: first line"),
        (raw(500, "Internal Server Error\nTraceback"), EngineError, "HTTP 500: Internal Server Error"),
        (raw(400, '{"detail":[{"msg":"bad"}]}'), EngineError, 'HTTP 400: [{"msg": "bad"}]'),
        (raw(400, '{"error":{"message":"Token id 99 is out of vocabulary"}}'), ContentError, "by another tokenizer"),
        (raw(200, "OK"), EngineError, "the answer to POST /v1/completions is no JSON; it begins 'OK'"),
        (raw(200, "[]"), EngineError, "its answer has no choices.0"),
        (raw(200, '{"choices":[]}'), EngineError, "its answer has no choices.0; another version, or another dialect"),
        (raw(302, "", Location="http://else.where"), EngineError, "HTTP 302: moved to http://else.where; use that"),
        (raw(401, '{"error":"Unauthorized"}'), UsageError, "(HTTP 401: Unauthorized); it needs an API key; name the"),
        (raw(503, '{"message":"loading"}'), EngineError, "busy (HTTP 503 to POST /v1/completions: loading), asked 2x"),
        (changed(prompt_logprobs=None), EngineError, "record '0': got no prompt log-probs for 3 tokens"),
        (changed(prompt_logprobs=[None]), EngineError, "got 1 prompt log-probs for 3 tokens"),
        (changed(prompt_logprobs=pairs([-1.0, float("nan")])), EngineError, "the log-prob at position 2 is NaN"),
        (changed(prompt_logprobs=pairs([None, -1.0])), EngineError, "the log-prob at position 1 is null, wanted a"),
        (changed(prompt_logprobs=pairs([-1.0, "x"])), EngineError, "position 2 is 'x', wanted a number"),
        (changed(prompt_logprobs=[None, None, None]), EngineError, "at position 1 are of null, not of the id 2"),
        (
            changed(prompt_logprobs=[None, {"2": {"logprob": -1}}, {"7": {}}]),
            EngineError,
            "2 are of 7, not of the id 3",
        ),
        (changed(prompt_token_ids=[0, 1, 2, 3]), EngineError, "other ids than were sent: at position 0 got 0, sent 1"),
        (changed(prompt_token_ids=[1, 2]), EngineError, "at position 2 got nothing, sent 3"),
    ],
)
def test_wrong_answers_to_a_score(routes: dict[str, Any], kind: type[OnepolicyError], says: str) -> None:
    error = scored(routes, retries=1)
    assert isinstance(error, kind) and says in str(error), str(error)


@pytest.mark.parametrize(
    ("routes", "says"),
    [
        (
            changed(token_ids=None, logprobs={"tokens": ["a", "b", "c"], "token_logprobs": [-1, -1, -1]}),
            "return_token_ids",
        ),
        (changed(token_ids=None, logprobs=None), "the server gives no token ids, and ids are never made from text"),
        (changed(token_ids=[1, "x"]), "its token_ids are no list of token ids"),
        (changed(logprobs=None), "its answer has no log-probs"),
        (changed(logprobs={"token_logprobs": [-1.0]}), "got 1 log-probs for 3 tokens"),
        (changed(logprobs={"token_logprobs": [-1.0, float("nan"), -1]}), "position 1 is NaN"),
        (changed(prompt_token_ids=[9, 1, 2]), "other ids than were sent: at position 0 got 9, sent 1"),
    ],
)
def test_wrong_answers_to_a_draw(routes: dict[str, Any], says: str) -> None:
    error = drawn(routes)
    assert isinstance(error, EngineError) and "prompt 0: " in str(error) and says in str(error), str(error)


def sglang(**meta: Any) -> dict[str, Any]:
    def generate(body: Any) -> Any:
        out = sglang_routes()["/generate"](body)
        out["meta_info"] = {k: v for k, v in (out["meta_info"] | meta).items() if v != "absent"}
        return out

    return sglang_routes() | {"/generate": generate}


@pytest.mark.parametrize(
    ("routes", "says"),
    [
        (sglang(output_token_logprobs="absent"), "SGLang at its own /generate"),
        (sglang(input_token_logprobs=[[None, 1, None]]), "got 1 log-probs for 3 tokens"),
        (sglang(input_token_logprobs=[[None, 1], [-1, 2], [-1, 4]]), "at position 2 got 4, sent 3"),
        (sglang(input_token_logprobs=[[None, 1], [None, 2], [-1, 3]]), "the log-prob at position 1 is null"),
        (sglang(input_token_logprobs=[-1, -1, -1]), "no list of [log-prob, id, text]"),
        (sglang(finish_reason={"type": "abort", "message": "too long"}), "the server gave up: too long"),
    ],
)
def test_wrong_answers_of_sglang(routes: dict[str, Any], says: str) -> None:
    assert says in str(scored(routes))


def test_sglang_whose_two_lists_of_ids_differ() -> None:
    routes = sglang_routes()

    def generate(body: Any) -> Any:
        return sglang_routes()["/generate"](body) | {"output_ids": [3, 4, 6]}

    assert "at position 2 got 5, sent 6" in str(drawn(routes | {"/generate": generate}))


def test_minus_infinity_comes_back_as_it_was() -> None:
    with serve(changed(prompt_logprobs=pairs([-9999.0, -2.0]))) as server, open_engine(address(server.port)) as engine:
        assert engine.score(fixed([1, 2, 3])).logprobs.values.tolist() == [0.0, float("-inf"), -2.0]


def test_a_model_that_is_not_served_and_a_near_one() -> None:
    with serve(vllm_routes()) as server, pytest.raises(UnknownName, match="model of the server 'tiney'; did you mean"):
        open_engine(address(server.port, model="tiney")).__enter__()


@pytest.mark.parametrize("n", [128, 129])
def test_too_long_for_the_server_is_said_before_it_is_asked(n: int) -> None:
    with serve(vllm_routes()) as server, open_engine(address(server.port)) as engine:
        with pytest.raises(EngineError, match=f"record '1': {n + 1} tokens with the reply, but .*max_model_len is 128"):
            engine.score(fixed([1, 2], [3] * n))
        with pytest.raises(EngineError, match="prompt 0: it is empty; a server needs at least one id"):
            engine.sample([[]], SamplingParams(max_tokens=1))
        assert server.bodies(COMPLETIONS) == []
        assert engine.score(fixed([3] * 127)).logprobs.mask().sum() == 126


def test_a_busy_server_is_asked_again_and_says_when() -> None:
    answers = [Raw(b"", 503, {"Retry-After": "0.1"}), Raw(b"", 429)]

    def busy(body: Any) -> Any:
        return answers.pop() if answers else vllm_routes()[COMPLETIONS](body)

    begun = time.monotonic()
    with serve(vllm_routes() | {COMPLETIONS: busy}) as server, open_engine(address(server.port)) as engine:
        assert engine.score(fixed([1, 2])).logprobs.values[1] == logprobs_of([1, 2])[1]
        assert len(server.bodies(COMPLETIONS)) == 3
    assert 0.5 < time.monotonic() - begun < 5


def test_a_connection_that_breaks_off_half_way() -> None:
    half = Raw(json.dumps({"choices": "x" * 1000}).encode(), cut=500)
    error = scored(vllm_routes() | {COMPLETIONS: lambda _: half})
    assert isinstance(error, EngineDied) and "broke off during POST /v1/completions (IncompleteRead)" in str(error)
    nothing = Raw(b"xxx", cut=0)
    assert isinstance(scored(vllm_routes() | {COMPLETIONS: lambda _: nothing}), EngineDied)


def test_an_answer_without_an_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onepolicy.engines.http_client._LARGEST", 2**20)
    error = scored(vllm_routes() | {COMPLETIONS: lambda _: Raw(b" " * 2**21)})
    assert "its answer is longer than 1 MiB" in str(error)


def test_the_key_is_sent_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret-key-1")
    refused = Raw(b'{"error":"the key secret-key-1 is wrong"}', 401)
    with serve(vllm_routes()) as server, open_engine(address(server.port, api_key_env="MY_KEY")) as engine:
        engine.score(fixed([1, 2]))
        assert {headers.get("Authorization") for _, _, headers in server.seen} == {"Bearer secret-key-1"}
        assert "secret-key-1" not in str(engine.fingerprint()) + repr(engine._client)  # type: ignore[attr-defined]
        server.routes[COMPLETIONS] = lambda _: refused
        with pytest.raises(UsageError, match=r"the key \(key\) is wrong") as caught:
            engine.score(fixed([1, 2]))
    assert "secret-key-1" not in str(caught.value)
    with serve(vllm_routes()) as server, open_engine(address(server.port)):
        assert not any("Authorization" in headers for _, _, headers in server.seen)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("http:", "wanted http://HOST:PORT"),
        ("http:localhost:8000", "wanted http://HOST:PORT, as http://localhost:8000"),
        ("https://h:99999", "Port out of range"),
        ("http://me:secret@h:80", "put the key into the environment and name it: api_key_env="),
        ("http://h:80?api_key_env=NO_SUCH_VARIABLE", "environment variable 'NO_SUCH_VARIABLE' holds no key"),
        ("http://h:80?timeout=0", "timeout: got 0.0, wanted seconds above 0"),
        ("http://h:80?timeout=nan", "timeout: got nan"),
        ("http://h:80?concurrency=0", "concurrency: got 0, wanted at least 1"),
        ("http://h:80?stop_token_ids=2,x", "stop_token_ids: got '2,x', wanted ids with commas"),
        ("http://h:80?tokenizer=no/such", "tokenizer: 'no/such' is no directory; wanted one with"),
        ("http://h:80?dialect=vlm", "did you mean 'vllm'"),
    ],
)
def test_a_wrong_address_or_switch(spec: str, says: str) -> None:
    with pytest.raises(UsageError) as caught, open_engine(spec):
        pass
    assert says in str(caught.value) and "secret" not in str(caught.value) and "\n" not in str(caught.value)


def test_tls_at_a_plain_port() -> None:
    with serve(vllm_routes()) as server, pytest.raises(EngineError, match=r"no TLS with 127\.0\.0\.1 port \d+: "):
        open_engine(f"https://127.0.0.1:{server.port}").__enter__()


def test_the_environments_proxy_is_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # nobody is there
    monkeypatch.delenv("no_proxy", raising=False)
    with serve(vllm_routes()) as server, open_engine(address(server.port)) as engine:
        assert engine.score(fixed([1, 2])).logprobs.mask().any()
    there = {f"http://far.example:8000{path}": route for path, route in vllm_routes().items()}
    with serve(there) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        with open_engine("http://far.example:8000") as engine:
            assert engine.score(fixed([1, 2])).logprobs.mask().any()


def test_a_load_that_does_not_start_or_last_is_no_loaded_score() -> None:
    def refuses(body: Any) -> Any:
        return Raw(b'{"message":"no room"}', 500) if body.get("stream") else vllm_routes()[COMPLETIONS](body)

    error = scored(vllm_routes() | {COMPLETIONS: refuses}, load="loaded")
    assert "the load beside the scoring failed" in str(error) and "HTTP 500: no room" in str(error)
    over = threading.Event()

    def never(body: Any) -> Any:
        over.wait(30 if body.get("stream") else 0)
        return vllm_routes()[COMPLETIONS](body)

    error = scored(vllm_routes() | {COMPLETIONS: never}, load="loaded", timeout=0.4)
    over.set()
    assert "it did not start: no answer to POST /v1/completions within 0.4 s" in str(error)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("load-")]


def test_llama_cpp_scores_nothing_because_it_echoes_no_prompt() -> None:
    assert "does not give back the ids and log-probs of a prompt" in str(scored(llama_routes(), logprobs="raw"))
