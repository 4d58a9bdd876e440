"""What an engine is: it declares its switches, says who it is, draws tokens and scores given ones.

An engine class has `NAME`, `SWITCHES`, `SAMPLES`, `SCORES`, `HEAVY`, is built as `Engine(target, **options)` with
options already parsed by its switches, and holds the methods of `Engine`. Heavy ones run in a child process
(`worker`); the class itself is the same on both sides. An optional `RULES = True`: it scores at whatever
temperature, truncation and penalties are declared. An optional `ENVIRONMENT` holds environment variables that must
stand before its packages are imported; those of the user win. Importing an engine's module imports no heavy package.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from onepolicy.errors import ContentError, EngineError, UnknownName, UsageError
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring


@dataclass(frozen=True, slots=True)
class Switch:
    """One option of an engine: how its text is read, its default, its choices, and what it changes.

    `live`: can be another at each `score` (`using=`), without a new start of the engine. `declared`: says what the
    engine does, and does not make it do so.
    """

    kind: type
    default: Any
    meaning: str
    choices: tuple[str, ...] = ()
    live: bool = False
    declared: bool = False

    def parse(self, name: str, text: str) -> Any:
        """The value of `name=text`. Errors: `UsageError` naming what was wanted."""
        if self.choices and text not in self.choices:
            raise UnknownName(f"value of switch {name!r}", text, self.choices)
        if self.kind is bool:
            if text.lower() not in ("1", "0", "true", "false", "yes", "no"):
                raise UsageError(f"switch {name!r}: got {text!r}, wanted true or false")
            return text.lower() in ("1", "true", "yes")
        try:
            return self.kind(text)
        except ValueError:
            raise UsageError(f"switch {name!r}: got {text!r}, wanted {self.kind.__name__}") from None


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """`name:target?key=value&key=value`, as written on the command line. Values are still text."""

    name: str
    target: str
    options: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def parse(cls, text: str) -> EngineSpec:
        """Errors: `UsageError` for a spec without a name or with an option given twice."""
        head, _, query = text.partition("?")
        name, colon, target = head.partition(":")
        if not name or not colon:
            raise UsageError(f"engine {text!r}: wanted name:target?key=value, as hf:DIR?dtype=bfloat16")
        pairs = [part.partition("=") for part in query.split("&") if query]
        options = {key: value for key, _, value in pairs}
        if len(options) != len(pairs) or not all(key and equals for key, equals, _ in pairs):
            raise UsageError(f"engine {text!r}: options are key=value joined by &, each once")
        return cls(name, target, options)

    def __str__(self) -> str:
        query = "&".join(f"{k}={v}" for k, v in self.options.items())
        return f"{self.name}:{self.target}" + (f"?{query}" if query else "")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Neutral values switch a rule off (top_p 1, top_k 0, min_p 0, penalties 1, 0, 0)."""

    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    samples: int = 1
    seed: int = 0
    ignore_eos: bool = False


class Engine(Protocol):
    """The one protocol of samplers and scorers. A class that cannot do one of the two says so in SAMPLES / SCORES."""

    NAME: ClassVar[str]
    SWITCHES: ClassVar[Mapping[str, Switch]]
    SAMPLES: ClassVar[bool]
    SCORES: ClassVar[bool]
    HEAVY: ClassVar[bool]

    def fingerprint(self) -> Mapping[str, Any]:
        """JSON-able: engine, versions, dtypes, kernels, flags, weights and tokenizer digests, vocabulary size."""
        ...

    def encode(self, prompts: Sequence[str | list[dict[str, str]]]) -> list[list[int]]:
        """Token ids of texts (as they are) or chat messages (by the chat template, generation prompt added)."""
        ...

    def decode(self, ids: Sequence[int]) -> list[str]:
        """The text of each token alone, for people to read in a report; never encoded again."""
        ...

    def sample(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Rollouts:
        """Draws `params.samples` replies to each prompt. Rollouts hold prompt + reply ids, `drawn`, `prompt_length`,
        the scoring `sampler`, the sampling parameters, `logprob_semantics`, `finish_reason`, `stop_token_ids`."""
        ...

    def score(
        self, rollouts: Rollouts, *, distributions: bool = False, using: Mapping[str, Any] | None = None
    ) -> Scoring:
        """Log-probs of the given ids at the rollouts' declared semantics; index 0 null. Order and lengths as given.

        `using`: values of live switches for this call alone; the fingerprint of the scoring says them.
        """
        ...

    def close(self) -> None:
        """Frees everything. Safe to call twice."""
        ...


#: Called with how many of how many items are done.
Progress = Callable[[int, int], None]


def options_of(engine: type[Any], spec: EngineSpec) -> dict[str, Any]:
    """The spec's options parsed by the engine's switches, defaults filled in.

    Errors: `UnknownName` (did you mean) for an option the engine has not declared.
    """
    for name in spec.options:
        if name not in engine.SWITCHES:
            raise UnknownName(f"switch of engine {engine.NAME!r}", name, engine.SWITCHES)
    return {
        name: switch.parse(name, spec.options[name]) if name in spec.options else switch.default
        for name, switch in engine.SWITCHES.items()
    }


def using_of(engine: Any, using: Mapping[str, Any] | None) -> dict[str, Any]:
    """`using`, once it is sure that each is a live switch of the engine. Errors: `UsageError`."""
    for name in using or {}:
        if name not in engine.SWITCHES or not engine.SWITCHES[name].live:
            live = ", ".join(k for k, s in engine.SWITCHES.items() if s.live) or "none"
            raise UsageError(f"engine {engine.NAME!r}: {name!r} cannot change while it runs; live switches: {live}")
    return dict(using or {})


def declared(rollouts: Rollouts, engine: str) -> list[dict[str, Any]]:
    """For each sequence the log-prob semantics and sampling parameters a scorer must reproduce.

    Errors: `UsageError` when they are not declared: a scorer never guesses what a log-prob means. `ContentError` for a
    parameter that no sampler can have had.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    out: list[dict[str, Any]] = []
    for i in range(len(rollouts)):
        row = {name: rollouts.record(name, i) for name in ("logprob_semantics", *names)}
        used = {None: (), "raw": (), "temperature": ("temperature",)}.get(row["logprob_semantics"], names)
        missing = [name for name in ("logprob_semantics", *used) if row[name] is None]
        if missing:
            raise UsageError(
                f"record {i}: {', '.join(missing)} not declared, so {engine} cannot know what to score; "
                "set the columns, or pass --declare logprob_semantics=raw (or temperature, processed)"
            )
        _refuse_impossible(i, row)
        out.append(row)
    return out


#: Sampling parameters and the values that make sense.
_POSSIBLE = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "top_k": (-1, math.inf),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, math.inf),
}


def _refuse_impossible(i: int, row: Mapping[str, Any]) -> None:
    for name, (least, most) in _POSSIBLE.items():
        value = row[name]
        if value is not None and not (least <= value <= most and math.isfinite(value)):
            wanted = f"at least {least:g}" if most == math.inf else f"{least:g} to {most:g}"
            raise ContentError(f"record {i}: {name}: got {value!r}, wanted {wanted}")


def digest_arrays(arrays: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 (first 16 hex digits) over names, dtypes, shapes and bytes of all arrays, in the order of their names.

    Errors: `EngineError` for an empty array: engines that move weights elsewhere after loading leave empty ones
    behind, and a digest of those is equal for any two models.
    """
    if not arrays:
        raise EngineError("weights digest: no tensors were given")
    total = hashlib.sha256()
    for name in sorted(arrays):
        a = np.ascontiguousarray(arrays[name])
        if a.size == 0:
            raise EngineError(f"weights digest: tensor {name!r} is empty {a.shape}; digest the files on disk instead")
        total.update(f"{name} {a.dtype} {a.shape}".encode())
        total.update(a.tobytes())
    return total.hexdigest()[:16]
