"""How text is split before byte-level BPE, by the names that GGUF files and tokenizers have for it.

The expressions are those of the models' own tokenizer files. llama.cpp, whose names these are, writes some of them in
another way, because its expressions know fewer letter classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onepolicy.tokens.components import GPT2_PATTERN

_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
    r"|\s*[\r\n]|\s+(?!\S)|\s"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = _CASED.replace("%s", _ENDINGS + "?") + r"|\p{N}{1,3}" + _CASED_TAIL
TEKKEN = _CASED.replace("%s", "") + r"|\p{N}" + _CASED_TAIL
_QWEN35 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
).replace(r"\r\n", "\r\n")
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True, slots=True)
class Pre:
    """One pre-tokenizer: expressions one after another (`DIGITS`: every digit alone), and what goes with its name.

    `ignore_merges`: a word that is a token is taken whole. `bos`: BOS in front unless the file says otherwise.
    """

    steps: tuple[str, ...]
    ignore_merges: bool = False
    bos: bool = False


DIGITS = "digits"
_GPT2, _DIGITS = Pre((GPT2_PATTERN,)), Pre((DIGITS, GPT2_PATTERN))
_LLAMA, _QWEN = Pre((LLAMA3,), ignore_merges=True, bos=True), Pre((QWEN2,))
_DEEPSEEK = Pre((r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK3))
_GPT4O = Pre((O200K,))

#: `tokenizer.ggml.pre` of GGUF files.
PRE: dict[str, Pre] = {
    "default": Pre((r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "modern-bert", "exaone4", "mpt"), _GPT2),
    **dict.fromkeys(("olmo", "jais", "trillion", "granite-docling", "jina-v2-code", "roberta-bpe"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Pre((LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "grok-2", "solar-open"), _QWEN),
    "qwen35": Pre((_QWEN35,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK),
    "deepseek-coder": Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGITS)),
    "tekken": Pre((TEKKEN,), ignore_merges=True, bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _GPT4O),
    "falcon": Pre((r"[\p{P}\$\+<=>\^~\|`]+", GPT2_PATTERN, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), Pre((_BAILING,))),
    "seed-coder": Pre((_SEED,)),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), Pre((_BLOOM,))),
    "viking": Pre((_BLOOM, DIGITS)),
}


def pre_tokenizer(pre: Pre) -> dict[str, Any]:
    """The pre-tokenizer in the terms of a tokenizer.json."""
    steps: list[dict[str, Any]] = [_step(text) for text in pre.steps]
    regex = pre.steps[-1] == GPT2_PATTERN
    letters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": regex}
    return {"type": "Sequence", "pretokenizers": [*(steps[:-1] if regex else steps), letters]}


def _step(text: str) -> dict[str, Any]:
    if text == DIGITS:
        return {"type": "Digits", "individual_digits": True}
    return {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}
