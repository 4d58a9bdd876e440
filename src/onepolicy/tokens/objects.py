"""Tokenizers as users hold them: an object of `tokenizers` or `transformers`, a function, a target's name."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from onepolicy.errors import ContentError, UsageError
from onepolicy.tokens.base import PARTS, AddedToken, Part, Tokenizer
from onepolicy.tokens.directory import ROLES, Around

_KNOWN: weakref.WeakKeyDictionary[Any, tuple[int, Tokenizer]] = weakref.WeakKeyDictionary()
_WANTED = (
    "wanted a tokenizer of tokenizers or transformers, one of onepolicy.tokens, a function, or a target such as a "
    "model directory"
)


def as_pair(decode_with: Any, encode_with: Any = None) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizers of a way ids -> text -> ids; one and the same where `encode_with` is None.

    Errors: `UsageError` for what is no tokenizer, for one function alone, and those of `open_tokenizer`.
    """
    decode, encode = (_is_function(x) for x in (decode_with, encode_with))
    if encode_with is None or encode_with is decode_with:
        if decode:
            raise UsageError("decode_with is a function, so encode_with is needed: a function of texts or a tokenizer")
        return (one := as_tokenizer(decode_with)), one
    if decode and encode:
        return (one := FunctionTokenizer(_name(encode_with), encode_with, decode_with)), one
    if decode:
        b = as_tokenizer(encode_with)
        return FunctionTokenizer(_name(decode_with), None, decode_with, b), b
    a = as_tokenizer(decode_with)
    return a, FunctionTokenizer(_name(encode_with), encode_with, None, a) if encode else as_tokenizer(encode_with)


def _is_function(given: Any) -> bool:
    return callable(given) and not hasattr(given, "encode") and not hasattr(given, "token_bytes")


def as_tokenizer(given: Any) -> Tokenizer:
    """The `Tokenizer` for what a user has. An object is converted once and remembered while it lives.

    Of a transformers tokenizer the rules are taken, not its habits: nothing is added, cut, padded or cleaned up.
    Errors: `UsageError` for what is no tokenizer, and those of `open_tokenizer`.
    """
    if isinstance(given, str | Path):
        from onepolicy.tokens.open import open_tokenizer

        return open_tokenizer(str(given))
    if hasattr(given, "BACKEND") and hasattr(given, "token_bytes"):
        return given
    size = _size(given)
    try:
        known = _KNOWN.get(given)
    except TypeError:  # cannot be referred to weakly
        return _converted(given)
    if known is None or known[0] != size:
        known = _KNOWN[given] = (size, _converted(given))
    return known[1]


def _size(given: Any) -> int:
    """How many tokens it has now: one that is added later makes it another tokenizer."""
    if hasattr(given, "get_vocab_size"):
        return given.get_vocab_size()
    return len(given) if hasattr(given, "__len__") else 0


def _converted(given: Any) -> Tokenizer:
    rust = getattr(given, "backend_tokenizer", None) or given
    if hasattr(rust, "to_str") and hasattr(rust, "encode_batch"):
        from onepolicy.tokens.fast import FastTokenizer

        return FastTokenizer.from_json(rust.to_str(), _name(given), _around(given))
    if hasattr(given, "encode") and hasattr(given, "decode"):
        return FunctionTokenizer(_name(given), _python_encode(given), _python_decode(given))
    raise UsageError(f"tokenizer: got {type(given).__name__}, {_WANTED}")


def _name(given: Any) -> str:
    return str(getattr(given, "name_or_path", None) or getattr(given, "__name__", None) or type(given).__name__)


def _around(given: Any) -> Around:
    """Special tokens that the object knows; a bare tokenizer knows none."""
    tokens = {f"{role}_token": getattr(given, f"{role}_token", None) for role in ROLES}
    named = {name: str(token) for name, token in tokens.items() if token is not None}
    return Around(tokens=named, specials_known=bool(named))


def _python_encode(given: Any) -> Callable[[str], Any]:
    if hasattr(given, "all_special_ids"):  # transformers
        return lambda text: given.encode(text, add_special_tokens=False)
    return given.encode


def _python_decode(given: Any) -> Callable[[list[int]], Any]:
    if hasattr(given, "all_special_ids"):
        plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return lambda ids: given.decode(ids, **plain)
    return given.decode


class FunctionTokenizer:
    """Functions of a pipeline: `encode` from a text to ids, `decode` from ids to a text, one at a time.

    What one of them does not give, and what the tokens are, is asked of `facts`, the tokenizer on the other side.
    Without one nothing is known of tokens but what `decode` says, and every id is taken to exist.
    """

    BACKEND: ClassVar[str] = "function"

    def __init__(
        self,
        name: str,
        encode: Callable[[str], Any] | None,
        decode: Callable[[list[int]], Any] | None,
        facts: Tokenizer | None = None,
    ) -> None:
        self.name, self._encode, self._decode, self._facts = name, encode, decode, facts
        self.size = 1 << 31 if facts is None else facts.size
        self.added: Mapping[int, AddedToken] = {} if facts is None else facts.added
        self.chat_template: str | None = None

    def encode(self, texts: Sequence[str], *, add_special: bool = False, parse_special: bool = True) -> list[list[int]]:
        """See `Tokenizer.encode`; the function decides what is added. Errors: `ContentError` for no list of ids."""
        if self._encode is None:
            assert self._facts is not None
            return self._facts.encode(texts, add_special=add_special, parse_special=parse_special)
        return [self._ids(self._encode(text)) for text in texts]

    def _ids(self, found: Any) -> list[int]:
        found = getattr(found, "ids", found)
        if isinstance(found, Mapping):
            found = found.get("input_ids")
        ids = found.tolist() if hasattr(found, "tolist") else found
        if not isinstance(ids, Sequence) or not all(isinstance(x, int) for x in ids):
            raise ContentError(f"encode_with ({self.name}): got {type(found).__name__}, wanted a list of ids")
        return list(ids)

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = False) -> list[str]:
        """See `Tokenizer.decode`. Errors: `ContentError` where the function gives no text."""
        if self._decode is None:
            assert self._facts is not None
            return self._facts.decode(ids, skip_special=skip_special)
        texts = [self._decode(list(one)) for one in ids]
        wrong = [type(text).__name__ for text in texts if not isinstance(text, str)]
        if wrong:
            raise ContentError(f"decode_with ({self.name}): got {wrong[0]}, wanted a text")
        return texts

    def token_bytes(self, token_id: int) -> bytes | None:
        """Of the text of the id alone; None where it is only a part of a character."""
        if self._facts is not None:
            return self._facts.token_bytes(token_id)
        text = self.decode([[token_id]])[0]
        return None if "\ufffd" in text else text.encode("utf-8", "surrogatepass")

    def exists(self, token_id: int) -> bool:
        """See `Tokenizer.exists`."""
        return 0 <= token_id < self.size if self._facts is None else self._facts.exists(token_id)

    def special_ids(self) -> Mapping[str, int | None]:
        """See `Tokenizer.special_ids`; none is known without `facts`."""
        return dict.fromkeys(ROLES) if self._facts is None else self._facts.special_ids()

    def parts(self) -> Mapping[str, Part]:
        """See `Tokenizer.parts`; none is known without `facts`."""
        unknown = Part(known=False, why="it is a function")
        return dict.fromkeys(PARTS, unknown) if self._facts is None else self._facts.parts()
