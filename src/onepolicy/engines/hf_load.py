"""A transformers model as it is loaded: config overrides, staged edits, rounded weights, a float32 head, no TF32.

Nothing here runs code of the model directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onepolicy.errors import EngineError, MissingExtra, OnepolicyError, UnknownName, UsageError

#: Keys of config.json that transformers 5 keeps inside `rope_parameters`.
_ROPE_VALUES = ("rope_theta", "partial_rotary_factor")
_ROPE_TABLES = ("rope_scaling", "rope_parameters")


@dataclass(frozen=True, slots=True)
class Loaded:
    """torch, the model, and what the fingerprint says of how it was loaded."""

    torch: Any
    model: Any
    notes: Mapping[str, Any]


def load(directory: Path, options: Mapping[str, Any], overrides: Mapping[str, Any], edit: Mapping[str, Any]) -> Loaded:
    """The model of the directory, in evaluation mode on its device.

    Errors: `MissingExtra`; `UnknownName` for an override or edit that the model does not have; `EngineError` for a
    model that cannot be loaded completely, and for memory that is not enough.
    """
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as err:
        raise MissingExtra(err.name or "transformers", "hf", "the engine 'hf'") from err
    if options["threads"]:
        torch.set_num_threads(options["threads"])
    if "float32" in (options["dtype"], options["head_dtype"]):
        _forbid_tf32(torch)
    device = options["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with _one_line(f"hf:{directory}: the model cannot be loaded"), out_of_memory(f"hf:{directory}: loading"):
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        override(config, overrides)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(directory),
            config=config,
            dtype=getattr(torch, options["dtype"]),
            attn_implementation=options["attention"],
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        model, info = loaded
        model = model.eval().to(device)
    _refuse_missing(directory, info)
    stage(torch, model, edit)
    changed = round_weights(torch, model, options["rounded_to"])
    if options["head_dtype"] == "float32":
        widen_head(torch, model)
    return Loaded(torch, model, {"rounding_changed_weights": changed, "overrides": overrides, "edit": edit})


def json_object(text: str, what: str) -> dict[str, Any]:
    """The JSON object in a switch's text; empty for no text. Errors: `UsageError`."""
    try:
        value = json.loads(text) if text else {}
    except ValueError as err:
        raise UsageError(f"{what}: got {text[:80]!r}, wanted a JSON object ({err})") from None
    if not isinstance(value, dict):
        raise UsageError(f'{what}: got {text[:80]!r}, wanted a JSON object, as {{"rope_theta": 50000}}')
    return value


def override(config: Any, values: Mapping[str, Any]) -> None:
    """Puts `values` into the language model's part of the config, in place; tables are merged, other values replaced.

    Errors: `UnknownName` for a key that the config does not have, `UsageError` for a value that it refuses.
    """
    text = config.get_text_config()
    tables = _rope_tables(text)
    known = {*text.to_dict(), *((*_ROPE_VALUES, *_ROPE_TABLES) if tables else ())}
    for key, value in values.items():
        if key not in known:
            raise UnknownName("key of the model's config", key, known)
        if key in _ROPE_TABLES and tables and isinstance(value, dict):
            for table in tables:
                table.update({"rope_type" if k == "type" else k: v for k, v in value.items()})
        elif key in _ROPE_VALUES and tables:
            for table in tables:
                table[key] = float(value)
        else:
            _set(text, key, value)
    if tables and hasattr(text, "standardize_rope_params"):
        text.standardize_rope_params()


def _rope_tables(config: Any) -> list[dict[str, Any]]:
    """The dicts that hold a RoPE base: one, or one a kind of layer; none before transformers 5."""
    whole = getattr(config, "rope_parameters", None)
    if not isinstance(whole, dict):
        return []
    return [whole] if "rope_theta" in whole else [t for t in whole.values() if isinstance(t, dict)]


def _set(config: Any, key: str, value: Any) -> None:
    if isinstance(getattr(config, key, None), float) and isinstance(value, int):
        value = float(value)
    try:
        setattr(config, key, value)
    except Exception as err:  # the config checks its own types
        why = " ".join(str(err).split())[:200]
        raise UsageError(f"overrides: {key}={value!r} is refused by the model's config: {why}") from None


def stage(torch: Any, model: Any, edit: Mapping[str, Any]) -> None:
    """A weight fault put in on purpose: `{"noise": {"tensor": NAME, "share": 0.01, "seed": 0}}` adds Gaussian noise
    of that share of the tensor's standard deviation. Errors: `UnknownName`, `UsageError`."""
    for kind, how in edit.items():
        if kind != "noise":
            raise UnknownName("edit", kind, ["noise"])
        if not isinstance(how, dict) or not isinstance(how.get("share"), int | float):
            raise UsageError('edit: wanted {"noise": {"tensor": NAME, "share": 0.01, "seed": 0}}')
        weights = dict(model.named_parameters())
        if how.get("tensor") not in weights:
            raise UnknownName("tensor of the model", str(how.get("tensor")), weights)
        weight = weights[how["tensor"]]
        # drawn on the CPU, so that it is the same noise on every device
        random = torch.Generator().manual_seed(int(how.get("seed", 0)))
        noise = torch.randn(weight.shape, generator=random).to(weight.device)
        wide = weight.detach().float()
        weight.data.copy_(wide + how["share"] * wide.std() * noise)


def round_weights(torch: Any, model: Any, dtype: str) -> bool:
    """Rounds every weight that a model of that dtype would hold in it; whether that changed any."""
    if dtype == "none":
        return False
    narrow, changed = getattr(torch, dtype), False
    kept = [*(getattr(model, "_keep_in_fp32_modules_strict", None) or ())]
    if dtype == "float16":
        kept += [*(getattr(model, "_keep_in_fp32_modules", None) or ())]
    for name, weight in model.named_parameters():
        if not set(kept) & set(name.split(".")):
            rounded = weight.data.to(narrow).to(weight.dtype)
            changed = changed or not torch.equal(rounded, weight.data)
            weight.data.copy_(rounded)
    return changed


def widen_head(torch: Any, model: Any) -> None:
    """The language-model head multiplies in float32: hidden states and weights are cast, embeddings stay as they are.

    Errors: `EngineError` for a model without an output head of its own.
    """
    head = model.get_output_embeddings()
    if head is None or getattr(head, "weight", None) is None:
        raise EngineError(f"head_dtype=float32: {type(model).__name__} has no head that could be cast; leave it out")
    weight = head.weight.detach().float()
    bias = None if getattr(head, "bias", None) is None else head.bias.detach().float()
    head.forward = lambda hidden: torch.nn.functional.linear(hidden.float(), weight, bias)


@contextmanager
def attention(model: Any, name: str) -> Iterator[None]:
    """The model with another attention kernel while the block runs. Errors: `EngineError` where it cannot have it."""
    before = model.config._attn_implementation
    if name == before:
        yield
        return
    change = getattr(model, "set_attn_implementation", None)
    if change is None:
        raise EngineError(
            f"attention={name}: this transformers cannot change it while it runs; start the engine with it"
        )
    with _one_line(f"attention={name} cannot be used here"):
        change(name)
    try:
        if model.config._attn_implementation != name:
            raise EngineError(f"attention={name}: {type(model).__name__} keeps {model.config._attn_implementation}")
        yield
    finally:
        change(before)


@contextmanager
def out_of_memory(what: str) -> Iterator[None]:
    """Errors: `EngineError` that says so, when memory, of the GPU or of the machine, does not suffice."""
    try:
        yield
    except (MemoryError, RuntimeError) as err:
        text = str(err)
        known = ("out of memory", "can't allocate memory", "not enough memory")
        if isinstance(err, OnepolicyError) or not (isinstance(err, MemoryError) or any(k in text for k in known)):
            raise
        first = (text.strip().splitlines() or ["no message"])[0][:200]
        raise EngineError(
            f"{what}: out of memory ({first}); lower batch_size, or give it fewer or shorter sequences"
        ) from err


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    try:
        yield
    except OnepolicyError:
        raise
    except Exception as err:
        first = (str(err).strip().splitlines() or ["no message"])[0]
        raise EngineError(f"{what}: {type(err).__name__}: {first[:300]}") from err


def _refuse_missing(directory: Path, info: Mapping[str, Any]) -> None:
    missing = sorted(info.get("missing_keys") or [])
    if missing:
        raise EngineError(
            f"hf:{directory}: {len(missing)} tensors are not in the files and would be random, {missing[0]!r} first; "
            "the checkpoint does not fit its config.json"
        )


def _forbid_tf32(torch: Any) -> None:
    """Float32 that is really float32: TF32 has the 10 mantissa bits of float16."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def kernels(torch: Any) -> dict[str, Any]:
    """What is known about the kernels that a run will use. `tf32`: whether float32 products are cut to TF32."""
    known: dict[str, Any] = {
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": False,
    }
    if torch.cuda.is_available():
        matmul = torch.backends.cuda.matmul
        known |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            # the environment variable is the driver's own and wins
            "tf32": bool(matmul.allow_tf32) or os.environ.get("NVIDIA_TF32_OVERRIDE") == "1",
            "bf16_reduced_precision_reduction": matmul.allow_bf16_reduced_precision_reduction,
            "fp16_reduced_precision_reduction": matmul.allow_fp16_reduced_precision_reduction,
        }
    return known
