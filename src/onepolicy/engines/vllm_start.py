"""Starting vLLM: the switches that hold for its whole life, what they become, and what it says it runs with."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import onepolicy
from onepolicy.engines import vllm_forced, vllm_routes
from onepolicy.engines.base import Switch
from onepolicy.errors import EngineError, MissingExtra, UnknownName, UsageError

_AUTO = ("auto", "true", "false")
_AS_BOOL = {"auto": None, "true": True, "false": False}

#: Switches that need a new start.
SWITCHES: Mapping[str, Switch] = {
    "dtype": Switch(str, "bfloat16", "precision of weights and activations", ("float32", "bfloat16", "float16")),
    "head_dtype": Switch(str, "auto", "precision of the output head; auto is the engine's dtype", ("auto", "float32")),
    "logprobs": Switch(str, "processed", "what is reported for drawn tokens", ("raw", "processed")),
    "quantization": Switch(str, "auto", "a vLLM method, as fp8; auto is what the model's files say"),
    "kv_cache_dtype": Switch(str, "auto", "auto is the engine's dtype", ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")),
    "prefix_caching": Switch(bool, True, "reuse the KV of equal prompt beginnings (vLLM's own default)"),
    "block_size": Switch(int, 0, "tokens in a KV block, the unit of prefix caching; 0 is vLLM's own (128 on a CPU)"),
    "chunked_prefill": Switch(str, "auto", "prefill long prompts in parts; auto is vLLM's own choice", _AUTO),
    "max_num_batched_tokens": Switch(int, 0, "tokens in one step; 0 is vLLM's own"),
    "max_num_seqs": Switch(int, 32, "sequences in one step"),
    "max_model_len": Switch(int, 0, "longest sequence; 0 is the model's own"),
    "enforce_eager": Switch(str, "auto", "no compilation; auto is true on a CPU only", _AUTO),
    "tensor_parallel": Switch(int, 1, "ranks that share each layer"),
    "overrides": Switch(str, "", 'JSON object of config.json values to replace, as {"rope_theta": 50000}'),
    "entropy": Switch(bool, False, "entropy and varentropy of drawn tokens, over the full vocabulary; costs time"),
    "routes": Switch(bool, False, "experts of mixture models, when it scores by prefill; one sequence at a time"),
    "seed": Switch(int, 0, "of the engine; each reply has its own besides"),
    "gpu_memory": Switch(float, 0.9, "share of the GPU memory"),
    "kv_cache_gib": Switch(int, 1, "KV cache of the CPU build; VLLM_CPU_KVCACHE_SPACE wins"),
}
#: They change no number.
_SIZES = ("gpu_memory", "kv_cache_gib")


def start(directory: Path, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """(the module vllm, a running `LLM`). Errors: `MissingExtra`, `UsageError`, `EngineError`."""
    try:
        import vllm
    except ImportError as err:
        raise MissingExtra(err.name or "vllm", "vllm", "the engine 'vllm'") from err
    changes = config_changes(directory, options["overrides"])
    arguments = _arguments(directory, options, changes)
    try:
        forcing = _forcing(arguments)
        if options["entropy"] and "logits_processors" not in forcing:
            raise UsageError("engine vllm: entropy=true needs vLLM's V1 model runner; set VLLM_USE_V2_MODEL_RUNNER=0")
        llm = vllm.LLM(**arguments, **forcing)
        if options["routes"] and not llm.collective_rpc(vllm_routes.watch)[0]:
            raise UsageError(f"vllm:{directory}: routes=true, but it has no mixture-of-experts layers; leave it out")
    except UsageError:
        raise
    except Exception as err:
        raise EngineError(f"vllm:{directory}: the engine cannot start: {one_line(err)}") from err
    _require_in_effect(llm, changes)
    return vllm, llm


def one_line(err: BaseException) -> str:
    """Its type and the first line that says what is wrong; pydantic puts counts and field names above it."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()] or ["no message"]
    at = next((i for i, line in enumerate(lines) if not _HEADING.fullmatch(line)), len(lines) - 1)
    return f"{type(err).__name__}: {' '.join(lines[: at + 1]).split(' [type=')[0][:300]}"


_HEADING = re.compile(r"\d+ validation errors? for \S+|[\w.]+|.*:")


def _arguments(directory: Path, options: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Options as `LLM` has them."""
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    memory = {"kv_cache_memory_bytes": options["kv_cache_gib"] * 2**30}
    memory = memory if on_cpu else {"gpu_memory_utilization": options["gpu_memory"]}
    head = {} if options["head_dtype"] == "auto" else {"head_dtype": options["head_dtype"]}
    eager = _AS_BOOL[options["enforce_eager"]]
    return {
        "model": str(directory),
        "dtype": options["dtype"],
        "logprobs_mode": f"{options['logprobs']}_logprobs",
        "quantization": None if options["quantization"] == "auto" else options["quantization"],
        "kv_cache_dtype": options["kv_cache_dtype"],
        "enable_prefix_caching": options["prefix_caching"],
        "enable_chunked_prefill": _AS_BOOL[options["chunked_prefill"]],
        "max_num_batched_tokens": options["max_num_batched_tokens"] or None,
        "max_num_seqs": options["max_num_seqs"],
        "max_model_len": options["max_model_len"] or None,
        "enforce_eager": options["routes"] or (on_cpu if eager is None else eager),
        "tensor_parallel_size": options["tensor_parallel"],
        "seed": options["seed"],
        "hf_overrides": {**changes, **head},
        "generation_config": "vllm",  # a model's own sampling defaults must not be applied behind our back
        "trust_remote_code": False,
        "disable_log_stats": True,
        **({"block_size": options["block_size"]} if options["block_size"] else {}),
        **memory,
    }


def _forcing(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """How given ids are forced: a logits processor of ours, or the V2 model runner's own trace replay."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        from vllm.engine.arg_utils import EngineArgs

        if EngineArgs(**arguments).create_engine_config().use_v2_model_runner:
            return {"enable_trace_replay": True}
    return {"logits_processors": [vllm_forced.PROCESSOR]}


def config_changes(directory: Path, text: str) -> dict[str, Any]:
    """The switch `overrides` as vLLM's `hf_overrides`. `rope_theta` and `rope_scaling` go where they are read from.

    Errors: `UsageError` for text that is no JSON object; `UnknownName` for a key that the model's config has not.
    """
    if not text:
        return {}
    try:
        given = json.loads(text)
    except ValueError as err:
        raise UsageError(f"engine vllm: overrides: got {text!r}, wanted a JSON object: {err}") from None
    if not isinstance(given, dict):
        raise UsageError(f"engine vllm: overrides: got a {type(given).__name__}, wanted a JSON object")
    known = _config(directory)
    for key in given:
        if key not in known and key not in ("rope_theta", "rope_scaling"):
            raise UnknownName(f"override of {directory.name}'s config", key, [*known, "rope_theta", "rope_scaling"])
    rope = dict(known.get("rope_parameters") or {})
    for key in ("rope_parameters", "rope_scaling"):
        part = given.pop(key, {})
        if not isinstance(part, dict):
            raise UsageError(f"engine vllm: overrides: {key}: got {part!r}, wanted an object")
        rope |= part
    if "rope_theta" in given:
        rope["rope_theta"] = given.pop("rope_theta")
    return given if rope == known.get("rope_parameters") else {**given, "rope_parameters": rope}


def _config(directory: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False).to_dict()
    except Exception as err:
        raise EngineError(f"{directory / 'config.json'}: cannot be read: {one_line(err)}") from err


def _require_in_effect(llm: Any, changes: Mapping[str, Any]) -> None:
    """An override that reaches nothing would be reported and not done."""
    config = llm.llm_engine.model_config
    for key, value in changes.items():
        now = getattr(config.hf_text_config, key, getattr(config.hf_config, key, None))
        if not isinstance(value, dict) and now != value:
            raise EngineError(f"engine vllm: overrides: {key} is {now!r} after the start, wanted {value!r}")


def facts(llm: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint's keys that say how it runs: the switches, replaced by what is in effect where vLLM decides."""
    config = llm.llm_engine.vllm_config
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    dtype, kv = _name(model.dtype), _name(cache.cache_dtype)
    return {
        **{k: v for k, v in options.items() if k not in _SIZES},
        "overrides": json.loads(options["overrides"] or "{}"),
        "dtype": dtype,
        "head_dtype": _name(model.head_dtype),
        "kv_cache_dtype": dtype if kv == "auto" else kv,
        "quantization": model.quantization,
        "block_size": cache.block_size,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_model_len": int(model.max_model_len),
        "enforce_eager": bool(model.enforce_eager),
        "device": _device(),
        "kernels": _kernels(),
        "model_runner": "v2" if getattr(config, "use_v2_model_runner", False) else "v1",
    }


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


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


def versions(vllm: Any) -> dict[str, str]:
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
