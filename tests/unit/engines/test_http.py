"""Servers over HTTP: ids in, ids and log-probs out, in every dialect; stand-ins answer in the documented layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_stand_ins import EOS, llama_routes, logprobs_of, models, serve, sglang_routes, vllm_routes

from onepolicy.engines.base import Engine, EngineSpec, SamplingParams, options_of
from onepolicy.engines.http import HttpEngine
from onepolicy.engines.open import open_engine
from onepolicy.errors import UnknownName, UsageError
from onepolicy.legs.base import CannotRun, Want, load_for
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import Values

ROUTES = {"vllm": vllm_routes, "sglang": sglang_routes, "openai": llama_routes}


def fixed(*rows: list[int], semantics: str = "raw") -> Rollouts:
    ids = np.array([x for row in rows for x in row], dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in rows])]).astype(np.int64)
    records = {"logprob_semantics": [semantics] * len(rows), "record_id": [str(i) for i in range(len(rows))]}
    return Rollouts(offsets, {"token_ids": Values(ids)}, {k: column_values(k, v) for k, v in records.items()})


def address(port: int, **switches: object) -> str:
    return f"http://127.0.0.1:{port}" + "".join(f"{'&?'[i == 0]}{k}={v}" for i, (k, v) in enumerate(switches.items()))


@pytest.mark.parametrize("dialect", ROUTES)
def test_it_finds_out_who_answers_and_draws_ids_with_their_logprobs(dialect: str) -> None:
    with serve(ROUTES[dialect]()) as server, open_engine(address(server.port)) as engine:
        assert engine.fingerprint()["dialect"] == dialect
        out = engine.sample([[1, 2], [6]], SamplingParams(max_tokens=4, samples=2, seed=3))
    assert [out.token_ids[out.sequence(i)].tolist() for i in (0, 2)] == [[1, 2, 3, 4, 5, 6], [6, 7, 8, EOS]]
    assert len(out) == 4 and [out.record("prompt_length", i) for i in range(4)] == [2, 2, 1, 1]
    sampler = out.scorings["sampler"]
    for i in range(4):
        at, n = out.sequence(i), out.record("prompt_length", i)
        want = logprobs_of(out.token_ids[at].tolist())
        assert sampler.logprobs.mask()[at].tolist() == [t >= n for t in range(len(want))]
        assert sampler.logprobs.values[at][n:].tolist() == want[n:]
    assert "stop_token_ids" not in out.lists  # not known, which is not the same as none


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
def test_given_ids_are_scored_in_order_and_index_0_is_null(dialect: str) -> None:
    rows = [[1, 2, 3], [7], [5, 5, 5, 0, 19]]
    with serve(ROUTES[dialect]()) as server, open_engine(address(server.port, concurrency=3)) as engine:
        out = engine.score(fixed(*rows))
    want = [x for row in rows for x in logprobs_of(row)]
    assert out.logprobs.mask().tolist() == [x is not None for x in want]
    assert out.logprobs.values[out.logprobs.mask()].tolist() == [x for x in want if x is not None]
    assert (out.semantics, out.dtype is None) == ("raw", dialect == "vllm")


def sent(dialect: str, path: str, params: SamplingParams) -> dict[str, Any]:
    with serve(ROUTES[dialect]()) as server, open_engine(address(server.port)) as engine:
        engine.sample([[1, 2]], params)
        return server.bodies(path)[0]


def test_neutral_parameters_are_sent_too_because_servers_have_defaults_of_their_own() -> None:
    body = sent("vllm", "/v1/completions", SamplingParams(max_tokens=3, seed=5))
    wanted = {"prompt": [1, 2], "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    wanted |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "seed": 5, "logprobs": 0, "max_tokens": 3}
    wanted |= {"return_token_ids": True, "add_special_tokens": False, "ignore_eos": False, "model": "tiny"}
    assert {k: body[k] for k in wanted} == wanted
    sampling = sent("sglang", "/generate", SamplingParams(max_tokens=3))["sampling_params"]
    assert sampling["top_k"] == -1 and sampling["max_new_tokens"] == 3 and "sampling_seed" not in sampling
    params = SamplingParams(max_tokens=3, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, ignore_eos=True)
    assert sent("sglang", "/generate", params)["sampling_params"]["top_k"] == 7
    body = sent("vllm", "/v1/completions", params)
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0.5, 0.9, 7, 0.1)
    assert body["ignore_eos"] and "stop_token_ids" not in body


def test_replies_are_asked_for_with_a_seed_each_and_the_stop_ids_that_were_declared() -> None:
    with serve(vllm_routes()) as server, open_engine(address(server.port, stop_token_ids="9,2")) as engine:
        out = engine.sample([[1], [2]], SamplingParams(max_tokens=2, samples=2, seed=10))
        bodies = server.bodies("/v1/completions")
    assert sorted((b["prompt"][0], b["seed"]) for b in bodies) == [(1, 10), (1, 11), (2, 12), (2, 13)]
    assert all(b["stop_token_ids"] == [2, 9] for b in bodies)
    assert out.lists["stop_token_ids"].row(3).tolist() == [2, 9]


@pytest.mark.parametrize(
    ("dialect", "switch", "params", "meaning"),
    [
        ("vllm", "auto", SamplingParams(temperature=0.5), "raw"),
        ("vllm", "processed", SamplingParams(temperature=0.5), "processed"),
        ("vllm", "unknown", SamplingParams(), None),
        ("sglang", "auto", SamplingParams(temperature=0.5), "temperature"),
        ("sglang", "auto", SamplingParams(top_p=0.9), None),
        ("sglang", "auto", SamplingParams(repetition_penalty=1.1), None),
        ("sglang", "raw", SamplingParams(top_p=0.9), "raw"),
        ("openai", "auto", SamplingParams(), None),
        ("openai", "raw", SamplingParams(), "raw"),
    ],
)
def test_what_a_logprob_means_is_said_or_null(
    dialect: str, switch: str, params: SamplingParams, meaning: str | None
) -> None:
    with serve(ROUTES[dialect]()) as server, open_engine(address(server.port, logprobs=switch)) as engine:
        out = engine.sample([[1]], params)
    assert out.record("logprob_semantics", 0) == meaning
    assert out.scorings["sampler"].semantics == meaning


def test_a_server_of_unknown_meaning_does_not_score_until_it_is_said() -> None:
    with serve(llama_routes()) as server:
        with open_engine(address(server.port)) as engine, pytest.raises(UsageError, match="say it: logprobs=raw"):
            engine.score(fixed([1, 2]))
        with (
            open_engine(address(server.port, logprobs="processed")) as engine,
            pytest.raises(UsageError, match="different dis"),
        ):
            engine.score(fixed([1, 2], semantics="raw"))


def test_texts_become_ids_at_the_server_and_ids_texts() -> None:
    for routes in (vllm_routes, llama_routes):
        with serve(routes()) as server, open_engine(address(server.port)) as engine:
            assert engine.encode(["AB", "C"]) == [[5, 6], [7]]
            assert engine.decode([1, 0, 1]) == ["B", "A", "B"]
            assert len(server.bodies("/detokenize")) == 2
    with serve(vllm_routes()) as server, open_engine(address(server.port)) as engine:
        engine.encode([[{"role": "user", "content": "hi"}]])
        assert server.bodies("/tokenize")[0]["add_generation_prompt"] is True


def test_a_server_without_a_tokenizer_says_what_to_name() -> None:
    with serve(sglang_routes()) as server, open_engine(address(server.port)) as engine:
        with pytest.raises(UsageError, match=r"prompt 0: the server has no /tokenize; .*tokenizer=DIR"):
            engine.encode(["x"])
        with pytest.raises(UsageError, match="it is chat messages, and this kind of server"):
            engine.encode([[{"role": "user", "content": "hi"}]])


def test_a_tokenizer_directory_stands_in_for_the_server_s(tmp_path: Path) -> None:
    """The digest and the stop ids are read from it; the texts of a real one are compared in tests/engines."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    with serve(sglang_routes()) as server, open_engine(address(server.port, tokenizer=tmp_path)) as engine:
        out = engine.sample([[6]], SamplingParams(max_tokens=8))
        assert server.bodies("/generate")[0]["sampling_params"]["stop_token_ids"] == [9]
        assert engine.fingerprint()["tokenizer_digest"]
    assert out.lists["stop_token_ids"].row(0).tolist() == [9]


def test_the_fingerprint_says_what_is_known_and_null_for_the_rest() -> None:
    with serve(sglang_routes()) as server, open_engine(address(server.port)) as engine:
        said = engine.fingerprint()
    known = {"engine": "http", "server": "sglang", "version": "0.5", "model": "tiny", "max_model_len": 128}
    known |= {"dtype": "bfloat16", "kv_cache_dtype": None, "weights_digest": None, "seeded": False}
    assert {k: said[k] for k in known} == known
    assert said["host"] == f"http://127.0.0.1:{server.port}"
    with serve(vllm_routes()) as server, open_engine(address(server.port, dtype="float16")) as engine:
        assert engine.fingerprint()["dtype"] == "float16"
        assert engine.score(fixed([1, 2])).dtype == "float16"


def live(engine: Engine, **using: object) -> dict[str, Any]:
    said = engine.score(fixed([1, 2], [3, 4], [5, 6]), using=using).fingerprint
    return {k: said[k] for k in ("batch_size", "load", "load_requests")}


def test_live_switches_are_of_one_call_and_its_fingerprint() -> None:
    with serve(vllm_routes()) as server, open_engine(address(server.port)) as engine:
        assert live(engine) == {"batch_size": 0, "load": "idle", "load_requests": 8}
        assert live(engine, batch_size=1)["batch_size"] == 1 and live(engine)["batch_size"] == 0
        assert not any(body.get("stream") for body in server.bodies("/v1/completions"))
        assert live(engine, load="loaded", load_requests=3) == {"batch_size": 0, "load": "loaded", "load_requests": 3}
        streams = [body for body in server.bodies("/v1/completions") if body.get("stream")]
        assert len(streams) >= 3 and all(b["ignore_eos"] and b["max_tokens"] == 95 for b in streams)
        with pytest.raises(UsageError, match="'dtype' cannot change while it runs; live switches: batch_size, load"):
            engine.score(fixed([1, 2]), using={"dtype": "float16"})
        with pytest.raises(UsageError, match="batch_size: got -1, wanted at least 0"):
            engine.score(fixed([1, 2]), using={"batch_size": -1})


def test_no_leg_sets_what_is_only_declared() -> None:
    """A bfloat16 server asked as `dtype=float32` still computes in bfloat16; that must not pass for a float32 leg."""
    current = options_of(HttpEngine, EngineSpec.parse("http://h?dtype=bfloat16"))
    for want in (Want("sampler", load={"dtype": "float32"}), Want("sampler", load={"logprobs": "processed"})):
        with pytest.raises(CannotRun):
            load_for(want, "http", HttpEngine.SWITCHES, current)
    assert load_for(Want("sampler", load={"concurrency": 4}), "http", HttpEngine.SWITCHES, current) == {
        "concurrency": 4
    }
    with pytest.raises(UnknownName, match="did you mean 'float32'"):
        options_of(HttpEngine, EngineSpec.parse("http://h?dtype=float31"))


def test_a_choice_of_models_is_made_by_name() -> None:
    routes = vllm_routes() | {"/v1/models": models("base", "adapter")}
    with serve(routes) as server:
        with open_engine(address(server.port, model="adapter")) as engine:
            engine.sample([[1]], SamplingParams(max_tokens=1))
        assert server.bodies("/v1/completions")[0]["model"] == "adapter"
        with pytest.raises(UsageError, match="it serves 2 models; choose one: model= base, adapter"):
            open_engine(address(server.port)).__enter__()


def test_a_path_before_the_endpoints_is_kept_and_v1_is_not_doubled() -> None:
    routes = {f"/gate{path}": route for path, route in vllm_routes().items()}
    with serve(routes) as server, open_engine(f"http://127.0.0.1:{server.port}/gate/v1") as engine:
        assert engine.score(fixed([1, 2])).logprobs.values[1] == logprobs_of([1, 2])[1]


def test_older_vllm_writes_ids_where_tokens_stand() -> None:
    def without_token_ids(body: Any) -> Any:
        out = vllm_routes()["/v1/completions"](body)
        del out["choices"][0]["token_ids"], out["choices"][0]["prompt_token_ids"]
        return out

    routes = vllm_routes() | {"/v1/completions": without_token_ids}
    with serve(routes) as server, open_engine(address(server.port)) as engine:
        out = engine.sample([[1, 2]], SamplingParams(max_tokens=3))
    assert out.token_ids.tolist() == [1, 2, 3, 4, 5]


def test_an_openai_server_that_echoes_ids_scores_them() -> None:
    def echo(body: Any) -> Any:
        ids = [*body["prompt"], 3] if body.get("echo") else [3]
        logprobs = {"tokens": [f"token_id:{i}" for i in ids], "token_logprobs": logprobs_of(ids)}
        return {"choices": [{"logprobs": logprobs}]}

    routes = {"/v1/models": models("m", owner="me"), "/v1/completions": echo}
    with serve(routes) as server, open_engine(address(server.port, logprobs="raw")) as engine:
        out = engine.score(fixed([4, 1, 1], [2]))
    assert out.logprobs.values[1:3].tolist() == logprobs_of([4, 1, 1])[1:]
