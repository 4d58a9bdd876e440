"""`open_tokenizer`: from what a user writes to a `Tokenizer`. A file is known by its content, not by its name alone.

A target is a directory, a file, the name of a packaged model (`tiny`), the address of a server (`http://host:8000`), or
one of these after the backend that must read it: `transformers:DIR`, `gguf:FILE`. Options follow as in the spec of an
engine, `FILE.tiktoken?pattern=...&specials=...`.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from onepolicy.errors import ContentError, UnknownName, UsageError
from onepolicy.tokens import BACKENDS
from onepolicy.tokens.base import Tokenizer
from onepolicy.tokens.directory import refuse_remote_code

_HEAD = 4096  # bytes of a file that are looked at
WANTED = (
    "wanted a tokenizer.json, a sentencepiece .model, a .tiktoken or tekken.json file, a GGUF file, a directory with "
    "one of them, a packaged model (tiny) or a server (http://HOST:PORT)"
)


def open_tokenizer(target: str) -> Tokenizer:
    """The tokenizer that a target names, by the backend that it names or that fits what is there.

    Errors: `UsageError` (nothing there, an unknown backend, code of the model's own), `ContentError` (a file that is no
    tokenizer, named with what it is), `MissingExtra`.
    """
    kind, rest = _split(str(target))
    path = rest if Path(rest).expanduser().exists() else rest.partition("?")[0]
    built = backend_class(kind or recognise(path))(rest)
    built.name = str(target)
    return built


def backend_class(kind: str) -> Any:
    """The class of a backend's name. Errors: `UnknownName`."""
    if kind not in BACKENDS:
        raise UnknownName("tokenizer backend", kind, BACKENDS)
    module, _, name = BACKENDS[kind].partition(":")
    return getattr(importlib.import_module(module), name)


def _split(target: str) -> tuple[str | None, str]:
    """The backend that a target names, if any, and the rest."""
    if not target.strip():
        raise UsageError(f"tokenizer: got an empty name; {WANTED}")
    head, colon, rest = target.partition(":")
    if head in ("http", "https"):
        return "server", target
    if not colon or Path(target).expanduser().exists():
        return None, target
    if head in BACKENDS and not rest:
        raise UsageError(f"tokenizer {target!r}: nothing after the backend; wanted {head}:PATH")
    if head in BACKENDS or (len(head) > 1 and head.replace("_", "").replace("-", "").isalnum()):
        backend_class(head)  # an unknown one is named
        return head, rest
    return None, target


def recognise(path: str) -> str:
    """The backend that reads what lies at a path. Errors as `open_tokenizer`."""
    from onepolicy import models

    place = Path(path).expanduser()
    if place.is_dir():
        return _directory(place)
    if place.is_file():
        return _file(place)
    if path in models.MODELS:
        return "tokenizers"
    raise UsageError(f"tokenizer {path!r}: no such file, directory or packaged model; {WANTED}")


#: What a directory holds -> its backend, the first that is there. None: as the file's content says.
_FILES: list[tuple[str, str | None]] = [
    ("tokenizer.json", "tokenizers"),
    ("tekken.json", "mistral"),
    ("tokenizer.model.v*", "mistral"),
    ("tokenizer_config.json", "transformers"),
    ("*.tiktoken", "tiktoken"),
    ("tokenizer.model", None),
    ("*.model", None),
    ("*.gguf", "gguf"),
]


def _directory(place: Path) -> str:
    refuse_remote_code(place)
    for pattern, backend in _FILES:
        if found := sorted(place.glob(pattern)):
            return backend or _file(found[0])
    names = sorted(f.name for f in place.iterdir())
    found = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") or "nothing"
    raise UsageError(f"tokenizer {place}: the directory holds no tokenizer, but {found}; {WANTED}")


def _file(place: Path) -> str:
    try:
        with place.open("rb") as file:
            head = file.read(_HEAD)
    except OSError as err:
        raise UsageError(f"tokenizer {place}: cannot be read: {err.strerror}") from err
    if not head.strip():
        raise ContentError(f"tokenizer {place}: the file is empty; {WANTED}")
    kind = _by_bytes(place, head)
    if kind in BACKENDS:
        return kind
    raise ContentError(f"tokenizer {place}: got {kind}; {WANTED}")


def _by_bytes(place: Path, head: bytes) -> str:
    """The backend of a file, else what the file is in words."""
    if head.startswith(b"GGUF"):
        return "gguf"
    if head.lstrip().startswith(b"{") or (head.lstrip().startswith(b"[") and place.suffix == ".json"):
        return _by_json(place)
    if _is_ranks(head):
        return "tiktoken"
    if head[0] == 0x0A and (b"<unk>" in head or ".model" in place.name):  # a message that begins with a piece
        return "mistral" if _is_mistral(place) else "sentencepiece"
    return _in_words(place, head)


def _by_json(place: Path) -> str:
    try:
        content = json.loads(place.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as err:
        return f"a file that begins like JSON and is none ({str(err).splitlines()[0]})"
    if not isinstance(content, dict):
        return f"a JSON {type(content).__name__}"
    if isinstance(content.get("model"), dict) and "pre_tokenizer" in content | content["model"]:
        return "tokenizers"
    if isinstance(content.get("model"), dict) and "vocab" in content["model"]:
        return "tokenizers"
    if "vocab" in content and isinstance(content.get("config"), dict):
        return "mistral"
    keys = ", ".join(list(content)[:5]) or "none"
    return f"a JSON object that is no tokenizer (keys: {keys})"


def _is_ranks(head: bytes) -> bool:
    """Whether it is lines of base64 and a number, as a tiktoken file."""
    import base64

    lines = head.split(b"\n")[:-1][:8] or [head]
    try:
        pairs = [line.split() for line in lines if line.strip()]
        return bool(pairs) and all(
            len(p) == 2 and base64.b64decode(p[0], validate=True) and int(p[1]) >= 0 for p in pairs
        )
    except ValueError:
        return False


def _is_mistral(place: Path) -> bool:
    """mistral-common's names of sentencepiece files end in `.model.v3`, `.model.v7m1`."""
    return place.suffix.startswith(".v") and place.suffix[2:3].isdigit()


_MAGIC: list[tuple[bytes, str]] = [
    (b"\x89PNG", "an image"),
    (b"PK\x03\x04", "a zip file"),
    (b"\x1f\x8b", "a gzip file"),
    (b"PAR1", "a Parquet file"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself (fetch it with git lfs pull)"),
]


def _in_words(place: Path, head: bytes) -> str:
    for magic, words in _MAGIC:
        if head.startswith(magic):
            return words
    if place.suffix == ".safetensors":
        return "model weights"
    try:
        return f"a text file that begins {head.decode().splitlines()[0][:40]!r}"
    except (UnicodeDecodeError, IndexError):
        return f"a binary file that begins {head[:8].hex(' ')}"
