"""The components of a tokenizer.json in one form, so that the same rules written in two ways are equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onepolicy.tokens import alphabet

#: GPT-2's regular expression, which `ByteLevel` applies unless it is told not to.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: Settings of components that change no id and no text.
_IDLE = {"trim_offsets"}


def components(part: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """A component as the flat list of what runs one after another, `Sequence`s unpacked."""
    if not part:
        return []
    for key in ("normalizers", "pretokenizers", "processors", "decoders"):
        if part.get("type") == "Sequence" and key in part:
            return [inner for each in part[key] for inner in components(each)]
    return [dict(part)]


def canonical(part: Mapping[str, Any] | None) -> list[dict[str, Any]] | None:
    """A component of a tokenizer.json in one form: flat, without settings that change nothing, None for none."""
    out: list[dict[str, Any]] = []
    for component in components(part):
        kept = {k: v for k, v in component.items() if k not in _IDLE and v is not None}
        if kept.get("type") == "ByteLevel":
            out += _byte_level(kept)
        else:
            out.append(kept)
    return out or None


def _byte_level(part: dict[str, Any]) -> list[dict[str, Any]]:
    """`ByteLevel` that splits by GPT-2's expression as its two steps: the split, then bytes to letters."""
    spaced = bool(part.get("add_prefix_space"))
    regex = bool(part.get("use_regex", True))
    step = {"type": "ByteLevel", "add_prefix_space": spaced, "use_regex": regex and spaced}
    pattern = {"type": "Split", "pattern": {"Regex": GPT2_PATTERN}, "behavior": "Isolated", "invert": False}
    return [pattern, step] if regex and not spaced else [step]


def canonical_decoder(part: Mapping[str, Any] | None) -> list[dict[str, Any]] | None:
    """A decoder in one form. `ByteLevel` reads none of its settings when it decodes."""
    idle = {"ByteLevel": {"type"}}
    steps = [{k: v for k, v in c.items() if k in idle.get(c["type"], c)} for c in components(part)]
    return steps or None


def canonical_post(part: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A post-processor as what it puts around one text: `before` and `after`, as tokens. None where it adds nothing.

    `ByteLevel` only moves offsets there, and what is added to pairs of texts does not matter here.
    """
    out: dict[str, Any] = {"before": [], "after": []}
    for step in components(part):
        if step["type"] == "TemplateProcessing":
            names = [_template_item(item) for item in step["single"]]
            at = names.index(None) if None in names else len(names)
            out = {"before": names[:at], "after": names[at + 1 :]}
        elif step["type"] in ("BertProcessing", "RobertaProcessing"):
            out = {"before": [step["cls"][0]], "after": [step["sep"][0]]}
        elif step["type"] != "ByteLevel":
            out.setdefault("other", []).append(step)
    return out if any(out.values()) else None


def _template_item(item: Mapping[str, Any]) -> str | None:
    """A special token of a template, None for the text itself."""
    return item["SpecialToken"]["id"] if "SpecialToken" in item else None


def bytes_rule(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """How a token's spelling becomes bytes, read from the decoder of a tokenizer.json."""
    steps = {step["type"]: step for step in components(decoder)}
    if "ByteLevel" in steps:
        return alphabet.byte_level_bytes
    if "WordPiece" in steps:
        prefix = str(steps["WordPiece"].get("prefix", "##"))
        return lambda token: alphabet.wordpiece_bytes(token, prefix)
    if steps.keys() & {"ByteFallback", "Metaspace", "Replace"}:
        space = str(steps.get("Metaspace", {}).get("replacement", alphabet.SPACE))
        return lambda token: alphabet.piece_bytes(token, space)
    return alphabet.plain_bytes
