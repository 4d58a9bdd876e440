"""The packaged mixture of experts: its shape, its files, that it is trained, and that every expert is used."""

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
from tokenizers import Tokenizer

from onepolicy import models

pytestmark = pytest.mark.engines

DIRECTORY = Path(models.path("tiny-moe"))
DENSE = Path(models.path("tiny"))
LAB = Path(__file__).resolve().parents[3] / "lab"
EXPERTS, CHOSEN, LAYERS = 8, 2, 4
LEAST = 1 / (4 * EXPERTS)


@pytest.fixture(scope="module")
def lab():
    """The measuring script as a module."""
    sys.path.insert(0, str(LAB))
    try:
        yield importlib.import_module("measure_tiny")
    finally:
        sys.path.remove(str(LAB))


@pytest.fixture(scope="module")
def model(lab):
    """The packaged model in float32."""
    return lab.load(DIRECTORY)[0]


@pytest.fixture(scope="module")
def sample(lab):
    """16,384 tokens from all over the held-out source files."""
    return lab.routed_sample(Tokenizer.from_file(str(DIRECTORY / "tokenizer.json")))


@pytest.fixture(scope="module")
def weights():
    """The stored tensors by name."""
    return safetensors_torch.load_file(DIRECTORY / "model.safetensors")


def test_the_shape_suits_every_engine():
    config = json.loads((DIRECTORY / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["num_attention_heads"] % 4 == 0 and config["num_key_value_heads"] % 4 == 0
    assert (config["num_experts"], config["num_experts_per_tok"]) == (EXPERTS, CHOSEN)
    assert config["num_hidden_layers"] == LAYERS and config["mlp_only_layers"] == []
    assert config["head_dim"] >= 32 and config["moe_intermediate_size"] % 32 == 0
    assert config["max_position_embeddings"] == 2048


def test_the_files_are_small():
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) < 4_000_000


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_text_becomes_the_same_ids_as_in_the_dense_model(name):
    assert (DIRECTORY / name).read_bytes() == (DENSE / name).read_bytes()


def test_it_stops_where_the_dense_model_stops():
    stops = [json.loads((path / "generation_config.json").read_text())["eos_token_id"] for path in (DIRECTORY, DENSE)]
    assert stops[0] == stops[1]


def test_experts_are_stored_one_by_one_as_engines_read_them(weights):
    names = {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for part in ("gate", "up", "down")
    }
    assert {name for name in weights if ".experts." in name} == names


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_exact_in_both_half_precision_types(weights, dtype):
    full = [tensor.float() for tensor in weights.values()]
    assert full and all(torch.isfinite(tensor).all() for tensor in full)
    assert all(torch.equal(tensor, tensor.to(getattr(torch, dtype)).float()) for tensor in full)


def test_every_expert_of_every_layer_is_used(lab, model, sample):
    shares = lab.expert_shares(lab.routes(model, sample), EXPERTS)
    assert shares.shape == (LAYERS, EXPERTS)
    assert torch.allclose(shares.sum(1), torch.full((LAYERS,), float(CHOSEN)))
    assert shares.min() >= LEAST, shares


def test_an_expert_that_is_never_chosen_is_seen(lab, model, sample):
    routed = lab.routes(model, sample[:2048]).clone()
    layer = routed[:, 1]  # a view
    layer[layer == 3] = 5
    shares = lab.expert_shares(routed, EXPERTS)
    assert shares[1, 3] < LEAST <= shares[1, 5]


def test_the_routes_are_those_that_the_layers_take(lab, model, sample):
    """What the router hands to the experts, caught on the way, against what is computed from its logits."""
    taken = []
    hooks = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, given: taken.append(given[1]))
        for layer in model.model.layers
    ]
    try:
        routed = lab.routes(model, sample[:512])
    finally:
        for hook in hooks:
            hook.remove()
    assert torch.equal(torch.stack(taken, dim=1), routed)


def test_experts_differ(weights):
    first = [weights[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"].float() for expert in range(EXPERTS)]
    gaps = [(first[i] - first[j]).norm() / first[i].norm() for i in range(EXPERTS) for j in range(i)]
    assert min(gaps) > 0.5


def test_it_is_a_language_model(lab, model, sample):
    """The dense model has 1.6 nats a token, a trigram 2.9."""
    assert lab.model_losses(model, sample).mean() < 1.9


def test_it_samples_certain_and_uncertain_tokens_and_stops(lab, model):
    tokenizer = transformers.AutoTokenizer.from_pretrained(DIRECTORY, local_files_only=True)
    rows = lab.sampled_probabilities(model, tokenizer, lab.held_out_prompts(tokenizer, 64), 64)
    pooled = np.concatenate(rows)
    assert (pooled > 0.95).mean() >= 0.15, (pooled > 0.95).mean()
    assert (pooled < 0.3).mean() >= 0.2, (pooled < 0.3).mean()
    assert min(len(row) for row in rows) < 64


def test_long_inputs_work(model):
    with torch.inference_mode():
        logits = model(input_ids=torch.arange(2048)[None] % model.config.vocab_size).logits
    assert logits.shape[1] == 2048 and torch.isfinite(logits).all()
