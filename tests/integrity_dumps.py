"""Dumps for the checks of the record: healthy ones with real rounding, and one fault put into each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onepolicy.counted import Counted
from onepolicy.engines.base import SamplingParams
from onepolicy.engines.fake import FakeEngine
from onepolicy.formats.base import BrokenRecord, Layout, RawRecord, flags, floats
from onepolicy.formats.settle import settle
from onepolicy.integrity import judge_all, look_all
from onepolicy.integrity.base import Batch, Told
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import Finding, FloatArray, Values

NAMES = ("sampler", "old")
PROMPT = 4


@functools.cache
def drawn(dtype: str = "float32", sequences: int = 24, tokens: int = 48, **settings: Any) -> Rollouts:
    """Replies of the fake engine and a scorer that adds up in another order, at one dtype; ids name the records."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 250, PROMPT).tolist() for _ in range(sequences)]
    params = SamplingParams(max_tokens=tokens, seed=3, **settings)
    out = FakeEngine(dtype=dtype, order="forward", path="decode").sample(prompts, params)
    out = out.with_scoring("old", FakeEngine(dtype=dtype, order="pairwise").score(out))
    return named(replace(out, scorings={**out.scorings, "old": only_drawn(out, "old")}))


@functools.cache
def shaped(noise: float = 0.02, sequences: int = 60, seed: int = 0) -> Rollouts:
    """Values with contrast, as a trained model gives: many near 0, some far below; replies of 8 to 80 tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(8 + PROMPT, 80 + PROMPT, sequences)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    n = int(offsets[-1])
    a = -np.exp(rng.normal(-1.5, 2.0, n))
    b = a * np.exp(noise * rng.standard_normal(n))
    at = np.arange(n) - np.repeat(offsets[:-1], lengths)
    reply = at >= PROMPT
    tokens = {"token_ids": Values(rng.integers(0, 1000, n).astype(np.int32)), "drawn": Values(reply)}
    records = {"prompt_length": column_values("prompt_length", [PROMPT] * sequences)}
    out = Rollouts(offsets, tokens, records)
    for name, x in zip(NAMES, (a, b), strict=True):
        out = with_values(out, name, x.astype(np.float32), reply)
    return named(out)


def named(rollouts: Rollouts) -> Rollouts:
    ids = column_values("record_id", [f"r{i:03}" for i in range(len(rollouts))])
    return replace(rollouts, records={**rollouts.records, "record_id": ids})


def only_drawn(rollouts: Rollouts, side: str) -> Any:
    scoring = rollouts.scorings[side]
    return replace(scoring, logprobs=Values(scoring.logprobs.values, rollouts.drawn & scoring.logprobs.mask()))


def with_values(rollouts: Rollouts, side: str, values: Any, valid: Any = None) -> Rollouts:
    from onepolicy.types import Scoring

    return rollouts.with_scoring(side, Scoring(Values(np.asarray(values), valid)))


def changed(rollouts: Rollouts, side: str, change: Callable[[FloatArray], Any]) -> Rollouts:
    """With the values `[T]` of a side changed: in place, or as returned."""
    col = rollouts.scorings[side].logprobs
    values = col.values.astype(np.float64)
    out = change(values)
    return with_values(rollouts, side, values if out is None else out, col.mask())


def rolled(rollouts: Rollouts, side: str, k: int) -> Rollouts:
    """The reply's values of a side k places late (k > 0) or early; what has none is 0.0."""
    col = rollouts.scorings[side].logprobs
    values = col.values.astype(np.float64)
    for i in range(len(rollouts)):
        at = rollouts.sequence(i)
        x = np.where(rollouts.drawn[at], values[at], 0.0)[PROMPT:]
        moved = np.zeros(len(x))
        if len(x) > abs(k):
            source, target = (slice(None, -k), slice(k, None)) if k > 0 else (slice(-k, None), slice(None, k))
            moved[target] = x[source]
        values[at.start + PROMPT : at.stop] = moved
    return with_values(rollouts, side, values, col.mask())


def batch(rollouts: Rollouts, names: Sequence[str | None] = NAMES, **more: Any) -> Batch:
    places = tuple(f"dump.jsonl:{name}" for name in rollouts.content_ids())
    return Batch(rollouts, tuple(rollouts.content_ids()), places, names[0], names[1], **more)


def settled(*records: RawRecord | BrokenRecord) -> Batch:
    """The batch that raw records make."""
    made = settle(records)
    if made.rollouts is None:
        empty = Rollouts(np.zeros(1, np.int64), {"token_ids": Values(np.zeros(0, np.int32))})
        return Batch(empty, (), (), None, None, made)
    a, b = (name if name in made.rollouts.scorings else None for name in NAMES)
    return Batch(made.rollouts, tuple(made.rollouts.content_ids()), made.places, a, b, made)


def reply(
    name: str, a: Sequence[Any] | None, b: Sequence[Any] | None, ids: Sequence[int] | int, *, mask: Any = None,
    prompt: int | None = None, layout: Layout = "reply", **more: Any,
) -> RawRecord:  # fmt: skip
    """A record as a dump has it. `prompt` None: `ids` hold the reply alone."""
    tokens = np.arange(ids) + 100 if isinstance(ids, int) else np.array(ids)
    columns = {}
    for column, x in (("sampler_logprobs", a), ("old_logprobs", b)):
        if x is not None:
            columns[column] = floats(x, layout)
    if mask is not None:
        columns["loss_mask"] = flags(mask, layout)
    facts = {"record_id": name, **more.pop("facts", {})}
    known = {"prompt_known": prompt is not None, **more}
    return RawRecord(f"dump.jsonl:{name}", tokens, prompt or 0, columns, facts, **known)


def totals(*batches: Batch) -> dict[str, Counted]:
    out: dict[str, Counted] = {}
    for one in batches:
        for key, counted in look_all(one).items():
            out.setdefault(key, Counted()).add(counted)
    return out


def found(*batches: Batch, vocab_size: int | None = None, **facts: Any) -> list[Finding]:
    names = (batches[0].a, batches[0].b) if batches[0].a or batches[0].b else NAMES
    return judge_all(totals(*batches), Told(names, vocab_size, facts))


def codes(findings: Sequence[Finding]) -> list[str]:
    return [f.code for f in findings]
