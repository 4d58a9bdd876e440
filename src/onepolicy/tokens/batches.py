"""What every backend does with a batch: refuse what is no text or id, split at special tokens, count threads."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from onepolicy.errors import ContentError
from onepolicy.tokens.base import AddedToken

LARGEST = 2**32  # ids are unsigned 32-bit integers in every library
Plain = Callable[[list[str]], list[list[int]]]


def bad_text(texts: Sequence[Any]) -> str | None:
    """Which text cannot be encoded and why; None where all can."""
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            return f"text {i}: got {type(text).__name__}, wanted str"
        try:
            text.encode()
        except UnicodeEncodeError as err:
            where = f"U+{ord(text[err.start]):04X} at character {err.start}"
            return f"text {i}: half of a surrogate pair ({where}) is no Unicode text and has no tokens"
    return None


def bad_ids(ids: Sequence[Any]) -> str | None:
    """Which id is no id and why; None where all are."""
    for i, one in enumerate(ids):
        if isinstance(one, str | bytes) or not hasattr(one, "__iter__"):
            return f"ids {i}: got {type(one).__name__}, wanted a list of ids"
        for j, token_id in enumerate(one):
            if not is_id(token_id):
                return f"ids {i}, position {j}: got {token_id!r}, wanted a whole number from 0 to below 2^32"
    return None


def unknown_id(ids: Sequence[Sequence[int]], exists: Callable[[int], bool]) -> str | None:
    """Which id is not in the vocabulary; None where all are."""
    for i, one in enumerate(ids):
        for j, token_id in enumerate(one):
            if not exists(token_id):
                return f"ids {i}, position {j}: the vocabulary has no id {token_id}"
    return None


def is_id(token_id: Any) -> bool:
    """Whether it is a whole number that a library takes as an id."""
    if isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
        return False
    return 0 <= token_id < LARGEST


@contextlib.contextmanager
def breaks_explained(name: str, what: str) -> Iterator[None]:
    """A panic of a library's Rust code, which is not even an `Exception`, or an expression that needs too much memory
    for a text (tiktoken, on a million spaces), as a `ContentError` of one line."""
    try:
        yield
    except BaseException as err:
        if type(err).__name__ != "PanicException" and not (type(err) is ValueError and "Regex" in str(err)):
            raise
        raise ContentError(f"tokenizer {name}: its library breaks when it {what}: {first_line(err)}") from err


def first_line(err: BaseException) -> str:
    """The first line of what an error says, short."""
    return (str(err).strip().splitlines() or [type(err).__name__])[0][:300]


def without(ids: Sequence[Sequence[int]], left_out: frozenset[int]) -> list[list[int]]:
    """The lists without some ids."""
    return [list(one) if left_out.isdisjoint(one) else [i for i in one if i not in left_out] for one in ids]


def texts_of(name: str, texts: Sequence[str]) -> list[str]:
    """The texts as a list, for libraries that take what is no text. Errors: `ContentError`."""
    if problem := bad_text(texts):
        raise ContentError(f"tokenizer {name}: {problem}")
    return list(texts)


def threads() -> int:
    """How many threads a library may take: one where TOKENIZERS_PARALLELISM says so, else one a core."""
    off = os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("0", "false", "off", "no", "n", "f")
    return 1 if off else len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class SpecialText:
    """Special tokens as a batch meets them: found in texts (the longest that fits, from the left), cut out of ids.

    For libraries that never read a special token from a text. What stands between them is encoded piece by piece, as
    transformers does with such a library.
    """

    def __init__(self, added: Mapping[int, AddedToken]) -> None:
        self.ids = {token.content: i for i, token in added.items() if token.special and token.content}
        self.set = frozenset(self.ids.values())

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(text) for text in sorted(self.ids, key=len, reverse=True)) or r"(?!)")

    def encode(self, texts: list[str], plain: Plain) -> list[list[int]]:
        """Ids of texts. `plain` encodes texts without special tokens, and is called once."""
        if not any(self._pattern.search(text) for text in texts):
            return plain(texts)
        cut = [self._cut(text) for text in texts]
        pieces = iter(plain([piece for parts in cut for piece in parts if isinstance(piece, str)]))
        return [[i for p in parts for i in (next(pieces) if isinstance(p, str) else [p])] for parts in cut]

    def _cut(self, text: str) -> list[str | int]:
        out: list[str | int] = []
        start = 0
        for match in self._pattern.finditer(text):
            out += [text[start : match.start()]] if match.start() > start else []
            out.append(self.ids[match.group()])
            start = match.end()
        return [*out, text[start:]] if start < len(text) else out

    def runs(self, ids: Sequence[int]) -> list[list[int] | int]:
        """One list as runs of ordinary ids, and the special ids between them."""
        out: list[list[int] | int] = []
        for i in ids:
            if i in self.set:
                out.append(i)
            elif out and isinstance(out[-1], list):
                out[-1].append(i)
            else:
                out.append([i])
        return out
