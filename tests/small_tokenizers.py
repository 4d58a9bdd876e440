"""Small tokenizers made for one test: byte-level BPE, one with sentencepiece's habits, one of whole words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onepolicy.tokens.alphabet import PRINTABLE, spell
from onepolicy.tokens.fast import FastTokenizer

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def added(token_id: int, content: str, **flags: bool) -> dict[str, Any]:
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **off, **flags}


def byte_bpe_json(merges: Sequence[str] = (), specials: Sequence[Any] = (), **parts: Any) -> dict[str, Any]:
    """Ids 0..255 are the bytes, then a token for each merge (`"a b"`, spaces as `Ġ`), then the special tokens.

    `specials`: texts, or (text, flags). `parts` replace those of the tokenizer.json.
    """
    vocabulary = {spell(bytes([i])): i for i in range(256)}
    for merge in merges:
        vocabulary["".join(merge.split(" "))] = len(vocabulary)
    pairs = [(s, {}) if isinstance(s, str) else s for s in specials]
    tokens = [added(len(vocabulary) + i, text, **flags) for i, (text, flags) in enumerate(pairs)]
    model = {"type": "BPE", "vocab": vocabulary, "merges": [m.split(" ") for m in merges]}
    return {
        "version": "1.0",
        "added_tokens": tokens,
        "normalizer": None,
        "pre_tokenizer": BYTE_LEVEL,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": model | parts.pop("model", {}),
        **parts,
    }


def byte_bpe(merges: Sequence[str] = (), specials: Sequence[Any] = (), name: str = "bytes", **parts: Any) -> Any:
    return FastTokenizer.from_json(byte_bpe_json(merges, specials, **parts), name=name)


def pieces(words: Sequence[str]) -> Any:
    """Like a sentencepiece model with a space in front and byte fallback: `<unk>`, byte pieces, characters, words."""
    tokens = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *sorted({c for w in words for c in w})]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    merges: list[list[str]] = []
    for word in words:
        for at in range(1, len(word)):
            if word[: at + 1] not in vocabulary:
                merges.append([word[:at], word[at]])
                vocabulary[word[: at + 1]] = len(vocabulary)
    steps = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    return FastTokenizer.from_json(
        {
            "version": "1.0",
            "added_tokens": [added(0, "<unk>")],
            "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, space]},
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": [*steps, strip]},
            "model": {
                "type": "BPE",
                "vocab": vocabulary,
                "merges": merges,
                "unk_token": "<unk>",
                "byte_fallback": True,
            },
        },
        name="pieces",
    )


def words(known: Sequence[str], normalizer: Any = None) -> Any:
    """Whole words between spaces, all others unknown."""
    vocabulary = {word: i for i, word in enumerate(["[UNK]", *known])}
    return FastTokenizer.from_json(
        {
            "version": "1.0",
            "added_tokens": [added(0, "[UNK]")],
            "normalizer": normalizer,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
        },
        name="words",
    )


#: Byte -> the character that spells it.
LETTERS = PRINTABLE
