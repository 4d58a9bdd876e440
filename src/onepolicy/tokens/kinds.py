"""What kind of text a token is: special, digits, space, punctuation, a script, a piece of a character."""

from __future__ import annotations

import unicodedata

import numpy as np

from onepolicy.tokens.base import Tokenizer
from onepolicy.types import IntArray

KINDS = ("special", "stop", "digits", "space", "punctuation", "latin", "cjk", "other script", "part of a character")
#: First word of a letter's Unicode name -> kind.
_SCRIPTS = {
    "LATIN": "latin", "CJK": "cjk", "HIRAGANA": "cjk", "KATAKANA": "cjk", "HANGUL": "cjk",
}  # fmt: skip


def kind_table(tokenizer: Tokenizer) -> IntArray:
    """`[V]` index into `KINDS` of every id, -1 where the vocabulary has a hole."""
    out = np.full(tokenizer.size, -1, dtype=np.int64)
    stops = {i for i in (tokenizer.special_ids().get("eos"),) if i is not None}
    for i in range(tokenizer.size):
        if i in tokenizer.added:
            out[i] = KINDS.index("stop" if i in stops else "special")
            continue
        text = tokenizer.token_bytes(i)
        if text is not None:
            out[i] = KINDS.index("stop" if i in stops else kind_of(text))
    return out


def kind_of(text: bytes) -> str:
    """The kind of a token's bytes, by its first character that is no space."""
    try:
        word = text.decode("utf-8")
    except UnicodeDecodeError:
        return "part of a character"
    inner = word.strip()
    if not inner:
        return "space"
    first = inner[0]
    if all(c.isdigit() for c in inner):
        return "digits"
    if not first.isalpha():
        return "digits" if first.isdigit() else "punctuation"
    return _SCRIPTS.get(unicodedata.name(first, "").partition(" ")[0], "other script")
