"""A started OpenVINO pipeline: ids in, ids and log-probs out, every failure one line."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy.engines import openvino_graph
from onepolicy.engines.openvino_target import EXPORT, FileTexts, Target, one_line
from onepolicy.errors import EngineError, MissingExtra, UsageError

DEVICE = "CPU"
#: Our names of number types, and OpenVINO's.
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "uint8": "u8", "uint4": "u4"}
_NAMES = {short: name for name, short in TYPES.items()}
#: KV cache types that are kept as asked, by the precision that is computed in; others fail, or are changed silently.
KV = {"float32": ("float32", "float16", "uint8", "uint4"), "bfloat16": ("bfloat16", "uint8", "uint4")}


@dataclass(frozen=True, slots=True)
class Drawn:
    """Ids and log-probs that came out (with `echo`, those of the prompt before them), and why it ended."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str | None


class Pipeline:
    """A continuous-batching pipeline. `dtype`, `kv_cache_dtype`: what it computes and stores in, read back.

    Errors: `MissingExtra`, `UsageError` for a model or switches that cannot be run as asked, `EngineError`.
    """

    def __init__(self, target: Target, options: Mapping[str, Any]) -> None:
        try:
            import openvino
            import openvino_genai
        except ImportError as err:
            raise MissingExtra(err.name or "openvino-genai", "openvino", "the engine 'openvino'") from err
        self._ov, self._genai = openvino, openvino_genai
        properties = _properties(options)
        self.dtype = self._executed(properties)
        self.kv_cache_dtype = _kv_type(self.dtype, options)
        properties["KV_CACHE_PRECISION"] = TYPES[self.kv_cache_dtype]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = options["max_num_seqs"]
        scheduler.max_num_batched_tokens = options["max_num_batched_tokens"]
        scheduler.enable_prefix_caching = False  # with it, prompt log-probs of cached tokens are left out
        try:
            self._pipe: Any = self._load(target, scheduler, properties)
        except RuntimeError as err:
            raise EngineError(f"openvino:{target.path}: it cannot be loaded: {one_line(err)}") from err

    def _load(self, target: Target, scheduler: Any, properties: Mapping[str, Any]) -> Any:
        make = self._genai.ContinuousBatchingPipeline
        if isinstance(target.texts, FileTexts):
            return make(str(target.path), target.texts.tokenizer, scheduler, DEVICE, **properties)
        # files that are mapped into memory outlive the directory
        with tempfile.TemporaryDirectory(prefix="onepolicy-openvino-", ignore_cleanup_errors=True) as scratch:
            tokenizer = self._no_tokenizer(Path(scratch))
            if target.weights == "export":
                return make(str(target.path), tokenizer, scheduler, DEVICE, **properties)
            openvino_graph.write(target.path, Path(scratch) / EXPORT)
            return make(scratch, tokenizer, scheduler, DEVICE, **properties)

    def _no_tokenizer(self, scratch: Path) -> Any:
        """The pipeline wants a tokenizer and, given ids, never asks it: this one knows nothing."""
        import openvino.opset13 as op

        texts = op.parameter([-1], self._ov.Type.string, name="texts")
        results: list[Any] = []
        for name in ("input_ids", "attention_mask"):
            results.append(op.result(op.constant(np.zeros((1, 1), dtype=np.int64))))
            results[-1].output(0).set_names({name})
        folder = scratch / "tokenizer"
        folder.mkdir()
        model = self._ov.Model(results, [texts], "tokenizer")
        self._ov.save_model(model, str(folder / "openvino_tokenizer.xml"), compress_to_fp16=False)
        return self._genai.Tokenizer(str(folder))

    def _executed(self, properties: Mapping[str, Any]) -> str:
        """What this machine makes of the hint: float16 becomes bfloat16 or float32 where it has no such kernels."""
        import openvino.opset13 as op

        x = op.parameter([1, 8], self._ov.Type.f32)
        tiny = self._ov.Model([op.result(op.matmul(x, op.constant(np.ones((8, 8), np.float32)), False, True))], [x])
        short = self._ov.compile_model(tiny, DEVICE, dict(properties)).get_property("INFERENCE_PRECISION_HINT")
        name = str(short.get_type_name())
        return _NAMES.get(name, name)

    def generate(self, prompts: Sequence[Sequence[int]], configs: Sequence[Mapping[str, Any]]) -> list[Drawn]:
        """One answer a prompt, in order. Errors: `EngineError`; what was under way is given up then."""
        handles: list[Any] = []
        try:
            for i, (ids, config) in enumerate(zip(prompts, configs, strict=True)):
                given = self._ov.Tensor(np.array([ids], dtype=np.int64))
                handles.append(self._pipe.add_request(i, given, self._genai.GenerationConfig(**config)))
            while self._pipe.has_non_finished_requests():
                self._pipe.step()
            return [self._drawn(handle) for handle in handles]
        except RuntimeError as err:
            for handle in handles:
                handle.cancel()
            raise EngineError(f"openvino: {one_line(err)}") from err

    @staticmethod
    def _drawn(handle: Any) -> Drawn:
        status, found = handle.get_status().name, handle.read_all()
        if status != "FINISHED" or len(found) != 1:
            raise EngineError(f"openvino: a request ended as {status} with {len(found)} answers; wanted one, finished")
        out = found[0]
        ids, logprobs = list(out.generated_ids), list(out.generated_log_probs)
        if len(ids) != len(logprobs):
            raise EngineError(f"openvino: it gave {len(logprobs)} log-probs for {len(ids)} tokens")
        reason = out.finish_reason.name.lower()
        return Drawn(ids, logprobs, None if reason == "none" else reason)

    def facts(self) -> dict[str, Any]:
        """Versions, the processor, and its kernels' instruction sets."""
        core = self._ov.Core()
        return {
            "device": DEVICE.lower(),
            "kernels": {
                "processor": str(core.get_property(DEVICE, "FULL_DEVICE_NAME")).strip(),
                "capabilities": sorted(core.get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")),
            },
            "versions": {name: version(name) for name in ("openvino", "openvino-genai")},
        }

    def close(self) -> None:
        self._pipe = None


def _properties(options: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides precision is said: left out, OpenVINO takes bfloat16 and an 8-bit KV cache by itself."""
    group = {} if options["dynamic_quantization"] else {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    threads = {"INFERENCE_NUM_THREADS": options["threads"]} if options["threads"] else {}
    return {"INFERENCE_PRECISION_HINT": TYPES[options["dtype"]], **group, **threads}


def _kv_type(dtype: str, options: Mapping[str, Any]) -> str:
    """Errors: `UsageError` for a type that would be refused later, or be stored as another."""
    asked = dtype if options["kv_cache_dtype"] == "auto" else options["kv_cache_dtype"]
    possible = KV.get(dtype, (dtype, "uint8", "uint4"))
    if asked not in possible:
        raise UsageError(
            f"engine openvino: kv_cache_dtype={asked}: where it computes in {dtype} it stores {', '.join(possible)}; "
            "leave it out, or change dtype"
        )
    return asked
