"""`transformers`: whatever its AutoTokenizer makes of a directory, in Python or in Rust.

It may change what a tokenizer.json says (added tokens and flags from tokenizer_config.json, a class that builds its own
rules), so this backend beside `tokenizers` shows what loading it changed. Code of the model's own is never run. The
decoder's clean-up of spaces, and the spaces that tokenizers in Python put around special tokens, are off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from onepolicy.errors import ContentError, MissingExtra, UsageError
from onepolicy.tokens import alphabet, directory
from onepolicy.tokens.base import AddedToken, Part
from onepolicy.tokens.batches import bad_ids, breaks_explained, first_line, is_id, texts_of, unknown_id
from onepolicy.tokens.directory import Around, added_part
from onepolicy.tokens.fast import FastTokenizer
from onepolicy.tokens.target import split_options

_PYTHON = "this tokenizer's rules are Python code of transformers ({})"
_YES = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class SlowTokenizer:
    """A directory, or a packaged model. `?use_fast=false` asks for the implementation in Python, where there is one.

    Errors: `UsageError` for a target that is neither or wants code of its own; `ContentError` when it cannot be loaded.
    """

    BACKEND: ClassVar[str] = "transformers"

    def __init__(self, target: str) -> None:
        path, options = split_options(target, self.BACKEND, ("use_fast",))
        place = _place(path)
        self.name, self._around = target, directory.around(place)
        self._library = _loaded(place, _fast(target, options))
        self._vocabulary: dict[str, int] = self._library.get_vocab()
        self._names = {i: token for token, i in self._vocabulary.items()}
        self.added: Mapping[int, AddedToken] = _added(self._library)
        self.size = max((*self._names, *self.added), default=-1) + 1
        self.chat_template = _template(self._library) or self._around.chat_template

    @cached_property
    def _rust(self) -> FastTokenizer | None:
        """The same tokenizer of the `tokenizers` library, where that is what runs; for its parts and bytes."""
        backend = getattr(self._library, "backend_tokenizer", None)
        return None if backend is None else FastTokenizer.from_json(backend.to_str(), self.name, self._around)

    def encode(self, texts: Sequence[str], *, add_special: bool = False, parse_special: bool = True) -> list[list[int]]:
        """See `Tokenizer.encode`."""
        checked = texts_of(self.name, texts)
        if not checked:
            return []
        how = {"add_special_tokens": add_special, "split_special_tokens": not parse_special, "verbose": False}
        with self._explained("encodes a text"):
            out = self._library(checked, padding=False, truncation=False, return_attention_mask=False, **how)
        return out["input_ids"]

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = False) -> list[str]:
        """See `Tokenizer.decode`. Errors: `ContentError`."""
        how = {"clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False}
        if problem := self._refused(ids):
            raise ContentError(f"tokenizer {self.name}: {problem}")
        with self._explained("decodes ids"):
            return [self._library.decode(list(one), skip_special_tokens=skip_special, **how) for one in ids]

    def _refused(self, ids: Sequence[Sequence[int]]) -> str | None:
        """What the library would misread: what is no id, and for tokenizers in Python an id that they do not have."""
        try:
            if all(min(one, default=0) >= 0 and max(one, default=0) < self.size for one in ids):
                return None
        except TypeError:
            pass
        return bad_ids(ids) or (unknown_id(ids, self.exists) if self._rust is None else None)

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """An error of the library's as one line of ours."""
        try:
            with breaks_explained(self.name, what):
                yield
        except ContentError:
            raise
        except Exception as err:  # whatever its Python raises: KeyError, TypeError, UnicodeDecodeError
            said = f"{type(err).__name__}: {first_line(err)}"
            raise ContentError(f"tokenizer {self.name}: transformers fails when it {what}: {said}") from err

    def token_bytes(self, token_id: int) -> bytes | None:
        """See `Tokenizer.token_bytes`."""
        if self._rust is not None:
            return self._rust.token_bytes(token_id)
        if not self.exists(token_id):
            return None
        if (token := self.added.get(token_id)) is not None:
            return token.content.encode("utf-8", "surrogatepass")
        return self._bytes_of(self._names[token_id])

    @cached_property
    def _bytes_of(self) -> Callable[[str], bytes]:
        """How a token becomes bytes, by what a tokenizer in Python holds."""
        library = self._library
        if hasattr(library, "byte_decoder"):
            return alphabet.byte_level_bytes
        if hasattr(library, "_utf_vocab_size"):  # ByT5: a token is a byte
            return lambda token: token.encode("latin-1", "replace")
        return alphabet.piece_bytes if hasattr(library, "sp_model") else self._said

    def _said(self, token: str) -> bytes:
        """The token as the library writes it alone."""
        return self._library.convert_tokens_to_string([token]).encode("utf-8", "surrogatepass")

    def exists(self, token_id: int) -> bool:
        """See `Tokenizer.exists`."""
        return is_id(token_id) and (token_id in self._names or token_id in self.added)

    def special_ids(self) -> Mapping[str, int | None]:
        """As transformers has them."""
        return {role: getattr(self._library, f"{role}_token_id", None) for role in directory.ROLES}

    def parts(self) -> Mapping[str, Part]:
        """See `Tokenizer.parts`."""
        return self._parts

    @cached_property
    def _parts(self) -> Mapping[str, Part]:
        inner = self._rust.parts() if self._rust is not None else self._python_parts()
        tokens = {k: v if isinstance(v, list) else str(v) for k, v in self._library.special_tokens_map.items()}
        beside = Around(
            tokens=dict(sorted(tokens.items())),
            templates=_templates(self._library),
            stop_ids=self._around.stop_ids,
            rows=self._around.rows,
            specials_known=True,
            templates_known=True,
        )
        return {
            **inner,
            "vocabulary": Part(self._vocabulary),
            "added_tokens": Part(added_part(self.added)),
            "special_ids": Part(dict(self.special_ids())),
            **beside.parts(),
        }

    def _python_parts(self) -> dict[str, Part]:
        """What can be told of a tokenizer in Python: its merges where it holds them, what it adds, and no rules."""
        library = self._library
        kind = type(library).__name__
        names = ("model", "merges", "normalizer", "pre_tokenizer", "post_processor", "decoder")
        parts = {name: Part(known=False, why=_PYTHON.format(kind)) for name in names}
        if isinstance(ranks := getattr(library, "bpe_ranks", None), dict):
            parts["merges"] = Part([list(pair) for pair in sorted(ranks, key=ranks.__getitem__)])
        parts["post_processor"] = self._around_text()
        return parts

    def _around_text(self) -> Part:
        """What is put around a text, read off one."""
        plain, full = (self.encode(["a"], add_special=add)[0] for add in (False, True))
        starts = [i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain]
        if len(starts) != 1:
            return Part(known=False, why=_PYTHON.format(type(self._library).__name__))
        before, after = full[: starts[0]], full[starts[0] + len(plain) :]
        sides = {"before": [self._names[i] for i in before], "after": [self._names[i] for i in after]}
        return Part(sides if before or after else None)


def _place(path: str) -> Path:
    """The directory of a target. Errors: `UsageError`."""
    from onepolicy import models

    place = Path(path).expanduser()
    if not place.exists() and path in models.MODELS:
        place = Path(models.path(path))
    if place.is_file() and place.name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"):
        place = place.parent
    if not place.is_dir():
        what = "is a file" if place.is_file() else "no such directory or packaged model"
        raise UsageError(f"tokenizer transformers:{path}: {what}; wanted a directory with a tokenizer")
    directory.refuse_remote_code(place)
    return place


def _fast(target: str, options: Mapping[str, str]) -> bool:
    said = options.get("use_fast", "true").lower()
    if said not in _YES:
        raise UsageError(f"tokenizer {target}: use_fast: got {said!r}, wanted true or false")
    return _YES[said]


def _loaded(place: Path, use_fast: bool) -> Any:
    """The library's tokenizer. Errors: `ContentError`, `MissingExtra`."""
    try:
        from transformers import AutoTokenizer
    except ImportError as err:
        raise MissingExtra("transformers", "tokenizers", "reading a tokenizer as transformers does") from err
    try:
        return AutoTokenizer.from_pretrained(
            str(place), local_files_only=True, trust_remote_code=False, use_fast=use_fast
        )
    except Exception as err:  # OSError, ValueError, KeyError, ImportError: whatever its loading raises
        said = f"{type(err).__name__}: {first_line(err)}"
        raise ContentError(f"tokenizer {place}: transformers cannot load it: {said}") from err


def _added(library: Any) -> dict[int, AddedToken]:
    return {
        int(i): AddedToken(int(i), t.content, t.special, t.lstrip, t.rstrip, t.single_word, t.normalized)
        for i, t in sorted(library.added_tokens_decoder.items())
    }


def _templates(library: Any) -> dict[str, str]:
    said = getattr(library, "chat_template", None)
    return said if isinstance(said, dict) else {"default": said} if said else {}


def _template(library: Any) -> str | None:
    return Around(templates=_templates(library)).chat_template
