"""Real tokenizers by family, the texts they are tried on, and random ids."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onepolicy import models
from onepolicy.suite import load
from onepolicy.tokens.open import open_tokenizer

BUILT = Path(__file__).resolve().parents[1] / "build" / "tokenizers"
#: Texts that tokenizers stumble over, beside those of the suite.
ODD = (
    "",
    " ",
    "  two  spaces  ",
    "\n\n\t end\r\n",
    "1234567890 3.14159 ²½",
    "naïve café; cafe\u0301 ﬁ Å",
    "HTTPServer isn't NASA's iPhone",
    "👩‍👩‍👧‍👦 🇩🇪 ☝🏽",
    "日本語のテキスト。中文，한국어",
    "שלום مرحبا नमस्ते ไทย",
    "\x00\x07 \u200b\ufeff\u00a0",
    "def f(x):\n    return {'a': [1, 2]}\n",
    "<s>[INST] <|im_end|> </s><|endoftext|>",
    "▁under <0x0A> Ġ",
    "𝔘𝔫𝔦 \U000e0041",
)


def built(family: str) -> Path:
    """The directory of a family that packages ship. Fails with what to do where it is not there."""
    path = BUILT / family
    if not path.is_dir():
        pytest.fail(f"{path} is not there; run `make tokenizers`", pytrace=False)
    return path


def mistral_file(name: str) -> str:
    """A file of mistral-common's package data."""
    import mistral_common

    return str(Path(mistral_common.__file__).parent / "data" / name)


V3, TEKKEN = "mistral_instruct_tokenizer_240323.model.v3", "tekken_240911.json"

#: family -> the target that is opened.
TARGETS = {
    "tiny": lambda: "tiny",
    "smollm2": lambda: str(built("smollm2")),
    "smollm2-gguf": lambda: str(built("smollm2-gguf")),
    "mistral-v3": lambda: mistral_file(V3),
    "sentencepiece": lambda: f"sentencepiece:{mistral_file(V3)}",
    "tekken": lambda: mistral_file(TEKKEN),
    "deepseek": lambda: str(built("deepseek")),
    "deepseek-transformers": lambda: f"transformers:{built('deepseek')}",
    "qwen": lambda: str(built("qwen") / "qwen.tiktoken"),
}
FAMILIES = tuple(TARGETS)
#: Those whose tokens are pieces with a space in front of a text, and those whose tokens are bytes.
PIECES = ("mistral-v3", "sentencepiece")
BYTES = tuple(f for f in FAMILIES if f not in PIECES)


@cache
def opened(family: str) -> Any:
    """A family's tokenizer, opened once a process."""
    return open_tokenizer(TARGETS[family]())


@cache
def texts() -> list[str]:
    """Every text of the suite and the odd ones."""
    out: list[str] = [*ODD]
    for item in load("full").texts:
        asked = [item.prompt] if isinstance(item.prompt, str) else [str(m["content"]) for m in item.prompt]
        out.append("\n".join(asked) + item.reply)
    return out


def random_ids(tokenizer: Any, n: int = 150, seed: int = 5) -> list[list[int]]:
    """Lists of ids of the vocabulary, special ones among them."""
    draw = np.random.default_rng(seed)
    known = [i for i in range(tokenizer.size) if tokenizer.exists(i)]
    special = sorted(tokenizer.added) or known
    out: list[list[int]] = []
    for _ in range(n):
        ids = draw.choice(known, size=int(draw.integers(1, 40))).tolist()
        ids[int(draw.integers(len(ids)))] = int(draw.choice(special))
        out.append(ids)
    return out


def tiny_json() -> Path:
    return Path(models.path("tiny")) / "tokenizer.json"
