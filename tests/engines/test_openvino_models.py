"""OpenVINO's model from a directory, an export, a GGUF file: the weights exact, the precision as it is declared."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepolicy import models
from onepolicy.engines import model_files, openvino_graph
from onepolicy.engines.base import Engine, SamplingParams
from onepolicy.engines.open import open_engine
from onepolicy.errors import EngineError, MissingExtra, UsageError
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import Scoring, Values

pytestmark = pytest.mark.engines

TINY = Path(models.path("tiny"))


def texts(lengths: list[int]) -> Rollouts:
    """Random ids, scored raw."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.random.default_rng(0).integers(3, 512, offsets[-1]).astype(np.int32)
    records = {"logprob_semantics": column_values("logprob_semantics", ["raw"] * len(lengths))}
    return Rollouts(offsets, {"token_ids": Values(ids)}, records)


def gap(a: Scoring, b: Scoring) -> np.ndarray:
    """`[n]` |log-ratio| of all tokens but each first."""
    assert np.array_equal(a.logprobs.mask(), b.logprobs.mask()) and a.logprobs.mask().any()
    at = a.logprobs.mask()
    return np.abs(a.logprobs.values[at].astype(np.float64) - b.logprobs.values[at])


def scored(spec: str, rollouts: Rollouts) -> Scoring:
    with open_engine(spec, in_process=True) as engine:
        return engine.score(rollouts)


@pytest.fixture(scope="module")
def long() -> Rollouts:
    """One reply as the model writes them, 1,500 tokens."""
    with open_engine("openvino:tiny?dtype=float32", in_process=True) as engine:
        return engine.sample([[5, 77]], SamplingParams(max_tokens=1500, ignore_eos=True))


# -- directories ---------------------------------------------------------------------------------------------------


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "mistral": {"num_key_value_heads": 1, "head_dim": 48, "sliding_window": None},
    "qwen2": {"num_key_value_heads": 2, "rope_theta": 1e6},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-4},
}


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_every_architecture_is_the_function_that_transformers_computes(kind: str, stored: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 192, "max_position_embeddings": 512}
    config = AutoConfig.for_model(kind, num_hidden_layers=2, num_attention_heads=4, **sizes, **VARIANTS[kind])
    model = AutoModelForCausalLM.from_config(config).to(getattr(torch, stored))
    with torch.no_grad():
        for name, weight in model.named_parameters():  # norms of one and biases of zero would hide a wrong one
            weight.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path)
    rollouts = texts([300, 1, 17])
    d = gap(scored(f"openvino:{tmp_path}?dtype=float32", rollouts), scored(f"hf:{tmp_path}?dtype=float32", rollouts))
    assert d.mean() < 2e-5 and d.max() < 1e-3


def changed(folder: Path, **config: Any) -> Path:
    """The packaged model with another config.json."""
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    old = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(old | config))
    return folder


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ({"model_type": "gpt2"}, UsageError, "model_type 'gpt2' is not covered"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, UsageError, "rope_type 'yarn' is not covered"),
        ({"model_type": "mistral", "sliding_window": 64}, UsageError, "sliding_window 64 is not covered"),
        ({"hidden_act": "gelu"}, UsageError, "hidden_act 'gelu' is not covered"),
        ({"num_hidden_layers": 5}, EngineError, r"tensor 'model\.layers\.4\.\S+' is not in the files"),
        ({"num_hidden_layers": 3}, EngineError, r"9 tensors belong to nothing .* 'model\.layers\.3\."),
        ({"intermediate_size": 256}, EngineError, r"got \[384, 128\] of BF16, wanted \[256, 128\]"),
        ({"vocab_size": None}, EngineError, "vocab_size and max_position_embeddings: got None"),
    ],
)
def test_a_model_that_the_graph_is_not_is_one_line(
    config: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    spec = f"openvino:{changed(tmp_path, **config)}"
    with pytest.raises(error, match=says) as caught, open_engine(spec, in_process=True):
        pass
    assert "\n" not in str(caught.value)


def test_a_sliding_window_that_is_not_used_is_none() -> None:
    config = {"model_type": "qwen2", "hidden_act": "silu", "sliding_window": 4096, "use_sliding_window": False}
    openvino_graph.require_covered(config, TINY)
    with pytest.raises(UsageError, match="use_sliding_window True"):
        openvino_graph.require_covered(config | {"use_sliding_window": True}, TINY)


# -- precision -----------------------------------------------------------------------------------------------------


def test_half_precision_stays_close_at_every_position(long: Rollouts) -> None:
    """A rotary embedding that is computed in bfloat16 is wrong from position 256 on: then the gap is a whole nat."""
    exact = scored("hf:tiny?dtype=float32", long)
    plain = scored("openvino:tiny", long)
    d = gap(plain, exact)
    assert plain.dtype == "bfloat16" and 1e-4 < d.mean() < 0.03
    assert d[-500:].mean() < 3 * d[:500].mean()
    narrow = scored("openvino:tiny?dtype=float32&kv_cache_dtype=uint8", long)
    assert (narrow.dtype, narrow.fingerprint["kv_cache_dtype"]) == ("float32", "uint8")
    assert 1e-3 < gap(narrow, exact).mean() < 0.03  # the 8-bit cache alone
    single = scored("openvino:tiny?dtype=float32&max_num_batched_tokens=1", long)
    assert gap(single, exact).max() < 1e-3  # token after token, which is its decode


LOGGED = """
import sys
from onepolicy.engines.open import open_engine
with open_engine(sys.argv[1], in_process=True) as engine:
    known = engine.fingerprint()
    print("SAID", known["dtype"], known["kv_cache_dtype"], known["dtype_asked"])
"""


@pytest.mark.parametrize("asked", ["dtype=float32", "dtype=float16", "dtype=bfloat16&kv_cache_dtype=uint8"])
def test_what_it_declares_is_what_openvino_says_it_compiled(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from onepolicy.engines.openvino_pipeline import TYPES

    monkeypatch.setenv("OPENVINO_LOG_LEVEL", "3")
    command = [sys.executable, "-c", LOGGED, f"openvino:tiny?{asked}"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    compiled = out[out.index("LLM with Paged Attention") :]
    precision, kv = (re.findall(rf"^\s*{k}: (\S+)$", compiled, re.M)[0] for k in ("INFERENCE_PRECISION_HINT", _KV))
    _, dtype, stored, wanted = next(line for line in out.splitlines() if line.startswith("SAID")).split()
    assert (TYPES[dtype], TYPES[stored]) == (precision, kv)
    assert f"dtype={wanted}" in asked
    assert "DYNAMIC_QUANTIZATION_GROUP_SIZE: 0\n" in compiled


_KV = "KV_CACHE_PRECISION"


# -- exports and GGUF files ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as OpenVINO's exporters leave it: no safetensors."""
    folder = tmp_path_factory.mktemp("export")
    openvino_graph.write(TINY, folder / "openvino_model.xml")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    return folder


def test_an_export_is_run_as_it_is(export: Path) -> None:
    rollouts = texts([60, 9])
    out = scored(f"openvino:{export}?dtype=float32", rollouts)
    assert gap(out, scored("hf:tiny?dtype=float32", rollouts)).mean() < 2e-5
    assert out.fingerprint["weights"] == "export" and "weights_digest" not in out.fingerprint
    assert len(out.fingerprint["file_digest"]) == 16 and out.fingerprint["quantization"] is None


def test_an_export_with_8_bit_weights_says_so(export: Path, tmp_path: Path) -> None:
    """Each matrix as unsigned bytes and one scale: what the exporters' own weight compression leaves."""
    import openvino
    import openvino.opset13 as op

    model = openvino.Core().read_model(str(export / "openvino_model.xml"))
    for node in [n for n in model.get_ops() if n.get_type_name() == "MatMul"]:
        weight = node.input_value(1).get_node()
        stored = weight.input_value(0).get_node()  # the Constant before the Convert
        bits = stored.get_data(dtype=np.float32)
        step = np.abs(bits).max() / 127
        whole = op.constant(np.round(bits / step).astype(np.int8))
        scaled = op.multiply(op.convert(whole, "f32"), op.constant(np.float32(step)))
        node.input(1).replace_source_output(scaled.output(0))
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path)
    openvino.save_model(model, str(tmp_path / "openvino_model.xml"), compress_to_fp16=False)
    rollouts = texts([60, 9])
    out = scored(f"openvino:{tmp_path}?dtype=float32", rollouts)
    assert out.fingerprint["quantization"] == "i8"
    assert 1e-3 < gap(out, scored("openvino:tiny?dtype=float32", rollouts)).mean() < 1.0


#: Names of a layer's tensors in transformers, and in GGUF.
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packaged model as llama.cpp stores it, in float16, where its weights are exact."""
    import gguf
    import torch
    from safetensors.torch import load_file

    config = json.loads((TINY / "config.json").read_text())
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    out = gguf.GGUFWriter(path, "llama")
    out.add_block_count(config["num_hidden_layers"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_file_type(1)
    write_tokenizer(out)
    for name, tensor in load_file(TINY / "model.safetensors").items():
        value = tensor.to(torch.float32).numpy()
        if "q_proj" in name or "k_proj" in name:  # halves of a head become neighbours
            value = value.reshape(4, 2, 16, 128).swapaxes(1, 2).reshape(128, 128)
        stem = name.removesuffix(".weight")
        layer = re.match(r"model\.layers\.(\d+)\.(.+)", stem)
        stem = f"blk.{layer[1]}.{NAMES[layer[2]]}" if layer else WHOLE[stem]
        out.add_tensor(f"{stem}.weight", value if value.ndim == 1 else value.astype(np.float16))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path


def write_tokenizer(out: Any) -> None:
    """The byte-level BPE of the packaged model in a GGUF's records."""
    whole = json.loads((TINY / "tokenizer.json").read_text())
    vocab = sorted(whole["model"]["vocab"].items(), key=lambda item: item[1])
    special = {t["id"]: t["content"] for t in whole["added_tokens"]}
    names = {i: t for t, i in vocab} | special
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list([names.get(i, f"[unused{i}]") for i in range(512)])
    out.add_token_types([3 if i in special else 1 for i in range(512)])
    out.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in whole["model"]["merges"]])
    out.add_bos_token_id(0)
    out.add_eos_token_id(2)
    out.add_pad_token_id(0)


@pytest.fixture(scope="module")
def from_gguf(gguf_file: Path) -> Iterator[Engine]:
    with open_engine(f"openvino:{gguf_file}?dtype=float32", in_process=True) as engine:
        yield engine


def test_openvinos_own_reader_of_gguf_makes_the_same_function_of_the_same_weights(from_gguf: Engine) -> None:
    rollouts = texts([200, 40])
    out = from_gguf.score(rollouts)
    assert gap(out, scored("openvino:tiny?dtype=float32", rollouts)).mean() < 5e-4
    assert out.fingerprint["weights"] == "gguf" and "weights_digest" not in out.fingerprint
    assert out.fingerprint["quantization"] is None
    assert (out.fingerprint["vocab_size"], out.fingerprint["max_model_len"]) == (512, 2048)
    replies = from_gguf.sample([[5, 6]], SamplingParams(max_tokens=5))
    assert replies.lists["stop_token_ids"].row(0).tolist() == [2]


def test_a_gguf_files_own_tokenizer_is_used(from_gguf: Engine, hf: Engine) -> None:
    assert from_gguf.encode(["a cat"]) == hf.encode(["a cat"])
    assert "".join(from_gguf.decode(hf.encode(["a cat"])[0])) == "a cat"


def test_a_file_that_is_no_gguf_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(EngineError, match="not a readable GGUF file") as caught, open_engine(f"openvino:{path}"):
        pass
    assert "\n" not in str(caught.value)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino_genai", None)
    with pytest.raises(MissingExtra, match=r"pip install 'onepolicy\[openvino\]'"):
        open_engine("openvino:tiny", in_process=True).__enter__()


def test_the_facts_of_a_directory_are_those_of_the_files() -> None:
    with open_engine("openvino:tiny", in_process=True) as engine:
        known = engine.fingerprint()
    assert {k: known[k] for k in model_files.model_facts(TINY)} == model_files.model_facts(TINY)
    assert json.loads(json.dumps(known)) == dict(known)
