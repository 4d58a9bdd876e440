"""Faults put into the scorer of a sound pair through its own options or files, for models of the Llama kind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Fault:
    """`options`: of the scorer's spec; `edit`: changes tensors of a copy of the model. `large`: larger than the floor,
    so that it is seen in bf16 production too (sizes in `dev/LOG.md`)."""

    options: str = ""
    edit: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    config: dict[str, Any] | None = None
    large: bool = True


def _head(tensors: dict[str, Any]) -> dict[str, Any]:
    """The head of an older checkpoint: it stayed behind by 5% of its spread, and is no longer tied."""
    import torch

    table = tensors["model.embed_tokens.weight"]
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(0))
    return {**tensors, "lm_head.weight": (table.float() + 0.05 * table.float().std() * noise).to(table.dtype)}


def _adapter(times: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A rank-4 adapter on the second layer's q_proj, merged `times` over."""

    def edit(tensors: dict[str, Any]) -> dict[str, Any]:
        import torch

        name = "model.layers.1.self_attn.q_proj.weight"
        w = tensors[name].float()
        rng = torch.Generator().manual_seed(0)
        a, b = torch.randn(w.shape[0], 4, generator=rng), torch.randn(4, w.shape[1], generator=rng)
        step = a @ b
        step *= 0.5 * w.std() / step.std()
        return {**tensors, name: (w + times * step).to(tensors[name].dtype)}

    return edit


ONE_LORA, TWO_LORAS = _adapter(1.0), _adapter(2.0)


def faults(rope: float, tensor: str, layers: int) -> dict[str, Fault]:
    """`rope`: half of the model's own base; `tensor`: a matrix in the middle; `layers`: one fewer than it has."""
    noise = json.dumps({"noise": {"tensor": tensor, "share": 0.01, "seed": 0}})
    return {
        "rope base": Fault(f'overrides={{"rope_theta": {rope}}}'),
        "norm epsilon": Fault('overrides={"rms_norm_eps": 1e-3}'),
        "one layer fewer": Fault(f'overrides={{"num_hidden_layers": {layers}}}'),
        "packed without document mask": Fault("packing=unmasked"),
        "left padding without position ids": Fault("padding_side=left_unpositioned"),
        "older head": Fault(edit=_head, config={"tie_word_embeddings": False}),
        "adapter merged twice": Fault(edit=TWO_LORAS),
        "1% noise on one matrix": Fault(f"edit={noise}", large=False),
    }


def model_with(fault: Fault, model: Path, into: Path) -> Path:
    """The model's directory, or a copy of it with the fault's tensors and configuration. The sampler that belongs to
    `adapter merged twice` has it merged once: `model_with(Fault(edit=ONE_LORA), ...)`."""
    if fault.edit is None:
        return model
    from safetensors.torch import load_file, save_file

    if not into.exists():
        shutil.copytree(model, into)
        save_file(fault.edit(load_file(model / "model.safetensors")), into / "model.safetensors", {"format": "pt"})
        config = json.loads((into / "config.json").read_text()) | (fault.config or {})
        (into / "config.json").write_text(json.dumps(config))
    return into
