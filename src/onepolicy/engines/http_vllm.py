"""vLLM's server: completions of token ids, `prompt_logprobs`, and its own /tokenize.

Read from and tested against vLLM 0.32. `return_token_ids` is there since 0.10.2; before that the ids stand as
`token_id:5` where tokens stand, which is asked for as well. Prompt log-probs are those of the logits as they are,
whatever `--logprobs-mode` says of the drawn ones (raw, unless the server was started otherwise).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from onepolicy.engines.base import SamplingParams
from onepolicy.engines.http_answers import integers, numbers, within
from onepolicy.engines.http_openai import FLOOR, OpenaiDialect, _check_prompt
from onepolicy.errors import EngineError

_PATH = "/v1/completions"
_LOCAL = "name a directory with the model's tokenizer: tokenizer=DIR"


class VllmDialect(OpenaiDialect):
    """As `http_answers.Dialect`."""

    SCORES_MEAN: ClassVar[str | None] = "raw"
    SERVER: ClassVar[str] = "vllm"

    def facts(self) -> dict[str, Any]:
        version = (self._client.get("/version") or {}).get("version")
        root = self._card.get("root")
        return {**super().facts(), "server": self.SERVER, "version": version, "model_root": root}

    def meaning(self, params: SamplingParams) -> str | None:
        return "raw"

    def tokenize(self, prompt: str | list[dict[str, str]]) -> list[int]:
        what = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt, "add_generation_prompt": True}
        said = self._client.post("/tokenize", {"model": self._model, **what}, absent=_LOCAL)
        return integers(within(said, "tokens"), "tokens")

    def score(self, ids: Sequence[int]) -> list[float]:
        asked = {"model": self._model, "prompt": list(ids), "add_special_tokens": False, "return_token_ids": True}
        asked |= {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        choice = within(self._client.post(_PATH, asked), "choices", 0)
        _check_prompt(choice, ids)
        given = within(choice, "prompt_logprobs")
        if not isinstance(given, list) or len(given) != len(ids):
            got = len(given) if isinstance(given, list) else "no"
            raise EngineError(f"got {got} prompt log-probs for {len(ids)} tokens")
        values = [_of(given[t], t, token) for t, token in enumerate(ids) if t]
        return numbers(values, len(ids) - 1, FLOOR, 1)

    def _request(
        self, prompt: Sequence[int], params: SamplingParams, seed: int, stops: Sequence[int]
    ) -> dict[str, Any]:
        body = super()._request(prompt, params, seed, stops)
        del body["repeat_penalty"]
        return {**body, "logprobs": 0, "add_special_tokens": False}


def _of(entry: Any, t: int, token: int) -> Any:
    """The log-prob of `token` in one entry, which is `{"5": {"logprob": -1.5, ...}}`."""
    if not isinstance(entry, dict) or str(token) not in entry:
        have = ", ".join(entry) if isinstance(entry, dict) else "null"
        raise EngineError(f"the prompt log-probs at position {t} are of {have}, not of the id {token} that was sent")
    return within(entry, str(token), "logprob")
