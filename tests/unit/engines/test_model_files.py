"""Digests of model directories: equal for equal models, whoever wrote the files; refused when they would lie."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from onepolicy import models
from onepolicy.engines.base import digest_arrays
from onepolicy.engines.model_files import model_facts, stored_dtypes, tokenizer_digest, weights_digest
from onepolicy.errors import EngineError


def write(file: Path, tensors: dict[str, np.ndarray]) -> None:
    header, body = {}, b""
    for name, a in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(a.shape), "data_offsets": [len(body), len(body) + a.nbytes]}
        body += a.tobytes()
    head = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(len(head).to_bytes(8, "little") + head + body)


def test_the_same_tensors_are_equal_in_any_order_and_number_of_files(tmp_path: Path) -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones(4, dtype=np.float32)
    write(tmp_path / "one" / "model.safetensors", {"a": a, "b": b})
    write(tmp_path / "two" / "model-1.safetensors", {"b": b})
    write(tmp_path / "two" / "model-2.safetensors", {"a": a})
    write(tmp_path / "bit" / "model.safetensors", {"a": np.nextafter(a, 9, dtype=np.float32), "b": b})
    write(tmp_path / "shape" / "model.safetensors", {"a": a.reshape(3, 2), "b": b})
    digests = {name: weights_digest(tmp_path / name) for name in ("one", "two", "bit", "shape")}
    assert digests["one"] == digests["two"]
    assert len(set(digests.values())) == 3


def test_empty_tensors_cut_files_and_other_files_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "empty" / "m.safetensors", {"qkv": np.zeros(0, dtype=np.float32)})
    with pytest.raises(EngineError, match=r"tensor 'qkv' .* is empty \[0\]"):
        weights_digest(tmp_path / "empty")
    write(tmp_path / "cut" / "m.safetensors", {"a": np.zeros(9, dtype=np.float32)})
    whole = (tmp_path / "cut" / "m.safetensors").read_bytes()
    (tmp_path / "cut" / "m.safetensors").write_bytes(whole[:-8])
    with pytest.raises(EngineError, match="ends 8 bytes too early"):
        weights_digest(tmp_path / "cut")
    (tmp_path / "cut" / "m.safetensors").write_bytes(b"not a model at all")
    with pytest.raises(EngineError, match="not a readable safetensors file"):
        weights_digest(tmp_path / "cut")
    with pytest.raises(EngineError, match="tensor 'w' is empty"):
        digest_arrays({"w": np.zeros(0, dtype=np.float32)})


def test_facts_of_the_packaged_model() -> None:
    facts = model_facts(Path(models.path("tiny")))
    assert facts["architecture"] == "LlamaForCausalLM" and facts["vocab_size"] == 512
    assert all(len(facts[f"{what}_digest"]) == 16 for what in ("weights", "config", "tokenizer"))


def test_what_the_files_hold_is_read_from_their_headers(tmp_path: Path) -> None:
    a = np.ones(4, dtype=np.float32)
    write(tmp_path / "model-1.safetensors", {"a": a})
    assert stored_dtypes(tmp_path) == {"float32"}
    header = {"b": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}
    header |= {"c": {"dtype": "I8", "shape": [4], "data_offsets": [4, 8]}}
    head = json.dumps(header).encode()
    (tmp_path / "model-2.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(8))
    assert stored_dtypes(tmp_path) == {"float32", "bfloat16", "i8"}
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    assert model_facts(tmp_path)["stored_dtype"] == "mixed"
    assert model_facts(Path(models.path("tiny")))["stored_dtype"] == "bfloat16"


def test_the_configs_digest_is_of_what_is_used(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"a": np.ones(4, dtype=np.float32)})
    (tmp_path / "config.json").write_text('{"vocab_size": 9, "rms_norm_eps": 1e-6}')
    plain, same, other = (
        model_facts(tmp_path, overrides)["config_digest"] for overrides in (None, {}, {"rms_norm_eps": 1e-5})
    )
    assert plain == same != other


def test_a_tokenizers_spacing_does_not_matter_and_its_meaning_does(tmp_path: Path) -> None:
    seen = []
    for i, text in enumerate(('{"a": 1, "b": [2]}', '{\n "b": [2],\n "a": 1}', '{"a": 1, "b": [3]}')):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "tokenizer.json").write_text(text)
        seen.append(tokenizer_digest(tmp_path / str(i)))
    assert seen[0] == seen[1] != seen[2]
    assert tokenizer_digest(tmp_path) is None
