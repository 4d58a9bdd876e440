"""Servers with OpenAI's completions endpoint only (llama.cpp's server and others), where token ids can be had.

What such a server's log-probs mean is not known: `logprobs=raw` or another word has to be said. Ids are looked for in
the three places where servers put them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from onepolicy.engines.base import SamplingParams
from onepolicy.engines.http_answers import NO_IDS, integers, numbers, same_ids, shared, within
from onepolicy.engines.http_client import Client
from onepolicy.engines.replies import Reply
from onepolicy.errors import EngineError, UsageError

#: vLLM and its kin write minus infinity as this, because JSON has none.
FLOOR = -9999.0
_PATH = "/v1/completions"
_LOCAL = "name a directory with the model's tokenizer: tokenizer=DIR"


class OpenaiDialect:
    """As `http_answers.Dialect`."""

    SCORES_MEAN: ClassVar[str | None] = None
    SERVER: ClassVar[str] = "openai"

    def __init__(self, client: Client, model: Mapping[str, Any]) -> None:
        self._client, self._card = client, model
        self._model = str(model["id"])

    def facts(self) -> dict[str, Any]:
        owner = self._card.get("owned_by")
        meta = self._card.get("meta")
        return {
            "server": owner if isinstance(owner, str) else self.SERVER,
            "version": None,
            "max_model_len": self._card.get("max_model_len") or None,
            "vocab_size": meta.get("n_vocab") if isinstance(meta, dict) else None,  # llama.cpp
            "seeded": True,
        }

    def meaning(self, params: SamplingParams) -> str | None:
        return None

    def tokenize(self, prompt: str | list[dict[str, str]]) -> list[int]:
        if not isinstance(prompt, str):
            raise UsageError(f"it is chat messages, and this kind of server makes no ids of them; {_LOCAL}")
        # llama.cpp reads `content`, the others `prompt`
        asked = {"model": self._model, "prompt": prompt, "content": prompt, "add_special": True}
        return integers(within(self._client.post("/tokenize", asked, absent=_LOCAL), "tokens"), "tokens")

    def detokenize(self, token: int) -> str:
        said = self._client.post("/detokenize", {"model": self._model, "tokens": [token]}, absent=_LOCAL)
        texts = [said[key] for key in ("prompt", "text", "content") if key in said]
        if not texts or not isinstance(texts[0], str):
            raise EngineError("its answer to POST /detokenize has no text")
        return texts[0]

    def draw(self, prompt: Sequence[int], params: SamplingParams, seed: int, stops: Sequence[int]) -> Reply:
        answer = self._client.post(_PATH, self._request(prompt, params, seed, stops))
        choice = within(answer, "choices", 0)
        ids = ids_of(choice)
        _check_prompt(choice, prompt)
        values = numbers(_logprobs(choice), len(ids), FLOOR)
        return Reply(prompt, ids, values, choice.get("finish_reason"), _cached(answer))

    def score(self, ids: Sequence[int]) -> list[float]:
        asked = {"model": self._model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0}
        answer = self._client.post(_PATH, {**asked, "echo": True, "logprobs": 1, "return_tokens_as_token_ids": True})
        choice = within(answer, "choices", 0)
        given = _written_ids(choice)  # `token_ids` hold the reply alone, also with echo
        if len(given) < len(ids):
            raise EngineError("it does not give back the ids and log-probs of a prompt (echo): use it as the sampler")
        same_ids(given[: len(ids)], ids)
        return numbers(_logprobs(choice)[1 : len(ids)], len(ids) - 1, FLOOR, 1)

    def load(self, ids: Sequence[int], tokens: int) -> tuple[str, dict[str, Any]]:
        body = {"model": self._model, "prompt": list(ids), "max_tokens": tokens, "ignore_eos": True, "stream": True}
        return _PATH, {**body, "temperature": 1.0}

    def _request(
        self, prompt: Sequence[int], params: SamplingParams, seed: int, stops: Sequence[int]
    ) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": list(prompt),
            **shared(params),
            "top_k": params.top_k,
            "repetition_penalty": params.repetition_penalty,
            "repeat_penalty": params.repetition_penalty,  # llama.cpp's name
            "max_tokens": params.max_tokens,
            "seed": seed,
            "logprobs": 1,
            "ignore_eos": params.ignore_eos,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **({} if params.ignore_eos or not stops else {"stop_token_ids": list(stops)}),
        }


def ids_of(choice: Any) -> list[int]:
    """The drawn ids of a choice. Errors: `EngineError` saying how a server can be made to give them."""
    given = within(choice, "token_ids") if isinstance(choice, dict) and choice.get("token_ids") is not None else None
    return _written_ids(choice) if given is None else integers(given, "token_ids")


def _written_ids(choice: Any) -> list[int]:
    """Ids that stand beside the log-probs: as `token_id:5` for tokens, or in llama.cpp's content list."""
    said = within(choice, "logprobs") or {}
    tokens = said.get("tokens")
    if isinstance(tokens, list) and all(isinstance(x, str) and x.startswith("token_id:") for x in tokens):
        return [int(x.removeprefix("token_id:")) for x in tokens]
    content = said.get("content")
    if isinstance(content, list) and all(isinstance(x, dict) and isinstance(x.get("id"), int) for x in content):
        return [x["id"] for x in content]
    raise EngineError(NO_IDS)


def _logprobs(choice: Any) -> list[Any]:
    said = within(choice, "logprobs") or {}
    if isinstance(said.get("token_logprobs"), list):
        return said["token_logprobs"]
    if isinstance(said.get("content"), list):
        return [x.get("logprob") for x in said["content"]]
    raise EngineError("its answer has no log-probs; does the server, or a proxy before it, switch them off?")


def _check_prompt(choice: Any, prompt: Sequence[int]) -> None:
    if choice.get("prompt_token_ids") is not None:
        same_ids(integers(choice["prompt_token_ids"], "prompt_token_ids"), prompt)


def _cached(answer: Any) -> int | None:
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return details.get("cached_tokens")
