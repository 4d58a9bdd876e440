"""One form of each part of a tokenizer, so that the same part compares equal however it was written.

Backends give parts in the terms of a tokenizer.json (`components`); here its defaults are filled in and settings that
change no id are left out. A part in other terms is compared with a part in the same terms only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onepolicy.tokens import alphabet, components
from onepolicy.tokens.base import Part, Tokenizer

#: Components of a tokenizer.json that this table's reader knows, with the settings that an absent one stands for.
#: Older files write `add_prefix_space` of a Metaspace where newer ones write `prepend_scheme`.
DEFAULTS: dict[str, dict[str, Any]] = {
    # normalizers
    **{name: {} for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Nmt", "Precompiled")},
    "Replace": {},
    "Prepend": {},
    "Strip": {},
    "BertNormalizer": {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
    # pre-tokenizers
    "ByteLevel": {"add_prefix_space": True, "use_regex": True},
    "Metaspace": {"replacement": alphabet.SPACE, "prepend_scheme": "always", "split": True},
    "Split": {"invert": False},
    "Digits": {"individual_digits": False},
    "Punctuation": {"behavior": "Isolated"},
    **{name: {} for name in ("Whitespace", "WhitespaceSplit", "BertPreTokenizer", "UnicodeScripts")},
    "CharDelimiterSplit": {},
    "FixedLength": {},
    # decoders
    **{name: {} for name in ("ByteFallback", "Fuse", "WordPiece", "BPEDecoder", "CTC")},
}
_POST = ("Sequence", "TemplateProcessing", "BertProcessing", "RobertaProcessing", "ByteLevel")
_SEQUENCE = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}


def canonical(name: str, part: Part, tokenizer: Tokenizer) -> Part:
    """The part in its one form. What it does not understand is left as it is."""
    form = _FORMS.get(name)
    if form is None or not part.known or part.content is None:
        return part
    content = form(part.content, tokenizer)
    return Part(content, part.known, part.why)


def comparable(name: str, a: Any, b: Any) -> bool:
    """Whether two contents are in the same terms. None is in those of a tokenizer.json: elsewhere another part may do
    what this one does (a sentencepiece normalizer puts the space in front)."""
    if name == "merges":
        return a is None or b is None or _row_kind(a) == _row_kind(b)
    return name not in _SEQUENCE or _terms(a or []) == _terms(b or [])


def _row_kind(rows: Any) -> str:
    """Merges are pairs of two strings; pieces have scores."""
    first = rows[0] if isinstance(rows, list) and rows else None
    return " ".join(type(x).__name__ for x in first) if isinstance(first, list) else type(first).__name__


def _terms(content: Any) -> str:
    chain = content if isinstance(content, list) else [content]
    types = {str(c.get("type", "other")) if isinstance(c, Mapping) else type(c).__name__ for c in chain}
    return " ".join(sorted(types - DEFAULTS.keys())) or "tokenizer.json"


def steps(name: str, content: Any) -> Any:
    """A chain of components as the flat list of what runs one after another; None where nothing runs."""
    wrapped = {"type": "Sequence", _SEQUENCE[name]: content} if isinstance(content, list) else content
    if not isinstance(wrapped, Mapping) or not all(c.get("type") in DEFAULTS for c in components.components(wrapped)):
        return content
    if name == "decoder":
        return [_decoder(c) for c in components.canonical_decoder(wrapped) or []] or None
    filled = [_filled(c) for c in components.components(wrapped)]
    return components.canonical({"type": "Sequence", _SEQUENCE[name]: filled})


def _filled(component: Mapping[str, Any]) -> dict[str, Any]:
    out = {k: v for k, v in component.items() if k != "str_rep"}
    if out["type"] == "Metaspace" and "add_prefix_space" in out:
        out.setdefault("prepend_scheme", "always" if out.pop("add_prefix_space") else "never")
        out.pop("add_prefix_space", None)
    return {**DEFAULTS[out["type"]], **out}


def _decoder(component: Mapping[str, Any]) -> dict[str, Any]:
    """`split` of a Metaspace belongs to the pre-tokenizer of the same name."""
    out = _filled(component) if component["type"] == "Metaspace" else dict(component)
    return {k: v for k, v in out.items() if k != "split" or out["type"] != "Metaspace"}


def _post(content: Any, _: Tokenizer) -> Any:
    """What is put around one text, as tokens before and after it."""
    if isinstance(content, Mapping) and ("before" in content or content.get("type") not in _POST):
        return content
    chain = content if isinstance(content, list) else [content]
    return components.canonical_post({"type": "Sequence", "processors": chain})


def _vocabulary(content: Any, tokenizer: Tokenizer) -> Any:
    """Token -> id, with the added tokens: some files list them among the others, some beside them."""
    if not isinstance(content, Mapping):
        return content
    return {**content, **{token.content: i for i, token in tokenizer.added.items()}}


def _merges(content: Any, _: Tokenizer) -> Any:
    """Pairs as two strings, however written; scores to the six digits that all formats keep."""
    if not isinstance(content, list):
        return content
    return [_merge(row) for row in content]


def _merge(row: Any) -> Any:
    if isinstance(row, str) and row.count(" ") == 1:
        return row.split(" ")
    if isinstance(row, list | tuple) and len(row) == 2 and isinstance(row[1], float):
        return [row[0], float(f"{row[1]:.6g}")]
    return list(row) if isinstance(row, tuple) else row


def _model(content: Any, _: Tokenizer) -> Any:
    """Only the switches that are on."""
    return {k: v for k, v in content.items() if v not in (None, False, "")} if isinstance(content, Mapping) else content


def _template_text(content: Any, _: Tokenizer) -> Any:
    """Jinja reads every line end as a newline and drops one at the end."""
    if isinstance(content, Mapping):
        content = content["default"] if list(content) == ["default"] else dict(content)
    if not isinstance(content, str):
        return content
    return content.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")


def _stop_ids(content: Any, _: Tokenizer) -> Any:
    return sorted(set(content)) if isinstance(content, list | tuple) else [content]


_FORMS: dict[str, Callable[[Any, Tokenizer], Any]] = {
    "model": _model,
    "vocabulary": _vocabulary,
    "merges": _merges,
    "normalizer": lambda content, _: steps("normalizer", content),
    "pre_tokenizer": lambda content, _: steps("pre_tokenizer", content),
    "decoder": lambda content, _: steps("decoder", content),
    "post_processor": _post,
    "chat_template": _template_text,
    "stop_ids": _stop_ids,
}
