"""Counts of one record against each other: ids, log-probs, mask, usage, token strings and text.

Ids decide: a column counts right if it has one value for each id of the reply, or of prompt and reply. What does not
is explained where the data allows it, with the explanations that it cannot tell apart, and never cut to fit: dropping
a value from the wrong end moves every log-prob by one token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from onepolicy.codes import finding
from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.cells import empty, finish_of, of_reply, sampler_logprobs
from onepolicy.tokens.miscounts import SAID, Column, explain
from onepolicy.tokens.shift import check_shift
from onepolicy.types import Finding, Outcome, Severity

#: Signs of byte-level spelling or broken characters: such token strings are not the text itself.
_MARKS = ("\u0120", "\u2581", "\u010a", "\ufffd", "<0x", "bytes:\\x")
_BYTES = frozenset(range(256))


def check_counts(record: TokenRecord, *, stop_ids: Sequence[int] = ()) -> list[Finding]:
    """`counts-disagree` for each column, usage count or text that speaks of other tokens than the reply's ids.

    Evidence: `what`, `counts` (all of them), `extra` (its count minus the ids'), `explanation`, `rivals` (explanations
    that fit as well), `usable` False, and for log-probs of both sides the largest difference with one end dropped.
    `stop_ids`: besides the record's own.
    """
    if record.reply_ids is None:
        said = any(x is not None for x in (record.logprobs, record.loss_mask, record.token_strings))
        return [_unchecked(record), *_among_themselves(record), *check_shift(record)] if said else []
    stops = frozenset((*record.stop_ids, *stop_ids))
    found = [_disagreement(column) for column in _columns(record, stops)]
    found += [f for f in (_completion(record, stops), _prompt(record)) if f]
    return found + check_shift(record) + list(_turns(record)) + list(_texts(record))


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


def _among_themselves(record: TokenRecord) -> Iterator[Finding]:
    """Without ids the columns can only be counted against each other: against the mask, or the trainer's log-probs."""
    by = next((name for name in ("loss_mask", "scorer_logprobs", "token_strings") if getattr(record, name)), None)
    if by is None:
        return
    wanted = len(getattr(record, by))
    stand_in = replace(record, prompt_ids=None, reply_ids=[0] * wanted)
    for column in _columns(stand_in, frozenset()):
        found = explain(column)
        text = f"{record.record_id}: {len(column.values)} {column.name} for {wanted} values of {by} ({column.extra:+d})"
        text += f": {SAID.get(found.why, found.why)}" if found.why else ""
        more = {**found.evidence, "counted_against": by}
        yield _counted(record, column.name, column.extra, text, found.why, found.rivals, more, found.kind)


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


def _disagreement(c: Column) -> Finding:
    found = explain(c)
    text = f"{c.record.record_id}: {len(c.values)} {c.name} for {c.wanted} reply ids ({c.extra:+d})"
    text += f": {SAID.get(found.why, found.why)}" if found.why else ""
    return _counted(c.record, c.name, c.extra, text, found.why, found.rivals, found.evidence, found.kind)


def _counted(
    record: TokenRecord,
    what: str,
    extra: int,
    message: str,
    why: str | None,
    rivals: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
    kind: str | None = None,
    **given: Any,
) -> Finding:
    """`kind`: the explanation without positions, where it has any: findings of one kind are told together."""
    kind = kind or why
    evidence = {
        "class": f"{what}: {kind}" if kind else what,
        "what": what,
        "extra": extra,
        "explanation": why,
        "rivals": list(rivals),
        "usable": False,
    }
    evidence |= {"counts": counts(record)} | dict(more or {})
    return finding("counts-disagree", message, place=record.place, evidence=evidence, **given)


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
