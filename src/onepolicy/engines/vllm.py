"""`vllm:DIR`: vLLM as the sampler, and as a scorer through its prefill or, with forced ids, through its decode.

Ids in, ids out. By default it reports `processed` log-probs, those of the distribution that the token was drawn from.
The same code runs on the CPU and the GPU build.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from onepolicy.engines import model_files, vllm_forced, vllm_score, vllm_start
from onepolicy.engines.base import SamplingParams, Switch, using_of
from onepolicy.engines.replies import Reply, rollouts_of
from onepolicy.engines.texts import OFFLINE, PATIENT_THREADS, Texts, stop_ids
from onepolicy.engines.vllm_running import Running, drawn_logprobs
from onepolicy.errors import UsageError
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring, Values

#: Parameters that have the same name and meaning here and in vLLM.
_SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")

#: What can be another at each `score`.
_LIVE: Mapping[str, Switch] = {
    "path": Switch(str, "prefill", "score by prefill, or force the reply through decode", ("prefill", "decode"), True),
    "batch_size": Switch(int, 0, "sequences that vLLM gets together to score; 0 is all, 1 each alone", live=True),
    "cache": Switch(str, "as_is", "prefix cache of the decode path", ("as_is", "cold", "warm"), True),
}


class VllmEngine:
    """One `vllm.LLM`. Errors: `MissingExtra`, `UsageError` for a target that is no model, `EngineError`."""

    NAME: ClassVar[str] = "vllm"
    SAMPLES: ClassVar[bool] = True
    SCORES: ClassVar[bool] = True
    HEAVY: ClassVar[bool] = True
    #: One process instead of three (numbers are the same): starts faster, and nothing is left when it is killed. It
    #: talks to itself over loopback: other addresses of a machine change, or are closed to itself.
    ENVIRONMENT: ClassVar[Mapping[str, str]] = {
        **OFFLINE,
        **PATIENT_THREADS,
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    SWITCHES: ClassVar[Mapping[str, Switch]] = {**vllm_start.SWITCHES, **_LIVE}

    def __init__(self, target: str, **options: Any) -> None:
        self._options = {**{k: s.default for k, s in self.SWITCHES.items()}, **options}
        _require_possible(self._options)
        directory = model_files.model_directory(target, self.NAME)
        self._environment = {k: v for k, v in sorted(os.environ.items()) if k.startswith("VLLM_")}
        self._running = Running(*vllm_start.start(directory, self._options), directory.name)
        self._facts = model_files.model_facts(directory)
        self._texts, self._stops = Texts(directory), stop_ids(directory)

    # the methods of an engine

    def fingerprint(self) -> Mapping[str, Any]:
        """Versions, switches, kernels and digests. JSON-able. What vLLM decides by itself is said as it decided."""
        return {
            "engine": self.NAME,
            **self._facts,
            "vocab_size": self._running.vocab,
            **vllm_start.facts(self._running.llm, self._options),
            "environment": self._environment,
            "versions": vllm_start.versions(self._running.vllm),
        }

    def encode(self, prompts: Sequence[str | list[dict[str, str]]]) -> list[list[int]]:
        return self._texts.encode(prompts)

    def decode(self, ids: Sequence[int]) -> list[str]:
        return self._texts.decode(ids)

    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Rollouts:
        """Draws `params.samples` replies to each prompt; reply k of all is drawn with seed `params.seed + k`.

        A drawn stop token belongs to the reply and has its log-prob. With the switch `entropy`, entropies besides.

        Errors: `ContentError` for an id outside the vocabulary, `EngineError` for a prompt that is empty or too long.
        """
        for i, prompt in enumerate(prompts):
            self._running.check(f"prompt {i}", prompt, len(prompt) + params.max_tokens)
        asked = [list(p) for p in prompts for _ in range(params.samples)]
        if self._options["entropy"]:
            self._running.take_entropies()  # what a failed call has left
        outs = self._running.generate(asked, [self._params(params, k) for k in range(len(asked))])
        replies = [_reply(given, out) for given, out in zip(asked, outs, strict=True)]
        cached = sum(reply.cached or 0 for reply in replies)
        fingerprint = {**self.fingerprint(), **_DRAWING, "cached_tokens": cached}
        rollouts = rollouts_of(
            replies,
            params,
            semantics=self._options["logprobs"],
            dtype=fingerprint["dtype"],
            stop_ids=self._stops,
            fingerprint=fingerprint,
            scoring_id=uuid.uuid4().hex,
        )
        return self._with_entropies(rollouts) if self._options["entropy"] else rollouts

    def score(
        self, rollouts: Rollouts, *, distributions: bool = False, using: Mapping[str, Any] | None = None
    ) -> Scoring:
        """`[T]` log-probs of the given ids.

        `path=prefill`: of all tokens but each first; they are raw (temperature 1). `path=decode`: of the tokens behind
        `prompt_length` (1 where it is not known), as vLLM gives them when it draws them: at the declared semantics
        with `logprobs=processed`, else raw; vLLM's own truncation, no recorded sampling mask; with the switch
        `entropy`, entropy and varentropy besides. The fingerprint's `cached_tokens` says how many prompt tokens of
        this call came from the prefix cache.

        Errors: `UsageError` where the rollouts declare what this path's log-probs do not mean, and for switches that
        do not go together; `EngineError` when another id came out than was forced; as `sample` besides.
        """
        if distributions:
            raise UsageError("engine 'vllm' gives no full distributions; use hf")
        now = {**self._options, **using_of(self, using)}
        _require_possible(now)
        if now["routes"] and now["path"] == "prefill":
            now["batch_size"] = 1
        score = vllm_score.decode if now["path"] == "decode" else vllm_score.prefill
        out = score(self._running, rollouts, now)
        fingerprint = {**self.fingerprint(), **{k: now[k] for k in _LIVE}, "cached_tokens": out.cached}
        return Scoring(
            Values(out.logprobs, out.valid),
            out.moment(0),
            out.moment(1),
            None,
            out.semantics,
            fingerprint["dtype"],
            fingerprint,
            uuid.uuid4().hex,
            out.routes,
        )

    def close(self) -> None:
        """Shuts the engine core down, which ends what it has started."""
        llm, self._running.llm = self._running.llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()

    # inside

    def _params(self, params: SamplingParams, k: int) -> Any:
        return self._running.params(
            **{name: getattr(params, name) for name in _SAME},
            seed=params.seed + k,
            max_tokens=params.max_tokens,
            logprobs=0,  # the drawn token's, and no others
            ignore_eos=params.ignore_eos,
            stop_token_ids=[] if params.ignore_eos else self._stops,
            extra_args=vllm_forced.kept_args(k) if self._options["entropy"] else None,
        )

    def _with_entropies(self, rollouts: Rollouts) -> Rollouts:
        """The same with the entropies of the drawn tokens, which are the end of each sequence."""
        drawn = rollouts.drawn
        ends = [rollouts.sequence(i) for i in range(len(rollouts))]
        places = [slice(at.stop - int(drawn[at].sum()), at.stop) for at in ends]
        moments = vllm_score.moments_of(self._running.take_entropies(), places, rollouts.n_tokens)
        entropy, varentropy = (Values(x, drawn) for x in moments)
        scoring = replace(rollouts.scorings["sampler"], entropy=entropy, varentropy=varentropy)
        return rollouts.with_scoring("sampler", scoring)


#: What the live switches are when it draws.
_DRAWING = {"path": "decode", "batch_size": 0, "cache": "as_is"}


def _require_possible(now: Mapping[str, Any]) -> None:
    """Errors: `UsageError` for values, or pairs of them, that would be reported and not done."""
    if not 0 <= now["batch_size"] <= now["max_num_seqs"]:
        raise UsageError(
            f"engine vllm: batch_size: got {now['batch_size']}, wanted 0 to max_num_seqs ({now['max_num_seqs']})"
        )
    if now["routes"] and now["batch_size"] > 1:
        raise UsageError("engine vllm: routes=true scores one sequence at a time; leave batch_size out, or 1")
    if now["routes"] and now["enforce_eager"] == "false":
        raise UsageError("engine vllm: routes=true reads experts in Python, which enforce_eager=false skips; leave one")
    if now["cache"] != "as_is" and now["path"] != "decode":
        raise UsageError(f"engine vllm: cache={now['cache']} needs path=decode; prefill with log-probs reads no cache")
    if now["cache"] == "warm" and not now["prefix_caching"]:
        raise UsageError("engine vllm: cache=warm needs prefix_caching=true")


def _reply(prompt: Sequence[int], out: Any) -> Reply:
    drawn = out.outputs[0]
    return Reply(prompt, list(drawn.token_ids), drawn_logprobs(out), drawn.finish_reason, out.num_cached_tokens)
