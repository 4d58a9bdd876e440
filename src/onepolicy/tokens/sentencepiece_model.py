"""The `sentencepiece` library on a `.model` file.

Each text gets the space in front that the file asks for (`add_dummy_prefix`), also in the middle of a sequence: so the
library has it. The library itself never reads a control token from a text; `parse_special` does it as transformers
does, and the text behind such a token gets its space in front again. Decoding takes that space away again.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from onepolicy.errors import ContentError, MissingExtra
from onepolicy.tokens import alphabet, directory
from onepolicy.tokens.base import AddedToken, Part
from onepolicy.tokens.batches import SpecialText, bad_ids, is_id, texts_of, threads, unknown_id, without
from onepolicy.tokens.directory import Around, added_part
from onepolicy.tokens.target import file_of, split_options

#: Kinds of pieces, as the file's format numbers them.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_MODELS = {1: "Unigram", 2: "BPE", 3: "Word", 4: "Char"}
_NO_PROTOBUF = "reading a sentencepiece file's settings needs the package 'protobuf'"


class SentencePieceTokenizer:
    """A sentencepiece file, or the directory of one `tokenizer.model` or `*.model`.

    Errors: `UsageError` for a target that is neither; `ContentError` for a file that the library refuses.
    """

    BACKEND: ClassVar[str] = "sentencepiece"

    def __init__(self, target: str) -> None:
        path, _ = split_options(target, self.BACKEND, ())
        file = file_of(path, self.BACKEND, ("tokenizer.model", "*.model"))
        self.begin(target, _content(file), directory.around(file.parent))

    def begin(self, name: str, content: bytes, beside: Around, spelled: bool = False) -> None:
        """Loads a model from the bytes of its file. `spelled`: the unknown token is read and shown as its spelling, as
        llama.cpp does; else it is never read, and shown as the library does."""
        self.name, self._around = name, beside
        self._library = _processor(content, name)
        self.size: int = self._library.vocab_size()
        self._pieces: list[str] = self._library.id_to_piece(list(range(self.size)))
        self.added: Mapping[int, AddedToken] = {i: t for i in range(self.size) if (t := self._token(i))}
        self._spelled = spelled
        self.special_text = SpecialText({i: t for i, t in self.added.items() if spelled or i != self._library.unk_id()})
        self.chat_template = beside.chat_template

    def _token(self, i: int) -> AddedToken | None:
        """Control and unknown tokens. User-defined ones are matched by the library, in its own way."""
        special = self._library.is_control(i) or self._library.is_unknown(i)
        user = not special and self._user_defined[i]
        return AddedToken(i, self._pieces[i], special) if special or user else None

    @cached_property
    def _skipped(self) -> frozenset[int]:
        return frozenset(i for i, token in self.added.items() if token.special)

    @cached_property
    def _user_defined(self) -> list[bool]:
        proto = self._proto
        return [p.type == USER_DEFINED for p in proto.pieces] if proto else [False] * self.size

    @cached_property
    def _proto(self) -> Any:
        """The file's content as a message, None without protobuf."""
        try:
            pb: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
        except ImportError:
            return None
        message = pb.ModelProto()
        message.ParseFromString(self._library.serialized_model_proto())
        return message

    def encode(self, texts: Sequence[str], *, add_special: bool = False, parse_special: bool = True) -> list[list[int]]:
        """See `Tokenizer.encode`. `add_special` adds nothing: a sentencepiece file asks for nothing around a text."""
        checked = texts_of(self.name, texts)
        return self.special_text.encode(checked, self._plain) if parse_special else self._plain(checked)

    def _plain(self, texts: list[str]) -> list[list[int]]:
        return self._library.encode(texts, num_threads=threads()) if texts else []

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = False) -> list[str]:
        """See `Tokenizer.decode`. The unknown token shows as the library's sign for it. Errors: `ContentError`."""
        try:
            lists = [array("q", one).tolist() for one in ids]  # refuses what is no number; the library takes texts too
            lists = without(lists, self._skipped) if skip_special else lists
            if all(self.special_text.set.isdisjoint(one) for one in lists):
                return self._texts(lists)
            return self._between(lists)
        except (IndexError, TypeError, ValueError, OverflowError) as err:
            problem = bad_ids(ids) or unknown_id(ids, self.exists) or err
            raise ContentError(f"tokenizer {self.name}: {problem}") from err

    def _texts(self, lists: list[list[int]]) -> list[str]:
        return self._library.decode(lists, num_threads=threads()) if lists else []

    def _between(self, lists: list[list[int]]) -> list[str]:
        """Texts of lists with special tokens in them, which the library would leave out."""
        cut = [self.special_text.runs(one) for one in lists]
        texts = iter(self._texts([run for runs in cut for run in runs if isinstance(run, list)]))
        return ["".join(next(texts) if isinstance(r, list) else self._pieces[r] for r in runs) for runs in cut]

    def token_bytes(self, token_id: int) -> bytes | None:
        """See `Tokenizer.token_bytes`; None for the unknown token."""
        if not self.exists(token_id) or (self._library.is_unknown(token_id) and not self._spelled):
            return None
        if token_id in self.special_text.set:
            return self._pieces[token_id].encode()
        if self._library.is_byte(token_id):
            return alphabet.piece_bytes(self._pieces[token_id])
        return self._pieces[token_id].replace(alphabet.SPACE, " ").encode()

    def exists(self, token_id: int) -> bool:
        """See `Tokenizer.exists`."""
        return is_id(token_id) and token_id < self.size

    def special_ids(self) -> Mapping[str, int | None]:
        """As the file has them."""
        library = self._library
        said = {"bos": library.bos_id(), "eos": library.eos_id(), "pad": library.pad_id(), "unk": library.unk_id()}
        return {role: i if i >= 0 else None for role, i in said.items()}

    def parts(self) -> Mapping[str, Part]:
        """See `Tokenizer.parts`. `merges`: the pieces with their scores."""
        return self._parts

    @cached_property
    def _parts(self) -> Mapping[str, Part]:
        special = self.special_ids()
        roles = {f"{role}_token": self._pieces[i] for role, i in special.items() if i is not None}
        beside = self._around
        beside = beside if beside.specials_known else replace(beside, tokens=roles, specials_known=True)
        scores = [[piece, self._library.get_score(i)] for i, piece in enumerate(self._pieces)]
        return {
            **self._settings(),
            "vocabulary": Part({piece: i for i, piece in enumerate(self._pieces)}),
            "merges": Part(scores),
            "post_processor": Part(None),
            "added_tokens": Part(added_part(self.added)),
            "special_ids": Part(dict(special)),
            **beside.parts(),
        }

    def _settings(self) -> dict[str, Part]:
        """`model`, `normalizer`, `pre_tokenizer`, `decoder`, from the file's own records."""
        if self._proto is None:
            names = ("model", "normalizer", "pre_tokenizer", "decoder")
            return {name: Part(known=False, why=_NO_PROTOBUF) for name in names}
        trainer, normal = self._proto.trainer_spec, self._proto.normalizer_spec
        switches = {"byte_fallback": trainer.byte_fallback, "unk_token": trainer.unk_piece}
        rules = {"add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces"}
        charsmap = directory.digest(normal.precompiled_charsmap)
        normalizer = {"type": "sentencepiece", "name": normal.name, "precompiled_charsmap": charsmap}
        return {
            "model": Part({"type": _MODELS[trainer.model_type], **{k: v for k, v in switches.items() if v}}),
            "normalizer": Part([normalizer | {rule: getattr(normal, rule) for rule in sorted(rules)}]),
            "pre_tokenizer": Part([{"type": "sentencepiece", "suffix": trainer.treat_whitespace_as_suffix}]),
            "decoder": Part([{"type": "sentencepiece", "unk_surface": trainer.unk_surface}]),
        }


def _content(file: Any) -> bytes:
    try:
        return file.read_bytes()
    except OSError as err:
        raise ContentError(f"{file}: cannot be read: {err.strerror}") from err


def _processor(content: bytes, name: str) -> Any:
    """The library's object. Errors: `ContentError`, `MissingExtra`."""
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as err:
        raise MissingExtra("sentencepiece", "tokenizers", "reading a sentencepiece file") from err
    try:
        return SentencePieceProcessor(model_proto=content)
    except Exception as err:  # RuntimeError and others: whatever it is, this is no file that the library reads
        said = " ".join(str(err).split())[:200]
        raise ContentError(f"{name}: not a sentencepiece file: {said}") from err
