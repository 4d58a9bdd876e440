"""GRPO with TRL on the packaged model, on a CPU: another path draws the tokens, the loss is corrected, the run watched.

    pip install 'onepolicy[trl]'
    python examples/trl_grpo.py                                 # healthy: silent to the end
    python examples/trl_grpo.py --fault temperature --at 6      # the sampler goes wrong at step 6: named, halted

The sampler is a bfloat16 copy of the policy that decodes with a KV cache and gets the new weights before each rollout;
the trainer is float32 and scores whole sequences. `--fault temperature`: from that step on the sampler draws at 0.7 and
reports what it drew from. `--fault weights`: one matrix reaches the sampler with its rows shifted by one.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from onepolicy import Halted, Monitor, corrections, models
from onepolicy.integrations import trl

FAULTS = ("none", "temperature", "weights")
PROMPTS = ("def add(a, b):", "import os", "class Stack:", "for i in range(", "return self.", "with open(")


class Sampler:
    """Draws tokens with its own copy of the policy, in its own precision, and says how likely each was."""

    def __init__(self, directory: str, fault: str, at: int, tokens: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
        self.fault, self.at, self.tokens = fault, at, tokens

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """TRL's rollout function: one completion for each prompt (TRL repeats them)."""
        step = trainer.state.global_step + 1
        self.update(trainer.model, broken=self.fault == "weights" and step >= self.at)
        temperature = 0.7 if self.fault == "temperature" and step >= self.at else 1.0
        asked = self.tokenizer(prompts, return_tensors="pt", padding=True)
        drawn, logprobs = self.draw(asked, temperature)
        kept = [self.length(row) for row in drawn.tolist()]
        return {
            "prompt_ids": self.tokenizer(prompts)["input_ids"],
            "completion_ids": [row[:n].tolist() for row, n in zip(drawn, kept, strict=True)],
            "logprobs": [row[:n].tolist() for row, n in zip(logprobs, kept, strict=True)],
            "policy_version": [trainer.state.global_step] * len(prompts),
        }

    @torch.no_grad()
    def update(self, policy: Any, broken: bool) -> None:
        """The weight transfer."""
        new = policy.state_dict()
        for name, mine in self.model.state_dict().items():
            mine.copy_(new[name])
            if broken and name.endswith("layers.1.mlp.down_proj.weight"):
                mine.copy_(mine.roll(1, 0))

    @torch.inference_mode()
    def draw(self, asked: Any, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids `[B, T]`, the log-probs of what they were drawn from `[B, T]`)."""
        out = self.model.generate(
            **asked,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=self.tokens,
            return_dict_in_generate=True,
            output_scores=True,
        )
        ids = out.sequences[:, asked["input_ids"].shape[1] :]
        scores = torch.stack(out.scores, 1).float().log_softmax(-1)
        return ids, scores.gather(-1, ids.unsqueeze(-1)).squeeze(-1)

    def length(self, ids: list[int]) -> int:
        """Up to and with the first stop token."""
        stops = self.model.generation_config.eos_token_id
        stops = stops if isinstance(stops, list) else [stops]
        return next((i + 1 for i, x in enumerate(ids) if x in stops), len(ids))


def reward(completions: list[str], **_: Any) -> list[float]:
    """Short lines."""
    return [completion.count("\n") / 8 for completion in completions]


class Trainer(trl.Watched, GRPOTrainer):
    """TRL's trainer with a correction and a monitor."""


def run(fault: str = "none", at: int = 6, steps: int = 10, tokens: int = 32, sinks: tuple[str, ...] = ()) -> Trainer:
    """Trains. Errors: `Halted` naming what the monitor found."""
    directory = models.path("tiny")
    torch.set_num_threads(1)  # for a model this small more of them only wait for each other
    with tempfile.TemporaryDirectory() as out, Monitor("bf16", "halt", micro_batches=None, sinks=sinks) as monitor:
        arguments = GRPOConfig(
            output_dir=out,
            max_steps=steps,
            per_device_train_batch_size=12,
            gradient_accumulation_steps=2,
            num_generations=6,
            max_completion_length=tokens,
            learning_rate=2e-5,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(
            model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
            args=arguments,
            reward_funcs=reward,
            train_dataset=Dataset.from_dict({"prompt": list(PROMPTS) * 8}),
            processing_class=AutoTokenizer.from_pretrained(directory, padding_side="left"),
            rollout_func=Sampler(directory, fault, at, tokens),
            correction=corrections.truncate,
            monitor=monitor,
        )
        trainer.train()
        return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--at", type=int, default=6, help="step of the fault, from 1")
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    try:
        trainer = run(asked.fault, asked.at, asked.steps)
    except Halted as halted:
        print(f"halted: {halted}")
        return
    rows = [row for row in trainer.state.log_history if "onepolicy/abs_log_ratio/mean" in row]
    print(
        f"{asked.steps} steps, nothing found; mean |d| of the last: {rows[-1]['onepolicy/abs_log_ratio/mean']:.4f} nats"
    )


if __name__ == "__main__":
    main()
