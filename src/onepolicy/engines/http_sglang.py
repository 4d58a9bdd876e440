"""SGLang's own endpoint: ids in, `[log-prob, id, text]` out.

Written from its documentation and source (versions 0.4 to 0.5); it does not install on a machine without CUDA, so the
tests ask a stand-in that answers in the documented layout. What is known of its numbers: those of given tokens are of
the logits as they are; those of drawn tokens are after temperature and penalties unless the server was started with
SGLANG_RETURN_ORIGINAL_LOGPROB=1, and versions differ in whether top-p is in them, so with a truncation it is not known.
Seeds act only under --enable-deterministic-inference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from onepolicy.engines.base import SamplingParams
from onepolicy.engines.http_answers import NO_IDS, integers, numbers, same_ids, shared, within
from onepolicy.engines.http_client import Client
from onepolicy.engines.http_openai import OpenaiDialect
from onepolicy.engines.replies import Reply
from onepolicy.engines.semantics import Rules
from onepolicy.errors import EngineError

_PATH = "/generate"
#: It clamps at the least float32, and JSON cannot say minus infinity.
_FLOOR = -1e30


class SglangDialect(OpenaiDialect):
    """As `http_answers.Dialect`."""

    SCORES_MEAN: ClassVar[str | None] = "raw"
    SERVER: ClassVar[str] = "sglang"

    def __init__(self, client: Client, model: Mapping[str, Any]) -> None:
        super().__init__(client, model)
        said = client.get("/server_info") or client.get("/get_server_info") or {}
        self._info: dict[str, Any] = said if isinstance(said, dict) else {}
        self._seeded = bool(self._info.get("enable_deterministic_inference"))

    def facts(self) -> dict[str, Any]:
        info, known = self._info, super().facts()
        return {
            **known,
            "server": self.SERVER,
            "version": info.get("version"),
            "model_root": info.get("model_path"),
            "max_model_len": known["max_model_len"] or info.get("context_length"),
            "seeded": self._seeded,
            **{key: _said(info.get(key)) for key in ("dtype", "kv_cache_dtype", "quantization")},
        }

    def meaning(self, params: SamplingParams) -> str | None:
        rules = Rules.of_params(params)
        return None if rules.truncated or rules.penalised else "temperature"

    def draw(self, prompt: Sequence[int], params: SamplingParams, seed: int, stops: Sequence[int]) -> Reply:
        sampling = {
            **shared(params),
            "top_k": params.top_k if params.top_k > 0 else -1,
            "repetition_penalty": params.repetition_penalty,
            "max_new_tokens": params.max_tokens,
            "ignore_eos": params.ignore_eos,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            **({"sampling_seed": seed} if self._seeded else {}),
            **({} if params.ignore_eos or not stops else {"stop_token_ids": list(stops)}),
        }
        answer = self._generate(prompt, sampling, -1)
        ids, values = _pairs(within(answer, "meta_info", "output_token_logprobs"))
        if answer.get("output_ids") is not None:
            same_ids(ids, integers(answer["output_ids"], "output_ids"))
        meta = answer["meta_info"]
        return Reply(prompt, ids, numbers(values, len(ids), _FLOOR), _finish(meta), meta.get("cached_tokens"))

    def score(self, ids: Sequence[int]) -> list[float]:
        answer = self._generate(ids, {"temperature": 0.0, "max_new_tokens": 0}, 0)
        given, values = _pairs(within(answer, "meta_info", "input_token_logprobs"))
        if len(given) != len(ids):
            raise EngineError(f"got {len(given)} log-probs for {len(ids)} tokens")
        same_ids(given, ids)
        return numbers(values[1:], len(ids) - 1, _FLOOR, 1)

    def load(self, ids: Sequence[int], tokens: int) -> tuple[str, dict[str, Any]]:
        sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True}
        return _PATH, {"input_ids": list(ids), "sampling_params": sampling, "stream": True}

    def _generate(self, ids: Sequence[int], sampling: Mapping[str, Any], start: int) -> Any:
        asked = {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True}
        answer = self._client.post(_PATH, {**asked, "logprob_start_len": start, "stream": False})
        if "output_token_logprobs" not in within(answer, "meta_info"):
            raise EngineError(NO_IDS)
        finish = answer["meta_info"].get("finish_reason")
        if isinstance(finish, dict) and finish.get("type") == "abort":
            raise EngineError(f"the server gave up: {str(finish.get('message'))[:300]}")
        return answer


def _pairs(triples: Any) -> tuple[list[int], list[Any]]:
    """(ids, log-probs) of `[[log-prob, id, text], ...]`."""
    if not isinstance(triples, list) or not all(isinstance(x, list) and len(x) >= 2 for x in triples):
        raise EngineError("its token log-probs are no list of [log-prob, id, text]")
    return integers([x[1] for x in triples], "token log-probs"), [x[0] for x in triples]


def _finish(meta: Mapping[str, Any]) -> str | None:
    finish = meta.get("finish_reason")
    return finish.get("type") if isinstance(finish, dict) else finish


def _said(value: Any) -> Any:
    """`auto` is a question, not an answer."""
    return None if value == "auto" else value
