"""What an engine says of tokens that it was given: vLLM's `prompt_logprobs`, SGLang's `input_token_logprobs`, `echo`.

They are a scoring of their own, `prompt`, and nothing of it is drawn. vLLM scores prompts before temperature and
truncation whatever its `logprobs_mode` is (`v1/worker/gpu_model_runner.py`, 0.32), the sampled reply as the mode says:
the two are never one column. An answer that only scores a text again (`max_tokens` 0 or 1) is a scoring of that text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from onepolicy.formats.base import RawColumn, floats
from onepolicy.formats.cells import Row
from onepolicy.formats.engine_parts import finish, requests
from onepolicy.values import quoted

_IDS = NDArray[np.int64]
_LIMITS = ("max_tokens", "max_completion_tokens", "max_new_tokens")


@dataclass(frozen=True, slots=True)
class Echo:
    """A completion that begins with its prompt, cut: `prompt` values, of which the first is null, and the reply's."""

    n_prompt: int
    prompt: list[Any]
    reply: list[Any]


def of_entries(part: Row, ids: _IDS | None) -> list[Any] | None:
    """vLLM's `prompt_logprobs`, `{id: {logprob, rank, decoded_token}}` a position and null at the first; None without
    the prompt's ids, since the prompt's own token stands among the likeliest ones.

    Errors: `ValueError` for entries that are not of these ids.
    """
    entries = part.list("prompt_logprobs")
    if entries is None or ids is None:
        return None
    if len(entries) != len(ids):
        raise ValueError(f"'prompt_logprobs': got {len(entries)} entries, wanted {len(ids)}, one for each prompt token")
    return [_own(entry, token, i) for i, (entry, token) in enumerate(zip(entries, ids.tolist(), strict=True))]


def _own(entry: Any, token: int, i: int) -> Any:
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise ValueError(f"'prompt_logprobs', position {i}: got {quoted(entry)}, wanted {{id: {{'logprob': ...}}}}")
    found: Any = cast(Mapping[str, Any], entry).get(str(token))
    if found is None:
        raise ValueError(f"'prompt_logprobs', position {i}: no value of the prompt's token {token}")
    return cast(Mapping[str, Any], found).get("logprob") if isinstance(found, Mapping) else found


def echoed(
    outer: Row, answer: Row, choice: Row, values: Sequence[Any] | None, prompt: _IDS | None, alone: bool
) -> Echo | None:
    """The completion's log-probs cut where the prompt ends; None where they are the reply's alone. `alone`: the answer
    has one choice, so that its `usage` is about it.

    Errors: `ValueError` for an echo whose prompt ends at no place that is told.
    """
    asked = [part.get("echo") for part in requests(outer) if part.get("echo") is not None]
    if not values or values[0] is not None or False in asked:
        return None
    reply = choice.ids("token_ids")
    if reply is not None and len(reply) == len(values) and True not in asked:
        return None  # one value a token of the reply: its first is null, which is for a check to tell
    usage = answer.object("usage") or Row({})
    text = next((p.get("prompt") for p in requests(outer) if isinstance(p.get("prompt"), str)), None)
    offsets = _offsets(choice, len(values))
    told = len(prompt) if prompt is not None else usage.whole("prompt_tokens") if alone else None
    if told is None and isinstance(text, str) and offsets is not None:
        told = sum(at < len(text) for at in offsets)
    if told is None:
        if reply is None and True not in asked and not _spelled(choice):
            return None  # no ids: good for its text alone
        raise ValueError("an echoed prompt, and neither prompt_token_ids, usage nor the request tells where it ends")
    if not 0 < told <= len(values):
        raise ValueError(f"'token_logprobs': got {len(values)} values of an echo, but the prompt has {told} tokens")
    rest = list(values[told:])
    if reply is not None and rest and len(rest) != len(reply):
        raise ValueError(
            f"'token_logprobs': got {len(values)} values, wanted {told} of the prompt and {len(reply)} of the reply"
        )
    return Echo(told, list(values[:told]), rest)


def _offsets(choice: Row, n: int) -> list[int] | None:
    part = choice.get("logprobs")
    found: Any = cast(Mapping[str, Any], part).get("text_offset") if isinstance(part, Mapping) else None
    whole = isinstance(found, list) and len(cast(list[Any], found)) == n
    return cast(list[int], found) if whole and all(type(x) is int and x >= 0 for x in cast(list[Any], found)) else None


def _spelled(choice: Row) -> bool:
    part = choice.get("logprobs")
    tokens: Any = cast(Mapping[str, Any], part).get("tokens") if isinstance(part, Mapping) else None
    return isinstance(tokens, list) and str(cast(list[Any], tokens)[:1]).startswith("['token_id:")


def of_end(given: tuple[list[Any], _IDS] | None, prompt: _IDS | None) -> list[Any] | None:
    """SGLang's (log-probs, ids) of the prompt from `logprob_start_len` on, over the whole prompt; null before.

    Errors: `ValueError` for values of other tokens.
    """
    if given is None or prompt is None or not given[0]:
        return None
    values, ids = given
    before = len(prompt) - len(ids)
    if before < 0:
        raise ValueError(f"'input_token_logprobs': got {len(ids)} entries, but the prompt has {len(prompt)} tokens")
    if not np.array_equal(prompt[before:], ids):
        at = int(np.flatnonzero(prompt[before:] != ids)[0])
        raise ValueError(
            f"'input_token_logprobs', position {at}: got a value of token {ids[at]}, but the prompt has "
            f"{prompt[before + at]} there"
        )
    return [None] * before + values


def column(values: list[Any] | None, n_reply: int) -> RawColumn | None:
    """The prompt's values over prompt and reply. None where none of them is a value."""
    if values is None or all(x is None for x in values):
        return None
    return floats([*values, *[None] * n_reply], "whole")


def rescored(
    outer: Row, ended: Row, prompt: list[Any] | None, n_reply: int | None, has_values: bool, alone: bool
) -> bool:
    """The engine was asked what it says of a text, not for a reply: the prompt has values, and what was drawn is
    nothing, or the one token that a request draws at least.

    One token without a limit beside it counts as that where it ended by length or has no value. `n_reply` None: not
    told. `ended`: what has the finish reason.
    """
    if prompt is None or all(x is None for x in prompt) or not alone:
        return False
    limits = [n for part in requests(outer) for key in _LIMITS if (n := part.whole(key)) is not None]
    if n_reply is None:
        return bool(limits) and max(limits) <= 1
    if n_reply == 0:
        return True
    if n_reply > 1:
        return False
    return max(limits) <= 1 if limits else finish(ended) == "length" or not has_values
