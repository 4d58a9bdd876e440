"""What a record itself says was not sampled: spans of tool output, template, prompt, and who wrote each token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from onepolicy.tokens.base import TokenRecord

#: Keys of a record that name spans of tokens that nobody sampled -> what they are.
NOT_SAMPLED: dict[str, str] = {
    "tool_spans": "tool",
    "observation_spans": "environment",
    "environment_spans": "environment",
    "env_spans": "environment",
    "user_spans": "user",
    "system_spans": "system",
    "template_spans": "template",
    "prompt_spans": "prompt",
    "forced_spans": "forced",
}
#: Keys of a record with one word a token, or with `{"role", "start", "stop"}`, that say who wrote it.
ROLES = ("roles", "token_roles", "segments")
#: Words for who wrote a token -> what it is; a word that is not here says nothing. None: the policy sampled it.
ROLE_WORDS: dict[str, str | None] = {
    **dict.fromkeys(("assistant", "a", "policy", "model", "sampler", "sampled", "generated", "response"), None),
    **dict.fromkeys(("completion", "agent", "gpt", "ai"), None),
    **dict.fromkeys(("tool", "t", "function", "observation", "obs", "o", "tool_response"), "tool"),
    **dict.fromkeys(("environment", "env", "e"), "environment"),
    **dict.fromkeys(("user", "u", "human"), "user"),
    **dict.fromkeys(("system", "s", "developer"), "system"),
    **dict.fromkeys(("template", "header", "scaffold"), "template"),
    **dict.fromkeys(("prompt", "p"), "prompt"),
    **dict.fromkeys(("pad", "padding"), "padding"),
}


def other_spans(record: TokenRecord, n: int) -> Iterator[tuple[str, int, int]]:
    """Spans that the record itself says are not sampled. One that is no span is left out: it says nothing."""
    for key, kind in NOT_SAMPLED.items():
        spans: Any = record.extra.get(key)
        for span in spans if isinstance(spans, list | tuple) else ():
            if isinstance(span, list | tuple) and len(span) == 2 and all(type(x) is int for x in span):
                yield kind, max(span[0], 0), min(span[1], n)
    for key in ROLES:
        yield from _by_role(record.extra.get(key), n)


def _by_role(said: Any, n: int) -> Iterator[tuple[str, int, int]]:
    """Spans of other roles than the policy's: of a word a token (of prompt and reply, or of the reply), or of spans."""
    words: list[Any] = list(said) if isinstance(said, list | tuple) else []
    first = n - len(words)
    for i, word in enumerate(words):
        if isinstance(word, str) and first >= 0 and (kind := ROLE_WORDS.get(word.lower())):
            yield kind, first + i, first + i + 1
        if isinstance(word, Mapping) and (kind := ROLE_WORDS.get(str(word.get("role")).lower())):
            start, stop = word.get("start"), word.get("stop", word.get("end"))
            if type(start) is int and type(stop) is int:
                yield kind, max(start, 0), min(stop, n)
