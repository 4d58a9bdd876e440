"""Faults of meaning that need more than one call of `drawn_from`: penalties, soft-caps, entropies, stored policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import audit_batches as batches
from onepolicy.rollouts import Rollouts
from onepolicy.types import Scoring, Values

Fault = Callable[[Rollouts, np.random.Generator], Rollouts]


def spread_over(r: Rollouts, x: np.ndarray) -> Values:
    """`[N]` values at the drawn tokens as a column."""
    out = np.zeros(r.n_tokens)
    out[r.drawn] = x
    return Values(out, r.drawn)


def entropies(logp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Entropy and varentropy `[N]` of log-probs `[N, V]`."""
    p = np.exp(logp)
    h = -(p * np.where(p > 0, logp, 0.0)).sum(axis=1)
    return h, (p * np.where(p > 0, (logp + h[:, None]) ** 2, 0.0)).sum(axis=1)


def redrawn(r: Rollouts, a: np.ndarray, b: np.ndarray, ids: np.ndarray, told: str = "") -> Rollouts:
    """Other drawn ids with both sides' log-probs `[N, V]`; `told`: which side's entropies are recorded."""
    at = np.arange(len(ids))
    tokens = r.token_ids.copy()
    tokens[r.drawn] = ids
    out = replace(r, tokens={**r.tokens, "token_ids": Values(tokens)})
    out = batches.with_side(batches.with_side(out, "sampler", a[at, ids]), "old", b[at, ids])
    if told:
        h, v = entropies(a if told == "sampler" else b)
        scoring = replace(out.scorings[told], entropy=spread_over(r, h), varentropy=spread_over(r, v))
        out = out.with_scoring(told, scoring)
    return out


def tempered(sampler: float, scorer: float, drawn: float, told: str, **declared: Any) -> Fault:
    """Log-probs at two temperatures, tokens drawn at a third one, entropies of one side recorded."""

    def fault(r: Rollouts, rng: np.random.Generator) -> Rollouts:
        hidden = batches.logits_of(r)
        at = lambda t: batches._log_softmax(batches._rounded(hidden, rng) / t)
        return batches.declare(redrawn(r, at(sampler), at(scorer), batches._draw(at(drawn), rng), told), **declared)

    return fault


def capped(cap: float, told: str = "") -> Fault:
    """The sampler caps its logits, the scorer does not."""

    def fault(r: Rollouts, rng: np.random.Generator) -> Rollouts:
        hidden = batches.logits_of(r)
        a = batches._log_softmax(cap * np.tanh(batches._rounded(hidden, rng) / cap))
        return redrawn(r, a, batches._log_softmax(batches._rounded(hidden, rng)), batches._draw(a, rng), told)

    return fault


def penalised(presence: float = 0.0, frequency: float = 0.0, repetition: float = 1.0, **declared: Any) -> Fault:
    """The sampler draws from and reports penalised logits, as vLLM has it; the scorer knows of none."""

    def fault(r: Rollouts, rng: np.random.Generator) -> Rollouts:
        hidden = batches.logits_of(r)
        z, b = batches._rounded(hidden, rng), batches._log_softmax(batches._rounded(hidden, rng))
        sequence, _ = batches.index_of(r)
        prompt = [set(r.token_ids[r.sequence(i)][~r.drawn[r.sequence(i)]].tolist()) for i in range(len(r))]
        ids, counts, last = np.empty(len(z), dtype=np.int64), np.zeros(z.shape[1]), -1
        for t in range(len(z)):
            if sequence[t] != last:
                last, counts = int(sequence[t]), np.zeros(z.shape[1])
                stood = np.isin(np.arange(z.shape[1]), list(prompt[last]))
            row = z[t]
            if repetition != 1.0:
                again = (counts > 0) | stood
                row = np.where(again, np.where(row > 0, row / repetition, row * repetition), row)
            z[t] = row - presence * (counts > 0) - frequency * counts
            ids[t] = batches._draw(batches._log_softmax(z[t : t + 1]), rng)[0]
            counts[ids[t]] += 1
        return batches.declare(redrawn(r, batches._log_softmax(z), b, ids), **declared)

    return fault


def min_p(share: float) -> Callable[[np.ndarray], np.ndarray]:
    def process(logp: np.ndarray) -> np.ndarray:
        kept = logp >= logp.max(axis=1, keepdims=True) + np.log(share)
        return batches._log_softmax(np.where(kept, logp, -1e3))

    return process


def _with(r: Rollouts, name: str, like: str, noise: float = 0.0, seed: int = 0) -> Rollouts:
    """One more scoring: another one's values, moved by `noise` (0: to the bit)."""
    values = r.scorings[like].logprobs
    moved = values.values + noise * np.random.default_rng(seed).standard_normal(len(values.values))
    return r.with_scoring(name, Scoring(Values(np.minimum(moved, 0.0), values.valid), scoring_id=name))


def old_is_current(r: Rollouts, rng: np.random.Generator) -> Rollouts:
    return _with(r, "current", "old")


def healthy_policies(r: Rollouts, rng: np.random.Generator) -> Rollouts:
    """Current and reference of their own: no fault."""
    return _with(_with(r, "current", "old", 1e-3, 1), "reference", "old", 0.1, 2)


def reference_follows(r: Rollouts, rng: np.random.Generator) -> Rollouts:
    return _with(r, "reference", "old")


def old_copied(r: Rollouts, rng: np.random.Generator) -> Rollouts:
    return batches.with_side(r, "old", batches.both(r)[0])


def declared_raw(r: Rollouts, rng: np.random.Generator) -> Rollouts:
    """Processed values of a nucleus, declared raw."""
    out = batches.declare(batches.MEANING["top-p-0.9"](r, rng), logprob_semantics="raw")
    return out.with_scoring("sampler", replace(out.scorings["sampler"], semantics="raw"))


def never_processed(r: Rollouts, rng: np.random.Generator) -> Rollouts:
    """Raw values of a nucleus, declared processed."""
    raw = batches.drawn_from(lambda logp: logp, top_p=0.9)
    return raw(r, rng)


def replayed(r: Rollouts, rng: np.random.Generator) -> Rollouts:
    """A nucleus whose sets the scorer replays: no fault."""
    hidden = batches.logits_of(r)
    a, b = (batches._log_softmax(batches._rounded(hidden, rng)) for _ in range(2))
    a = batches.top_p(0.9)(a)
    b = batches._log_softmax(np.where(a > -500, b, -1e3))
    return batches.declare(redrawn(r, a, b, batches._draw(a, rng)), top_p=0.9)


#: name -> (fault, key of the signature that names it)
MEANING: dict[str, tuple[Fault, str]] = {
    "temperature-0.6-entropy": (tempered(1.0, 0.6, 1.0, "old"), "temperature"),
    "temperature-0.6-drawn": (tempered(1.0, 0.6, 0.6, "old", temperature=0.6), "temperature"),
    "temperature-0.6-sampler": (tempered(1.0, 0.6, 1.0, "sampler"), "temperature"),
    "temperature-1.2-entropy": (tempered(1.2, 1.0, 1.2, "old", temperature=1.2), "temperature"),
    "temperature-0.9-entropy": (tempered(1.0, 0.9, 1.0, "old"), "temperature"),
    "logits-doubled": (tempered(1.0, 0.5, 1.0, "old"), "temperature"),
    "softcap-15": (capped(15.0), ""),
    "softcap-15-entropy": (capped(15.0, "old"), "softcap"),
    "softcap-30-entropy": (capped(30.0, "sampler"), "softcap"),
    "presence-0.5": (penalised(presence=0.5, presence_penalty=0.5), "penalties"),
    "frequency-0.3": (penalised(frequency=0.3), "penalties"),
    "repetition-1.2": (penalised(repetition=1.2, repetition_penalty=1.2), "penalties"),
    "min-p-0.1": (batches.drawn_from(min_p(0.1), min_p=0.1), "truncation"),
    "top-p-0.95": (batches.drawn_from(batches.top_p(0.95), top_p=0.95), "truncation"),
    "declared-raw": (declared_raw, "raw_processed"),
    "never-processed": (never_processed, "raw_processed"),
    "old-is-current": (old_is_current, "stored_policy"),
    "reference-follows": (reference_follows, "reference"),
    "old-copied": (old_copied, "copied_old"),
    "healthy-policies": (healthy_policies, ""),
    "replayed-sets": (replayed, ""),
    "one-temperature-entropy": (tempered(0.6, 0.6, 0.6, "old", temperature=0.6), ""),
}
