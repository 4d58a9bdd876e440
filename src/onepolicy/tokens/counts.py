"""Counts of one record against each other: ids, log-probs, mask, usage, token strings and text.

Ids decide: a column counts right if it has one value for each id of the reply, or of prompt and reply. What does not
is explained where the data allows it, with the explanations that it cannot tell apart, and never cut to fit: dropping
a value from the wrong end moves every log-prob by one token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onepolicy.codes import finding
from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.lag import evidence_of, find_lag, in_words
from onepolicy.types import Finding, Outcome, Severity

#: Engines' words for how a reply ended -> what they say. Lower case; a word that is not here says nothing.
FINISH: dict[str, str] = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn", "end_of_turn", "stop_token", "completed"), "stop"),
    **dict.fromkeys(("tool_calls", "tool_call", "function_call", "tool_use"), "stop"),
    **dict.fromkeys(("stop_sequence", "stop_str", "stop_string", "word"), "string"),
    **dict.fromkeys(("length", "max_tokens", "max_length", "max_new_tokens", "limit", "truncated"), "length"),
    **dict.fromkeys(("abort", "aborted", "cancelled", "error", "timeout", "content_filter"), "abort"),
}

#: Signs of byte-level spelling or broken characters: such token strings are not the text itself.
_MARKS = ("\u0120", "\u2581", "\u010a", "\ufffd", "<0x", "bytes:\\x")
_BYTES = frozenset(range(256))

_Rule = Callable[["Column"], str | None]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a record that does not count its reply: `len(values)` is neither R nor P + R."""

    name: str
    values: Sequence[Any]
    record: TokenRecord
    stop_ids: frozenset[int]

    @property
    def wanted(self) -> int:
        return len(self.record.reply_ids or ())

    @property
    def extra(self) -> int:
        return len(self.values) - self.wanted


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


def check_counts(record: TokenRecord, *, stop_ids: Sequence[int] = ()) -> list[Finding]:
    """`counts-disagree` for each column, usage count or text that speaks of other tokens than the reply's ids.

    Evidence: `what`, `counts` (all of them), `extra` (its count minus the ids'), `explanation`, `rivals` (explanations
    that fit as well), `usable` False, and for log-probs of both sides the largest difference with one end dropped.
    `stop_ids`: besides the record's own.
    """
    if record.reply_ids is None:
        said = any(x is not None for x in (record.logprobs, record.loss_mask, record.token_strings))
        return [_unchecked(record)] if said else []
    stops = frozenset((*record.stop_ids, *stop_ids))
    found = [_disagreement(column) for column in _columns(record, stops)]
    found += [f for f in (_completion(record, stops), _prompt(record)) if f]
    return found + list(_turns(record)) + list(_texts(record))


def counts(record: TokenRecord) -> dict[str, int]:
    """Every count that the record gives, by its name."""
    lists = {
        "prompt_ids": record.prompt_ids,
        "reply_ids": record.reply_ids,
        "logprobs": record.logprobs,
        "scorer_logprobs": record.scorer_logprobs,
        "loss_mask": record.loss_mask,
        "token_strings": record.token_strings,
        "token_bytes": record.token_bytes,
    }
    return {k: len(v) for k, v in lists.items() if v is not None} | {f"usage.{k}": v for k, v in record.usage.items()}


def _unchecked(record: TokenRecord) -> Finding:
    return finding(
        "tokens-not-checked",
        f"{record.record_id}: the record has no reply ids, so nothing can be counted against them",
        place=record.place,
        evidence={"lacks": ["reply_ids"], "unchecked": ["counts"]},
    )


def _columns(record: TokenRecord, stops: frozenset[int]) -> Iterator[Column]:
    """Those that count neither the reply's ids nor prompt and reply."""
    n, whole = len(record.reply_ids or ()), len(record.reply_ids or ()) + len(record.prompt_ids or ())
    for name in ("logprobs", "scorer_logprobs", "loss_mask", "token_strings", "token_bytes"):
        values: list[Any] | None = getattr(record, name)
        if (
            values is None
            or len(values) == n
            or (len(values) == whole and _leaves_prompt_open(name, values, whole - n))
        ):
            continue
        yield Column(name, values, record, stops)


def _leaves_prompt_open(name: str, values: Sequence[Any], n_prompt: int) -> bool:
    """A whole sequence's mask; or its log-probs, null over the prompt."""
    return name == "loss_mask" or (name.endswith("logprobs") and all(map(empty, values[:n_prompt])))


# what explains a column


def _prompt_included(c: Column) -> str | None:
    n_prompt = len(c.record.prompt_ids or ())
    if not n_prompt or c.extra not in (n_prompt, n_prompt - 1):
        return None
    return "prompt included" if c.extra == n_prompt else "prompt included, without its first token"


def _filled(x: Any) -> bool:
    return empty(x) or x == 0


def _padded(c: Column) -> str | None:
    if c.extra > 1 and all(map(_filled, c.values[c.wanted :])):
        return "padding at the tail"
    if c.extra > 1 and all(map(_filled, c.values[: c.extra])):
        return "padding at the front"
    return None


def _placeholder(c: Column) -> str | None:
    if c.extra != 1 or "logprobs" not in c.name:
        return None
    first = c.values[0]
    return "placeholder at the front" if empty(first) or (isinstance(first, int | float) and first >= 0) else None


def _ends_at_stop(c: Column) -> bool:
    ids = c.record.reply_ids or ()
    return bool(ids) and ids[-1] in c.stop_ids


def _tail(c: Column) -> str | None:
    ended = finish_of(c.record) in ("stop", "string", None)
    return "tail" if c.extra == 1 and ended and not _ends_at_stop(c) else None


def _appended(c: Column) -> str | None:
    return "last value missing" if c.extra == -1 and _ends_at_stop(c) else None


def _first_missing(c: Column) -> str | None:
    return "first value missing" if c.extra == -1 else None


def _last_missing(c: Column) -> str | None:
    return "last value missing" if c.extra == -1 else None


def _as_the_engine_counts(c: Column) -> str | None:
    return "the engine counts these, not the ids" if c.record.usage.get("completion_tokens") == len(c.values) else None


#: In this order: what is exact first. `tail` means the log-prob of a stop token that was trimmed from the ids.
RULES: tuple[_Rule, ...] = (
    _prompt_included,
    _padded,
    _placeholder,
    _tail,
    _appended,
    _first_missing,
    _last_missing,
    _as_the_engine_counts,
)
SAID: dict[str, str] = {
    "prompt included": "the prompt's values stand before the reply's",
    "prompt included, without its first token": "the prompt's values but the first stand before the reply's",
    "padding at the tail": "the rest is padding behind the reply",
    "padding at the front": "the rest is padding before the reply",
    "placeholder at the front": "the first one is a placeholder",
    "tail": "the last one is of a stop token that was trimmed from the ids",
    "last value missing": "the last token has no value (a stop token that was appended?)",
    "first value missing": "the first token has no value (values sliced as shifted labels?)",
    "inside": "neither end explains it",
    "the engine counts these, not the ids": "the engine counted as many tokens: the ids were cut or encoded again",
}


def _disagreement(c: Column) -> Finding:
    holds = list(dict.fromkeys(said for rule in RULES if (said := rule(c))))
    by_values, more = _by_values(c)
    if by_values is not None:
        ends = [h for h in holds if h != by_values and by_values in SAID]
        holds = [by_values, *(ends if more["lag"]["rivals"] else [])]
    why = holds[0] if holds else None
    text = f"{c.record.record_id}: {len(c.values)} {c.name} for {c.wanted} reply ids ({c.extra:+d})"
    return _counted(c.record, c.name, c.extra, f"{text}: {SAID.get(why, why)}" if why else text, why, holds[1:], more)


def _counted(
    record: TokenRecord,
    what: str,
    extra: int,
    message: str,
    why: str | None,
    rivals: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
    **given: Any,
) -> Finding:
    evidence = {"what": what, "extra": extra, "explanation": why, "rivals": list(rivals), "usable": False}
    evidence |= {"counts": counts(record)} | dict(more or {})
    return finding("counts-disagree", message, place=record.place, evidence=evidence, **given)


#: more values than ids? -> the end at which the lag search finds them -> what that says
ENDS = {
    True: {"tail": "tail", "head": "placeholder at the front"},
    False: {"tail": "last value missing", "head": "first value missing"},
}


def _by_values(c: Column) -> tuple[str | None, dict[str, Any]]:
    """What the other side's log-probs say of the place of the values too many, if they count the ids (`lag`)."""
    other = {"logprobs": c.record.scorer_logprobs, "scorer_logprobs": c.record.logprobs}.get(c.name)
    if other is None or len(other) != c.wanted:
        return None, {}
    long, short = (c.values, other) if c.extra > 0 else (other, c.values)
    found = find_lag(long, short)
    if found is None:
        return None, {}
    more = {"lag": evidence_of(found), **_dropped(long, short)}
    if found.kind in ENDS[True]:
        sure = not found.rivals or (found.kind == "tail" and c.extra > 0)
        return (ENDS[c.extra > 0][found.kind] if sure else None), more
    if found.kind == "inside" and not (found.merged or found.inserted):
        return "inside", more
    return in_words(found, (c.extra > 0) == (c.name == "logprobs")), more


def _dropped(long: Sequence[Any], short: Sequence[Any]) -> dict[str, float]:
    """The largest |difference| (nats) with one end of the longer side dropped: what cutting would have compared."""
    ends = {"tail": long[: len(short)], "head": long[len(long) - len(short) :]}
    gaps = {end: [abs(x - y) for x, y in zip(cut, short, strict=True) if _finite(x, y)] for end, cut in ends.items()}
    return {f"max_abs_after_drop_{end}": max(found) for end, found in gaps.items() if found}


def _finite(*values: Any) -> bool:
    return all(isinstance(x, int | float) and math.isfinite(x) for x in values)


# usage


def _completion(record: TokenRecord, stops: frozenset[int]) -> Finding | None:
    """What the engine counted against the reply's ids, or what was drawn of them, or the last turn's."""
    said, ids = record.usage.get("completion_tokens"), record.reply_ids or []
    drawn = sum(stop - start for start, stop in record.spans or ())
    turns = [len(turn.get("reply_ids") or ()) for turn in record.turns or ()]
    if said is None or said in (len(ids), drawn, sum(turns), *turns) or said == _unpadded(record):
        return None
    extra, finish = said - len(ids), finish_of(record)
    trimmed = extra == 1 and finish in ("stop", "string", None) and not (ids and ids[-1] in stops)
    why = (
        "stop token trimmed" if trimmed else "reply cut after sampling" if extra > 0 else "tokens added after sampling"
    )
    text = (
        f"{record.record_id}: the engine counted {said} completion tokens, the record has {len(ids)} reply ids: {why}"
    )
    return _counted(record, "usage.completion_tokens", extra, text, why)


def _unpadded(record: TokenRecord) -> int:
    """Reply ids up to the last one with a log-prob, or else with a mask: what stands behind may be padding."""
    logprobs, mask = sampler_logprobs(record), of_reply(record.loss_mask, record)
    real = [not empty(x) for x in logprobs] if logprobs else [bool(x) for x in mask or ()]
    return max((i + 1 for i, x in enumerate(real) if x), default=len(record.reply_ids or ()))


def _prompt(record: TokenRecord) -> Finding | None:
    said, n = record.usage.get("prompt_tokens"), len(record.prompt_ids or ())
    prompts = [len(turn.get("prompt_ids") or ()) for turn in record.turns or ()]
    if said is None or not n or said in (n, *prompts):
        return None
    why = "one more: a beginning-of-sequence token that the engine adds?" if said == n + 1 else "other prompt"
    text = f"{record.record_id}: the engine counted {said} prompt tokens, the record has {n} prompt ids"
    return _counted(record, "usage.prompt_tokens", said - n, text, why)


def _turns(record: TokenRecord) -> Iterator[Finding]:
    """The log-probs of every turn against its own ids."""
    for k, turn in enumerate(record.turns or ()):
        values, ids = turn.get("logprobs"), turn.get("reply_ids")
        if values is None or ids is None or len(values) == len(ids):
            continue
        text = f"{record.record_id}, turn {k}: {len(values)} logprobs for {len(ids)} reply ids"
        yield _counted(record, "turn.logprobs", len(values) - len(ids), text, None, (), {"turn": k})


# token strings, bytes, text


def _texts(record: TokenRecord) -> Iterator[Finding]:
    """Token strings that name other ids; a text that its own tokens do not spell; a text without ids."""
    ids, text = record.reply_ids or [], record.reply_text
    if text and not ids:
        yield _counted(
            record, "text", 0, f"{record.record_id}: a reply text of {len(text)} characters and no ids", None
        )
    named = _named_ids(record.token_strings)
    if named is not None and len(named) == len(ids) and named != ids:
        at = next(i for i, (x, y) in enumerate(zip(named, ids, strict=True)) if x != y)
        said = f"{record.record_id}: token string {at} names id {named[at]}, the id there is {ids[at]}"
        yield _counted(record, "token_strings", 0, said, "strings of other ids", (), {"first_diff": at})
    if text is not None and ids:
        yield from _spelled(record, text)


def _named_ids(strings: Sequence[str] | None) -> list[int] | None:
    """The ids of strings like `token_id:123` (vLLM's `return_tokens_as_token_ids`), None for other strings."""
    if not strings or not all(isinstance(x, str) and x.startswith("token_id:") and x[9:].isdigit() for x in strings):
        return None
    return [int(x[9:]) for x in strings]


def _spelled(record: TokenRecord, text: str) -> Iterator[Finding]:
    """The text must be what the tokens spell, but for a stop token or stop string that was trimmed from its end."""
    whole = text.encode("utf-8", "surrogatepass")
    spelled = _bytes_of(record)
    if spelled is None or spelled.startswith(whole) or spelled.strip() == whole.strip():
        return
    at = next(
        (i for i, (x, y) in enumerate(zip(spelled, whole, strict=False)) if x != y), min(len(spelled), len(whole))
    )
    said = (
        f"{record.record_id}: the tokens spell {len(spelled)} bytes, the text has {len(whole)}; they part at byte {at}"
    )
    more = {"first_diff_byte": at, "spelled": _shown(spelled, at), "text": _shown(whole, at)}
    yield _counted(
        record, "text", 0, said, "text of other tokens", (), more, severity=Severity.WARN, outcome=Outcome.PASS
    )


def _bytes_of(record: TokenRecord) -> bytes | None:
    """What the tokens spell by the record's own bytes or plain strings; None where these are not the plain text."""
    n, parts, strings = len(record.reply_ids or ()), record.token_bytes, record.token_strings
    if parts and len(parts) == n and all(isinstance(x, list) and set(x) <= _BYTES for x in parts):
        return b"".join(bytes(x) for x in parts)
    if not strings or len(strings) != n or not all(isinstance(x, str) for x in strings) or _named_ids(strings):
        return None
    joined = "".join(strings)
    return None if any(mark in joined for mark in _MARKS) else joined.encode("utf-8", "surrogatepass")


def _shown(text: bytes, at: int) -> str:
    return text[max(at - 12, 0) : at + 12].decode("utf-8", "replace")
