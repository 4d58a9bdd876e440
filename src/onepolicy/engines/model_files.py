"""A model directory on disk: found, checked, and digested from its files, alike for every engine.

Digests come from the files and not from what an engine holds: vLLM on CPU empties linear weights after loading, and
fused or padded weights would differ between engines that hold the same model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onepolicy.errors import EngineError, UsageError

#: Keys of config.json that change no number: who wrote it, and the dtype, which the engine's own switch decides.
_VOLATILE = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache", "architectures")
_CHUNK = 2**24


def model_directory(target: str, engine: str) -> Path:
    """The directory that `engine:target` names: a path, else a packaged model (`tiny`).

    Errors: `UsageError` for a target that is neither, or a directory that holds no model.
    """
    from onepolicy import models

    path = Path(target).expanduser()
    if not path.is_dir():
        try:
            path = Path(models.path(target))
        except (OSError, KeyError, UsageError):
            known = ", ".join(models.MODELS)
            what = "is a file" if path.exists() else f"is no directory and no packaged model ({known})"
            raise UsageError(f"engine {engine}:{target}: {target!r} {what}; wanted a model directory") from None
    missing = [what for what in ("config.json", "*.safetensors") if not any(path.glob(what))]
    if missing:
        raise UsageError(
            f"engine {engine}:{target}: {path} holds no {' and no '.join(missing)}; wanted a directory in the "
            "Hugging Face format with safetensors weights"
        )
    return path.resolve()


def read_config(directory: Path) -> dict[str, Any]:
    """config.json. Errors: `EngineError` when it cannot be read or is no object."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise EngineError(f"{directory / 'config.json'}: cannot be read: {err}") from err
    if not isinstance(config, dict):
        raise EngineError(f"{directory / 'config.json'}: got a {type(config).__name__}, wanted an object")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a multi-part config."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def model_facts(directory: Path, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fingerprint keys that belong to the model: architecture, vocabulary, length, stored dtype, digests.

    `overrides`: keys of the config that an engine was told to replace; the config's digest is of what it uses.
    """
    config = {**read_config(directory), **(overrides or {})}
    text = text_config(config)
    stored = stored_dtypes(directory)
    return {
        "model": directory.name,
        "architecture": next(iter(config.get("architectures") or []), None),
        "vocab_size": text.get("vocab_size"),
        "max_position_embeddings": text.get("max_position_embeddings"),
        "checkpoint_dtype": text.get("dtype") or text.get("torch_dtype"),
        "weight_quantization": weight_quantization(config),
        "stored_dtype": next(iter(stored)) if len(stored) == 1 else "mixed",
        "weights_digest": weights_digest(directory),
        "config_digest": _json_digest({k: v for k, v in config.items() if k not in _VOLATILE}),
        "tokenizer_digest": tokenizer_digest(directory),
    }


def weight_quantization(config: Mapping[str, Any]) -> str | None:
    """What a config says of quantised weights: `fp8`, `int8`, `int4`, ..., the method's own name, or None."""
    said: Any = text_config(dict(config)).get("quantization_config")
    if not isinstance(said, Mapping):
        return None
    for group in (said.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        return f"{'fp' if weights.get('type') == 'float' else 'int'}{weights.get('num_bits', '')}"
    method = str(said.get("quant_method") or "unknown")
    if method == "bitsandbytes":
        return "int4" if said.get("load_in_4bit") else "int8"
    bits = said.get("bits")
    return f"int{bits}" if method in ("gptq", "awq") and bits else method


def weights_digest(directory: Path) -> str:
    """SHA-256 (16 hex digits) over the name, dtype, shape and bytes of every tensor in the safetensors files.

    By tensor name, so the same weights in more or fewer files are equal. Errors: `EngineError` for a file that is
    not safetensors, or an empty tensor.
    """
    tensors = sorted(t for file in sorted(directory.glob("*.safetensors")) for t in _tensors(file))
    total = hashlib.sha256()
    for name, dtype, shape, file, start, stop in tensors:
        if stop <= start:
            raise EngineError(f"weights digest: tensor {name!r} of {file} is empty {shape}")
        total.update(f"{name} {dtype} {shape}".encode())
        for chunk in _bytes(Path(file), start, stop):
            total.update(chunk)
    return total.hexdigest()[:16]


#: Names of dtypes in safetensors headers that are not just spelled out; others are given in small letters.
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn"}


def stored_dtypes(directory: Path) -> set[str]:
    """The dtypes of all tensors in the safetensors files, by torch's names. Rounding to an only one is no change."""
    files = sorted(directory.glob("*.safetensors"))
    return {_DTYPES.get(dtype, dtype.lower()) for file in files for _, dtype, *_ in _tensors(file)}


def _tensors(file: Path) -> Iterator[tuple[str, str, list[int], str, int, int]]:
    """(name, dtype, shape, file, first byte, last byte + 1). The header: 8 bytes of length, then JSON."""
    try:
        with file.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            if not 0 < size <= 10**8:
                raise ValueError(f"header of {size} bytes")
            header = json.loads(f.read(size))
        for name, spec in header.items():
            if name != "__metadata__":
                start, stop = spec["data_offsets"]
                yield name, spec["dtype"], spec["shape"], str(file), 8 + size + start, 8 + size + stop
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise EngineError(f"{file}: not a readable safetensors file: {err}") from err


def _bytes(file: Path, start: int, stop: int) -> Iterator[bytes]:
    with file.open("rb") as f:
        f.seek(start)
        while start < stop:
            chunk = f.read(min(_CHUNK, stop - start))
            if not chunk:
                raise EngineError(f"{file}: ends {stop - start} bytes too early; download it again")
            start += len(chunk)
            yield chunk


def tokenizer_digest(directory: Path) -> str | None:
    """Over tokenizer.json (its meaning, not its spacing), else the vocabulary files; None when there is none."""
    whole = directory / "tokenizer.json"
    if whole.is_file():
        return _json_digest(json.loads(whole.read_text(encoding="utf-8")))
    names = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "tekken.json")
    files = [directory / n for n in names if (directory / n).is_file()]
    if not files:
        return None
    return hashlib.sha256(b"".join(f.name.encode() + f.read_bytes() for f in files)).hexdigest()[:16]


def _json_digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
