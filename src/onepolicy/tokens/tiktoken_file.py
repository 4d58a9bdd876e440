"""The `tiktoken` library on a file of ranks (`qwen.tiktoken`, a `tokenizer.model` of Llama 3).

Such a file holds the vocabulary alone. How text is split and which special tokens there are is code elsewhere, so it
is assumed from the family that the number of ranks tells (`FAMILIES`), or given: `FILE?pattern=...&specials=...`, each
as a text, as `@FILE`, or as a family's name; `normalizer=nfc` or `none`. What was assumed stands in `assumed`.
"""

from __future__ import annotations

import base64
import binascii
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from onepolicy.errors import ContentError, MissingExtra, UsageError
from onepolicy.tokens import directory
from onepolicy.tokens.base import AddedToken, Part
from onepolicy.tokens.batches import (
    bad_ids,
    breaks_explained,
    first_line,
    is_id,
    texts_of,
    threads,
    unknown_id,
    without,
)
from onepolicy.tokens.components import GPT2_PATTERN
from onepolicy.tokens.directory import added_part
from onepolicy.tokens.patterns import CL100K, LLAMA3, O200K, QWEN2
from onepolicy.tokens.ranks import model_parts, vocabulary
from onepolicy.tokens.target import file_of, split_options


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of the files with so many ranks. `specials`: text -> id. `roles`: `bos`, `eos`, ... -> text."""

    ranks: int
    pattern: str
    specials: Mapping[str, int]
    roles: Mapping[str, str]
    normalizer: str = "none"


def _from(first: int, *texts: str) -> dict[str, int]:
    return {text: first + i for i, text in enumerate(texts)}


_END = {"eos": "<|endoftext|>"}
_LLAMA3 = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
    *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
    *("<|eot_id|>", "<|python_tag|>"),
    *(f"<|reserved_special_token_{i}|>" for i in range(2, 247)),
)
#: Families by name. Qwen's own code normalises to NFC before it encodes; the others leave texts as they are.
FAMILIES: dict[str, Family] = {
    "qwen": Family(
        151643,
        QWEN2,
        _from(151643, "<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
        _END,
        "nfc",
    ),
    "llama3": Family(128000, LLAMA3, _from(128000, *_LLAMA3), {"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>"}),
    "cl100k": Family(
        100256,
        CL100K,
        _from(100257, "<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
        | {"<|endofprompt|>": 100276},
        _END,
    ),
    "o200k": Family(199998, O200K, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}, _END),
    "gpt2": Family(50256, GPT2_PATTERN, {"<|endoftext|>": 50256}, _END),
    "p50k": Family(50280, GPT2_PATTERN, {"<|endoftext|>": 50256}, _END),
}
_NORMALIZERS: dict[str, Callable[[str], str] | None] = {
    "nfc": lambda text: unicodedata.normalize("NFC", text),
    "none": None,
}


class TiktokenTokenizer:
    """A file of ranks, or the directory of one `*.tiktoken`.

    Errors: `UsageError` for a target that is neither, or a file of no known family without `pattern`; `ContentError`
    for lines that are no ranks.
    """

    BACKEND: ClassVar[str] = "tiktoken"

    def __init__(self, target: str) -> None:
        path, options = split_options(target, self.BACKEND, ("pattern", "specials", "normalizer"))
        file = file_of(path, self.BACKEND, ("*.tiktoken", "tokenizer.model"))
        self.name, self._around = target, directory.around(file.parent)
        self._ranks = _ranks(file)
        family = next((name for name, f in FAMILIES.items() if f.ranks == len(self._ranks)), None)
        self._rules = _rules(target, len(self._ranks), family, options)
        self.assumed = _assumed(family, len(self._ranks), options)
        self._library = _encoding(target, self._ranks, self._rules)
        self._normalize = _NORMALIZERS[self._rules.normalizer]
        specials = sorted(self._rules.specials.items(), key=lambda item: item[1])
        self.added: Mapping[int, AddedToken] = {i: AddedToken(i, text) for text, i in specials}
        self._skipped = frozenset(self.added)
        self._ids = frozenset((*self._ranks.values(), *self.added))
        self.size = max(self._ids) + 1
        self.chat_template = self._around.chat_template

    def encode(self, texts: Sequence[str], *, add_special: bool = False, parse_special: bool = True) -> list[list[int]]:
        """See `Tokenizer.encode`. `add_special` adds nothing: the library puts nothing around a text."""
        checked = texts_of(self.name, texts)
        if self._normalize:
            checked = [text if text.isascii() else self._normalize(text) for text in checked]
        with breaks_explained(self.name, "encodes a text"):
            if parse_special:
                return self._library.encode_batch(
                    checked, num_threads=threads(), allowed_special="all", disallowed_special=()
                )
            return self._library.encode_ordinary_batch(checked, num_threads=threads())

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = False) -> list[str]:
        """See `Tokenizer.decode`. Errors: `ContentError`."""
        try:
            lists = without(ids, self._skipped) if skip_special else ids
            return [self._library.decode(one) for one in lists]
        except (KeyError, OverflowError, TypeError, ValueError) as err:
            problem = bad_ids(ids) or unknown_id(ids, self.exists) or err
            raise ContentError(f"tokenizer {self.name}: {problem}") from err

    def token_bytes(self, token_id: int) -> bytes | None:
        """See `Tokenizer.token_bytes`."""
        return self._library.decode_single_token_bytes(token_id) if self.exists(token_id) else None

    def exists(self, token_id: int) -> bool:
        """See `Tokenizer.exists`."""
        return is_id(token_id) and token_id in self._ids

    def special_ids(self) -> Mapping[str, int | None]:
        """By the files beside it, else by the family."""
        tokens = self._around.tokens or {f"{role}_token": text for role, text in self._rules.roles.items()}
        return directory.special_ids(tokens, self._rules.specials)

    def parts(self) -> Mapping[str, Part]:
        """See `Tokenizer.parts`."""
        return self._parts

    @cached_property
    def _parts(self) -> Mapping[str, Part]:
        special, rules, why = self.special_ids(), self._rules, self.assumed
        named = any(i is not None for i in special.values())
        unknown = Part(known=False, why="a file of ranks names no special token")
        normalizer = [{"type": rules.normalizer.upper()}] if self._normalize else None
        return {
            **model_parts(self._ranks, rules.pattern, why),
            "vocabulary": Part(vocabulary(self._ranks.items(), self.added)),
            "normalizer": Part(normalizer, why=why),
            "post_processor": Part(None),
            "added_tokens": Part(added_part(self.added), why=why),
            "special_ids": Part(dict(special), why=why) if named else unknown,
            **self._around.parts(),
        }


def _rules(target: str, n: int, name: str | None, options: Mapping[str, str]) -> Family:
    """The family with the options over it. Errors: `UsageError`."""
    family = FAMILIES[name] if name else None
    pattern = _given(options.get("pattern"), lambda f: f.pattern) or (family.pattern if family else None)
    if pattern is None:
        known = ", ".join(f"{k} {f.ranks}" for k, f in FAMILIES.items())
        raise UsageError(
            f"tokenizer {target}: {n} ranks are of no family that onepolicy knows ({known}), and such a file does not "
            "say how text is split; add ?pattern=REGEX and &specials={...} as JSON, or each as @FILE"
        )
    said = _given(options.get("specials"), lambda f: json.dumps(dict(f.specials)))
    specials = _specials(target, said) if said else family.specials if family else {}
    normalizer = options.get("normalizer") or (family.normalizer if family else "none")
    if normalizer not in _NORMALIZERS:
        raise UsageError(f"tokenizer {target}: normalizer: got {normalizer!r}, wanted one of {', '.join(_NORMALIZERS)}")
    return Family(n, pattern, specials, family.roles if family else {}, normalizer)


def _assumed(name: str | None, n: int, options: Mapping[str, str]) -> str:
    """In words, what the file does not say and was not given."""
    parts = {"pattern": "pattern", "specials": "special tokens", "normalizer": "normaliser"}
    left = [words for option, words in parts.items() if option not in options]
    return f"assumed from its {n} ranks, as in the family {name}: {', '.join(left)}" if name and left else ""


def _given(option: str | None, of: Callable[[Family], str]) -> str | None:
    """The value of an option: text, `@FILE`, or what a named family has."""
    if option is None or option in FAMILIES:
        return of(FAMILIES[option]) if option else None
    if not option.startswith("@"):
        return option
    try:
        return Path(option[1:]).expanduser().read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, ValueError) as err:
        raise UsageError(f"option {option}: cannot be read: {first_line(err)}") from err


def _specials(target: str, text: str) -> dict[str, int]:
    try:
        said = json.loads(text)
        return {str(token): int(i) for token, i in said.items()}
    except (ValueError, AttributeError, TypeError) as err:
        raise UsageError(f"tokenizer {target}: specials: wanted a JSON object of text and id: {err}") from err


def _ranks(file: Path) -> dict[bytes, int]:
    """Bytes -> rank. Errors: `ContentError` naming the line."""
    out: dict[bytes, int] = {}
    try:
        lines = file.read_bytes().splitlines()
    except OSError as err:
        raise ContentError(f"{file}: cannot be read: {err.strerror}") from err
    for n, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            out[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as err:
            raise ContentError(f"{file}: line {n} is {line[:40]!r}, wanted a token in base64 and its rank") from err
    if missing := [b for b in range(256) if bytes([b]) not in out]:
        raise ContentError(f"{file}: {len(missing)} of the 256 single bytes have no rank; the file is not whole")
    return out


def _encoding(target: str, ranks: Mapping[bytes, int], rules: Family) -> Any:
    """The library's object. Errors: `ContentError`, `UsageError`, `MissingExtra`."""
    try:
        import tiktoken
    except ImportError as err:
        raise MissingExtra("tiktoken", "tokenizers", "reading a tiktoken file") from err
    if twice := sorted(set(rules.specials.values()) & set(ranks.values())):
        raise UsageError(f"tokenizer {target}: special tokens with ids of ordinary ones: {twice[:5]}")
    try:
        return tiktoken.Encoding(
            Path(target).name, pat_str=rules.pattern, mergeable_ranks=dict(ranks), special_tokens=dict(rules.specials)
        )
    except Exception as err:  # a bad expression is a bare ValueError of its Rust code
        raise UsageError(f"tokenizer {target}: tiktoken refuses the pattern: {first_line(err)}") from err
