"""Train the packaged tiny model: a one-million-parameter Llama on Python's own standard library."""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import os
import random
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "src" / "onepolicy" / "models" / "tiny"
END, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (END, IM_START, IM_END)
END_ID, IM_END_ID = 0, 2
VOCAB = 512
SEQUENCE, LONG_SEQUENCE = 256, 512  # for the first three quarters of the updates, and for the rest
BATCH_TOKENS = 4096
STEPS = 4000
SEED = 20261130
SPLITS = {0: "held_out", 1: "tune"}  # of 32 hash buckets; the other 30 are training files
SKIPPED_PARTS = {"site-packages", "dist-packages", "encodings", "__pycache__"}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
Turn = tuple[str, str]


def corpus_files(stdlib: Path) -> list[Path]:
    """The source files below the standard library directory that belong to the corpus, in a fixed order."""
    found = []
    for folder, children, names in os.walk(stdlib):
        children[:] = [name for name in children if name not in SKIPPED_PARTS and not name.startswith("config-")]
        kept = [name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        found.extend(Path(folder, name) for name in kept)
    return sorted(found)


def split_of(relative: Path) -> str:
    """The split a file belongs to; it depends on the file's path alone."""
    digest = hashlib.sha256(relative.as_posix().encode()).digest()
    return SPLITS.get(digest[0] % 32, "train")


def read_text(path: Path) -> str:
    """A file's text, or the empty string where it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def corpus(split: str) -> list[str]:
    """The non-empty source texts of one split, in a fixed order."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = [path for path in corpus_files(stdlib) if split_of(path.relative_to(stdlib)) == split]
    texts = (read_text(path) for path in files)
    return [text for text in texts if text.strip()]


def parsed(source: str) -> ast.Module:
    """The syntax tree of a source text, empty where it does not parse."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def functions(source: str) -> Iterator[tuple[str, str, str]]:
    """(signature, docstring, body) of every function of a source text, in source form."""
    lines = source.splitlines()
    for node in ast.walk(parsed(source)):
        if not isinstance(node, ast.FunctionDef) or node.body[0].lineno <= node.lineno:
            continue
        first = node.body[0].lineno - 1
        head = "\n".join(line[node.col_offset :] for line in lines[node.lineno - 1 : first])
        body = "\n".join(line[node.col_offset :] for line in lines[first : node.end_lineno])
        yield head, ast.get_docstring(node) or "", body


def turn_for(head: str, doc: str, body: str, rng: random.Random) -> Turn:
    """One question and answer about a function."""
    name = head.partition("(")[0].removeprefix("def ").strip()
    if doc and rng.random() < 0.5:
        return rng.choice([f"Document {name}", f"What does {name} do?", f"Document:\n{head}"]), doc
    if doc and rng.random() < 0.5:
        return f"Write a function: {doc.splitlines()[0]}", f"{head}\n{body}"
    return f"Complete:\n{head}", f"{head}\n{body}"


def conversations(source: str, share: float, rng: random.Random) -> Iterator[list[Turn]]:
    """Short conversations about a sample of a source's functions, one to three turns each."""
    pool = [found for found in functions(source) if len(found[0]) + len(found[2]) < 1200 and rng.random() < share]
    while pool:
        turns = rng.choice((1, 1, 1, 2, 3))
        taken, pool = pool[:turns], pool[turns:]
        yield [turn_for(*found, rng) for found in taken]


def render(turns: list[Turn]) -> str:
    """A conversation as the chat template writes it."""
    pairs = [(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]
    return "".join(f"{IM_START}{role}\n{text}{IM_END}\n" for role, text in pairs)


def documents(split: str, share: float = 0.6, seed: int = SEED) -> list[str]:
    """The files of a split and conversations made from them, shuffled."""
    rng = random.Random(seed)
    sources = corpus(split)
    chats = [render(turns) for source in sources for turns in conversations(source, share, rng)]
    mixed = sources + chats
    rng.shuffle(mixed)
    return mixed


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer with every byte in its vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_stream(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts' tokens in one array, each text preceded by the end-of-text token."""
    pieces = []
    for start in range(0, len(texts), 256):  # a part at a time: an encoding takes far more memory than its ids
        encoded = tokenizer.encode_batch_fast(texts[start : start + 256])
        pieces.extend(np.asarray([END_ID, *item.ids], dtype=np.int64) for item in encoded)
    return np.concatenate(pieces)


def new_model(seed: int) -> LlamaForCausalLM:
    """An untrained model of the packaged shape."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=384, num_hidden_layers=4, head_dim=32,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=[IM_END_ID, END_ID], pad_token_id=END_ID,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def windows(stream: np.ndarray, steps: int, width: int, seed: int) -> Iterator[torch.Tensor]:
    """`steps` batches of windows of `width` + 1 tokens: every epoch a fresh offset and order."""
    rng = np.random.default_rng(seed)
    rows = BATCH_TOKENS // width
    queue: list[int] = []
    for _ in range(steps):
        if len(queue) < rows:
            starts = np.arange(rng.integers(width), len(stream) - width - 1, width)
            queue = rng.permutation(starts).tolist()
        taken, queue = queue[:rows], queue[rows:]
        yield torch.from_numpy(np.stack([stream[start : start + width + 1] for start in taken]))


def batches(stream: np.ndarray, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """Short windows for three quarters of the updates, then long ones."""
    long = steps // 4
    yield from windows(stream, steps - long, SEQUENCE, seed)
    yield from windows(stream, long, LONG_SEQUENCE, seed + 1)


def schedule(step: int, steps: int) -> float:
    """The share of the peak rate: linear over the first hundred updates, then a cosine to a fiftieth."""
    return min((step + 1) / 100, 0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))


def optimizers_for(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    named = dict(model.named_parameters())
    hidden = [weight for name, weight in named.items() if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in named.items() if weight.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(hidden, lr=0.02, weight_decay=0.03),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def loss_of(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """A batch's mean loss in nats a token."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def train(
    model: PreTrainedModel,
    stream: np.ndarray,
    optimizers: list[torch.optim.Optimizer],
    chosen: argparse.Namespace,
    loss_of: Callable[[PreTrainedModel, torch.Tensor], torch.Tensor] = loss_of,
) -> None:
    """Train in place, printing the mean loss every hundred updates."""
    steps = chosen.steps
    plans = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: schedule(step, steps)) for each in optimizers]
    started, losses = time.monotonic(), []
    for step, batch in enumerate(batches(stream, steps, chosen.seed), 1):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=chosen.autocast):
            loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in (*optimizers, *plans):
            each.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step % 100 == 0:
            speed = step * BATCH_TOKENS / (time.monotonic() - started)
            print(f"step {step}/{steps} loss {np.mean(losses[-100:]):.4f} {speed:.0f} tokens/s", flush=True)


@torch.no_grad()
def round_weights(model: PreTrainedModel) -> None:
    """Round every weight to a value that bfloat16 and float16 both hold exactly."""
    for name, weight in model.named_parameters():
        weight.copy_(weight.bfloat16().float().half().float())
        exact = torch.equal(weight, weight.bfloat16().float()) and torch.equal(weight, weight.half().float())
        if not exact or not torch.isfinite(weight).all():
            raise ValueError(f"{name} is not exact in both half-precision types")


def write_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048, "bos_token": None,
        "eos_token": END, "pad_token": END, "additional_special_tokens": [IM_START, IM_END],
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    text = json.dumps(settings, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def export(model: PreTrainedModel, tokenizer: Tokenizer, out: Path) -> None:
    """Write the model directory; each file replaces its predecessor in one step."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".tiny-") as name:
        staged = Path(name)
        model.generation_config = GenerationConfig(eos_token_id=[IM_END_ID, END_ID], pad_token_id=END_ID)
        model.bfloat16().save_pretrained(staged)
        write_tokenizer(tokenizer, staged)
        for path in staged.iterdir():
            path.chmod(0o644)
            os.replace(path, out / path.name)


def arguments(about: str | None, out: Path, steps: int) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, default=out, help="model directory to write")
    parser.add_argument("--steps", type=int, default=steps, help="updates of BATCH_TOKENS tokens")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--autocast", action="store_true", help="bfloat16 matrix products: for CPUs where it is faster")
    return parser.parse_args()


def training_text() -> tuple[Tokenizer, np.ndarray]:
    """The tokenizer, trained on the training documents, and their tokens in one array."""
    texts = documents("train")
    tokenizer = train_tokenizer(texts)
    stream = token_stream(tokenizer, texts)
    chats = sum(len(text) for text in texts if text.startswith(IM_START)) / sum(map(len, texts))
    print(f"{len(texts)} documents, {len(stream)} tokens, chat share {chats:.3f}", flush=True)
    return tokenizer, stream


def main() -> None:
    """Train, round and export."""
    chosen = arguments(__doc__, OUT, STEPS)
    tokenizer, stream = training_text()
    model = new_model(chosen.seed)
    print(f"{model.num_parameters()} parameters")
    train(model, stream, optimizers_for(model), chosen)
    round_weights(model)
    export(model, tokenizer, chosen.out)


if __name__ == "__main__":
    main()
