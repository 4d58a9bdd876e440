"""Texts of records: is a reply's text the text of its ids, and does text -> ids -> text give it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.classes import form
from onepolicy.tokens.roundtrip_result import RoundTrip
from onepolicy.tokens.token_strings import lost_strings

if TYPE_CHECKING:
    from onepolicy.tokens.roundtrip import Way

TEXT = "text->ids->text"
#: What a record's text is to the text of its ids, the first that holds; the names are in `RoundTrip.texts`.
TEXT_CLASSES: dict[str, str] = {
    "equal": "the text of the ids",
    "stop-token-not-in-text": "the same without the special tokens at the end, as engines give it",
    "special-token-skipped": "the same without special tokens inside",
    "end-not-decoded": "the same without an incomplete character at the end",
    "stripped": "the same without white space at its ends",
    "clean-up": "the same after a clean-up of the spaces before punctuation",
    "part-of-text": "a part of it (a stop string, a reasoning block or a tool call was taken out)",
    "normalizer": "the same after a normalisation",
    "other-text": "a truly different text",
}
#: What is not equal -> its class.
_TOLD = {
    "stop-token-not-in-text": "stop-token-not-in-text",
    "special-token-skipped": "special-token-skipped",
    "end-not-decoded": "end-not-decoded",
    "stripped": "text-stripped",
    "clean-up": "text-cleaned-up",
    "part-of-text": "part-of-text",
    "normalizer": "text-normalised",
    "other-text": "text-of-other-ids",
}
#: `clean_up_tokenization_spaces` of transformers.
_CLEAN = (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"), (" 's", "'s")
_CLEAN_MORE = (" 've", "'ve"), (" 're", "'re")


def compare_texts(result: RoundTrip, records: Sequence[TokenRecord], texts: Sequence[str | None], there: Way) -> None:
    """`texts`: of each reply's ids, None where there are none or they cannot be decoded."""
    alone: list[tuple[TokenRecord, str, str]] = []
    for record, text in zip(records, texts, strict=True):
        if record.reply_text is not None and text is not None:
            name = "equal" if record.reply_text == text else _text_class(record, text, there)
            result.texts[name] = result.texts.get(name, 0) + 1
            result.checked["text"] = result.checked.get("text", 0) + 1
            if name in _TOLD:
                result.add("text", _TOLD[name], _example(record, "text", record.reply_text, text))
        elif record.reply_ids is None and record.prompt_ids is None:
            _strings(result, record, there)
            given = (("reply text", record.reply_text), ("prompt text", record.prompt_text))
            alone += [(record, part, said) for part, said in given if said]
    _texts_alone(result, alone, there)


def _strings(result: RoundTrip, record: TokenRecord, there: Way) -> None:
    """A record whose tokens are known as strings alone."""
    if record.token_strings:
        result.checked["token strings"] = result.checked.get("token strings", 0) + 1
        if (lost := lost_strings(record, there.b)) is not None:
            cls = "characters-in-bytes" if lost["ids_recoverable"] else "characters-lost-in-strings"
            result.add("token strings", cls, lost)


def _text_class(record: TokenRecord, text: str, there: Way) -> str:
    said, ids = record.reply_text or "", record.reply_ids or []
    without = there.a.tokenizer.decode([ids], skip_special=True)[0]
    end = len(ids)
    while end and ids[end - 1] in there.a.added:
        end -= 1
    if said == there.decode([ids[:end]])[0]:
        return "stop-token-not-in-text"
    if said == without:
        return "special-token-skipped"
    return next((name for name, holds in _HOLDS.items() if holds(said, text) or holds(said, without)), "other-text")


def _cleaned(text: str) -> str:
    for before, after in (*_CLEAN, *_CLEAN_MORE):
        text = text.replace(before, after)
    return text


_HOLDS: dict[str, Callable[[str, str], bool]] = {
    "end-not-decoded": lambda said, text: text.endswith("\ufffd") and said == text.rstrip("\ufffd"),
    "stripped": lambda said, text: said.strip() == text.strip(),
    "clean-up": lambda said, text: said == _cleaned(text),
    "part-of-text": lambda said, text: said.strip() in text,
    "normalizer": lambda said, text: form(text, said) is not None,
}


def _texts_alone(result: RoundTrip, alone: Sequence[tuple[TokenRecord, str, str]], there: Way) -> None:
    """Records without ids: text -> ids -> text by the tokenizer that encodes."""
    if not alone:
        return
    again = there.b.tokenizer.decode(there.encode([text for _, _, text in alone]))
    for (record, part, text), back in zip(alone, again, strict=True):
        result.checked[part] = result.checked.get(part, 0) + 1
        if back != text:
            result.fails(TEXT)
            name = form(text, back)
            cls = "normalizer" if name else "prefix-space" if text.strip() == back.strip() else "other-text"
            result.add(part, cls, _example(record, part, text, back) | ({"detail": name} if name else {}))


def _example(record: TokenRecord, part: str, said: str, other: str) -> dict[str, Any]:
    """Where two texts part, and what stands there."""
    at = next((i for i, (x, y) in enumerate(zip(said, other, strict=False)) if x != y), min(len(said), len(other)))
    return {
        "record_id": record.record_id,
        "place": record.place,
        "part": part,
        "first_diff": at,
        "text": said[max(0, at - 20) : at + 40],
        "other_text": other[max(0, at - 20) : at + 40],
        "text_len": len(said),
        "other_len": len(other),
    }
