"""Measure a packaged tiny model: held-out loss against a trigram, how sure it is of what it samples, its experts.

Run it as `python lab/measure_tiny.py [MODEL_DIRECTORY]`; it prints one JSON object. It rebuilds the training
text, and the held-out and tuning files, from the standard library of the Python that runs it.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
from pathlib import Path

import numpy as np
import torch
import train_tiny
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

ORDERS = 4  # uniform, unigram, bigram, trigram
BUCKETS = 16  # of the trigram's context counts, by their binary logarithm
PROMPTS = 128
NEW_TOKENS = 128
ROUTED_WINDOWS = 32  # of the training length


def looked_up(keys: np.ndarray, counts: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The count of every wanted key, zero where it was never seen."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, counts[at], 0)


class Trigram:
    """An interpolated (Jelinek-Mercer) trigram whose weights depend on how often the context was seen."""

    def __init__(self, stream: np.ndarray, vocab: int) -> None:
        """Count the 1-, 2- and 3-grams of a token stream."""
        self.vocab = vocab
        self.total = len(stream)
        self.tables = [np.unique(self.grams(stream, order), return_counts=True) for order in (1, 2, 3)]
        self.weights = np.full((BUCKETS, ORDERS), 1 / ORDERS)

    def grams(self, stream: np.ndarray, order: int) -> np.ndarray:
        """One integer key for every window of `order` tokens."""
        windows = [stream[place : len(stream) - order + place + 1] for place in range(order)]
        return sum(window * self.vocab ** (order - place - 1) for place, window in enumerate(windows))

    def counts(self, stream: np.ndarray, order: int) -> np.ndarray:
        """Training counts of a stream's `order`-grams, those that end at its third token and later."""
        return looked_up(*self.tables[order - 1], self.grams(stream, order)[3 - order :])

    def contexts(self, stream: np.ndarray, order: int) -> np.ndarray:
        """Training counts of the contexts that precede those same tokens."""
        return looked_up(*self.tables[order - 1], self.grams(stream, order)[2 - order : -1])

    def parts(self, stream: np.ndarray) -> np.ndarray:
        """Every order's probability of each token from the third on: uniform first, trigram last."""
        uniform = np.full(len(stream) - 2, 1 / self.vocab)
        single = self.counts(stream, 1) / self.total
        double = self.counts(stream, 2) / np.maximum(self.contexts(stream, 1), 1)
        triple = self.counts(stream, 3) / np.maximum(self.contexts(stream, 2), 1)
        return np.stack([uniform, single, double, triple], axis=1)

    def buckets(self, stream: np.ndarray) -> np.ndarray:
        """The weights' row for each token from the third on."""
        return np.minimum(np.log2(self.contexts(stream, 2) + 1).astype(int), BUCKETS - 1)

    def tune(self, stream: np.ndarray, rounds: int = 50) -> None:
        """Fit the weights to a stream by expectation maximisation."""
        parts, buckets = self.parts(stream), self.buckets(stream)
        for _ in range(rounds):
            shares = parts * self.weights[buckets]
            shares /= shares.sum(axis=1, keepdims=True)
            for bucket in np.unique(buckets):
                self.weights[bucket] = shares[buckets == bucket].mean(axis=0)

    def losses(self, stream: np.ndarray) -> np.ndarray:
        """Nats for each token of a stream from the third on."""
        return -np.log((self.parts(stream) * self.weights[self.buckets(stream)]).sum(axis=1))


@torch.inference_mode()
def model_losses(model: PreTrainedModel, stream: np.ndarray) -> np.ndarray:
    """Nats for each token of a stream from the third on, scored in separate windows of the training length."""
    width, found = train_tiny.LONG_SEQUENCE, []
    for start in range(0, len(stream) - 1, width):
        window = torch.from_numpy(stream[start : start + width + 1])
        logits = model(input_ids=window[None, :-1]).logits[0].float()
        found.append(torch.nn.functional.cross_entropy(logits, window[1:], reduction="none"))
    return torch.cat(found).numpy()[1:]


def held_out_losses(model: PreTrainedModel, tokenizer: Tokenizer) -> dict[str, float]:
    """Mean nats a token on the held-out files: the model's and the trigram's, over the same tokens."""
    streams = {
        name: train_tiny.token_stream(tokenizer, texts)
        for name, texts in (
            ("train", train_tiny.documents("train")),
            ("tune", train_tiny.corpus("tune")),
            ("held_out", train_tiny.corpus("held_out")),
        )
    }
    trigram = Trigram(streams["train"], tokenizer.get_vocab_size())
    trigram.tune(streams["tune"])
    held_out = streams["held_out"]
    losses = {"model_loss": model_losses(model, held_out), "trigram_loss": trigram.losses(held_out)}
    sizes = {f"{name}_tokens": len(stream) for name, stream in streams.items()}
    return sizes | {name: round(float(found.mean()), 4) for name, found in losses.items()}


def chosen(router_logits: tuple[torch.Tensor, ...], k: int) -> torch.Tensor:
    """`[T, L, K]` experts, computed as the model does: ties between equal bfloat16 logits fall the same way."""
    return torch.stack([logits.softmax(-1, dtype=torch.float).topk(k).indices for logits in router_logits], dim=1)


@torch.inference_mode()
def routes(model: PreTrainedModel, stream: np.ndarray) -> torch.Tensor:
    """`[T, L, K]` experts that each token of a stream is sent to by each layer, the most probable first."""
    width, found = train_tiny.LONG_SEQUENCE, []
    for start in range(0, len(stream), width):
        window = torch.from_numpy(stream[start : start + width])[None]
        out = model(input_ids=window, output_router_logits=True)
        found.append(chosen(out.router_logits, model.config.num_experts_per_tok))
    return torch.cat(found)


def expert_shares(routed: torch.Tensor, experts: int) -> torch.Tensor:
    """`[L, E]` share of the tokens that each expert gets in each layer; a row sums to K."""
    return torch.nn.functional.one_hot(routed, experts).sum(2).float().mean(0)


def routed_sample(tokenizer: Tokenizer) -> np.ndarray:
    """The tokens on which the use of experts is measured: windows spread evenly over the held-out files."""
    stream, width = train_tiny.token_stream(tokenizer, train_tiny.corpus("held_out")), train_tiny.LONG_SEQUENCE
    starts = np.linspace(0, len(stream) - width, ROUTED_WINDOWS).astype(int)
    return np.concatenate([stream[start : start + width] for start in starts])


@torch.inference_mode()
def cached_routes(model: PreTrainedModel, stream: np.ndarray) -> torch.Tensor:
    """`[T, L, K]` as `routes`, but each token alone through the KV cache, as an engine draws."""
    width, k = train_tiny.LONG_SEQUENCE, model.config.num_experts_per_tok
    rows = torch.from_numpy(stream[: len(stream) // width * width]).view(-1, width)
    past, found = None, []
    for place in range(width):
        out = model(input_ids=rows[:, place, None], past_key_values=past, use_cache=True, output_router_logits=True)
        past = out.past_key_values
        found.append(chosen(out.router_logits, k))
    return torch.stack(found, dim=1).flatten(0, 1)


def moved(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """`[L]` share of the tokens whose set of experts is another one."""
    other = (a.sort(-1).values != b.sort(-1).values).any(-1)
    return [round(float(share), 4) for share in other.float().mean(0)]


def route_flips(directory: Path, stream: np.ndarray) -> dict[str, list[float]]:
    """By layer, how often bfloat16 chooses other experts than float32, and than itself by another kernel."""
    kernels = {"float32": ("float32", "sdpa"), "sdpa": ("bfloat16", "sdpa"), "eager": ("bfloat16", "eager")}
    opened = {
        name: AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation=kernel).eval()
        for name, (dtype, kernel) in kernels.items()
    }
    found = {name: routes(model, stream) for name, model in opened.items()}
    found["decode"] = cached_routes(opened["sdpa"], stream)
    pairs = [(a, b) for i, a in enumerate(found) for b in list(found)[i + 1 :]]
    return {f"{a}/{b}": moved(found[a], found[b]) for a, b in pairs}


def expert_facts(directory: Path, model: PreTrainedModel, tokenizer: Tokenizer) -> dict[str, object]:
    """Shares of held-out tokens by layer and expert, and flips; empty for a model without experts."""
    experts = getattr(model.config, "num_experts", 0)
    if not experts:
        return {}
    stream = routed_sample(tokenizer)
    shares = [[round(float(share), 3) for share in layer] for layer in expert_shares(routes(model, stream), experts)]
    return {"expert_shares": shares, "other_experts": route_flips(directory, stream)}


def code_prompts(tokenizer: PreTrainedTokenizerBase, texts: list[str], count: int, rng: random.Random) -> list[str]:
    """Stretches of 16 to 64 tokens from source texts."""
    prompts = []
    for _ in range(count):
        text = rng.choice(texts)
        start = rng.randrange(max(1, len(text) - 400))
        ids = tokenizer.encode(text[start : start + 400])
        prompts.append(tokenizer.decode(ids[: rng.randint(16, 64)]))
    return prompts


def chat_prompts(tokenizer: PreTrainedTokenizerBase, texts: list[str], count: int, rng: random.Random) -> list[str]:
    """Questions about the functions of source texts, in the chat template."""
    talks = [turns for text in texts for turns in train_tiny.conversations(text, 1.0, rng)]
    asked = [[{"role": "user", "content": turns[0][0]}] for turns in rng.sample(talks, count)]
    return [tokenizer.apply_chat_template(ask, tokenize=False, add_generation_prompt=True) for ask in asked]


def held_out_prompts(tokenizer: PreTrainedTokenizerBase, count: int = PROMPTS) -> list[str]:
    """Held-out prompts, half of them code and half chat."""
    rng = random.Random(train_tiny.SEED)
    texts = train_tiny.corpus("held_out")
    return code_prompts(tokenizer, texts, count // 2, rng) + chat_prompts(tokenizer, texts, count - count // 2, rng)


@torch.inference_mode()
def sampled_probabilities(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[str], new_tokens: int = NEW_TOKENS
) -> list[np.ndarray]:
    """The probability of every token sampled at temperature 1, one array a prompt, stop tokens included."""
    torch.manual_seed(train_tiny.SEED)
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    made = model.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], do_sample=True, temperature=1.0,
        top_k=0, top_p=1.0, max_new_tokens=new_tokens, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    chosen = made.sequences[:, batch["input_ids"].shape[1] :]
    probabilities = torch.stack(made.logits, dim=1).float().softmax(-1).gather(-1, chosen[..., None])[..., 0]
    stops = torch.tensor([train_tiny.END_ID, train_tiny.IM_END_ID])
    ended = torch.isin(chosen, stops).cumsum(1)
    kept = (ended == 0) | ((ended == 1) & torch.isin(chosen, stops))
    return [row[mask].numpy() for row, mask in zip(probabilities, kept, strict=True)]


def sampling_facts(sampled: list[np.ndarray], new_tokens: int = NEW_TOKENS) -> dict[str, float]:
    """How many tokens were sampled, how sure the model was of them and how long the replies ran."""
    pooled, lengths = np.concatenate(sampled), np.array([len(row) for row in sampled])
    return {
        "prompts": len(sampled),
        "sampled_tokens": len(pooled),
        "share_above_0.95": round(float((pooled > 0.95).mean()), 4),
        "share_below_0.3": round(float((pooled < 0.3).mean()), 4),
        "stopped_replies": int((lengths < new_tokens).sum()),
        "shortest_reply": int(lengths.min()),
        "median_reply": float(np.median(lengths)),
    }


def load(directory: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model directory's model in fp32 and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(directory)


def measure(directory: Path) -> dict[str, object]:
    """Every number of the model card."""
    model, tokenizer = load(directory)
    facts: dict[str, object] = {"python": platform.python_version(), "parameters": model.num_parameters()}
    plain = Tokenizer.from_file(str(directory / "tokenizer.json"))
    facts |= held_out_losses(model, plain) | expert_facts(directory, model, plain)
    return facts | sampling_facts(sampled_probabilities(model, tokenizer, held_out_prompts(tokenizer)))


def main() -> None:
    """Print the measurements of one model directory."""
    parser = argparse.ArgumentParser(description="Measure a packaged tiny model.")
    parser.add_argument("directory", type=Path, nargs="?", default=train_tiny.OUT)
    print(json.dumps(measure(parser.parse_args().directory), indent=2))


if __name__ == "__main__":
    main()
