"""Values in the forms in which engines answer: log-probs with their tokens, messages, how a reply ended."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from onepolicy.errors import ContentError
from onepolicy.tokens.base import TokenRecord
from onepolicy.values import quoted

Entry = Mapping[str, Any]


def one_choice(row: Entry) -> Entry:
    """A server's whole answer with one choice, as one record: the choice's `token_ids` are the reply's."""
    choices: Any = row.get("choices")
    if not isinstance(choices, list) or len(cast(list[Any], choices)) != 1 or not isinstance(choices[0], Mapping):
        return row
    choice = dict(cast(Entry, choices[0]))
    if "token_ids" in choice:
        choice["response_ids"] = choice.pop("token_ids")
    return {**choice, **{k: v for k, v in row.items() if k != "choices"}}


def answer_logprobs(record: TokenRecord, value: Any) -> None:
    """`{"content": [{"token", "logprob", "bytes"}]}` of chat servers, `{"token_logprobs", "tokens"}` of completions, a
    list of `{id: {"logprob"}}` as vLLM has it. Anything else says nothing."""
    if isinstance(value, Mapping):
        value = cast(Entry, value)
        if isinstance(value.get("token_logprobs"), list):
            record.logprobs = record.logprobs or value["token_logprobs"]
            record.token_strings = record.token_strings or value.get("tokens")
            return
        value = value.get("content") or []
    entries = cast(list[Any], value)
    if entries and all(isinstance(x, Mapping) and "logprob" in x for x in entries):
        _with_tokens(record, entries)
    elif entries and record.reply_ids and len(entries) == len(record.reply_ids):
        found = [_of_id(x, i) for x, i in zip(entries, record.reply_ids, strict=True)]
        record.logprobs = record.logprobs or (found if any(x is not None for x in found) else None)


def _with_tokens(record: TokenRecord, entries: Sequence[Entry]) -> None:
    record.logprobs = record.logprobs or [x["logprob"] for x in entries]
    strings = [x.get("token") for x in entries]
    if record.token_strings is None and all(isinstance(x, str) for x in strings):
        record.token_strings = cast(list[str], strings)
    if record.token_bytes is None and any(x.get("bytes") is not None for x in entries):
        record.token_bytes = cast(Any, [x.get("bytes") for x in entries])


def _of_id(entry: Any, token_id: int) -> Any:
    """The sampled id's log-prob among the top ones."""
    found: Any = entry.get(str(token_id)) if isinstance(entry, Mapping) else None
    value: Any = cast(Entry, found).get("logprob") if isinstance(found, Mapping) else found
    return value if isinstance(value, int | float) else None


def messages_of(text: str | None) -> list[Any] | None:
    """Messages from their JSON text, as the canonical form keeps them. Errors: `ContentError`."""
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(m, Mapping) for m in cast(list[Any], found)):
        raise ContentError(f"messages: got {quoted(text)}, wanted a list of objects, or its JSON text")
    return cast(list[Any], found)


def reply_messages(record: TokenRecord, value: Any) -> None:
    """One assistant message as the reply's text; more are kept as they are."""
    messages: Any = [value] if isinstance(value, Mapping) else value
    content: Any = messages[0].get("content") if len(messages) == 1 else None
    if isinstance(content, str) and record.reply_text is None and is_unicode(content):
        record.reply_text = content
    record.extra = {**record.extra, "reply_messages": messages}


def finish_reason(record: TokenRecord, value: Entry) -> None:
    """`{"type": "stop", "matched": 2}` of SGLang: the matched id, or string, is what ended the reply."""
    reason = value.get("type")
    record.finish_reason = record.finish_reason or (reason if isinstance(reason, str) else None)
    ended_by(record, value.get("matched"))


def ended_by(record: TokenRecord, value: Any) -> None:
    """What the engine says that it stopped at: an id is a stop id, a text a stop string."""
    if type(value) is int and value not in record.stop_ids:
        record.stop_ids = (*record.stop_ids, value)
    elif isinstance(value, str):
        record.extra = {**record.extra, "matched_stop": value}


def is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: no half of a surrogate pair stands in it."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False
