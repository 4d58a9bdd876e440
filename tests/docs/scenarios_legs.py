"""Scenarios of the codes that legs and the floor make: two fake engines, one of them with one fault.

The tokens are drawn in float64, so they are the same on every machine; each side then scores them in its own precision.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar
from unittest import mock

import numpy as np

from onepolicy.check import Choices, check
from onepolicy.engines import ENGINES
from onepolicy.engines.base import SamplingParams, Switch, using_of
from onepolicy.engines.fake import FakeEngine
from onepolicy.errors import EngineError
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.suite import Suite, SuitePrompt, SuiteText
from onepolicy.types import Report, Scoring, Values

SAMPLER, SCORER = "fake:?dtype=bfloat16", "fake:?dtype=bfloat16&order=pairwise"


class OddEngine(FakeEngine):
    """The fake engine with the live switches that servers and trainers have, and what can be wrong behind them."""

    SWITCHES: ClassVar[Mapping[str, Switch]] = {
        **FakeEngine.SWITCHES,
        "reverse": Switch(bool, False, "the sequences in reverse order", live=True),
        "cache": Switch(str, "cold", "whether the prompt is served from the cache", ("cold", "warm"), live=True),
        "load": Switch(str, "idle", "whether it is busy with others", ("idle", "loaded"), live=True),
        "max_model_len": Switch(int, 4096, "longest sequence"),
        "routes": Switch(bool, False, "experts of each token, as a mixture model has"),
        "flaw": Switch(str, "none", "what is wrong"),
    }
    _OWN = ("reverse", "cache", "load", "max_model_len", "routes", "flaw")

    def __init__(self, target: str = "", **options: Any) -> None:
        own = {k: options.pop(k) for k in self._OWN if k in options}
        super().__init__(target, **options)
        self.options |= own
        self.calls = 0

    def score(
        self, rollouts: Rollouts, *, distributions: bool = False, using: Mapping[str, Any] | None = None
    ) -> Scoring:
        given = using_of(self, using)
        live = self.options | given
        self.calls += 1
        plain = {k: v for k, v in given.items() if k not in self._OWN}
        order = list(range(len(rollouts)))[:: -1 if live["reverse"] else 1]
        scoring = _back(super().score(rollouts.take(order), using=plain), rollouts, order)
        values = scoring.logprobs.values.copy()
        FLAWS[live["flaw"]](self, rollouts, values, live)
        fingerprint = {**scoring.fingerprint, **given}
        routes = _experts(rollouts, live) if live["routes"] else None
        return replace(scoring, logprobs=Values(values, scoring.logprobs.valid), fingerprint=fingerprint, routes=routes)


class OneKernel(FakeEngine):
    """It has one way to compute, so nothing shows what rounding does between two."""

    SWITCHES: ClassVar[Mapping[str, Switch]] = {
        **FakeEngine.SWITCHES,
        "order": Switch(str, "pairwise", "how it adds", ("pairwise",), live=True),
        "path": Switch(str, "prefill", "how it scores", ("prefill",), live=True),
    }


def _back(scoring: Scoring, rollouts: Rollouts, order: list[int]) -> Scoring:
    """The scoring of `rollouts.take(order)`, its sequences put back in their places."""
    starts = np.concatenate([[0], np.cumsum(rollouts.lengths[order])])
    at = {row: int(starts[i]) for i, row in enumerate(order)}
    lengths = rollouts.lengths.tolist()
    return scoring.take(np.concatenate([np.arange(at[i], at[i] + n) for i, n in enumerate(lengths)]))


def _experts(rollouts: Rollouts, live: Mapping[str, Any]) -> np.ndarray:
    """`[T, 4]`, two experts in each of two layers; every kernel takes another one at 2% of the tokens."""
    out = (rollouts.token_ids[:, None] * np.array([1, 3, 5, 7]) % 16).astype(np.int16)
    rng = np.random.default_rng(zlib.crc32(f"{live['order']} {live['path']}".encode()))
    other = rng.random(len(out)) < (0.1 if live["flaw"] == "other_experts" else 0.02)
    out[other, 0] = (out[other, 0] + 1) % 16
    return out


Flaw = Callable[[OddEngine, Rollouts, np.ndarray, Mapping[str, Any]], None]


def _old_cache(engine: OddEngine, rollouts: Rollouts, values: np.ndarray, live: Mapping[str, Any]) -> None:
    """Served from the cache, the first tokens of a reply still see what older weights made of the prompt."""
    if live["cache"] == "warm":
        old = FakeEngine(dtype=live["dtype"], fault="stale").score(rollouts).logprobs.values
        near = _reply_position(rollouts) < 8
        values[near] = old[near]


def _routed_by_load(engine: OddEngine, rollouts: Rollouts, values: np.ndarray, live: Mapping[str, Any]) -> None:
    """Under load every seventh token takes other experts."""
    if live["load"] == "loaded":
        values[::7] += 0.4 * np.random.default_rng(5).standard_normal(len(values[::7]))


def _no_soft_cap(engine: OddEngine, rollouts: Rollouts, values: np.ndarray, live: Mapping[str, Any]) -> None:
    """The other kernel forgets a soft cap: what is unlikely becomes more so."""
    if live["order"] != engine.options["order"]:
        values *= 1.15


def _unsteady(engine: OddEngine, rollouts: Rollouts, values: np.ndarray, live: Mapping[str, Any]) -> None:
    """Dropout is on: every call gives other values."""
    rng = np.random.default_rng(engine.calls)
    values += 0.2 * rng.standard_normal(len(values)) * -np.expm1(values)


def _decode_fails(engine: OddEngine, rollouts: Rollouts, values: np.ndarray, live: Mapping[str, Any]) -> None:
    if live["path"] == "decode":
        raise EngineError("engine hf:model: out of memory on the device during KV decode (batch_size=32)")


FLAWS: dict[str, Flaw] = {
    "none": lambda *_: None,
    "other_experts": lambda *_: None,
    "old_cache": _old_cache,
    "routed_by_load": _routed_by_load,
    "no_soft_cap": _no_soft_cap,
    "unsteady": _unsteady,
    "decode_fails": _decode_fails,
}


def _reply_position(rollouts: Rollouts) -> np.ndarray:
    """`[T]` place in the reply, beyond any for tokens of the prompt."""
    place = np.arange(rollouts.n_tokens) - np.repeat(rollouts.offsets[:-1], rollouts.lengths)
    prompt = np.repeat(rollouts.records["prompt_length"].values, rollouts.lengths)
    return np.where(place < prompt, rollouts.n_tokens, place - prompt)


# -- what is scored ----------------------------------------------------------------------------------------------------


@functools.cache
def drawn(prompts: int = 48, tokens: int = 64, prompt_length: int = 12, temperature: float = 1.0) -> Rollouts:
    """Replies to `prompts` prompts, with the scoring of `SAMPLER`."""
    texts = [f"Question {i:02}: what then? ".ljust(prompt_length, ".")[-prompt_length:] for i in range(prompts)]
    engine = FakeEngine(dtype="float64")
    rollouts = engine.sample(engine.encode(texts), SamplingParams(max_tokens=tokens, temperature=temperature, seed=5))
    names = column_values("record_id", [f"prompt-{i:02}" for i in range(prompts)])
    rollouts = replace(rollouts, records={**rollouts.records, "record_id": names})
    return scored(rollouts, FakeEngine(dtype="bfloat16"))


def scored(rollouts: Rollouts, by: FakeEngine, /, **fingerprint: Any) -> Rollouts:
    """With the drawn tokens' log-probs by that engine as the scoring `sampler`."""
    s = by.score(rollouts)
    columns = {k: Values(getattr(s, k).values, rollouts.drawn) for k in ("logprobs", "entropy", "varentropy")}
    return rollouts.with_scoring("sampler", replace(s, **columns, fingerprint={**s.fingerprint, **fingerprint}))


def checked(
    legs: str,
    scorer: str = SCORER,
    sampler: str | None = None,
    rollouts: Rollouts | None = None,
    suite: Suite | None = None,
) -> Report:
    """A check with these legs, or none. `odd:` and `plain:` are the engines of this file."""
    more = {"odd": f"{__name__}:OddEngine", "plain": f"{__name__}:OneKernel"}
    choices = Choices(legs=legs.split(), suite=suite or _texts())
    with mock.patch.dict(ENGINES, more):
        return check(rollouts or drawn(), scorer, sampler=sampler, choices=choices)[0]


def _contract() -> Report:
    """Drawn at temperature 0.7 and declared processed; the sampler reports raw log-probs."""
    rollouts = scored(drawn(temperature=0.7), FakeEngine(dtype="bfloat16"), engine="vllm")
    return checked("contract", sampler=f"{SAMPLER}&logprobs=raw", rollouts=rollouts)


def _placeholders() -> Report:
    rollouts = drawn()
    values = rollouts.scorings["sampler"].logprobs.values.copy()
    values[np.flatnonzero(rollouts.drawn)[[200, 900, 1500, 2100]]] = 0.0
    side = replace(rollouts.scorings["sampler"], logprobs=Values(values, rollouts.drawn))
    return checked("", rollouts=rollouts.with_scoring("sampler", side))


def _step_zero() -> Report:
    """`current` was computed with dropout on."""
    rollouts = drawn()
    old = replace(FakeEngine(dtype="bfloat16", order="pairwise").score(rollouts), entropy=None, varentropy=None)
    noise = 0.15 * np.random.default_rng(3).standard_normal(rollouts.n_tokens)
    current = replace(old, logprobs=Values(old.logprobs.values + noise, old.logprobs.valid), scoring_id="current")
    return checked("step-0", rollouts=rollouts.with_scoring("old", old).with_scoring("current", current))


def _long_replies() -> Report:
    """Replies that pass position 256, where the scorer's positions go wrong."""
    rollouts = drawn(prompts=64, tokens=72, prompt_length=224)
    return checked("scorer-batch", f"{SCORER}&fault=late_positions", rollouts=rollouts)


_WORDS = ("the", "river", "ran", "over", "stones", "and", "under", "a", "bridge", "while", "miller", "counted", "sacks")


def _texts(*more: int) -> Suite:
    """Fixed texts of 80 words, longer than any reply here, and some of as many words as asked."""
    rng = np.random.default_rng(11)
    text = lambda n: " ".join(_WORDS[i] for i in rng.integers(0, len(_WORDS), n))
    words_of = [*[80] * 24, *more]
    texts = [
        SuiteText(f"text-{i:02}", "prose", "smoke", f"t{i}", f"Part {i}. ", text(n)) for i, n in enumerate(words_of)
    ]
    prompts = [SuitePrompt(f"p{i}", "prose", "smoke", f"p{i}", f"Go on, page {i}. ") for i in range(12)]
    return Suite("mine", "mine", tuple(prompts), tuple(texts))


def _no_repeat() -> Report:
    return checked("scorer-again", "odd:?dtype=bfloat16&order=pairwise&flaw=unsteady")


def _faulty(leg: str, options: str) -> Callable[[], Report]:
    """The scorer at its fault, in the leg that looks for it."""
    return lambda: checked(leg, f"{SCORER}&{options}")


def _odd(side: str, leg: str, options: str) -> Callable[[], Report]:
    spec = f"odd:?dtype=bfloat16&{options}"
    if side == "sampler":
        return lambda: checked(leg, sampler=spec)
    return lambda: checked(leg, f"{spec}&order=pairwise")


SCENARIOS: dict[str, Callable[[], Report]] = {
    "logprob-contract": _contract,
    "placeholder-logprob": _placeholders,
    "not-at-step-zero": _step_zero,
    "different-function": lambda: checked("same-function", f"{SCORER}&fault=eps_norm", sampler=SAMPLER),
    "not-repeatable": _no_repeat,
    "depends-on-order": _odd("scorer", "scorer-order", "fault=leaks_neighbours"),
    "depends-on-packing": _faulty("scorer-packing", "batch_size=1&fault=leaks_neighbours"),
    "depends-on-padding": _faulty("scorer-padding", "fault=left_padding"),
    "depends-on-batch": _faulty("scorer-batch", "fault=leaks_neighbours"),
    "depends-on-path": _faulty("scorer-path", "fault=decode_cache"),
    "depends-on-cache": _odd("sampler", "sampler-cache", "flaw=old_cache"),
    "depends-on-load": _odd("sampler", "sampler-load", "flaw=routed_by_load"),
    "depends-on-kernel": _odd("scorer", "scorer-attention", "flaw=no_soft_cap"),
    "routes-differ": lambda: checked(
        "routes scorer-batch",
        "odd:?dtype=bfloat16&order=pairwise&routes=true",
        "odd:?dtype=bfloat16&routes=true&flaw=other_experts",
    ),
    "texts-differ": lambda: checked("fixed-texts", f"{SCORER}&fault=late_positions", SAMPLER, suite=_texts()),
    "beyond-rounding": lambda: checked("scorer-batch", f"{SCORER}&drift=0.12"),
    "beyond-rounding-late": _long_replies,
    "same-function-open": lambda: checked("same-function", SCORER, f"{SAMPLER}&fault=oom"),
    "leg-failed": _odd("scorer", "scorer-path", "flaw=decode_fails"),
    "floor-incomplete": lambda: checked(
        "scorer-batch", rollouts=scored(drawn(), FakeEngine(dtype="bfloat16"), kv_cache_dtype="fp8")
    ),
    "floor-assumed": lambda: checked("scorer-batch", "plain:?dtype=bfloat16"),
    "texts-left-out": lambda: checked(
        "fixed-texts", sampler="odd:?dtype=bfloat16&max_model_len=1024", suite=_texts(900, 1600)
    ),
}
