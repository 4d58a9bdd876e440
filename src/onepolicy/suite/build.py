"""From items to token ids, by an engine's own tokenizer. What does not fit is left out and named, never cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from onepolicy.errors import ContentError, EngineDied, EngineError, EngineTimeout, UsageError
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.suite import makers
from onepolicy.suite.items import Item, Made, Prompt, SuitePrompt, SuiteText
from onepolicy.suite.load import Suite
from onepolicy.types import Values

#: Characters of made text that are tried first for each token wanted.
CHARACTERS_A_TOKEN = 6
#: Ids behind the last one taken: where a text ends its last ids are others than in a longer one.
_MARGIN = 64
#: What is declared of a text: nothing was done to the logits.
_NEUTRAL: dict[str, Any] = {
    "logprob_semantics": "raw",
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class Encoder(Protocol):
    """Any engine."""

    def encode(self, prompts: Sequence[str | list[dict[str, str]]]) -> list[list[int]]: ...


class _LeftOut(Exception):
    """Why an item has no ids here."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    text: SuiteText
    ids: list[int]
    prompt_length: int


def fixed_rollouts(suite: Suite, engine: Encoder, max_length: int | None = None) -> tuple[Rollouts, list[str]]:
    """The texts as rollouts of which nothing is drawn, and one line for each text that was left out.

    Ids: those of the prompt, then those of the reply. `max_length`: tokens of the longest sequence that both engines
    take (vLLM scores one fewer than its `max_model_len`). Texts are left out that are longer, that are chats where
    the model has no template for them, and those made to "limit" where that is None.

    Errors: `ContentError` when no text is left; what the engine raises.
    """
    ids = _Ids(engine, suite.texts, max_length)
    found: list[_Sequence] = []
    left_out: list[str] = []
    for text in suite.texts:
        try:
            found.append(ids.text(text))
        except _LeftOut as why:
            left_out.append(f"{text.id}: {why}")
    if not found:
        raise ContentError(f"the suite has no text to score: {left_out[0] if left_out else 'it holds prompts only'}")
    return _rollouts(suite, found), left_out


def encoded_prompts(
    suite: Suite, engine: Encoder, max_length: int | None = None, max_tokens: int = 0
) -> tuple[list[SuitePrompt], list[list[int]], list[str]]:
    """(prompts, their ids, one line for each that was left out): those that leave room for `max_tokens` more.

    Errors: `ContentError` when no prompt is left; what the engine raises.
    """
    room = None if max_length is None else max_length - max_tokens
    ids = _Ids(engine, suite.prompts, room)
    kept: list[SuitePrompt] = []
    rows: list[list[int]] = []
    left_out: list[str] = []
    for prompt in suite.prompts:
        try:
            rows.append(ids.prompt(prompt))
            kept.append(prompt)
        except _LeftOut as why:
            left_out.append(f"{prompt.id}: {why}")
    if not kept:
        raise ContentError(
            f"the suite has no prompt to draw from: {left_out[0] if left_out else 'it holds texts only'}"
        )
    return kept, rows, left_out


class _Ids:
    """Token ids of items. What a tokenizer adds by itself stays before a prompt and is taken from its end and from
    replies: a reply goes on, it does not begin."""

    def __init__(self, engine: Encoder, items: Sequence[Item], room: int | None) -> None:
        self._engine, self._room = engine, room
        texts = [x.prompt for x in items if isinstance(x.prompt, str) and not (x.made and x.made.tokens)]
        texts += [x.reply for x in items if isinstance(x, SuiteText) and not x.made]
        unlike = list(dict.fromkeys(["a", "b", *texts]))
        self._known = dict(zip(unlike, engine.encode(unlike), strict=True))
        self._head, self._tail = _added(self._known["a"], self._known["b"])

    def text(self, text: SuiteText) -> _Sequence:
        made = text.made
        if made and made.tokens is not None:
            ids = self._made(made, self._length(made))
            return self._fitting(_Sequence(text, ids, len(ids) - made.reply_tokens))
        prompt = self._prompt(text.prompt)
        if made:
            self._require_room(len(prompt) + made.reply_tokens)
            reply = self._made(made, made.reply_tokens + self._head)[self._head :]
        else:
            reply = self._inner(self._known[text.reply]) if text.reply else []
        return self._fitting(_Sequence(text, prompt + reply, len(prompt)))

    def prompt(self, prompt: SuitePrompt) -> list[int]:
        ids = self._made(prompt.made, self._length(prompt.made)) if prompt.made else self._prompt(prompt.prompt)
        if not ids:
            raise _LeftOut("no tokens; a reply needs at least one before it")
        self._require_room(len(ids))
        return ids

    def _prompt(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return self._chat(prompt)
        ids = self._known[prompt]
        return ids[: len(ids) - self._tail]

    def _chat(self, messages: list[dict[str, str]]) -> list[int]:
        try:
            return self._engine.encode([messages])[0]
        except (EngineDied, EngineTimeout):
            raise
        except (EngineError, UsageError) as err:
            raise _LeftOut(str(err).removeprefix("prompt 0").lstrip(": ")) from err

    def _inner(self, ids: list[int]) -> list[int]:
        return ids[self._head : len(ids) - self._tail]

    def _length(self, made: Made) -> int:
        if made.tokens != "limit":
            assert made.tokens is not None
            self._require_room(made.tokens)
            return made.tokens
        if self._room is None:
            raise _LeftOut("as long as the model takes, which is not known")
        if self._room <= made.reply_tokens:
            raise _LeftOut(f"its last {made.reply_tokens:,} tokens alone fill the {max(0, self._room):,} there are")
        return self._room

    def _made(self, made: Made, n: int) -> list[int]:
        """The first n ids of the maker's text, with what the tokenizer puts before any text."""
        characters = n * CHARACTERS_A_TOKEN
        while True:
            ids = self._engine.encode([makers.text(made.maker, made.seed, characters)])[0]
            if len(ids) >= n + self._tail + _MARGIN:
                return ids[:n]
            characters = 2 * characters + _MARGIN

    def _fitting(self, sequence: _Sequence) -> _Sequence:
        if len(sequence.ids) < 2:
            raise _LeftOut(f"{len(sequence.ids)} tokens; the first has no log-prob, so nothing could be scored")
        self._require_room(len(sequence.ids))
        return sequence

    def _require_room(self, n: int) -> None:
        if self._room is not None and n > self._room:
            raise _LeftOut(f"{n:,} tokens, and there is room for {max(0, self._room):,}")


def _added(a: list[int], b: list[int]) -> tuple[int, int]:
    """How many ids a tokenizer puts before and behind any text, seen on two different letters."""
    head = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)
    tail = next((i for i, (x, y) in enumerate(zip(reversed(a), reversed(b), strict=False)) if x != y), 0)
    return head, tail


def _rollouts(suite: Suite, found: Sequence[_Sequence]) -> Rollouts:
    lengths = [len(x.ids) for x in found]
    texts = [x.text for x in found]
    written = [None if x.made and x.made.tokens is not None else x.prompt for x in texts]
    records: dict[str, list[Any]] = {
        "record_id": [x.id for x in texts],
        "run_id": [suite.version] * len(texts),
        "group_id": [x.group for x in texts],
        "env_id": [x.category for x in texts],
        "prompt_length": [x.prompt_length for x in found],
        **{name: [value] * len(texts) for name, value in _NEUTRAL.items()},
        "prompt_text": [p if isinstance(p, str) else None for p in written],
        "prompt_messages": [json.dumps(p, ensure_ascii=False) if isinstance(p, list) else None for p in written],
    }
    return Rollouts(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        {
            "token_ids": Values(np.array([i for x in found for i in x.ids], dtype=np.int32)),
            "drawn": Values(np.zeros(sum(lengths), dtype=bool)),
        },
        {name: column_values(name, values) for name, values in records.items()},
    )
