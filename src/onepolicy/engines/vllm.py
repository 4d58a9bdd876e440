"""`vllm:DIR`: vLLM as the sampler; at raw log-probs also as a scorer, through `prompt_logprobs`.

Ids in, ids out. By default it reports `processed` log-probs, those of the distribution that the token was drawn from.
The same code runs on the CPU and the GPU build.
"""

# imported before vllm: some switches become environment variables

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

import onepolicy
from onepolicy.engines import model_files
from onepolicy.engines.base import SamplingParams, Switch
from onepolicy.engines.replies import Reply, rollouts_of
from onepolicy.engines.semantics import require_same_meaning
from onepolicy.engines.texts import OFFLINE, PATIENT_THREADS, Texts, stop_ids
from onepolicy.errors import ContentError, EngineError, MissingExtra, UsageError
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring, Values

#: Parameters that have the same name and meaning here and in vLLM.
_SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class VllmEngine:
    """One `vllm.LLM`. Errors: `MissingExtra`, `UsageError` for a target that is no model, `EngineError`."""

    NAME: ClassVar[str] = "vllm"
    SAMPLES: ClassVar[bool] = True
    SCORES: ClassVar[bool] = True
    HEAVY: ClassVar[bool] = True
    #: One process instead of three (numbers are the same): starts faster, and nothing is left when it is killed.
    ENVIRONMENT: ClassVar[Mapping[str, str]] = {
        **OFFLINE,
        **PATIENT_THREADS,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    SWITCHES: ClassVar[Mapping[str, Switch]] = {
        "dtype": Switch(str, "bfloat16", "precision of weights and activations", ("float32", "bfloat16", "float16")),
        "logprobs": Switch(str, "processed", "what is reported for drawn tokens", ("raw", "processed")),
        "kv_cache_dtype": Switch(str, "auto", "auto is the engine's dtype", ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")),
        "prefix_caching": Switch(bool, True, "reuse the KV of equal prompt beginnings (vLLM's own default)"),
        "enforce_eager": Switch(str, "auto", "no compilation; auto is true on a CPU only", ("auto", "true", "false")),
        "max_model_len": Switch(int, 0, "longest sequence; 0 is the model's own"),
        "max_num_seqs": Switch(int, 32, "sequences in one step"),
        "tensor_parallel": Switch(int, 1, "ranks that share each layer"),
        "seed": Switch(int, 0, "of the engine; each reply has its own besides"),
        "gpu_memory": Switch(float, 0.9, "share of the GPU memory"),
        "kv_cache_gib": Switch(int, 1, "KV cache of the CPU build; VLLM_CPU_KVCACHE_SPACE wins"),
    }

    def __init__(self, target: str, **options: Any) -> None:
        self._options = {**{k: s.default for k, s in self.SWITCHES.items()}, **options}
        self._directory = model_files.model_directory(target, self.NAME)
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(self._options["kv_cache_gib"]))
        self._environment = {k: v for k, v in sorted(os.environ.items()) if k.startswith("VLLM_")}
        self._llm: Any
        self._vllm, self._llm = _load(str(self._directory), self._options)
        self._facts = model_files.model_facts(self._directory)
        self._texts, self._stops = Texts(self._directory), stop_ids(self._directory)
        config = self._llm.llm_engine.model_config
        self._vocab, self._max_length = int(config.get_vocab_size()), int(config.max_model_len)

    # the methods of an engine

    def fingerprint(self) -> Mapping[str, Any]:
        """Versions, switches, kernels and digests. JSON-able. `dtype` and `kv_cache_dtype` are what it computes in."""
        config = self._llm.llm_engine.vllm_config
        dtype = str(config.model_config.dtype).removeprefix("torch.")
        kv = str(config.cache_config.cache_dtype)
        return {
            "engine": self.NAME,
            **{k: v for k, v in self._options.items() if k not in ("gpu_memory", "kv_cache_gib")},
            **self._facts,
            "vocab_size": self._vocab,
            "dtype": dtype,
            "kv_cache_dtype": dtype if kv == "auto" else kv,
            "max_model_len": self._max_length,
            "enforce_eager": bool(config.model_config.enforce_eager),
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "quantization": config.model_config.quantization,
            "device": _device(),
            "kernels": _kernels(),
            "environment": self._environment,
            "versions": _versions(self._vllm),
        }

    def encode(self, prompts: Sequence[str | list[dict[str, str]]]) -> list[list[int]]:
        return self._texts.encode(prompts)

    def decode(self, ids: Sequence[int]) -> list[str]:
        return self._texts.decode(ids)

    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Rollouts:
        """Draws `params.samples` replies to each prompt; reply k of all is drawn with seed `params.seed + k`.

        A drawn stop token belongs to the reply and has its log-prob.

        Errors: `ContentError` for an id outside the vocabulary, `EngineError` for a prompt that is empty or too long.
        """
        for i, prompt in enumerate(prompts):
            self._check(f"prompt {i}", prompt, len(prompt) + params.max_tokens)
        asked = [list(p) for p in prompts for _ in range(params.samples)]
        each = [self._params(params, params.seed + k) for k in range(len(asked))]
        replies = [self._reply(given, out) for given, out in zip(asked, self._generate(asked, each), strict=True)]
        fingerprint = self.fingerprint()
        return rollouts_of(
            replies,
            params,
            semantics=self._options["logprobs"],
            dtype=fingerprint["dtype"],
            stop_ids=self._stops,
            fingerprint=fingerprint,
            scoring_id=uuid.uuid4().hex,
        )

    def score(self, rollouts: Rollouts, *, distributions: bool = False) -> Scoring:
        """`[T]` log-probs of the given ids by vLLM's prefill; index 0 null; no entropy. They are raw (temperature 1).

        Errors: `UsageError` where the rollouts declare something that is not the same as raw; as `sample` besides.
        """
        if distributions:
            raise UsageError("engine 'vllm' gives no full distributions; use hf")
        require_same_meaning(rollouts, "raw", "vllm")
        rows = [rollouts.token_ids[rollouts.sequence(i)].tolist() for i in range(len(rollouts))]
        for name, row in zip(rollouts.record_ids(), rows, strict=True):
            self._check(f"record {name!r}", row, len(row) + 1)  # vLLM draws one token behind it
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outs = self._generate(rows, [params] * len(rows))
        values = np.zeros(rollouts.n_tokens, dtype=np.float32)
        valid = np.zeros(rollouts.n_tokens, dtype=bool)
        for i, (row, out) in enumerate(zip(rows, outs, strict=True)):
            at = rollouts.sequence(i)
            given = out.prompt_logprobs or []
            if len(given) != len(row):
                raise EngineError(f"vllm: got {len(given)} prompt log-probs for the {len(row)} tokens of sequence {i}")
            values[at.start + 1 : at.stop] = [given[t][row[t]].logprob for t in range(1, len(row))]
            valid[at.start + 1 : at.stop] = True
        fingerprint = self.fingerprint()
        return Scoring(
            Values(values, valid), None, None, None, "raw", fingerprint["dtype"], fingerprint, uuid.uuid4().hex
        )

    def close(self) -> None:
        """Shuts the engine core down, which ends what it has started."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()

    # inside

    def _check(self, what: str, ids: Sequence[int], length: int) -> None:
        bad = [t for t, x in enumerate(ids) if not 0 <= x < self._vocab]
        if bad:
            raise ContentError(
                f"{what}: token id {ids[bad[0]]} at position {bad[0]} is outside the vocabulary of {self._vocab} of "
                f"{self._directory.name}; the ids were made by another tokenizer or model"
            )
        if not len(ids):
            raise EngineError(f"{what}: it is empty; vLLM needs at least one id")
        if length > self._max_length:
            raise EngineError(
                f"{what}: {length} tokens with the reply, but max_model_len is {self._max_length}; shorten the reply "
                "(max_tokens), raise max_model_len, or leave it out"
            )

    def _params(self, params: SamplingParams, seed: int) -> Any:
        return self._vllm.SamplingParams(
            **{name: getattr(params, name) for name in _SAME},
            seed=seed,
            max_tokens=params.max_tokens,
            logprobs=0,  # the drawn token's, and no others
            detokenize=False,
            ignore_eos=params.ignore_eos,
            stop_token_ids=[] if params.ignore_eos else self._stops,
        )

    def _generate(self, rows: list[list[int]], params: list[Any]) -> list[Any]:
        prompts = [{"prompt_token_ids": row} for row in rows]
        try:
            return self._llm.generate(prompts, params, use_tqdm=False)
        except Exception as err:
            first = (str(err).strip().splitlines() or ["no message"])[0]
            raise EngineError(f"vllm: {type(err).__name__}: {first[:300]}") from err

    @staticmethod
    def _reply(prompt: Sequence[int], out: Any) -> Reply:
        if list(out.prompt_token_ids) != list(prompt):
            raise EngineError("vllm: it changed the ids of a prompt, so its log-probs belong to other tokens")
        drawn = out.outputs[0]
        logprobs = [step[token].logprob for token, step in zip(drawn.token_ids, drawn.logprobs or [], strict=True)]
        return Reply(prompt, list(drawn.token_ids), logprobs, drawn.finish_reason, out.num_cached_tokens)


def _load(directory: str, options: Mapping[str, Any]) -> tuple[Any, Any]:
    try:
        import vllm
        from vllm.platforms import current_platform
    except ImportError as err:
        raise MissingExtra(err.name or "vllm", "vllm", "the engine 'vllm'") from err
    eager = {"true": True, "false": False}.get(options["enforce_eager"], current_platform.is_cpu())
    on_gpu = {} if current_platform.is_cpu() else {"gpu_memory_utilization": options["gpu_memory"]}
    try:
        llm = vllm.LLM(
            model=directory,
            dtype=options["dtype"],
            logprobs_mode=f"{options['logprobs']}_logprobs",
            kv_cache_dtype=options["kv_cache_dtype"],
            enable_prefix_caching=options["prefix_caching"],
            enforce_eager=eager,
            max_model_len=options["max_model_len"] or None,
            max_num_seqs=options["max_num_seqs"],
            tensor_parallel_size=options["tensor_parallel"],
            seed=options["seed"],
            generation_config="vllm",  # a model's own sampling defaults must not be applied behind our back
            trust_remote_code=False,
            disable_log_stats=True,
            **on_gpu,
        )
    except Exception as err:
        first = (str(err).strip().splitlines() or ["no message"])[0]
        raise EngineError(f"vllm:{directory}: the engine cannot start: {type(err).__name__}: {first[:300]}") from err
    return vllm, llm


def _device() -> str:
    from vllm.platforms import current_platform

    return "cpu" if current_platform.is_cpu() else str(current_platform.get_device_name())


def _kernels() -> dict[str, Any]:
    """Settings of the process that decide which kernels run."""
    import torch

    return {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
    }


def _versions(vllm: Any) -> dict[str, str]:
    import torch
    import transformers

    return {
        "onepolicy": onepolicy.__version__,
        "vllm": str(vllm.__version__),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }
