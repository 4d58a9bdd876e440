"""What stands around a tokenizer in a model directory: special ids, chat templates, stop ids, rows of the head.

Only the directory's JSON and Jinja files are read. The order in which they win is transformers': a template in a file
of its own before the one in tokenizer_config.json; generation_config.json before config.json.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onepolicy.errors import ContentError, UsageError
from onepolicy.tokens.base import AddedToken, Part
from onepolicy.tokens.batches import first_line

ROLES = ("bos", "eos", "pad", "unk")
_ALONE = "the tokenizer's file says nothing of it, and no {} stands beside it"


@dataclass(frozen=True, slots=True)
class Around:
    """`tokens`: `bos_token`, ... -> its text. `templates`: name -> text, the usual one is `default`.

    `stop_ids`, `rows`: None where unknown, for the reason in `why`. `specials_known`: False where no file names them.
    """

    tokens: Mapping[str, Any] = field(default_factory=dict[str, Any])
    templates: Mapping[str, str] = field(default_factory=dict[str, str])
    stop_ids: tuple[int, ...] | None = None
    rows: int | None = None
    specials_known: bool = False
    templates_known: bool = False
    why: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def chat_template(self) -> str | None:
        """The template that is used when none is named."""
        return self.templates.get("default")

    def parts(self) -> dict[str, Part]:
        """`chat_template`, `template_defaults`, `stop_ids`, `padded_vocabulary`."""
        only = self.chat_template if set(self.templates) <= {"default"} else dict(self.templates)
        return {
            "chat_template": self._part("chat_template", only, self.templates_known or bool(self.templates)),
            "template_defaults": self._part("template_defaults", dict(self.tokens) or None, self.specials_known),
            "stop_ids": self._part("stop_ids", list(self.stop_ids or ()) or None, self.stop_ids is not None),
            "padded_vocabulary": self._part("padded_vocabulary", self.rows, self.rows is not None),
        }

    def _part(self, name: str, content: Any, known: bool) -> Part:
        return Part(content) if known else Part(known=False, why=self.why.get(name, _ALONE.format(_WHERE[name])))


#: The file that would tell a part.
_WHERE = {
    "chat_template": "chat_template.jinja or tokenizer_config.json",
    "template_defaults": "tokenizer_config.json",
    "stop_ids": "generation_config.json or config.json",
    "padded_vocabulary": "config.json",
}


def digest(content: bytes) -> str | None:
    """First 12 hex digits of SHA-256; None for nothing."""
    return hashlib.sha256(content).hexdigest()[:12] if content else None


def added_part(added: Mapping[int, AddedToken]) -> list[dict[str, Any]] | None:
    """Added tokens as a part's content, by id."""
    flags = ("id", "content", "special", "lstrip", "rstrip", "single_word", "normalized")
    return [{flag: getattr(token, flag) for flag in flags} for _, token in sorted(added.items())] or None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, empty where there is no such file. Errors: `ContentError` with one line."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise ContentError(f"{file}: cannot be read as JSON: {first_line(err)}") from err
    if not isinstance(content, dict):
        raise ContentError(f"{file}: got a JSON {type(content).__name__}, wanted an object")
    return content


def around(directory: Path) -> Around:
    """What the files of a directory say. Errors: `ContentError` for one that cannot be read."""
    config = read_json(directory / "tokenizer_config.json")
    tokens = _tokens(config, read_json(directory / "special_tokens_map.json"))
    templates = _templates(directory, config)
    known = (directory / "tokenizer_config.json").is_file()
    return Around(
        tokens=tokens,
        templates=templates,
        stop_ids=_stop_ids(directory),
        rows=_rows(directory),
        specials_known=known or bool(tokens),
        templates_known=known,
    )


def refuse_remote_code(directory: Path) -> None:
    """Errors: `UsageError` for a directory whose tokenizer is code of its own, which is never run."""
    for name in ("tokenizer_config.json", "config.json"):
        asked = read_json(directory / name).get("auto_map")
        asked = asked.get("AutoTokenizer") if isinstance(asked, dict) else asked if "token" in name else None
        if asked:
            code = next((str(c) for c in (asked if isinstance(asked, list) else [asked]) if c), "?")
            raise UsageError(
                f"{directory}: its {name} asks to run code from the model ({code}), which onepolicy never does; give "
                "a file that needs none, as tokenizers:PATH/tokenizer.json or tiktoken:PATH/FILE.tiktoken"
            )


def special_ids(tokens: Mapping[str, Any], id_of: Mapping[str, int]) -> dict[str, int | None]:
    """`bos`, `eos`, `pad`, `unk` -> id, for tokens that the vocabulary has."""
    texts = {role: tokens.get(f"{role}_token") for role in ROLES}
    return {role: id_of.get(text) if isinstance(text, str) else None for role, text in texts.items()}


def _text(token: Any) -> str | None:
    """A special token as its text: it is written plainly, or as an object with its flags."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _tokens(config: Mapping[str, Any], mapped: Mapping[str, Any]) -> dict[str, Any]:
    """`bos_token`, `eos_token`, ...: what transformers hands to a template by default. Lists of more special tokens
    are left out: newer versions no longer hand them over."""
    out: dict[str, Any] = {}
    for name in {**mapped, **config}:
        value = config.get(name, mapped.get(name))
        if name.endswith("_token") and (text := _text(value)) is not None:
            out[name] = text
    return dict(sorted(out.items()))


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> template. Errors: `ContentError` for one that is no text."""
    said: Any = config.get("chat_template")
    out: dict[str, str] = {}
    if isinstance(said, str):
        out["default"] = said
    elif isinstance(said, list):
        out = {str(t.get("name")): str(t.get("template")) for t in said if isinstance(t, dict)}
    elif isinstance(said, dict):
        out = {str(name): str(text) for name, text in said.items()}
    elif legacy := read_json(directory / "chat_template.json").get("chat_template"):
        out["default"] = str(legacy)
    files = {"default": directory / "chat_template.jinja"}
    files |= {f.stem: f for f in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    return out | {name: _read(file) for name, file in files.items() if file.is_file()}


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as err:
        raise ContentError(f"{file}: cannot be read as UTF-8 text: {first_line(err)}") from err


def _stop_ids(directory: Path) -> tuple[int, ...] | None:
    """`eos_token_id` of the generation config, else of the config; empty where they are there and name none."""
    found = [read_json(directory / n) for n in ("generation_config.json", "config.json") if (directory / n).is_file()]
    for config in found:
        said: Any = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
        if said is not None:
            ids = said if isinstance(said, list) else [said]
            return tuple(sorted({int(i) for i in ids if isinstance(i, int)}))
    return () if found else None


def _rows(directory: Path) -> int | None:
    config = read_json(directory / "config.json")
    said: Any = (config.get("text_config") or {}).get("vocab_size", config.get("vocab_size"))
    return said if isinstance(said, int) else None
