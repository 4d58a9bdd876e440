"""Records that hold token strings and no ids: whether the strings still name tokens.

A token that is part of a character has no text of its own; engines then write U+FFFD, which stands for many ids, or an
empty text. Such strings cannot be turned back into ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.classes import Facts

_LOST = "\ufffd"


def lost_strings(record: TokenRecord, side: Facts) -> dict[str, Any] | None:
    """What is lost in a record without reply ids, as JSON-able evidence; None where its strings hold every character.

    `bad_positions`: tokens whose string is no text of theirs. `ids_recoverable`: True only if true bytes stand beside
    the strings. `true_ids`: of the text, where they fit all strings that are whole (then only these tokens can have
    been meant); else `text_ids`, which the sampler need not have drawn.
    """
    strings = record.token_strings
    if record.reply_ids is not None or not strings:
        return None
    data = record.token_bytes if record.token_bytes and len(record.token_bytes) == len(strings) else None
    bad = [k for k, text in enumerate(strings) if _LOST in text] + _swallowed(strings)
    if not bad:
        return None
    kept = data is not None and all(data[k] and bytes(data[k]) != strings[k].encode() for k in bad)
    found: dict[str, Any] = {
        "record_id": record.record_id,
        "place": record.place,
        "part": "token strings",
        "first_diff": min(bad),
        "bad_positions": sorted(bad)[:64],
        "ids_recoverable": bool(kept),
        "text": record.reply_text,
    }
    return {k: v for k, v in found.items() if v is not None} | _ids_of_text(record, strings, set(bad), side)


def _swallowed(strings: Sequence[str]) -> list[int]:
    """Empty strings before a character that took several tokens: the last of them got its whole text."""
    bad: list[int] = []
    run: list[int] = []
    for k, text in enumerate(strings):
        if text == "":
            run.append(k)
            continue
        if run and not text[0].isascii():
            bad += [*run, k]
        run = []
    return bad


def _ids_of_text(record: TokenRecord, strings: Sequence[str], bad: set[int], side: Facts) -> dict[str, Any]:
    text = record.reply_text
    if not text or _LOST in text:
        return {}
    ids = side.tokenizer.encode([text])[0]
    whole = len(ids) == len(strings) and all(
        k in bad or side.bytes_of(i) == strings[k].encode() for k, i in enumerate(ids)
    )
    return {"true_ids" if whole else "text_ids": ids[:64]}
