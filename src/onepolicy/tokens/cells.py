"""What the columns of one record say at the tokens of its reply: values, gaps, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from onepolicy.tokens.base import TokenRecord

#: Engines' words for how a reply ended -> what they say. Lower case; a word that is not here says nothing.
FINISH: dict[str, str] = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn", "end_of_turn", "stop_token", "completed"), "stop"),
    **dict.fromkeys(("tool_calls", "tool_call", "function_call", "tool_use"), "stop"),
    **dict.fromkeys(("stop_sequence", "stop_str", "stop_string", "word"), "string"),
    **dict.fromkeys(("length", "max_tokens", "max_length", "max_new_tokens", "limit", "truncated"), "length"),
    **dict.fromkeys(("abort", "aborted", "cancelled", "error", "timeout", "content_filter"), "abort"),
}


def finish_of(record: TokenRecord) -> str | None:
    """`stop`, `string`, `length`, `abort`, or None where the file does not say (or says a word nobody knows)."""
    return FINISH.get((record.finish_reason or "").strip().lower())


def empty(x: Any) -> bool:
    """Null or NaN, also as JSON spells it: no value here."""
    return x is None or (isinstance(x, float) and math.isnan(x)) or (isinstance(x, str) and x.lower() == "nan")


def any_empty(values: Sequence[Any]) -> bool:
    """Whether one of them is null or NaN; quick where none is."""
    if None in values:
        return True
    try:
        total = sum(values)
    except TypeError:  # "-inf" is a text
        return any(map(empty, values))
    return total != total and any(map(empty, values))


def of_reply(values: Sequence[Any] | None, record: TokenRecord) -> list[Any] | None:
    """The values at the reply's ids `[R]`; None where there are none, or where they do not count the ids."""
    n = len(record.reply_ids or ())
    if values is None or len(values) not in (n, n + len(record.prompt_ids or ())):
        return None
    return list(values[len(values) - n :])


def sampler_logprobs(record: TokenRecord) -> list[Any] | None:
    """The sampler's log-probs at the reply's ids `[R]`; None where they do not count them, or are all null."""
    found = of_reply(record.logprobs, record)
    return None if found is None or all(map(empty, found)) else found
