"""A GGUF file's own tokenizer, built from its records with the libraries that those were taken from.

`gpt2` (byte-level BPE): the `tokenizers` library, with the split that `tokenizer.ggml.pre` names. `llama` (pieces with
scores) and `t5`: the `sentencepiece` library. Others are refused. Flags of added tokens other than "special" are not in
such a file; llama.cpp takes them from the model's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from onepolicy.errors import ContentError, MissingExtra, UnknownName, UsageError
from onepolicy.tokens import patterns
from onepolicy.tokens.base import AddedToken, Part
from onepolicy.tokens.batches import first_line
from onepolicy.tokens.directory import Around
from onepolicy.tokens.fast import FastTokenizer
from onepolicy.tokens.sentencepiece_model import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceTokenizer,
)
from onepolicy.tokens.target import file_of, split_options

_KINDS = {"gpt2": "byte-level BPE", "llama": "sentencepiece BPE", "t5": "sentencepiece Unigram"}
#: Special ids that llama.cpp takes where a file names none, by kind.
_DEFAULT_IDS = {
    "gpt2": {"bos": 11, "eos": 11},
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "t5": {"eos": 1, "unk": 2, "pad": 0},
}
_ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
_STOPS = ("eos", "eot", "eom")
_ALSO = "llama.cpp also stops at tokens that it knows by their text, as <|endoftext|> and <|im_end|>"


class GgufTokenizer:
    """A GGUF file, or the directory of one. `?pre=NAME` reads it with another pre-tokenizer than it names.

    Errors: `UsageError` for a target that is neither, `UnknownName` for a pre-tokenizer that is not in the table;
    `ContentError` for a file without a tokenizer, or of a kind that is not built here.
    """

    BACKEND: ClassVar[str] = "gguf"

    def __init__(self, target: str) -> None:
        path, options = split_options(target, self.BACKEND, ("pre",))
        records = Records(file_of(path, self.BACKEND, ("*.gguf",)))
        self.name, self.kind = target, records.kind()
        self.pre = options.get("pre") or records.text("pre") or "default"
        beside = records.around()
        self._inner: Any = _bpe(records, self.pre, beside) if self.kind == "gpt2" else _pieces(records, beside)
        self._ids = records.special_ids()
        self._add = records.added_around(self.pre)
        self.added: Mapping[int, AddedToken] = self._inner.added
        self.size: int = self._inner.size
        self.chat_template: str | None = beside.chat_template

    def encode(self, texts: Sequence[str], *, add_special: bool = False, parse_special: bool = True) -> list[list[int]]:
        """See `Tokenizer.encode`. `add_special`: BOS and EOS as the file or its pre-tokenizer asks for them."""
        ids = self._inner.encode(texts, parse_special=parse_special)
        before, after = self._add
        return [[*before, *one, *after] for one in ids] if add_special and (before or after) else ids

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = False) -> list[str]:
        """See `Tokenizer.decode`."""
        return self._inner.decode(ids, skip_special=skip_special)

    def token_bytes(self, token_id: int) -> bytes | None:
        """See `Tokenizer.token_bytes`."""
        return self._inner.token_bytes(token_id)

    def exists(self, token_id: int) -> bool:
        """See `Tokenizer.exists`."""
        return self._inner.exists(token_id)

    def special_ids(self) -> Mapping[str, int | None]:
        """As the file has them, else what llama.cpp takes for this kind."""
        return self._ids

    def parts(self) -> Mapping[str, Part]:
        """See `Tokenizer.parts`."""
        return self._parts

    @cached_property
    def _parts(self) -> Mapping[str, Part]:
        parts = dict(self._inner.parts())
        before, after = ([self._text(i) for i in side] for side in self._add)
        pre, stops = parts["pre_tokenizer"], parts["stop_ids"]
        named = f"tokenizer.ggml.pre is {self.pre!r}" if self.kind == "gpt2" else pre.why
        return parts | {
            "pre_tokenizer": Part(pre.content, pre.known, named),
            "post_processor": Part({"before": before, "after": after} if before or after else None),
            "special_ids": Part(dict(self._ids)),
            "stop_ids": Part(stops.content, stops.known, _ALSO if stops.known else stops.why),
        }

    def _text(self, token_id: int) -> str:
        return self.added[token_id].content if token_id in self.added else self._inner.decode([[token_id]])[0]


class Records:
    """The `tokenizer.*` records of a GGUF file. Errors: `ContentError` for a file that is no whole GGUF."""

    def __init__(self, file: Path) -> None:
        self.file, self._reader = file, _reader(file)

    def get(self, name: str, default: Any = None) -> Any:
        """A record of the file by its full name."""
        found = self._reader.get_field(name)
        return default if found is None else found.contents()

    def ggml(self, name: str, default: Any = None) -> Any:
        """A record `tokenizer.ggml.NAME`."""
        return self.get(f"tokenizer.ggml.{name}", default)

    def text(self, name: str) -> str | None:
        """A text record `tokenizer.ggml.NAME`, None where there is none."""
        found = self.ggml(name)
        return found if isinstance(found, str) and found else None

    def kind(self) -> str:
        """The kind of its model. Errors: `ContentError`."""
        kind = self.text("model")
        if kind in _KINDS:
            return kind
        what = f"a tokenizer of the kind {kind!r}" if kind else "no tokenizer (no record tokenizer.ggml.model)"
        built = ", ".join(f"{name} ({words})" for name, words in _KINDS.items())
        raise ContentError(f"{self.file}: holds {what}; onepolicy builds {built}")

    @cached_property
    def tokens(self) -> list[str]:
        """The vocabulary, by id. Errors: `ContentError` for none, or for one token twice."""
        tokens = list(self.ggml("tokens", []))
        if not tokens:
            raise ContentError(f"{self.file}: holds no vocabulary (no record tokenizer.ggml.tokens)")
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]  # llama.cpp's name for it
        if len(set(tokens)) < len(tokens):
            seen: dict[str, int] = {}
            first, again = next((seen[t], i) for i, t in enumerate(tokens) if seen.setdefault(t, i) != i)
            raise ContentError(f"{self.file}: token {tokens[again]!r} has two ids, {first} and {again}")
        return tokens

    @cached_property
    def types(self) -> list[int]:
        """The kind of each token; all are normal where the file does not say."""
        types = [int(t) for t in self.ggml("token_type", [])] or [NORMAL] * len(self.tokens)
        if len(types) != len(self.tokens):
            raise ContentError(f"{self.file}: {len(types)} token types for {len(self.tokens)} tokens")
        return types

    def role(self, role: str) -> int | None:
        """The id of `bos`, `eos`, `padding`, ..., None where there is none in the vocabulary."""
        found = self.ggml(f"{role}_token_id")
        return int(found) if found is not None and 0 <= int(found) < len(self.tokens) else None

    def special_ids(self) -> dict[str, int | None]:
        """`bos`, `eos`, `pad`, `unk`, with llama.cpp's own where the file names none."""
        default = _DEFAULT_IDS[self.kind()]
        out: dict[str, int | None] = {}
        for role, name in _ROLES.items():
            said, assumed = self.role(name), default.get(role)
            out[role] = assumed if said is None and assumed is not None and assumed < len(self.tokens) else said
        return out

    def added_around(self, pre: str) -> tuple[list[int], list[int]]:
        """Ids that are put before and after a text."""
        kind, ids = self.kind(), self.special_ids()
        bos = kind == "llama" or (kind == "gpt2" and pre in patterns.PRE and patterns.PRE[pre].bos)
        wanted = {"bos": self.ggml("add_bos_token", bos), "eos": self.ggml("add_eos_token", kind == "t5")}
        before, after = ([ids[r]] if wanted[r] and ids[r] is not None else [] for r in ("bos", "eos"))
        return [i for i in before if i is not None], [i for i in after if i is not None]

    def around(self) -> Around:
        """Templates, special tokens, stop ids and rows of the head, as the file says."""
        tokens = {f"{r}_token": self.tokens[i] for r, i in self.special_ids().items() if i is not None}
        stops = {i for name in _STOPS if (i := self.role(name)) is not None}
        return Around(
            tokens=tokens,
            templates=self._templates(),
            stop_ids=tuple(sorted(stops)),
            rows=self._rows(),
            specials_known=True,
            templates_known=True,
            why={"padded_vocabulary": "the file has neither a vocabulary size nor a token embedding"},
        )

    def _templates(self) -> dict[str, str]:
        usual = self.get("tokenizer.chat_template")
        names = [str(name) for name in self.get("tokenizer.chat_templates", [])]
        named = {name: self.get(f"tokenizer.chat_template.{name}") for name in names}
        found = {"default": usual} | named
        return {name: text for name, text in found.items() if isinstance(text, str)}

    def _rows(self) -> int | None:
        """Rows of the output matrix, else of the embedding, else what the file says of them."""
        shapes = {t.name: t.shape for t in self._reader.tensors if t.name in ("output.weight", "token_embd.weight")}
        for name in ("output.weight", "token_embd.weight"):
            if name in shapes:
                return int(shapes[name][-1])
        said = self.get(f"{self.get('general.architecture')}.vocab_size")
        return int(said) if said is not None else None


def _bpe(records: Records, pre: str, beside: Around) -> FastTokenizer:
    """Byte-level BPE. Errors: `UnknownName` for its pre-tokenizer, `ContentError` for merges that do not fit."""
    if pre not in patterns.PRE:
        raise UnknownName(f"pre-tokenizer of {records.file} (tokenizer.ggml.pre)", pre, patterns.PRE)
    merges = [_pair(records.file, n, text) for n, text in enumerate(records.ggml("merges", []))]
    if not merges:
        raise ContentError(f"{records.file}: holds no merges (no record tokenizer.ggml.merges)")
    vocabulary = {token: i for i, token in enumerate(records.tokens)}
    if odd := next((pair for pair in merges if "".join(pair) not in vocabulary), None):
        raise ContentError(f"{records.file}: merge {' '.join(odd)!r} makes a token that is not in the vocabulary")
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": patterns.PRE[pre].ignore_merges}
    content = {
        "version": "1.0",
        "added_tokens": [_added(i, text, records.types[i]) for text, i in vocabulary.items() if _is_added(records, i)],
        "normalizer": None,
        "pre_tokenizer": patterns.pre_tokenizer(patterns.PRE[pre]),
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }
    return FastTokenizer.from_json(content, str(records.file), beside)


def _is_added(records: Records, i: int) -> bool:
    return records.types[i] in (CONTROL, USER_DEFINED, UNKNOWN)


def _added(i: int, text: str, kind: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": text, "special": kind != USER_DEFINED, **flags}


def _pair(file: Path, n: int, text: str) -> list[str]:
    """One merge. Errors: `ContentError`."""
    at = text.find(" ", 1)
    if at < 0:
        raise ContentError(f"{file}: merge {n} is {text!r}, wanted two tokens with a space between them")
    return [text[:at], text[at + 1 :]]


def _pieces(records: Records, beside: Around) -> SentencePieceTokenizer:
    """Pieces with scores, as a sentencepiece file in memory."""
    inner = SentencePieceTokenizer.__new__(SentencePieceTokenizer)
    inner.begin(str(records.file), _message(records), beside, spelled=True)
    return inner


def _message(records: Records) -> bytes:
    """The content of a sentencepiece file. Errors: `ContentError` for scores that do not fit."""
    pb = _protobuf()
    scores = [float(s) for s in records.ggml("scores", [])]
    if len(scores) != len(records.tokens):
        raise ContentError(f"{records.file}: {len(scores)} scores for {len(records.tokens)} tokens")
    out = pb.ModelProto()
    for token, score, kind in zip(records.tokens, scores, records.types, strict=True):
        out.pieces.add(piece=token, score=score, type=kind if kind in _PIECES else NORMAL)
    ids, unigram = records.special_ids(), records.kind() == "t5"
    trainer, normal = out.trainer_spec, out.normalizer_spec
    trainer.model_type = trainer.UNIGRAM if unigram else trainer.BPE
    trainer.byte_fallback = BYTE in records.types
    for role, i in ids.items():
        setattr(trainer, f"{role}_id", -1 if i is None else i)
        if i is not None:
            setattr(trainer, f"{role}_piece", records.tokens[i])
    normal.name = "identity" if not unigram else "nmt_nfkc"
    normal.add_dummy_prefix = bool(records.ggml("add_space_prefix", True))
    normal.remove_extra_whitespaces = bool(records.ggml("remove_extra_whitespaces", False))
    normal.precompiled_charsmap = bytes(x & 255 for x in records.ggml("precompiled_charsmap", []))
    return out.SerializeToString()


_PIECES = {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}


def _protobuf() -> Any:
    import importlib

    try:
        return importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError as err:
        raise MissingExtra("protobuf", "tokenizers", "building a GGUF file's sentencepiece tokenizer") from err


def _reader(file: Path) -> Any:
    """The library's reader. Errors: `ContentError`, `UsageError`, `MissingExtra`."""
    try:
        from gguf import GGUFReader
    except ImportError as err:
        raise MissingExtra("gguf", "tokenizers", "reading a GGUF file") from err
    try:
        return GGUFReader(str(file))
    except OSError as err:
        raise UsageError(f"{file}: cannot be read: {err.strerror or err}") from err
    except Exception as err:  # ValueError, IndexError, UnicodeDecodeError and numpy's: a file that is not whole
        raise ContentError(f"{file}: not a whole GGUF file: {type(err).__name__}: {first_line(err)}") from err
