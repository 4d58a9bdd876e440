"""`openvino:DIR`: OpenVINO GenAI, a light second sampler with kernels, scheduler and sampler of its own; no torch.

Its log-probs are `raw` (temperature 1, nothing cut off), whatever it draws by. It lowers precision silently, so
everything that decides precision is set here, and what is computed in is read back and declared. It adds up the
vocabulary in float32, one id after another: at 49k ids its log-probs come out about 1e-4 nats too high, in float32 too.
"""

from __future__ import annotations

import platform
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

import onepolicy
from onepolicy.engines.base import SamplingParams, Switch, using_of
from onepolicy.engines.openvino_pipeline import Drawn, Pipeline
from onepolicy.engines.openvino_target import target_of
from onepolicy.engines.replies import Reply, rollouts_of
from onepolicy.engines.semantics import GREEDY, require_same_meaning
from onepolicy.engines.texts import OFFLINE
from onepolicy.errors import ContentError, EngineError, UsageError
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring, Values

_KV = ("auto", "float32", "bfloat16", "float16", "uint8", "uint4")


class OpenvinoEngine:
    """One continuous-batching pipeline of openvino-genai on the CPU.

    Errors: `MissingExtra`; `UsageError` for a target that is no model it covers; `EngineError`.
    """

    NAME: ClassVar[str] = "openvino"
    SAMPLES: ClassVar[bool] = True
    SCORES: ClassVar[bool] = True
    HEAVY: ClassVar[bool] = True
    ENVIRONMENT: ClassVar[Mapping[str, str]] = OFFLINE
    SWITCHES: ClassVar[Mapping[str, Switch]] = {
        "dtype": Switch(str, "bfloat16", "precision hint of the computation", ("float32", "bfloat16", "float16")),
        "kv_cache_dtype": Switch(str, "auto", "auto is what it computes in", _KV),
        "dynamic_quantization": Switch(bool, False, "activations to 8 bits before quantised weights"),
        "threads": Switch(int, 0, "CPU threads; 0 leaves OpenVINO's own number"),
        "max_num_seqs": Switch(int, 32, "sequences in one step"),
        "max_num_batched_tokens": Switch(int, 256, "tokens in one step; longer prompts are read in parts"),
        "batch_size": Switch(int, 0, "sequences it gets together to score; 0 is all, 1 each alone", live=True),
    }

    def __init__(self, target: str, **options: Any) -> None:
        self._options = {**{k: s.default for k, s in self.SWITCHES.items()}, **options}
        _require_possible(self._options)
        self._target = target_of(target)
        self._pipeline = Pipeline(self._target, self._options)
        self._known = self._pipeline.facts()

    # the methods of an engine

    def fingerprint(self) -> Mapping[str, Any]:
        """Versions, switches, digests. JSON-able. `dtype` and `kv_cache_dtype` are what it computes and stores in."""
        return {
            "engine": self.NAME,
            **self._options,
            **self._target.facts,
            "weights": self._target.weights,
            "vocab_size": self._target.vocab,
            "max_model_len": self._target.longest,
            "dtype": self._pipeline.dtype,
            "dtype_asked": self._options["dtype"],
            "kv_cache_dtype": self._pipeline.kv_cache_dtype,
            "logprobs": "raw",
            "prefix_caching": False,
            **self._known,
            "versions": {
                "onepolicy": onepolicy.__version__,
                **self._known["versions"],
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
        }

    def encode(self, prompts: Sequence[str | list[dict[str, str]]]) -> list[list[int]]:
        return self._target.texts.encode(prompts)

    def decode(self, ids: Sequence[int]) -> list[str]:
        return self._target.texts.decode(ids)

    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Rollouts:
        """Draws `params.samples` replies to each prompt; reply k of all is drawn with seed `params.seed + k`.

        The log-probs are raw at any temperature and truncation. A drawn stop token belongs to the reply.

        Errors: `UsageError` for rules that it does not have; `ContentError` for an id outside the vocabulary;
        `EngineError` for a prompt that is empty or too long.
        """
        rules = _rules(params)
        for i, prompt in enumerate(prompts):
            self._check(f"prompt {i}", prompt, len(prompt) + params.max_tokens)
        asked = [list(p) for p in prompts for _ in range(params.samples)]
        common = {**rules, **self._ending(params), "max_new_tokens": params.max_tokens, "logprobs": 1}
        outs = self._pipeline.generate(asked, [{**common, "rng_seed": params.seed + k} for k in range(len(asked))])
        replies = [
            Reply(ids, out.ids, out.logprobs, out.finish_reason, 0) for ids, out in zip(asked, outs, strict=True)
        ]
        fingerprint = {**self.fingerprint(), "batch_size": 0}
        return rollouts_of(
            replies,
            params,
            semantics="raw",
            dtype=fingerprint["dtype"],
            stop_ids=self._target.stops,
            fingerprint=fingerprint,
            scoring_id=uuid.uuid4().hex,
        )

    def score(
        self, rollouts: Rollouts, *, distributions: bool = False, using: Mapping[str, Any] | None = None
    ) -> Scoring:
        """`[T]` raw log-probs of the given ids by its prefill (`echo`); index 0 null; no entropy.

        Errors: `UsageError` where the rollouts declare something that is not the same as raw; as `sample` besides.
        """
        if distributions:
            raise UsageError("engine 'openvino' gives no full distributions; use hf")
        now = {**self._options, **using_of(self, using)}
        _require_possible(now)
        require_same_meaning(rollouts, "raw", self.NAME)
        rows = [rollouts.token_ids[rollouts.sequence(i)].tolist() for i in range(len(rollouts))]
        for name, row in zip(rollouts.record_ids(), rows, strict=True):
            self._check(f"record {name!r}", row, len(row))
        values = np.zeros(rollouts.n_tokens, dtype=np.float32)
        valid = np.zeros(rollouts.n_tokens, dtype=bool)
        for i, out in enumerate(self._echoes(rows, now["batch_size"] or max(1, len(rows)))):
            at = rollouts.sequence(i)
            values[at.start + 1 : at.stop] = _echoed(rows[i], out)
            valid[at.start + 1 : at.stop] = True
        fingerprint = {**self.fingerprint(), "batch_size": now["batch_size"]}
        return Scoring(
            Values(values, valid), None, None, None, "raw", fingerprint["dtype"], fingerprint, uuid.uuid4().hex
        )

    def close(self) -> None:
        self._pipeline.close()

    # inside

    def _check(self, what: str, ids: Sequence[int], length: int) -> None:
        """OpenVINO itself reads beyond the embedding, and beyond the last position, without a word."""
        bad = [t for t, x in enumerate(ids) if not 0 <= x < self._target.vocab]
        if bad:
            raise ContentError(
                f"{what}: token id {ids[bad[0]]} at position {bad[0]} is outside the vocabulary of "
                f"{self._target.vocab} of {self._target.path.name}; the ids were made by another tokenizer or model"
            )
        if not len(ids):
            raise EngineError(f"{what}: it is empty; OpenVINO needs at least one id")
        if length > self._target.longest:
            raise EngineError(
                f"{what}: {length} tokens with the reply, but {self._target.path.name} has positions for "
                f"{self._target.longest}; shorten the reply (max_tokens), or leave it out"
            )

    def _ending(self, params: SamplingParams) -> dict[str, Any]:
        """When a reply ends. Without any id that it may be, the pipeline asks its tokenizer, so there is always one."""
        stops = list(self._target.stops)
        if params.ignore_eos or not stops:
            return {"eos_token_id": 0, "ignore_eos": True}
        return {"eos_token_id": stops[0], "stop_token_ids": set(stops)}

    def _echoes(self, rows: Sequence[Sequence[int]], size: int) -> list[Drawn]:
        config = {"max_new_tokens": 0, "logprobs": 1, "echo": True, "eos_token_id": 0, "ignore_eos": True}
        out: list[Drawn] = []
        for first in range(0, len(rows), size):
            part = rows[first : first + size]
            out.extend(self._pipeline.generate(part, [config] * len(part)))
        return out


def _echoed(row: Sequence[int], out: Drawn) -> list[float]:
    """Log-probs of `row` but its first, where the echo has a placeholder."""
    if out.ids != list(row):
        raise EngineError("openvino: it did not give back the ids of a sequence, so its log-probs belong to others")
    return out.logprobs[1:]


def _rules(params: SamplingParams) -> dict[str, Any]:
    """The rules as `GenerationConfig` has them. Errors: `UsageError` for those that mean something else there."""
    if (params.presence_penalty, params.frequency_penalty) != (0.0, 0.0):
        raise UsageError(
            "engine openvino: presence_penalty and frequency_penalty raise negative logits there instead of lowering "
            "them, which is another rule than what these names declare; leave them out, or sample with vllm"
        )
    if params.min_p > 0 and params.top_p < 1:
        raise UsageError(
            "engine openvino: min_p together with top_p: there top_p is taken of the whole mass, not of what min_p has "
            "left, so it keeps more tokens than is declared; leave one out, or sample with vllm"
        )
    if 0 <= params.temperature < GREEDY:
        return {"do_sample": False, "repetition_penalty": params.repetition_penalty}
    return {
        "do_sample": True,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        **({"top_k": params.top_k} if params.top_k > 0 else {}),
    }


def _require_possible(now: Mapping[str, Any]) -> None:
    """Errors: `UsageError` for numbers that mean nothing."""
    for name, least in (("threads", 0), ("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("batch_size", 0)):
        if now[name] < least:
            raise UsageError(f"engine openvino: {name}: got {now[name]}, wanted at least {least}")
