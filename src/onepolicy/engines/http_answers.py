"""What the dialects have in common: how an answer is read, and what is never accepted in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from onepolicy.engines.base import SamplingParams
from onepolicy.engines.replies import Reply
from onepolicy.errors import EngineError

#: Parameters that have the same name and meaning in every dialect.
SAME = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")

NO_IDS = (
    "the server gives no token ids, and ids are never made from text again: vLLM gives them since 0.10.2 "
    "(return_token_ids) and before that when started with --return-tokens-as-token-ids, SGLang at its own /generate "
    "(dialect=sglang), llama.cpp's server with logprobs"
)


class Dialect(Protocol):
    """How one kind of server is asked. Built as `Dialect(client, model)`; `model` is a served name.

    Errors of all methods: `EngineError` and its kind, without the server's address.
    """

    #: What the log-probs of given tokens mean; None where the server cannot be known to mean one thing.
    SCORES_MEAN: ClassVar[str | None]

    def facts(self) -> dict[str, Any]:
        """`server`, `version`, and whatever else the server says of itself; null for what it does not say."""
        ...

    def meaning(self, params: SamplingParams) -> str | None:
        """What the log-probs of drawn tokens mean as the server comes; None if it cannot be known."""
        ...

    def tokenize(self, prompt: str | list[dict[str, str]]) -> list[int]: ...

    def detokenize(self, token: int) -> str: ...

    def draw(self, prompt: Sequence[int], params: SamplingParams, seed: int, stops: Sequence[int]) -> Reply: ...

    def score(self, ids: Sequence[int]) -> list[float]:
        """The log-probs of `ids[1:]`, in nats."""
        ...

    def load(self, ids: Sequence[int], tokens: int) -> tuple[str, dict[str, Any]]:
        """Path and body of a streamed request that keeps the server busy for `tokens` tokens."""
        ...


def within(answer: Any, *path: str | int) -> Any:
    """The value at a path of keys and indices. Errors: `EngineError` naming the path that is not there."""
    value = answer
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            where = ".".join(str(p) for p in path)
            raise EngineError(f"its answer has no {where}; another version, or another dialect than this?") from None
    return value


def integers(values: Any, what: str) -> list[int]:
    """Token ids. Errors: `EngineError` for anything else."""
    if not isinstance(values, list) or not all(isinstance(x, int) and not isinstance(x, bool) for x in values):
        raise EngineError(f"its {what} are no list of token ids")
    return values


def numbers(values: Sequence[Any], wanted: int, floor: float, first: int = 0) -> list[float]:
    """Log-probs, as many as wanted; `floor` and below is how this server writes minus infinity.

    `first`: the position of the first value, for messages. Errors: `EngineError` for another number of values, for
    null, NaN, or anything that is no number.
    """
    if len(values) != wanted:
        raise EngineError(f"got {len(values)} log-probs for {wanted} tokens")
    for t, x in enumerate(values, first):
        if isinstance(x, bool) or not isinstance(x, int | float):
            raise EngineError(
                f"the log-prob at position {t} is {'null' if x is None else repr(x)[:40]}, wanted a number"
            )
        if math.isnan(x):
            raise EngineError(
                f"the log-prob at position {t} is NaN; the server's numbers have overflowed or are broken"
            )
    return [-math.inf if x <= floor else float(x) for x in values]


def same_ids(given: Sequence[int], sent: Sequence[int]) -> None:
    """Errors: `EngineError` when a server worked on other ids than were sent, with the first position."""
    if list(given) == list(sent):
        return
    at = next((t for t, (a, b) in enumerate(zip(given, sent, strict=False)) if a != b), min(len(given), len(sent)))
    got = given[at] if at < len(given) else "nothing"
    want = sent[at] if at < len(sent) else "nothing"
    raise EngineError(f"it worked on other ids than were sent: at position {at} got {got}, sent {want}")


def shared(params: SamplingParams) -> Mapping[str, Any]:
    """Every parameter in words that all dialects know, the neutral ones too: servers have defaults of their own."""
    return {name: getattr(params, name) for name in SAME}
