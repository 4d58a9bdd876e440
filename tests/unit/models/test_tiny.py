"""The packaged tiny model: its shape, its files, and that it is trained."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch as safetensors_torch
import torch
import transformers

from onepolicy import models
from onepolicy.errors import UsageError

pytestmark = pytest.mark.engines

DIRECTORY = Path(models.path("tiny"))
LAB = Path(__file__).resolve().parents[3] / "lab"
TEXTS = [
    "",
    "def f(x):\n\treturn x  # plain\r\n",
    "naïve café, Ελληνικά, 日本語, עברית, 🙂🙃, e\u0301 and é",
    "".join(map(chr, range(0x250))),
    "\x00\x01\x7f\u2028\ufeff\uffff\U0010ffff",
    "    \n\n   trailing   ",
]


@pytest.fixture(scope="module")
def tokenizer():
    """The packaged tokenizer."""
    return transformers.AutoTokenizer.from_pretrained(DIRECTORY, local_files_only=True)


@pytest.fixture(scope="module")
def weights():
    """The stored tensors by name."""
    return safetensors_torch.load_file(DIRECTORY / "model.safetensors")


@pytest.fixture(scope="module")
def lab():
    """The measuring script as a module."""
    sys.path.insert(0, str(LAB))
    try:
        yield importlib.import_module("measure_tiny")
    finally:
        sys.path.remove(str(LAB))


@pytest.fixture(scope="module")
def sampled(lab, tokenizer):
    """Probabilities of a few thousand sampled tokens, from 64 held-out prompts, pooled."""
    model, _ = lab.load(DIRECTORY)
    return np.concatenate(lab.sampled_probabilities(model, tokenizer, lab.held_out_prompts(tokenizer, 64), 64))


def test_every_named_model_is_a_directory():
    assert all(Path(models.path(name), "config.json").is_file() for name in models.MODELS)


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'tiny'"):
        models.path("tinny")


def test_heads_split_over_four_devices_and_suit_every_attention_kernel():
    config = json.loads((DIRECTORY / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_attention_heads"] % 4 == 0 and config["num_key_value_heads"] % 4 == 0
    assert config["head_dim"] >= 32
    assert config["max_position_embeddings"] == 2048


def test_the_directory_is_small():
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) < 12_000_000


def test_no_tensor_is_empty_or_not_finite(weights):
    assert weights and all(tensor.numel() and torch.isfinite(tensor).all() for tensor in weights.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_exact_in_both_half_precision_types(weights, dtype):
    full = [tensor.float() for tensor in weights.values()]
    assert all(torch.equal(tensor, tensor.to(getattr(torch, dtype)).float()) for tensor in full)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_every_byte_is_a_token(tokenizer):
    stand_ins = {token for token in tokenizer.get_vocab() if len(token) == 1}
    assert len(stand_ins) == 256


def test_encoding_adds_no_tokens(tokenizer):
    assert tokenizer.encode("x = 1") == tokenizer.encode("x = 1", add_special_tokens=False)
    assert tokenizer.bos_token is None and tokenizer.eos_token == "<|endoftext|>"


def test_the_vocabulary_fits_the_embedding(tokenizer, weights):
    assert len(tokenizer) == weights["model.embed_tokens.weight"].shape[0]


def test_the_chat_template_renders(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Complete:\ndef f():"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nComplete:\ndef f():<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.encode(text).count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3


def test_generation_stops_at_the_end_of_a_turn_or_text(tokenizer):
    stops = json.loads((DIRECTORY / "generation_config.json").read_text())["eos_token_id"]
    assert sorted(tokenizer.convert_ids_to_tokens(stops)) == ["<|endoftext|>", "<|im_end|>"]


@pytest.mark.engines
def test_long_inputs_work(lab):
    model, _ = lab.load(DIRECTORY)
    with torch.inference_mode():
        logits = model(input_ids=torch.arange(2048)[None] % model.config.vocab_size).logits
    assert logits.shape[1] == 2048 and torch.isfinite(logits).all()


@pytest.mark.engines
def test_many_sampled_tokens_are_near_certain(sampled):
    assert (sampled > 0.95).mean() >= 0.2, (sampled > 0.95).mean()


@pytest.mark.engines
def test_many_sampled_tokens_are_uncertain(sampled):
    assert (sampled < 0.3).mean() >= 0.2, (sampled < 0.3).mean()


@pytest.mark.engines
def test_replies_differ_in_length_and_some_stop(lab, tokenizer):
    model, _ = lab.load(DIRECTORY)
    prompts = lab.held_out_prompts(tokenizer, 32)[16:]
    lengths = [len(row) for row in lab.sampled_probabilities(model, tokenizer, prompts, 96)]
    assert min(lengths) < 96 and len(set(lengths)) > 2
