"""The `tokenizers` library on a tokenizer.json: what most pipelines run, and the fastest of the backends.

Texts and ids go through the library's batch calls, which are in Rust and take several cores unless
TOKENIZERS_PARALLELISM is `false`. Truncation and padding that a file asks for are off: here every text is whole.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from onepolicy.errors import ContentError, MissingExtra, UsageError
from onepolicy.tokens import components, directory
from onepolicy.tokens.base import AddedToken, Part
from onepolicy.tokens.batches import bad_ids, bad_text, breaks_explained, first_line, is_id
from onepolicy.tokens.directory import Around, added_part
from onepolicy.tokens.target import split_options

#: Switches of a model that are off at these values; only those that are on are part of its description.
_OFF = (None, False, "")


class FastTokenizer:
    """A tokenizer.json: a file, the directory that holds it, or the name of a packaged model.

    Files beside it (tokenizer_config.json, chat_template.jinja, generation_config.json, config.json) say what they say
    of special ids, templates and stop ids.

    Errors: `UsageError` for a target that is none of these; `ContentError` for a file that the library refuses.
    """

    BACKEND: ClassVar[str] = "tokenizers"

    def __init__(self, target: str) -> None:
        path, _ = split_options(target, self.BACKEND, ())
        file = _file(path)
        text = _read(file)
        self._begin(str(target), _built(text, str(file)), directory.around(file.parent))

    @classmethod
    def from_json(cls, content: str | Mapping[str, Any], name: str = "tokenizer", beside: Around | None = None) -> Any:
        """From the content of a tokenizer.json, as text or parsed. `beside`: what else is known of the model."""
        text = content if isinstance(content, str) else json.dumps(content)
        self = cls.__new__(cls)
        self._begin(name, _built(text, name), beside or Around())
        return self

    def _begin(self, name: str, tokenizer: Any, beside: Around) -> None:
        self.name, self._rust, self._around = name, tokenizer, beside
        self.added: Mapping[int, AddedToken] = _added(tokenizer)
        self._ids: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(self._ids.values(), default=-1) + 1
        self.chat_template = beside.chat_template

    def encode(self, texts: Sequence[str], *, add_special: bool = False, parse_special: bool = True) -> list[list[int]]:
        """See `Tokenizer.encode`. Errors: `ContentError` for an item that is no text or holds half a surrogate."""
        rust = self._rust if parse_special else self._literal
        batch = getattr(rust, "encode_batch_fast", rust.encode_batch)
        try:
            with breaks_explained(self.name, "encodes a text"):
                return [e.ids for e in batch(list(texts), add_special_tokens=add_special)]
        except (TypeError, UnicodeEncodeError) as err:
            raise ContentError(f"tokenizer {self.name}: {bad_text(texts) or err}") from err

    @cached_property
    def _literal(self) -> Any:
        """The same tokenizer that reads text which spells a special token as plain text. A second object, because the
        switch belongs to the object and threads share it."""
        twin = copy.deepcopy(self._rust)
        twin.encode_special_tokens = True
        return twin

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = False) -> list[str]:
        """See `Tokenizer.decode`. Errors: `ContentError` for ids that are no whole numbers from 0 to below 2^32."""
        try:
            with breaks_explained(self.name, "decodes ids"):
                return self._rust.decode_batch(ids, skip_special_tokens=skip_special)
        except (TypeError, OverflowError, ValueError) as err:
            raise ContentError(f"tokenizer {self.name}: {bad_ids(ids) or err}") from err

    def token_bytes(self, token_id: int) -> bytes | None:
        """See `Tokenizer.token_bytes`. Added tokens go through the decoder like all others."""
        spelled = self._rust.id_to_token(token_id) if is_id(token_id) else None
        return None if spelled is None else self._bytes_of(spelled)

    @cached_property
    def _bytes_of(self) -> Callable[[str], bytes]:
        return components.bytes_rule(self.description["decoder"])

    def exists(self, token_id: int) -> bool:
        """See `Tokenizer.exists`."""
        return is_id(token_id) and self._rust.id_to_token(token_id) is not None

    def special_ids(self) -> Mapping[str, int | None]:
        """From tokenizer_config.json; the unknown token also from the model itself."""
        found = directory.special_ids(self._around.tokens, self._ids)
        if found["unk"] is None:
            found["unk"] = self._unknown
        return found

    @cached_property
    def _unknown(self) -> int | None:
        model = self.description["model"]
        by_text = self._ids.get(model.get("unk_token") or "")
        return model.get("unk_id", by_text)

    @cached_property
    def description(self) -> dict[str, Any]:
        """The tokenizer.json as the library writes it: one form, whoever wrote the file. Without the vocabulary."""
        content = json.loads(self._rust.to_str())
        if content["model"]["type"] != "Unigram":
            content["model"].pop("vocab", None)
        return content

    def parts(self) -> Mapping[str, Part]:
        """See `Tokenizer.parts`."""
        return self._parts

    @cached_property
    def _parts(self) -> Mapping[str, Part]:
        content, model = self.description, self.description["model"]
        switches = {k: v for k, v in model.items() if k not in ("vocab", "merges") and v not in _OFF}
        special = self.special_ids()
        named = self._around.specials_known or any(i is not None for i in special.values())
        return {
            "model": Part(switches),
            "vocabulary": Part(self._ids),
            "merges": Part(model.get("merges") or model.get("vocab")),
            "normalizer": Part(components.canonical(content["normalizer"])),
            "pre_tokenizer": Part(components.canonical(content["pre_tokenizer"])),
            "post_processor": Part(components.canonical_post(content["post_processor"])),
            "decoder": Part(components.canonical_decoder(content["decoder"])),
            "added_tokens": Part(added_part(self.added)),
            "special_ids": Part(dict(special)) if named else Part(known=False, why=_NO_NAMES),
            **self._around.parts(),
        }


_NO_NAMES = (
    "a tokenizer.json does not say which token is BOS, EOS or padding, and no tokenizer_config.json is beside it"
)


def _file(target: str) -> Path:
    """The tokenizer.json that a target names."""
    from onepolicy import models

    path = Path(target).expanduser()
    if not path.exists() and target in models.MODELS:
        path = Path(models.path(target))
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        what = f"{path} holds no tokenizer.json" if path.is_dir() else f"{target!r}: no such file or directory"
        raise UsageError(f"tokenizer {what}; wanted a tokenizer.json, a directory with one, or a packaged model (tiny)")
    return file


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as err:
        raise ContentError(f"{file}: cannot be read as UTF-8 text: {str(err).splitlines()[0]}") from err


def _built(text: str, name: str) -> Any:
    """The library's tokenizer. Errors: `ContentError`, `MissingExtra`."""
    try:
        from tokenizers import Tokenizer
    except ImportError as err:
        raise MissingExtra("tokenizers", "tokenizers", "reading a tokenizer.json") from err
    try:
        with breaks_explained(name, "reads its file"):
            built = Tokenizer.from_str(text)
    except ContentError:
        raise
    except Exception as err:  # the library raises bare Exception for every fault of a file
        raise ContentError(f"{name}: not a tokenizer.json: {first_line(err)}") from err
    built.no_truncation()
    built.no_padding()
    return built


def _added(tokenizer: Any) -> dict[int, AddedToken]:
    return {
        i: AddedToken(i, t.content, t.special, t.lstrip, t.rstrip, t.single_word, t.normalized)
        for i, t in sorted(tokenizer.get_added_tokens_decoder().items())
    }
