"""What of a reply was drawn by the policy, from the best witness that a record has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onepolicy.tokens.base import TokenRecord
from onepolicy.tokens.cells import any_empty, empty, finish_of, of_reply, sampler_logprobs

Runs = list[tuple[int, int]]


@dataclass(slots=True)
class Sampled:
    """What of a reply was drawn: `[start, stop)` in the reply, and who says so (`spans`, `drawn`, `log-probs`,
    `padding` where only trailing padding was left out, `ids` where nothing is known and the whole reply is taken).
    """

    runs: Runs
    source: str

    @property
    def known(self) -> bool:
        return self.source in ("spans", "drawn", "log-probs")


def sampled_runs(record: TokenRecord, stops: frozenset[int] = frozenset(), pad: int | None = None) -> Sampled:
    """The drawn parts of the reply, from the best witness that the record has."""
    ids, n_prompt = record.reply_ids or [], len(record.prompt_ids or ())
    if record.spans is not None:
        inside = [(max(a - n_prompt, 0), min(b - n_prompt, len(ids))) for a, b in record.spans]
        return Sampled([(a, b) for a, b in inside if a < b], "spans")
    drawn = of_reply(record.extra.get("drawn"), record)
    if drawn is not None:
        return Sampled(runs_of([bool(x) for x in drawn]), "drawn")
    logprobs = sampler_logprobs(record)
    if logprobs is not None and any_empty(logprobs):
        return Sampled(runs_of([not empty(x) or i == _first(logprobs) for i, x in enumerate(logprobs)]), "log-probs")
    cut, mask = finish_of(record) in ("length", "abort"), of_reply(record.loss_mask, record)
    end = len(ids) - _padding(ids, stops, pad, logprobs, mask, cut)
    filled = _filled(logprobs, mask, end)
    if filled:
        return Sampled(runs_of([i not in filled for i in range(end)]), "log-probs")
    return Sampled(
        [(0, end)] if end else [], "padding" if end < len(ids) else "ids" if logprobs is None else "log-probs"
    )


def _first(logprobs: Sequence[Any]) -> int | None:
    """0 where the first token alone has no log-prob: that is how engines and trainers leave it, not who drew it."""
    return 0 if len(logprobs) > 1 and empty(logprobs[0]) and not any_empty(logprobs[1:]) else None


def _filled(logprobs: Sequence[Any] | None, mask: Sequence[Any] | None, end: int) -> set[int]:
    """Tokens between trained ones that are outside of the mask and have 0.0 for a log-prob: tool output, filled up."""
    if logprobs is None or mask is None or all(mask) or not any(mask[:end]):
        return set()
    first, last = next(i for i in range(end) if mask[i]), next(i for i in range(end - 1, -1, -1) if mask[i])
    return {i for i in range(first, last) if not mask[i] and logprobs[i] == 0}


def runs_of(flags: Sequence[bool]) -> Runs:
    """`[start, stop)` of every stretch of True."""
    edges = [i for i in range(len(flags) + 1) if (i < len(flags) and flags[i]) != (i > 0 and flags[i - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _padding(
    ids: Sequence[int],
    stops: frozenset[int],
    pad: int | None,
    logprobs: Sequence[Any] | None,
    mask: Sequence[Any] | None,
    cut: bool = False,
) -> int:
    """Trailing ids that are padding: the padding id, or one id repeated behind a stop token (that id itself, often) or
    behind the loss mask.

    `cut`: the reply was cut by length, so stop ids at its end are padding too, but for a single one that is trained.
    """
    if not ids:
        return 0
    last, k = ids[-1], 1
    while k < len(ids) and ids[-k - 1] == last:
        k += 1
    behind_stop = k < len(ids) and ids[-k - 1] in stops
    masked = mask is not None and not any(mask[-k:])
    if last in stops:
        count = k if behind_stop or (cut and (k > 1 or masked or last == pad)) else k - 1
    else:
        behind_mask = k > 1 and masked and mask is not None and any(mask[:-k])
        count = k if last == pad or behind_mask or (behind_stop and k > 1) else 0
    if logprobs is None or not count:
        return count
    values = set(logprobs[-count:])
    filled = values == {0} or (count > 1 and len(values) == 1) or (mask is not None and not any(mask[-count:]))
    return count if filled else 0  # with log-probs of their own they were drawn
