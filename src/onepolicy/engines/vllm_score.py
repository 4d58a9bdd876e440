"""vLLM as a scorer of given ids: by one prefill of each sequence, or through its decode with the reply forced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onepolicy.engines import vllm_forced
from onepolicy.engines.base import declared
from onepolicy.engines.processing import context_of
from onepolicy.engines.semantics import Rules, common_semantics, require_same_meaning
from onepolicy.engines.vllm_running import Running, drawn_logprobs
from onepolicy.errors import EngineError, UsageError
from onepolicy.rollouts import Rollouts
from onepolicy.types import Values

#: Of a drawn token, full vocabulary: entropy and varentropy.
Moments = tuple[NDArray[np.float32], NDArray[np.float32]]


@dataclass(slots=True)
class Scored:
    """`[T]` columns; `valid` holds for all of them. `cached`: prompt tokens that came from the prefix cache."""

    logprobs: NDArray[np.float32]
    valid: NDArray[np.bool_]
    semantics: str | None
    cached: int = 0
    moments: Moments | None = None
    routes: NDArray[np.int16] | None = None

    @classmethod
    def empty(cls, rollouts: Rollouts, semantics: str | None) -> Scored:
        n = rollouts.n_tokens
        return cls(np.zeros(n, dtype=np.float32), np.zeros(n, dtype=bool), semantics)

    def moment(self, which: int) -> Values | None:
        return None if self.moments is None else Values(self.moments[which], self.valid)


def prefill(running: Running, rollouts: Rollouts, now: Mapping[str, Any]) -> Scored:
    """All tokens but each first, raw. With `routes`, one sequence at a time, and the experts of every token.

    Errors: `UsageError` where the rollouts declare what is not the same as raw.
    """
    require_same_meaning(rollouts, "raw", "vllm")
    rows = _rows(running, rollouts, 1)  # vLLM draws one token behind it
    out = Scored.empty(rollouts, "raw")
    params = running.params(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for group in _groups(range(len(rows)), 1 if now["routes"] else now["batch_size"]):
        if now["routes"]:
            running.take_routes()  # what another call has left
        for i, got in zip(group, running.generate([rows[i] for i in group], [params] * len(group)), strict=True):
            _fill_prefilled(out, rollouts.sequence(i), rows[i], got)
        if now["routes"]:
            _fill_routes(out, rollouts.sequence(group[0]), running.take_routes())
    return out


def _fill_prefilled(out: Scored, at: slice, row: Sequence[int], got: Any) -> None:
    given = got.prompt_logprobs or []
    if len(given) != len(row):
        raise EngineError(f"vllm: got {len(given)} prompt log-probs for the {len(row)} tokens of a sequence")
    out.logprobs[at.start + 1 : at.stop] = [given[t][row[t]].logprob for t in range(1, len(row))]
    out.valid[at.start + 1 : at.stop] = True
    out.cached += got.num_cached_tokens or 0


def _fill_routes(out: Scored, at: slice, experts: NDArray[np.int16]) -> None:
    if len(experts) != at.stop - at.start:
        raise EngineError(f"vllm: got the experts of {len(experts)} tokens for a sequence of {at.stop - at.start}")
    if out.routes is None:
        out.routes = np.full((len(out.logprobs), experts.shape[1]), -1, dtype=np.int16)
    out.routes[at] = experts


def decode(running: Running, rollouts: Rollouts, now: Mapping[str, Any]) -> Scored:
    """The tokens behind each prompt, as vLLM gives them when it draws them.

    Errors: `UsageError` where the rollouts declare what this engine's log-probs do not mean; `EngineError` when vLLM
    gives another id than was forced, or a cold request met a cache.
    """
    rules, semantics = _meaning(rollouts, now)
    rows = _rows(running, rollouts, 0)
    starts = [min(max(1, rollouts.record("prompt_length", i) or 1), len(row)) for i, row in enumerate(rows)]
    out = Scored.empty(rollouts, semantics)
    if now["entropy"]:
        running.take_entropies()  # what a failed call has left
    for group in _groups([i for i, row in enumerate(rows) if starts[i] < len(row)], now["batch_size"]):
        prompts, forced = [rows[i][: starts[i]] for i in group], [rows[i][starts[i] :] for i in group]
        if now["cache"] == "warm":
            running.generate(prompts, [running.params(temperature=0.0, max_tokens=1)] * len(prompts))
        params = [_forced(running, ids, rules[i], i, now) for i, ids in zip(group, forced, strict=True)]
        for i, ids, got in zip(group, forced, running.generate(prompts, params), strict=True):
            at = rollouts.sequence(i)
            _fill_decoded(out, slice(at.start + starts[i], at.stop), ids, got)
    if now["cache"] == "cold" and out.cached:
        raise EngineError(f"vllm: {out.cached} tokens came from the prefix cache of a cold request")
    if now["entropy"]:
        places = [slice(rollouts.sequence(i).start + starts[i], rollouts.sequence(i).stop) for i in range(len(rows))]
        out.moments = moments_of(running.take_entropies(), places, rollouts.n_tokens)
    return out


def _forced(running: Running, ids: Sequence[int], rules: Rules, key: int, now: Mapping[str, Any]) -> Any:
    given = running.forced(ids)
    if now["entropy"]:
        given = {**given, "extra_args": {**given.get("extra_args", {}), **vllm_forced.kept_args(key)}}
    if now["cache"] == "cold":
        given["skip_reading_prefix_cache"] = True
    if now["logprobs"] == "raw":  # no rule moves them; greedy is the cheapest
        return running.params(temperature=0.0, **given)
    return running.params(**asdict(rules), **given)


def _fill_decoded(out: Scored, at: slice, ids: Sequence[int], got: Any) -> None:
    came = list(got.outputs[0].token_ids)
    if came != list(ids):
        t = next((t for t, (a, b) in enumerate(zip(came, ids, strict=False)) if a != b), min(len(came), len(ids)))
        raise EngineError(
            f"vllm: at token {t} of a forced reply another id came out, or none: got {came[t : t + 1]}, wanted "
            f"{list(ids[t : t + 1])}; this vLLM does not let ids be forced, use path=prefill"
        )
    out.logprobs[at] = drawn_logprobs(got)
    out.valid[at] = True
    out.cached += got.num_cached_tokens or 0


def _meaning(rollouts: Rollouts, now: Mapping[str, Any]) -> tuple[list[Rules], str | None]:
    """By which rules each sequence is drawn again, and what the log-probs then mean."""
    if now["logprobs"] == "raw":
        return [Rules()] * len(require_same_meaning(rollouts, "raw", "vllm")), "raw"
    ways = declared(rollouts, "vllm")
    rules = [Rules.of(way) for way in ways]
    for i, rule in enumerate(rules):
        begin = max(1, rollouts.record("prompt_length", i) or 1)
        counts = (rule.presence_penalty, rule.frequency_penalty) != (0.0, 0.0)
        if counts and (context_of(rollouts, i).starts[begin:] != begin).any():
            raise UsageError(
                f"record {i}: it has tokens that were not drawn behind its prompt, and presence or frequency "
                "penalties; vLLM would count them; score with an engine that knows which were drawn (hf)"
            )
    return rules, common_semantics(ways)


def moments_of(kept: vllm_forced.Entropies, places: Sequence[slice], n: int) -> Moments:
    """Entropy and varentropy `[n]`: request k's stand at `places[k]`. Errors: `EngineError` when one is missing."""
    entropy, varentropy = np.zeros(n, dtype=np.float32), np.zeros(n, dtype=np.float32)
    for key, at in enumerate(places):
        for t in range(at.stop - at.start):
            if t not in kept.get(key, {}):
                raise EngineError(f"vllm: the entropy of token {t} of reply {key} was not kept by its sampler")
            entropy[at.start + t], varentropy[at.start + t] = kept[key][t]
    return entropy, varentropy


def _rows(running: Running, rollouts: Rollouts, more: int) -> list[list[int]]:
    """The ids of each sequence, once it is sure that vLLM takes them with `more` behind them."""
    rows = [rollouts.token_ids[rollouts.sequence(i)].tolist() for i in range(len(rollouts))]
    for name, row in zip(rollouts.record_ids(), rows, strict=True):
        running.check(f"record {name!r}", row, len(row) + more)
    return rows


def _groups(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Runs of `size` items; 0: all at once."""
    step = size or max(1, len(items))
    for first in range(0, len(items), step):
        yield items[first : first + step]
