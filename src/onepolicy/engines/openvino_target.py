"""What `openvino:TARGET` can name, and what is known of it: a model directory, an OpenVINO export, a GGUF file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from onepolicy.engines import model_files
from onepolicy.engines.texts import Texts, stop_ids
from onepolicy.errors import EngineError, MissingExtra, UsageError

EXPORT = "openvino_model.xml"
_CHUNK = 2**24


class TextsOf(Protocol):
    """Texts to ids and back."""

    def encode(self, prompts: Sequence[str | list[dict[str, str]]]) -> list[list[int]]: ...
    def decode(self, ids: Sequence[int]) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Target:
    """A model that is there. `weights`: `graph` (built here from safetensors), `export`, or `gguf` (OpenVINO's reader).

    `facts`: keys of the fingerprint. `stops`: ids that end a reply. `longest`: tokens with the reply.
    """

    path: Path
    weights: str
    facts: Mapping[str, Any]
    stops: Sequence[int]
    vocab: int
    longest: int
    texts: TextsOf


def target_of(target: str) -> Target:
    """Errors: `UsageError` for a target that is no model; `EngineError` for one that cannot be read."""
    path = Path(target).expanduser()
    if path.suffix == ".gguf":
        return _gguf(path)
    if (path / EXPORT).is_file():
        return _directory(path.resolve(), "export", _export_facts(path.resolve()))
    directory = model_files.model_directory(target, "openvino")
    return _directory(directory, "graph", model_files.model_facts(directory))


def _directory(path: Path, weights: str, facts: Mapping[str, Any]) -> Target:
    vocab, longest = facts["vocab_size"], facts["max_position_embeddings"]
    if not (isinstance(vocab, int) and isinstance(longest, int)):
        raise EngineError(f"{path / 'config.json'}: vocab_size and max_position_embeddings: got {vocab} and {longest}")
    return Target(path, weights, facts, stop_ids(path), vocab, longest, Texts(path))


def _export_facts(path: Path) -> dict[str, Any]:
    """An export's weights are changed (folded, compressed), so they have a digest of their own and no common one."""
    text = model_files.text_config(model_files.read_config(path))
    return {
        "model": path.name,
        "vocab_size": text.get("vocab_size"),
        "max_position_embeddings": text.get("max_position_embeddings"),
        "tokenizer_digest": model_files.tokenizer_digest(path),
        "file_digest": _digest(path / EXPORT, (path / EXPORT).with_suffix(".bin")),
        "quantization": _quantised_constants(path / EXPORT),
    }


def _quantised_constants(file: Path) -> str | None:
    """Number types of an export's weights that are no floats of 16 bits or more, in words. Errors: `EngineError`."""
    try:
        import openvino
    except ImportError as err:
        raise MissingExtra("openvino", "openvino", "the engine 'openvino'") from err
    try:
        nodes = openvino.Core().read_model(str(file)).get_ops()
    except RuntimeError as err:
        raise EngineError(f"{file}: OpenVINO cannot read it: {one_line(err)}") from err
    outputs = [node.output(0) for node in nodes if node.get_type_name() == "Constant"]
    weights = {
        x.get_element_type().get_type_name() for x in outputs if len(x.get_shape()) > 1 and max(x.get_shape()) > 8
    }
    return ", ".join(sorted(weights - {"f32", "f16", "bf16", "f64", "i64", "i32", "boolean"})) or None


def _digest(*files: Path) -> str:
    """SHA-256 (16 hex digits) over the bytes of all files. Errors: `EngineError`."""
    total = hashlib.sha256()
    try:
        for file in files:
            with file.open("rb") as f:
                while chunk := f.read(_CHUNK):
                    total.update(chunk)
    except OSError as err:
        raise EngineError(f"{err.filename}: cannot be read: {err.strerror}") from err
    return total.hexdigest()[:16]


def _gguf(path: Path) -> Target:
    if not path.is_file():
        raise UsageError(f"engine openvino:{path}: no such file; wanted a .gguf file or a model directory")
    fields, quantised = _fields(path)
    kind = fields["general.architecture"]
    facts = {
        "model": path.name,
        "architecture": kind,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "max_position_embeddings": int(fields[f"{kind}.context_length"]),
        "file_digest": _digest(path),
        "quantization": ", ".join(sorted(quantised)) or None,
    }
    stop = fields.get("tokenizer.ggml.eos_token_id")
    return Target(
        path.resolve(),
        "gguf",
        facts,
        [] if stop is None else [int(stop)],
        facts["vocab_size"],
        facts["max_position_embeddings"],
        FileTexts(path),
    )


def _fields(path: Path) -> tuple[dict[str, Any], set[str]]:
    """The records of a GGUF file that are needed, and its quantised types. Errors: `MissingExtra`, `EngineError`."""
    try:
        import gguf
    except ImportError as err:
        raise MissingExtra("gguf", "openvino", "reading what a GGUF file says of itself") from err
    try:
        reader = gguf.GGUFReader(path)
        found = {name: field.contents() for name, field in reader.fields.items() if "merges" not in name}
        kind = found["general.architecture"]
        types = {tensor.tensor_type.name.lower() for tensor in reader.tensors} - {"f32", "f16", "bf16"}
        wanted = (f"{kind}.context", "general.arch", "tokenizer.ggml")
        return {k: found[k] for k in found if k.startswith(wanted)}, types
    except (ValueError, KeyError, IndexError, OSError) as err:
        raise EngineError(f"{path}: not a readable GGUF file: {type(err).__name__}: {err}") from err


class FileTexts:
    """The tokenizer that OpenVINO rebuilds from a GGUF file, made at first use."""

    def __init__(self, path: Path) -> None:
        self._path, self._made = path, None

    @property
    def tokenizer(self) -> Any:
        """`openvino_genai.Tokenizer`. Errors: `EngineError`."""
        if self._made is None:
            from openvino_genai import Tokenizer

            try:
                self._made = Tokenizer(str(self._path))
            except RuntimeError as err:
                raise EngineError(f"{self._path}: OpenVINO cannot make its tokenizer: {one_line(err)}") from err
        return self._made

    def encode(self, prompts: Sequence[str | list[dict[str, str]]]) -> list[list[int]]:
        return [self._one(i, prompt) for i, prompt in enumerate(prompts)]

    def _one(self, i: int, prompt: str | list[dict[str, str]]) -> list[int]:
        chat = not isinstance(prompt, str)
        try:
            text = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True) if chat else prompt
            ids = self.tokenizer.encode(text, add_special_tokens=not chat).input_ids.data
        except RuntimeError as err:
            raise EngineError(f"prompt {i}: OpenVINO cannot encode it: {one_line(err)}") from err
        return [int(x) for x in ids[0]]

    def decode(self, ids: Sequence[int]) -> list[str]:
        """The text of each token alone."""
        return [self.tokenizer.decode([int(i)], skip_special_tokens=False) for i in ids]


def one_line(err: BaseException) -> str:
    """The last line of a message of OpenVINO: above it stand the places in its own source."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(err).__name__
