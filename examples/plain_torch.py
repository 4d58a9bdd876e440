"""A training loop without a framework: draw, score, correct, watch, step.

    pip install 'onepolicy[hf]'
    python examples/plain_torch.py                                 # healthy: silent to the end
    python examples/plain_torch.py --fault temperature --at 6      # the sampler goes wrong at step 6: named, halted

The sampler is a bfloat16 copy of the packaged model that decodes with a KV cache; the policy is float32 and scores
whole sequences. Each batch is trained on twice, so that the current policy leaves the old one.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from onepolicy import Halted, Monitor, corrections, models

PROMPTS = ("def add(a, b):", "class Stack:\n", "for i in range(", "return self.x")
PROMPT_TOKENS, GROUP, STOPS, SPACE = 4, 8, (0, 2), 223


@torch.no_grad()
def draw(model: Any, prompts: torch.Tensor, tokens: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(replies `[B, T]`, the log-probs of what they were drawn from `[B, T]`), token by token."""
    ids, logprobs, cache, asked = [], [], None, prompts
    for _ in range(tokens):
        out = model(asked, past_key_values=cache, use_cache=True)
        cache, scores = out.past_key_values, (out.logits[:, -1].float() / temperature).log_softmax(-1)
        asked = torch.multinomial(scores.exp(), 1)
        ids.append(asked)
        logprobs.append(scores.gather(-1, asked))
    return torch.cat(ids, 1), torch.cat(logprobs, 1)


def score(model: Any, prompts: torch.Tensor, replies: torch.Tensor) -> torch.Tensor:
    """Log-probs of the replies `[B, T]`, in one forward."""
    logits = model(torch.cat([prompts, replies], 1)).logits[:, prompts.shape[1] - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, replies.unsqueeze(-1)).squeeze(-1)


def trained(replies: torch.Tensor) -> torch.Tensor:
    """`[B, T]` up to and with the first stop token."""
    stops = torch.isin(replies, torch.tensor(STOPS)).int()
    return stops.cumsum(1) - stops == 0


def advantages(replies: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[B]`: the reward, spaces, against the mean of its group."""
    rewards = ((replies == SPACE) & mask).sum(1).float().reshape(-1, GROUP)
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).reshape(-1)


def run(fault: str = "none", at: int = 6, steps: int = 10, tokens: int = 32, sinks: tuple[str, ...] = ()) -> Monitor:
    """Trains. Errors: `Halted` naming what the monitor found."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for a model this small more of them only wait for each other
    directory = models.path("tiny")
    policy = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    sampler = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    encoded = AutoTokenizer.from_pretrained(directory)(list(PROMPTS))["input_ids"]
    prompts = torch.tensor([x[:PROMPT_TOKENS] for x in encoded]).repeat_interleave(GROUP, 0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-5)
    with Monitor("bf16", "halt", micro_batches=2, sinks=sinks) as monitor:
        for step in range(1, steps + 1):
            sampler.load_state_dict(policy.state_dict())
            broken = fault == "temperature" and step >= at
            replies, logprobs = draw(sampler, prompts, tokens, 0.7 if broken else 1.0)
            train(policy, optimizer, monitor, prompts, replies, logprobs, step)
    return monitor


def train(
    policy: Any,
    optimizer: Any,
    monitor: Monitor,
    prompts: torch.Tensor,
    replies: torch.Tensor,
    sampler_logprobs: torch.Tensor,
    version: int,
) -> None:
    """Two updates on one batch of replies."""
    mask = trained(replies)
    A = advantages(replies, mask).unsqueeze(1)
    with torch.no_grad():
        old = score(policy, prompts, replies)
    c = corrections.truncate(sampler=sampler_logprobs, old=old, mask=mask, cap=2.0)
    for _ in range(2):
        current = score(policy, prompts, replies)
        out = monitor.observe(
            sampler_logprobs, old, mask, current_logprobs=current, advantages=A, policy_version=version, correction=c
        )
        ratio = corrections.policy_ratio(current=current, old=old, mask=mask)
        per_token_loss = -torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
        loss = c.loss(per_token_loss) * out.weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=("none", "temperature"), default="none")
    parser.add_argument("--at", type=int, default=6, help="step of the fault, from 1")
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    try:
        monitor = run(asked.fault, asked.at, asked.steps)
    except Halted as halted:
        print(f"halted: {halted}")
        return
    gap = monitor.close().numbers["abs_log_ratio/mean"]
    print(f"{asked.steps} steps, nothing found; mean |d| of the last: {gap:.4f} nats")


if __name__ == "__main__":
    main()
