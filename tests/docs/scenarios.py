"""One small scenario for each finding code: numpy rollouts with one fault, judged as `compare` and `check` judge them.

The healthy batch is exact by construction: each token is one of two outcomes with known probability, so its entropy and
varentropy are known, and the scorer differs by noise whose mean ratio is 1.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import scenarios_audit
import scenarios_dump
import scenarios_legs
import scenarios_loop
import scenarios_shape
import scenarios_tokens

from onepolicy.check import check, compare_rollouts
from onepolicy.engines.fake import FakeEngine
from onepolicy.errors import EngineDied, EngineError
from onepolicy.rollouts import Rollouts, column_values
from onepolicy.types import Report, Scoring, TokenReport, Values

PROMPT = 4


def batch(
    sequences: int = 64, tokens: int = 40, noise: float = 0.03, sharper: float = 1.0, scorer: str = "bfloat16"
) -> Rollouts:
    """`sequences` x `tokens` drawn tokens behind a prompt; `sharper` > 1: drawn sharper than told."""
    rng = np.random.default_rng(20261130)
    shape = (sequences, PROMPT + tokens)
    p = rng.uniform(0.05, 0.95, shape)
    drawn_p = p**sharper / (p**sharper + (1 - p) ** sharper)
    first = rng.random(shape) < drawn_p
    logprob = np.log(np.where(first, p, 1 - p)).ravel()
    gap = noise * rng.standard_normal(shape).ravel() - noise**2 / 2
    entropy = (-p * np.log(p) - (1 - p) * np.log1p(-p)).ravel()
    varentropy = (p * (1 - p) * np.log(p / (1 - p)) ** 2).ravel()
    drawn = np.tile(np.arange(PROMPT + tokens) >= PROMPT, sequences)
    ids = rng.integers(0, 1000, shape, dtype=np.int32).ravel()
    told = {"entropy": Values(entropy, drawn), "varentropy": Values(varentropy, drawn)}
    records = {
        "record_id": [f"prompt-{i:02}" for i in range(sequences)],
        "group_id": [str(i) for i in range(sequences)],
        "logprob_semantics": ["processed"] * sequences,
        "temperature": [1.0] * sequences,
        "prompt_length": [PROMPT] * sequences,
    }
    return Rollouts(
        np.arange(sequences + 1, dtype=np.int64) * (PROMPT + tokens),
        {"token_ids": Values(ids), "drawn": Values(drawn)},
        {k: column_values(k, v) for k, v in records.items()},
        {},
        {
            "sampler": Scoring(Values(logprob, drawn), semantics="processed", dtype="bfloat16", **told),
            "scorer": Scoring(Values(np.minimum(logprob + gap, 0), drawn), semantics="processed", dtype=scorer, **told),
        },
    )


def judged(rollouts: Rollouts, bounds: str | None = None) -> Report:
    return compare_rollouts(rollouts, None, ("sampler", "scorer"), bounds=bounds)


def changed(rollouts: Rollouts, side: str, change: Callable[[np.ndarray], None], valid: Any = None) -> Rollouts:
    """With the log-probs `[T]` of a side changed in place, or others of them valid."""
    scoring = rollouts.scorings[side]
    values = scoring.logprobs.values.copy()
    change(values)
    mask = scoring.logprobs.valid if valid is None else valid
    return rollouts.with_scoring(side, replace(scoring, logprobs=Values(values, mask)))


def told(rollouts: Rollouts, a: Mapping[str, Any], b: Mapping[str, Any]) -> Rollouts:
    """With fingerprints."""
    for side, fingerprint in (("sampler", a), ("scorer", b)):
        rollouts = rollouts.with_scoring(side, replace(rollouts.scorings[side], fingerprint=fingerprint))
    return rollouts


def declared(rollouts: Rollouts, **columns: Any) -> Rollouts:
    """With record columns set to one value; None removes one."""
    records = {k: v for k, v in rollouts.records.items() if k not in columns}
    new = {k: column_values(k, [v] * len(rollouts)) for k, v in columns.items() if v is not None}
    return replace(rollouts, records=records | new)


def bounds(text: str) -> str:
    """A TOML file of the user's own bounds, with a name that does not change."""
    path = Path(tempfile.mkdtemp()) / "mine.toml"
    path.write_text(f'[[bound]]\nwhen = "required"\nsource = "ours"\ndate = 2026-11-30\n{text}\n', encoding="utf-8")
    return str(path)


def with_own_bounds(rollouts: Rollouts, text: str) -> Report:
    return replace(judged(rollouts, bounds(text)), preset="mine.toml")


class Breaking(FakeEngine):
    """Scores one shard; the second request ends as a broken engine's does."""

    def __init__(self, error: Exception) -> None:
        super().__init__(dtype="float32")
        self._error, self._calls = error, 0

    def score(self, rollouts: Rollouts, *, distributions: bool = False, using: Any = None) -> Scoring:
        self._calls += 1
        if self._calls > 1:
            raise self._error
        scoring = super().score(rollouts, distributions=distributions, using=using)
        return replace(scoring, entropy=None, varentropy=None)


def _broken(error: Exception) -> Report:
    rollouts = declared(batch(), top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)
    rollouts = declared(rollouts, presence_penalty=0.0, frequency_penalty=0.0)
    ids = rollouts.token_ids % 255
    rollouts = replace(rollouts, tokens={**rollouts.tokens, "token_ids": Values(ids)}, scorings={})
    fake = FakeEngine(dtype="float32", order="pairwise")
    scoring = fake.score(rollouts)
    drawn = replace(scoring, logprobs=Values(scoring.logprobs.values, rollouts.drawn), entropy=None, varentropy=None)
    return check(rollouts.with_scoring("sampler", drawn), Breaking(error), bounds="fp32")[0]


def _outlier(values: np.ndarray) -> None:
    values[1201] -= 1.2


def _heavy(values: np.ndarray) -> None:
    rng = np.random.default_rng(7)
    at = rng.choice(len(values), len(values) // 12, replace=False)
    values[at] -= rng.exponential(1.0, len(at))


def _fill(x: float, *places: int) -> Callable[[np.ndarray], None]:
    def change(values: np.ndarray) -> None:
        values[list(places)] = x

    return change


def _every(n: int) -> Callable[[Rollouts], np.ndarray]:
    return lambda r: r.drawn & (np.arange(r.n_tokens) % n != 0)


def _missing() -> Report:
    r = batch()
    return judged(changed(r, "scorer", lambda v: None, _every(150)(r)))


def _nothing_scored() -> Report:
    r = batch()
    return judged(changed(r, "scorer", lambda v: None, np.zeros(r.n_tokens, dtype=bool)))


def _probabilities() -> Report:
    r = changed(batch(), "scorer", _fill(-1.5, 4, 5))
    return judged(changed(r, "sampler", _fill(0.25, 4, 5)))


def _truncated() -> Report:
    """The sampler renormalises over a nucleus of mass 0.9, the scorer does not: d = log 0.9."""

    def lower(values: np.ndarray) -> None:
        values += np.log(0.9)

    return judged(changed(batch(), "scorer", lower))


def _semantics_differ() -> Report:
    r = declared(batch(), temperature=0.7, logprob_semantics="raw")
    return judged(r.with_scoring("sampler", replace(r.scorings["sampler"], semantics="raw")))


def _kl_withheld() -> Report:
    r = declared(batch(), temperature=0.7, logprob_semantics="raw")
    for side in ("sampler", "scorer"):
        r = r.with_scoring(side, replace(r.scorings[side], semantics="raw"))
    return judged(r, "bf16")


def _no_entropy() -> Report:
    r = batch()
    return judged(r.with_scoring("sampler", replace(r.scorings["sampler"], entropy=None, varentropy=None)))


def _overflow() -> Report:
    """One ratio beyond what a float64 can hold."""
    text = 'metric = "chi2_token/mean"\nat_most = 0.5'
    return with_own_bounds(changed(batch(), "sampler", _fill(-800.0, 1201)), text)


_VOCABULARIES = ({"engine": "vllm", "vocab_size": 128256}, {"engine": "hf", "vocab_size": 128264})
_TOKENIZERS = (
    {"engine": "vllm", "tokenizer_digest": "5cc5f00a9d1e"},
    {"engine": "hf", "tokenizer_digest": "c2b1a37ce04f"},
)
_WEIGHTS = ({"engine": "vllm", "weights_digest": "1cde46dd1a9d"}, {"engine": "hf", "weights_digest": "897ddd56cbe5"})

SCENARIOS: dict[str, Callable[[], Report | TokenReport]] = {
    "engine-died": lambda: _broken(EngineDied("engine hf:tiny: its process was killed by SIGKILL during score")),
    "engine-failed": lambda: _broken(EngineError("engine hf:tiny: out of memory while scoring")),
    "nothing-scored": _nothing_scored,
    "positive-logprob": _probabilities,
    "nonfinite-logprob": lambda: judged(changed(batch(), "scorer", _fill(np.nan, 1201, 2011))),
    "missing-logprobs": _missing,
    "vocabulary-differs": lambda: judged(told(batch(), *_VOCABULARIES)),
    "tokenizer-differs": lambda: judged(told(batch(), *_TOKENIZERS)),
    "semantics-differ": _semantics_differ,
    "support-violation": lambda: judged(changed(batch(), "scorer", _fill(-np.inf, 1201, 2011))),
    "not-drawn-from-reported": lambda: judged(batch(sharper=1 / 0.7)),
    "weights-differ": lambda: judged(told(batch(noise=0.3), *_WEIGHTS)),
    "ratio-biased": _truncated,
    "kl-above-bound": lambda: judged(batch(noise=0.25)),
    "gap-above-bound": lambda: judged(batch(noise=0.005), "fp32"),
    "token-above-bound": lambda: judged(changed(batch(noise=0.005), "scorer", _outlier), "strict"),
    "above-bound": lambda: with_own_bounds(batch(noise=0.25), 'metric = "extreme_share/1.2"\nat_most = 0.02'),
    "heavy-ratio-tail": lambda: judged(changed(batch(), "sampler", _heavy)),
    "not-measured": lambda: with_own_bounds(batch(), 'metric = "kl_sampler_scorer_exact/mean"\nat_most = 1e-3'),
    "too-few-tokens": lambda: judged(batch(tokens=8)),
    "too-few-clusters": lambda: judged(batch(sequences=8, tokens=200)),
    "undecided": lambda: judged(batch(noise=0.132)),
    "nonfinite-terms": _overflow,
    "kl-withheld": _kl_withheld,
    "semantics-undeclared": lambda: judged(declared(batch(), logprob_semantics=None), "bf16"),
    "not-covered": _no_entropy,
    **scenarios_legs.SCENARIOS,
    **scenarios_tokens.SCENARIOS,
    **scenarios_loop.SCENARIOS,
    **scenarios_audit.SCENARIOS,
    **scenarios_dump.SCENARIOS,
    **scenarios_shape.SCENARIOS,
}
#: Codes whose report is one of numbers; the others' is a `TokenReport`.
_TOLD = {
    **scenarios_tokens.SCENARIOS,
    **scenarios_loop.SCENARIOS,
    **scenarios_audit.SCENARIOS,
    **scenarios_dump.SCENARIOS,
}
_TOLD |= scenarios_shape.SCENARIOS
OF_NUMBERS = [code for code in SCENARIOS if code not in _TOLD]
