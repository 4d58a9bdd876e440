"""The `mistral_common` library on its own files: tekken.json, and sentencepiece files named `tokenizer.model.v3`.

The library never reads a control token from a text: it puts them in by id. `parse_special` finds them as transformers
would. `add_special` puts BOS in front, as the library does around a text of its own. There is no chat template: the
library builds a conversation in Python, so what it would send is asked of the library itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from onepolicy.errors import ContentError, MissingExtra
from onepolicy.tokens import directory
from onepolicy.tokens.base import AddedToken, Part
from onepolicy.tokens.batches import SpecialText, bad_ids, breaks_explained, first_line, is_id, texts_of, unknown_id
from onepolicy.tokens.directory import Around, added_part
from onepolicy.tokens.ranks import model_parts, vocabulary
from onepolicy.tokens.sentencepiece_model import SentencePieceTokenizer
from onepolicy.tokens.target import file_of, split_options

_NO_TEMPLATE = "mistral-common builds conversations in Python and has no chat template"


class MistralTokenizer:
    """A tekken.json, a `tokenizer.model.vN`, or a directory with one of them.

    Errors: `UsageError` for a target that is none; `ContentError` for a file that the library refuses.
    """

    BACKEND: ClassVar[str] = "mistral"

    def __init__(self, target: str) -> None:
        path, _ = split_options(target, self.BACKEND, ())
        file = file_of(path, self.BACKEND, ("tekken.json", "tekken*.json", "tokenizer.model.v*", "*.model.v*"))
        self.name, self.chat_template = target, None
        self._around = directory.around(file.parent)
        self._library = _loaded(file, target)
        self._file = file
        self._pieces = None if file.suffix == ".json" else _Pieces(file, target, self._around)
        self.size: int = self._library.n_words
        self.added: Mapping[int, AddedToken] = self._pieces.added if self._pieces else self._control()
        self._special = self._pieces.special_text if self._pieces else SpecialText(self.added)

    def _control(self) -> dict[int, AddedToken]:
        """Special tokens of a tekken file, those included that fill up its range."""
        return {i: AddedToken(i, self._library.id_to_piece(i)) for i in sorted(self._library.special_ids)}

    def encode(self, texts: Sequence[str], *, add_special: bool = False, parse_special: bool = True) -> list[list[int]]:
        """See `Tokenizer.encode`."""
        checked = texts_of(self.name, texts)
        ids = self._special.encode(checked, self._plain) if parse_special else self._plain(checked)
        return [[self._library.bos_id, *one] for one in ids] if add_special else ids

    def _plain(self, texts: list[str]) -> list[list[int]]:
        if self._pieces:
            return self._pieces.encode(texts, parse_special=False)
        with breaks_explained(self.name, "encodes a text"):
            return [self._library.encode(text, bos=False, eos=False) for text in texts]

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = False) -> list[str]:
        """See `Tokenizer.decode`. Errors: `ContentError`."""
        if self._pieces:
            return self._pieces.decode(ids, skip_special=skip_special)
        policy = self._policy.IGNORE if skip_special else self._policy.KEEP
        try:
            lists = [
                array("Q", one).tolist() for one in ids
            ]  # refuses what is no id; a list there would wrap -1 around
            return [self._library.decode(one, special_token_policy=policy) for one in lists]
        except (KeyError, IndexError, OverflowError, TypeError, ValueError) as err:
            problem = bad_ids(ids) or unknown_id(ids, self.exists) or err
            raise ContentError(f"tokenizer {self.name}: {problem}") from err

    @cached_property
    def _policy(self) -> Any:
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        return SpecialTokenPolicy

    def token_bytes(self, token_id: int) -> bytes | None:
        """See `Tokenizer.token_bytes`."""
        if self._pieces:
            return self._pieces.token_bytes(token_id)
        if (token := self.added.get(token_id)) is not None:
            return token.content.encode()
        return self._bytes[token_id - len(self.added)] if self.exists(token_id) else None

    @cached_property
    def _bytes(self) -> list[bytes]:
        """The bytes of a tekken file's ordinary tokens, by rank."""
        first = len(self.added)
        return [self._library.id_to_byte_piece(i) for i in range(first, self.size)]

    def exists(self, token_id: int) -> bool:
        """See `Tokenizer.exists`."""
        return is_id(token_id) and token_id < self.size

    def special_ids(self) -> Mapping[str, int | None]:
        """As the library names them."""
        return {role: _role(self._library, role) for role in directory.ROLES}

    def parts(self) -> Mapping[str, Part]:
        """See `Tokenizer.parts`."""
        return self._parts

    @cached_property
    def _parts(self) -> Mapping[str, Part]:
        special = self.special_ids()
        inner = dict(self._pieces.parts()) if self._pieces else self._tekken_parts()
        bos = self.added[self._library.bos_id].content
        unknown = {n: Part(known=False, why=_NO_TEMPLATE) for n in ("chat_template", "template_defaults")}
        beside = self._around.parts()
        return inner | {
            "post_processor": Part({"before": [bos], "after": []}),
            "added_tokens": Part(added_part(self.added)),
            "special_ids": Part(dict(special)),
            **beside,
            **{name: part for name, part in unknown.items() if not beside[name].known},
        }

    def _tekken_parts(self) -> dict[str, Part]:
        config = directory.read_json(self._file)["config"]
        ranks = {token: i for i, token in enumerate(self._bytes)}
        shifted = ((token, i + len(self.added)) for token, i in ranks.items())
        return {
            **model_parts(ranks, config["pattern"]),
            "vocabulary": Part(vocabulary(shifted, self.added)),
            "normalizer": Part(None),
        }


class _Pieces(SentencePieceTokenizer):
    """The sentencepiece file behind mistral-common, for what its own wrapper does a text at a time or not at all: its
    `decode` with special tokens gives pieces, not text."""

    def __init__(self, file: Path, name: str, beside: Around) -> None:
        self.begin(name, file.read_bytes(), beside)


def _role(library: Any, role: str) -> int | None:
    try:
        found = int(getattr(library, f"{role}_id"))
    except (ValueError, NotImplementedError):
        return None
    return found if found >= 0 else None


def _loaded(file: Path, name: str) -> Any:
    """The library's tokenizer. Errors: `ContentError`, `MissingExtra`."""
    try:
        from mistral_common.tokens.tokenizers.sentencepiece import SentencePieceTokenizer as Pieces
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer
    except ImportError as err:
        raise MissingExtra("mistral-common", "tokenizers", "reading a tekken.json or tokenizer.model.vN") from err
    try:
        return Tekkenizer.from_file(file) if file.suffix == ".json" else Pieces(str(file))
    except Exception as err:  # assertions, key errors and others: the library names no class of its own for a bad file
        raise ContentError(f"{name}: not a file of mistral-common: {first_line(err)}") from err
