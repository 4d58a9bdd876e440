"""A started `vllm.LLM` as the engine uses it: ids in, outputs out, every failure one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.engines import vllm_forced, vllm_routes
from onepolicy.engines.vllm_start import one_line
from onepolicy.errors import ContentError, EngineError


@dataclass(slots=True)
class Running:
    """`name`: the model's, for messages. `vocab`, `longest`: what ids and lengths may be."""

    vllm: Any
    llm: Any
    name: str

    @property
    def vocab(self) -> int:
        return int(self.llm.llm_engine.model_config.get_vocab_size())

    @property
    def longest(self) -> int:
        return int(self.llm.llm_engine.model_config.max_model_len)

    def check(self, what: str, ids: Sequence[int], length: int) -> None:
        """Errors: `ContentError` for an id outside the vocabulary, `EngineError` for an empty or too long sequence."""
        vocab, longest = self.vocab, self.longest
        bad = [t for t, x in enumerate(ids) if not 0 <= x < vocab]
        if bad:
            raise ContentError(
                f"{what}: token id {ids[bad[0]]} at position {bad[0]} is outside the vocabulary of {vocab} of "
                f"{self.name}; the ids were made by another tokenizer or model"
            )
        if not len(ids):
            raise EngineError(f"{what}: it is empty; vLLM needs at least one id")
        if length > longest:
            raise EngineError(
                f"{what}: {length} tokens with the reply, but max_model_len is {longest}; shorten the reply "
                "(max_tokens), raise max_model_len, or leave it out"
            )

    def params(self, **given: Any) -> Any:
        """`vllm.SamplingParams`. Errors: `EngineError` for values that vLLM refuses."""
        try:
            return self.vllm.SamplingParams(detokenize=False, **given)
        except Exception as err:
            raise EngineError(f"vllm: it refuses the sampling parameters: {one_line(err)}") from err

    def forced(self, ids: Sequence[int]) -> dict[str, Any]:
        """Arguments of `params` under which exactly these ids come out, at their own log-probs."""
        given = {"max_tokens": len(ids), "ignore_eos": True, "stop_token_ids": [], "logprobs": 0}
        if getattr(self.llm.llm_engine.model_config, "enable_trace_replay", False):
            return {**given, "trace_decode_token_ids": list(ids)}
        return {**given, "extra_args": vllm_forced.forced_args(ids)}

    def generate(self, rows: Sequence[Sequence[int]], params: Sequence[Any]) -> list[Any]:
        """One output a row, in order. Errors: `EngineError`."""
        prompts = [{"prompt_token_ids": list(row)} for row in rows]
        try:
            outs = self.llm.generate(prompts, list(params), use_tqdm=False)
        except Exception as err:
            raise EngineError(f"vllm: {one_line(err)}") from err
        for row, out in zip(rows, outs, strict=True):
            if list(out.prompt_token_ids) != list(row):
                raise EngineError("vllm: it changed the ids of a prompt, so its log-probs belong to other tokens")
        return outs

    def take_entropies(self) -> vllm_forced.Entropies:
        """By request key and place: what was kept since the last call."""
        return self.llm.collective_rpc(vllm_forced.take_entropies)[0]

    def take_routes(self) -> NDArray[np.int16]:
        """`[n, L * K]`: the experts of the tokens since the last call."""
        return self.llm.collective_rpc(vllm_routes.take)[0]


def drawn_logprobs(out: Any) -> list[float]:
    """Log-probs of the ids that came out."""
    drawn = out.outputs[0]
    return [step[token].logprob for token, step in zip(drawn.token_ids, drawn.logprobs or [], strict=True)]
