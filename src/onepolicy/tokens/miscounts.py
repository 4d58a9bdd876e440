"""What explains a column that does not count its reply: what the record shows exactly, then the values themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.cells import any_empty, empty, finish_of, of_reply
from onepolicy.tokens.lag import FITS, Lag, evidence_of, find_lag, in_words

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


@dataclass(frozen=True, slots=True)
class Explained:
    """`why`: in words, None where nothing explains it. `rivals`: what fits as well. `kind`: `why` without positions."""

    why: str | None
    rivals: tuple[str, ...]
    kind: str | None
    evidence: Mapping[str, Any]


def explain(c: Column) -> Explained:
    """What explains the values too many, or too few."""
    holds = list(dict.fromkeys(said for rule in RULES if (said := rule(c))))
    found, evidence = _by_values(c)
    why, rivals = (holds[0] if holds else None), holds[1:]
    if found is not None:
        why, rivals = _with_values(c, found, holds)
    kind = why if why is None or why in SAID else "no shift fits" if found and found.kind == "none" else "re-encoded"
    return Explained(why, tuple(rivals), kind, evidence)


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


def _of_trained(c: Column) -> str | None:
    """One value for each token in the loss mask: tool output in a reply has none."""
    mask = of_reply(c.record.loss_mask, c.record)
    if mask is None or c.name == "loss_mask" or c.extra >= 0 or any_empty(mask):
        return None
    return "trained tokens only" if sum(map(bool, mask)) == len(c.values) else None


def _ids_padded(c: Column) -> str | None:
    """One id repeated behind the last value, outside of the loss mask."""
    behind, mask = (c.record.reply_ids or [])[len(c.values) :], of_reply(c.record.loss_mask, c.record)
    masked = mask is not None and not any(mask[len(c.values) :])
    return "padding in the ids" if c.extra < 0 and masked and len(set(behind)) == 1 else None


def _as_the_engine_counts(c: Column) -> str | None:
    return "the engine counts these, not the ids" if c.record.usage.get("completion_tokens") == len(c.values) else None


#: In this order: what is exact first. `tail` means the log-prob of a stop token that was trimmed from the ids.
RULES: tuple[_Rule, ...] = (
    _prompt_included,
    _padded,
    _placeholder,
    _ids_padded,
    _of_trained,
    _tail,
    _appended,
    _first_missing,
    _last_missing,
    _as_the_engine_counts,
)
SAID: dict[str, str] = {
    "padding in the ids": "the ids behind them are padding",
    "trained tokens only": "there is one for each token in the loss mask, and none for the others",
    "values before the reply": "the first ones are not the reply's",
    "values behind the reply": "the last ones are not the reply's",
    "first values missing": "the first tokens have no values",
    "last values missing": "the last tokens have no values",
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


#: What a record shows exactly, and the end (as `lag` calls it) that it speaks of; None: neither.
EXACT: dict[str, str | None] = {
    "prompt included": "head",
    "prompt included, without its first token": "head",
    "padding at the front": "head",
    "placeholder at the front": "head",
    "padding at the tail": "tail",
    "padding in the ids": "tail",
    "trained tokens only": None,
}


def _with_values(c: Column, found: Lag, holds: Sequence[str]) -> tuple[str | None, list[str]]:
    """What explains a column whose values have been held against the other side's, and what fits as well."""
    fits = {found.kind, *(end for end in found.rivals if _nothing_at(c, end))}  # nulls fit anywhere
    exact = next((h for h in holds if h in EXACT and (EXACT[h] in fits or (EXACT[h] is None and _scattered(c)))), None)
    if exact is not None:
        return exact, []
    if found.kind in ENDS[True]:
        sure = not found.rivals or (found.kind == "tail" and c.extra > 0)
        why = ENDS[c.extra > 0][found.kind][abs(c.extra) > 1] if sure else holds[0] if holds else None
        return why, [h for h in holds if h != why] if found.rivals else []
    if found.kind == "inside" and not (found.merged or found.inserted):
        return "inside", []
    return in_words(found, (c.extra > 0) == (c.name == "logprobs")), []


def _nothing_at(c: Column, end: str) -> bool:
    """Whether the values too many are null, if they stand at this end."""
    n = abs(c.extra)
    return c.extra > 0 and all(map(empty, c.values[:n] if end == "head" else c.values[-n:]))


def _scattered(c: Column) -> bool:
    """Whether the values are the other side's at the tokens of the loss mask."""
    mask, other = of_reply(c.record.loss_mask, c.record), _other(c)
    if mask is None or other is None:
        return False
    pairs = [(x, y) for x, y in zip(c.values, (y for y, m in zip(other, mask, strict=True) if m), strict=True)]
    gaps = [abs(x - y) for x, y in pairs if _finite(x, y)]
    return bool(gaps) and sum(gaps) / len(gaps) <= FITS


#: more values than ids? -> the end at which the lag search finds them -> what that says of one value, of several
ENDS = {
    True: {
        "tail": ("tail", "values behind the reply"),
        "head": ("placeholder at the front", "values before the reply"),
    },
    False: {
        "tail": ("last value missing", "last values missing"),
        "head": ("first value missing", "first values missing"),
    },
}


def _other(c: Column) -> Sequence[Any] | None:
    """The other side's log-probs, if they count the ids."""
    other = {"logprobs": c.record.scorer_logprobs, "scorer_logprobs": c.record.logprobs}.get(c.name)
    return other if other is not None and len(other) == c.wanted else None


def _by_values(c: Column) -> tuple[Lag | None, dict[str, Any]]:
    """Where the other side's log-probs say that the values too many stand, and the evidence of it."""
    other = _other(c)
    if other is None:
        return None, {}
    long, short = (c.values, other) if c.extra > 0 else (other, c.values)
    found = find_lag(long, short)
    return found, {} if found is None else {"lag": evidence_of(found), **_dropped(long, short)}


def _dropped(long: Sequence[Any], short: Sequence[Any]) -> dict[str, float]:
    """The largest |difference| (nats) with one end of the longer side dropped: what cutting would have compared."""
    ends = {"tail": long[: len(short)], "head": long[len(long) - len(short) :]}
    gaps = {end: [abs(x - y) for x, y in zip(cut, short, strict=True) if _finite(x, y)] for end, cut in ends.items()}
    return {f"max_abs_after_drop_{end}": max(found) for end, found in gaps.items() if found}


def _finite(*values: Any) -> bool:
    return all(isinstance(x, int | float) and math.isfinite(x) for x in values)
