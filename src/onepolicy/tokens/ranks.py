"""Byte-level BPE by ranks, as tiktoken and tekken files hold it: bytes -> rank, no list of merges.

The merges follow from the ranks: a token was made of the two parts that its own bytes end in when only lower ranks may
merge. Files of that kind were converted to tokenizer.json and GGUF in this way, so the lists can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from onepolicy.tokens.alphabet import spell
from onepolicy.tokens.base import AddedToken, Part

DERIVED = "derived from the ranks: this library keeps no list, and merges any two neighbours whose bytes are a token"


def last_parts(ranks: Mapping[bytes, int], token: bytes) -> list[bytes]:
    """What a token's bytes are before the last merge: two parts, more where its ranks never lead to it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    limit = ranks[token]
    while len(parts) > 1:
        joined = [ranks.get(a + b, limit) for a, b in pairwise(parts)]
        best = min(joined)
        if best >= limit:
            break
        at = joined.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def merges_of(ranks: Mapping[bytes, int]) -> list[list[str]]:
    """Pairs in the order of their ranks, in the printable alphabet. A token that no merge makes has none."""
    out: list[list[str]] = []
    for token in sorted((t for t in ranks if len(t) > 1), key=ranks.__getitem__):
        parts = last_parts(ranks, token)
        if len(parts) == 2:
            out.append([spell(part) for part in parts])
    return out


def vocabulary(ranks: Iterable[tuple[bytes, int]], added: Mapping[int, AddedToken]) -> dict[str, int]:
    """Token -> id. `ranks`: with ids instead of ranks where the two differ."""
    return {spell(token): i for token, i in ranks} | {token.content: i for i, token in added.items()}


def split_steps(pattern: str) -> list[dict[str, Any]]:
    """The split by an expression, in the terms of a tokenizer.json."""
    return [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ]


def model_parts(ranks: Mapping[bytes, int], pattern: str, why: str = "") -> dict[str, Part]:
    """`model`, `merges`, `pre_tokenizer`, `decoder`. Both libraries take a whole word that is a token as it is."""
    return {
        "model": Part({"type": "BPE", "ignore_merges": True}),
        "merges": Part(merges_of(ranks), why=DERIVED),
        "pre_tokenizer": Part(split_steps(pattern), why=why),
        "decoder": Part([{"type": "ByteLevel"}]),
    }
