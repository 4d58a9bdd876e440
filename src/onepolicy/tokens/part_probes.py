"""Texts made for the very tokens, merges and flags that differ: what common texts would seldom meet.

Without them a moved id among a hundred thousand tokens would look harmless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onepolicy.tokens.base import Tokenizer
from onepolicy.tokens.pair_texts import Pair
from onepolicy.tokens.part_differences import PartRow
from onepolicy.tokens.part_words import vocabulary_change

_TOKENS, _MERGES, _ADDED = 128, 64, 64  # how many of each kind are probed
#: How an added token may stand in a text: alone, in words, with white space on either side and on both, twice.
_PLACES = ("{}", "a{}b", "a {} b", "a  {}\n b", "a\n{}", "{}{}", "{} ", "un{}ed")


def made_for(pair: Pair, rows: Mapping[str, PartRow]) -> list[str]:
    """Texts for the differences of `vocabulary`, `merges` and `added_tokens`, without repeats."""
    texts = [*_of_tokens(pair, rows["vocabulary"]), *_of_merges(pair[0], rows), *_of_added(rows["added_tokens"])]
    return list(dict.fromkeys(texts))


def _text(tokenizer: Tokenizer, token_ids: Sequence[int | None]) -> str | None:
    """The tokens' text, None where they are not whole characters."""
    found = [None if i is None else tokenizer.token_bytes(i) for i in token_ids]
    if any(data is None for data in found):
        return None
    try:
        return b"".join(data for data in found if data is not None).decode("utf-8")
    except UnicodeDecodeError:
        return None


def _of_tokens(pair: Pair, row: PartRow) -> list[str]:
    a, b = row.contents
    if not row.differs or not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return []
    only_a, only_b, moved = vocabulary_change(a, b)
    wanted = [(pair[0], a[t]) for t in spread(only_a, _TOKENS)] + [(pair[1], b[t]) for t in spread(only_b, _TOKENS)]
    wanted += [(pair[0], a[t]) for t in spread(moved, _TOKENS)]
    return [text for tokenizer, i in wanted if (text := _text(tokenizer, [i]))]


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of the items, evenly from first to last."""
    if len(items) <= most:
        return list(items)
    return [items[i * len(items) // most] for i in range(most)]


def _of_merges(tokenizer: Tokenizer, rows: Mapping[str, PartRow]) -> list[str]:
    """The pairs that differ, alone and chained: `a b` and `b c` compete in `abc`; words that hold them."""
    row, ids = rows["merges"], rows["vocabulary"].contents[0]
    a, b = row.contents
    if not row.differs or not isinstance(ids, Mapping) or not _are_pairs(a) or not _are_pairs(b):
        return []
    unlike = _unlike(a, b)
    chains = [(x, y, z) for x, y in unlike for w, z in unlike if w == y]
    out = [_text(tokenizer, [ids.get(t) for t in row]) for row in [*unlike, *chains[:_MERGES]]]
    joined = [x + y for x, y in unlike[:8]]
    inside = [i for t, i in ids.items() if any(j in t for j in joined)]
    out += [_text(tokenizer, [i]) for i in spread(inside, _TOKENS)]
    return [text for text in out if text]


def _are_pairs(rows: Any) -> bool:
    return isinstance(rows, list) and bool(rows) and isinstance(rows[0], list) and isinstance(rows[0][-1], str)


def _unlike(a: list[list[str]], b: list[list[str]]) -> list[list[str]]:
    """Merges that stand on one side only, or first at another rank: both of them."""
    keys = [{tuple(row) for row in side} for side in (a, b)]
    lone = [row for row in a if tuple(row) not in keys[1]] + [row for row in b if tuple(row) not in keys[0]]
    moved = [row for x, y in zip(a, b, strict=False) if x != y for row in (x, y)]
    return spread(list({tuple(row): row for row in lone}.values()), _MERGES) + moved[:_MERGES]


def _of_added(row: PartRow) -> list[str]:
    change = row.contents[0]
    if not row.differs or not isinstance(change, Mapping):
        return []
    return [place.replace("{}", token) for token in spread(list(change), _ADDED) for place in _PLACES]
