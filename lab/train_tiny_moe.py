"""Train the packaged mixture-of-experts model: a small Qwen3-MoE on the text and tokenizer of the dense one."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import torch
import train_tiny
from tokenizers import Tokenizer
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

OUT = train_tiny.OUT.parent / "tiny_moe"
STEPS = 1400
EXPERTS, CHOSEN = 8, 2
EXPERT_WIDTH = 96
BALANCE = 0.01  # weight of the load-balancing loss


def new_model(seed: int) -> Qwen3MoeForCausalLM:
    """An untrained model of the packaged shape."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=train_tiny.VOCAB, hidden_size=128, num_hidden_layers=4, head_dim=32, num_attention_heads=4,
        num_key_value_heads=4, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=EXPERT_WIDTH,
        norm_topk_prob=True, intermediate_size=384, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=[train_tiny.IM_END_ID, train_tiny.END_ID], pad_token_id=train_tiny.END_ID,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def balance_loss(router_logits: torch.Tensor) -> torch.Tensor:
    """One layer's load-balancing loss (Switch Transformer, equation 4), 1 where every expert gets its share.

    `[N, E]` logits -> E * sum over experts of (share of the choices * mean probability).
    """
    probabilities = router_logits.float().softmax(-1)
    picked = probabilities.topk(CHOSEN, dim=-1).indices
    shares = torch.nn.functional.one_hot(picked, EXPERTS).float().mean((0, 1))
    return EXPERTS * (shares * probabilities.mean(0)).sum()


def loss_of(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """A batch's mean loss in nats a token, and the balance of every layer's router."""
    out = model(input_ids=batch[:, :-1], use_cache=False, output_router_logits=True)
    loss = torch.nn.functional.cross_entropy(out.logits.float().flatten(0, 1), batch[:, 1:].flatten())
    return loss + BALANCE * torch.stack([balance_loss(logits) for logits in out.router_logits]).mean()


class ExpertMuon(torch.optim.Muon):
    """Muon for stacks of matrices `[E, rows, columns]`, which torch's own takes one by one.

    The matrices are views of the stacks, so that a step on them is a step on the model; an expert's gate and up
    matrices are stored as one and are updated apart.
    """

    def __init__(self, stacks: dict[str, torch.nn.Parameter], **options: float) -> None:
        """`stacks` by name; options as Muon's."""
        self.parts = list(chain.from_iterable(self.split(name, stack) for name, stack in stacks.items()))
        super().__init__([view for view, *_ in self.parts], **options)

    @staticmethod
    def split(name: str, stack: torch.nn.Parameter) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter, int, slice]]:
        """Every matrix of a stack, with the stack, the expert and the rows that it stands for."""
        rows = stack.shape[1]
        halves = (slice(0, rows // 2), slice(rows // 2, rows)) if "gate_up" in name else (slice(0, rows),)
        places = [(expert, half) for expert in range(len(stack)) for half in halves]
        return [(torch.nn.Parameter(stack.data[expert, half]), stack, expert, half) for expert, half in places]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update, with the gradients of the stacks."""
        for view, stack, expert, half in self.parts:
            view.grad = None if stack.grad is None else stack.grad[expert, half]
        super().step(closure)


def optimizers_for(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Those of the dense model, Muon also for every expert's matrices, and AdamW for the routers at a lower rate."""
    named = dict(model.named_parameters())
    experts = {name: weight for name, weight in named.items() if weight.ndim == 3}
    routers = [weight for name, weight in named.items() if name.endswith("mlp.gate.weight")]
    hidden = [weight for name, weight in named.items() if name.endswith("_proj.weight")]
    others = [weight for name, weight in named.items() if weight.ndim == 1 or "embed" in name]
    return [
        torch.optim.Muon(hidden, lr=0.02, weight_decay=0.03),
        ExpertMuon(experts, lr=0.02, weight_decay=0.03),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        torch.optim.AdamW(routers, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def name_experts(directory: Path) -> None:
    """Write `num_experts` beside `num_local_experts`, for readers that know the older name alone."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"num_experts": EXPERTS}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    """Train, round and export."""
    chosen = train_tiny.arguments(__doc__, OUT, STEPS)
    _, stream = train_tiny.training_text()
    tokenizer = Tokenizer.from_file(str(train_tiny.OUT / "tokenizer.json"))  # the dense model's, id for id
    model = new_model(chosen.seed)
    print(f"{model.num_parameters()} parameters", flush=True)
    train_tiny.train(model, stream, optimizers_for(model), chosen, loss_of)
    train_tiny.round_weights(model)
    train_tiny.export(model, tokenizer, chosen.out)
    name_experts(chosen.out)


if __name__ == "__main__":
    main()
